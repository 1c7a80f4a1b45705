"""The package's shape: who may import whom, how long a file may be, and which files know threads."""

import ast
from pathlib import Path

import pytest

import agentkv

PACKAGE = Path(agentkv.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import modules of lower layers, and of its own layer where that is the same package. A line is a layer.
LAYERS = [
    "errors",
    "config types",
    "lanes detokenize rendering",
    "memory heads backends models",
    "scheduler transcript",
    "generation",
    "proposers room backup calibration",
    "rounds",
    "decide",
    "executor",
    "engine",
    "waking",
    "stream starting result",
    "session",
    "building offline",
    "manager",
    "__init__",
    "cli chat demo demo_worker progress sync store_commands",
]
PACKAGES = {"memory", "heads", "backends", "models", "scheduler"}
SURFACE = {"cli", "chat", "demo", "demo_worker", "progress", "sync", "store_commands"}
"""Built on public names alone, and on each other."""

# Only for annotations (TYPE_CHECKING), so that two files that work hand in hand can name each other.
HAND_IN_HAND = {("stream", "session"), ("starting", "stream"), ("result", "stream")}

# Files that may use threads, and why.
THREADS = {
    "lanes.py": "the lanes",
    "rendering.py": "a lock: sessions share the child process that renders",
    "memory/store.py": "a lock: record ids are allotted on the compute lane, pages written on the disk lane",
    "memory/reader.py": "a lock: one of its threads goes over to a new generation, while others read",
    "memory/environment.py": "a lock: LMDB opens a file once per process, whatever the threads",
}


def module_of(path: Path) -> str:
    """Its top part below agentkv: "session", "memory"; "__init__" for the package's own file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute dotted name, whether for annotations only) of every import, wherever it stands."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in guarded) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, id(node) in guarded) for name in names]
    return found


def own_imports(path: Path) -> set[tuple[str, bool]]:
    """The parts of agentkv that `path` imports from other parts."""
    found = set()
    for name, guarded in imports(path):
        parts = name.split(".")
        if parts[0] == "agentkv":
            is_module = len(parts) > 1 and ((PACKAGE / f"{parts[1]}.py").exists() or (PACKAGE / parts[1]).is_dir())
            found.add((parts[1] if is_module else "__init__", guarded))
    return {(part, guarded) for part, guarded in found if part != module_of(path)}


def layer(part: str) -> int:
    return next(number for number, line in enumerate(LAYERS) if part in line.split())


def test_every_module_has_its_layer():
    assert sorted({module_of(path) for path in FILES}) == sorted(" ".join(LAYERS).split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    me = module_of(path)
    for part, guarded in own_imports(path):
        if me == "__init__" or (guarded and (me, part) in HAND_IN_HAND):
            continue
        below = layer(part) < layer(me)
        beside = layer(part) == layer(me) and {me, part} <= SURFACE
        assert below or beside, f"{path.name} imports {part}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_keep_to_themselves(path):
    me = module_of(path)
    others = {part for part, _ in own_imports(path)} & PACKAGES
    if me == "scheduler":
        assert others <= {"memory"}
    elif me in PACKAGES:
        assert not others
    if me in SURFACE:
        assert {part for part, _ in own_imports(path)} <= {"__init__"} | SURFACE


def test_only_building_makes_the_parts():
    made = {"Executor", "Backup", "PagePool", "Room", "TorchBackend", "Lane", "Engine", "Controller"}
    for path in FILES:
        called = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert path.name == "building.py" or not called & made, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "a module says what it owns"


def test_functions_fit_a_screen():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def test_only_named_files_know_threads():
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for name, _ in imports(path)
        if name.split(".")[0] in ("threading", "concurrent", "multiprocessing", "_thread")
    }
    assert found == set(THREADS)


def test_the_library_does_not_print_nor_read_the_environment():
    may_print = SURFACE
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                assert module_of(path) in may_print, path
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                assert path.relative_to(PACKAGE) == Path("models/cache.py"), path
