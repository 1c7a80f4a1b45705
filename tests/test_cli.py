"""The `agentkv` command, run as a user runs it: arguments, exit codes, the demo, and a chat on a pseudo-terminal."""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentkv import AgentKVError, demo
from agentkv.chat import chat
from agentkv.demo_worker import Row

ROOT = Path(__file__).parents[1]
# On one core, so with one thread of torch: two of them beside anything else wait for one another.
COMMAND = ["taskset", "-c", str(max(os.sched_getaffinity(0))), sys.executable, "-m", "agentkv.cli"]
ROW_KEYS = [
    *("context", "cached", "prefilled", "loaded", "ttft_s", "tokens_per_s", "proposed", "accepted"),
    *("kv_read_share", "equals_full"),
]


def run(*arguments: str, timeout: float = 200, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


# Arguments and exit codes


def test_version_and_help() -> None:
    assert run("--version").stdout == "agentkv 0.1.0\n"
    shown = run("--help")
    assert shown.returncode == 0
    assert "demo" in shown.stdout
    assert "chat" in shown.stdout


def test_the_command_line_is_light() -> None:
    heavy = "{'torch', 'transformers', 'lmdb', 'rich', 'asyncio'} & set(sys.modules)"
    code = f"import sys; from agentkv.cli import build_parser; build_parser(); print(len({heavy} - {{'asyncio'}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["chat", "--session"]])
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: agentkv" in done.stderr
    assert not done.stdout


def assert_one_line(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.startswith("agentkv: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    assert_one_line(run("demo", "--file", str(tmp_path / "absent")), "No such file")
    assert_one_line(run("demo", "--file", str(tmp_path)), "Is a directory")
    (tmp_path / "empty").touch()
    assert_one_line(run("demo", "--file", str(tmp_path / "empty")), "no text")
    assert_one_line(run("chat", "--model", "no such model", "--store", str(tmp_path / "store")), "no such model")


def test_an_error_in_a_process_of_the_demo_is_one_line_too() -> None:
    done = run("demo", "--json", "--model", "no such model")
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.splitlines()[-1].startswith("agentkv: 'no such model' is no directory")


# The demo


def check_demo(done: subprocess.CompletedProcess[str]) -> list[dict]:
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert list(shown) == ["steps", "resumed_after_kill"]
    assert shown["resumed_after_kill"] is True
    steps = shown["steps"]
    assert len(steps) == 4
    for step in steps:
        assert list(step) == ROW_KEYS
        assert step["equals_full"] is True
        assert step["proposed"] >= step["accepted"] > 0
        assert 0 < step["kv_read_share"] < 0.9, "proposals read a part of the KV"
        assert step["ttft_s"] > 0
        assert step["tokens_per_s"] > 0
    first, second, third, fourth = steps
    assert (first["cached"], first["loaded"], first["prefilled"]) == (0, 0, first["context"])
    assert (third["cached"], third["loaded"] > second["context"]) == (0, True), "what was committed is loaded"
    for step in (second, third, fourth):
        assert step["cached"] + step["loaded"] + step["prefilled"] + 1 == step["context"], "and one, the carry"
        assert step["prefilled"] < 0.2 * first["prefilled"], "only what is new is prefilled"
    return steps


def test_demo_on_the_tiny_model(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(Path(subprocess.__file__).read_bytes()[:2000])
    steps = check_demo(run("demo", "--json", "--model", "tiny", "--file", str(text)))
    assert 1200 < steps[0]["context"] < 3000


@pytest.mark.model
@pytest.mark.timeout(900)
def test_demo_as_it_is() -> None:
    steps = check_demo(run("demo", "--json", timeout=850, command=COMMAND[3:]))
    assert 2000 < steps[0]["context"] < 3200
    assert sum(step["accepted"] for step in steps) > 0.5 * sum(step["proposed"] for step in steps)
    assert all(step["kv_read_share"] < 0.5 for step in steps)


def step(head: str, *token_ids: int) -> demo._Step:
    return demo._Step(head, list(token_ids), Row(9, 0, 9, 0, 0.1, 10.0, 4, 3, 0.4))


@pytest.mark.parametrize(("found", "last", "code"), [("s@2", 4, 0), ("s@1", 4, 1), ("s@2", 5, 1)])
def test_demo_fails_when_the_resume_or_a_token_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: str, last: int, code: int
) -> None:
    class Told(demo._Story):
        def until_killed(self) -> list[demo._Step]:
            return [step("s@1", 1), step("s@2", 2)]

        def resumed(self, head: str) -> tuple[str, list[demo._Step]]:
            assert head == "s@2"
            return found, [step("s@3", 3), step("s@4", 4)]

        def in_full(self, store: str) -> list[demo._Step]:
            return [step("s@1", 1), step("s@2", 2), step("s@3", 3), step("s@4", last)]

    monkeypatch.setattr(demo, "_Story", Told)
    assert demo.run_demo(None, "tiny", as_json=True) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["resumed_after_kill"] is (found == "s@2")
    assert [s["equals_full"] for s in shown["steps"]] == [True, True, True, last == 4]
    demo.run_demo(None, "tiny", as_json=False)
    table = capsys.readouterr().out
    assert table.count("yes") + table.count("NO") == 4
    assert ("NO" in table) is (last != 4)
    assert "…" not in table, "it fits a terminal of 80 columns"


def test_demo_says_so_when_the_kill_came_too_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_KILL_AFTER_TOKENS", 10**6)
    monkeypatch.chdir(ROOT)
    (tmp_path / "text").write_text("A short text.\n")
    with pytest.raises(AgentKVError, match="the third step was over"):
        demo.run_demo(tmp_path / "text", "tiny", as_json=True)


# The chat


class Terminal:
    """A process on a pseudo-terminal: `expect` reads on until a text is shown."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._master = master
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, timeout_s: float = 90) -> str:
        """What was shown up to and including `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self._unread:
            ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{text!r} was not shown; there was {self._unread!r}"
            try:
                self._unread += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                raise AssertionError(f"{text!r} was not shown; there was {self._unread!r}") from None
        shown, found, self._unread = self._unread.partition(text)
        return shown + found


@contextmanager
def chatting(store: Path) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [*COMMAND, "chat", "--model", "tiny", "--store", str(store), "--session", "s"]
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "200"}
    # A terminal of its own, so that ^C typed there reaches the process as it would a user's.
    with subprocess.Popen(
        ["setsid", "--ctty", *command], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        try:
            yield Terminal(master, process)
        finally:
            process.kill()
            os.close(master)


def test_chat_streams_stops_and_survives(tmp_path: Path) -> None:
    with chatting(tmp_path / "store") as terminal:
        terminal.expect("session s, 0 tokens")
        terminal.expect("> ")
        terminal.type("\x03")  # nothing to stop
        terminal.expect("Ctrl-D leaves.\r\n> ")
        terminal.type("Hello there\n")
        terminal.expect("Hello there\r\n")
        assert len(terminal.expect("drafts accepted")) > 100, "the answer came before its summary"
        terminal.expect("> ")
        terminal.type("And again\n")
        terminal.expect("And again\r\n")
        while len(terminal.expect(" ")) < 2:
            pass  # until a word has been said
        terminal.type("\x03")
        terminal.expect("stopped: what was said is kept")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    with chatting(tmp_path / "store") as terminal:
        tokens = int(terminal.expect(" tokens").split("session s, ")[1].split()[0])
        assert tokens > 512, "both answers were kept"
        terminal.expect("> ")
        terminal.type("Still there?\n")
        said = terminal.expect("prefilled ")
        assert f"loaded {tokens - 1}," in said.replace("\r\n", " ")
        terminal.process.send_signal(signal.SIGKILL)


def test_chat_tells_an_error_and_goes_on(tmp_path: Path) -> None:
    with chatting(tmp_path / "store") as terminal:
        terminal.expect("> ")
        for _ in range(3):  # a terminal takes 4 KB a line: too much for the model's context together
            terminal.type("long " * 700 + "\n")
        terminal.expect("ContextOverflow: ")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


async def test_chat_waits_for_a_person_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        talk = asyncio.create_task(chat("tiny", str(tmp_path), "s"))
        shown = ""
        while not shown.endswith("> "):
            await asyncio.sleep(0.01)
            assert not talk.done()
            shown += capsys.readouterr().out
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not talk.done()
        os.close(writer)
        await talk
