"""The examples run as a reader would run them, each in a process of its own, on the tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_example(name: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    core = str(max(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart() -> None:
    out = run_example("quickstart.py", "tiny")
    first, second = (re.findall(rf"{name}=(\d+)", out) for name in ("cached", "prefilled"))
    assert int(first[0]) == 0
    assert int(second[0]) > 0
    assert int(first[1]) > int(second[0]), "the second step reads the first from the cache"
    assert "committed as quickstart@2" in out


def test_resume_in_a_second_process(tmp_path: Path) -> None:
    first = run_example("resume.py", "tiny", str(tmp_path / "store"))
    second = run_example("resume.py", "tiny", str(tmp_path / "store"))
    assert "found the session at resume-example@0" in first
    assert "found the session at resume-example@1" in second
    loaded, prefilled = map(int, re.search(r"loaded (\d+), prefilled (\d+); now at resume-example@2", second).groups())  # type: ignore[union-attr]
    new = int(re.search(r"prefilled (\d+)", first)[1])  # type: ignore[index]
    assert loaded == new + 48 - 1, "everything the first run had computed is loaded"
    assert prefilled <= new, "and nothing of it is computed again"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert f"python examples/{path.name}" in text
