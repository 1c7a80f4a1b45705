"""The documents say what is so: code runs, commands and files exist, the error tree and the list of files are whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv import errors
from agentkv.cli import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "AGENTS.md", "CHANGELOG.md", "docs/structure.md", "docs/decisions.md"]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    """As it stands there, on the tiny model and in a home directory of its own."""
    code = BLOCKS[number].replace('"smollm2"', '"tiny"')
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
    core = str(max(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    if "agentkv.open" in code:
        assert (tmp_path / ".agentkv").is_dir(), "the store is where it says"
        assert ("result.usage" in code) == ("Usage(" in done.stdout)
        assert done.stdout


def test_the_two_commands_stand_at_the_top() -> None:
    assert len(BLOCKS) == 3
    assert README.index("make demo") < README.index("make test") < README.index("## ")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_targets_exist(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`|    )make ([a-z]+)", text)) <= set(targets)


def test_commands_parse() -> None:
    inline = re.findall(r"`agentkv ([a-z]+[^`]*)`", README)
    listed = re.findall(r"(?:^|  )  agentkv ([a-z]+.*?)(?=   |$)", README, re.MULTILINE)
    assert inline
    assert len(listed) == 8
    commands = [*inline, *listed]
    for command in commands:
        build_parser().parse_args(command.split())


def test_the_error_tree_is_that_of_the_code() -> None:
    tree = errors.__doc__.split("\n\n", 1)[1].strip()  # type: ignore[union-attr]
    shown = re.search(r"^    AgentKVError\n(?:    .*\n)+", README, re.MULTILINE)[0]  # type: ignore[index]
    assert "\n".join(line[4:] for line in shown.splitlines()) == tree
    named = set(re.findall(r"^(?:.*── )?(\w+)", tree, re.MULTILINE))
    assert named == {name for name, value in vars(errors).items() if isinstance(value, type)}


def test_structure_names_every_file() -> None:
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    files = {path.relative_to(ROOT / "agentkv").as_posix() for path in (ROOT / "agentkv").rglob("*.py")}
    packages = {name for name in files if name.count("/") and name.endswith("__init__.py")}
    assert len(listed) == len(set(listed))
    assert set(listed) == files - packages
