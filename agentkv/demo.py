"""`agentkv demo`: the parent of three processes, which tells their story and checks it.

The first opens a session, takes two steps over a real text and is killed (SIGKILL) in its third. The second resumes,
repeats the third step and takes a fourth. The third takes the same four steps in mode `full`, in a session of its own:
its tokens must be those of the others. What the processes do is in `demo_worker.py`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from agentkv import AgentKVError, InvalidInput
from agentkv.demo_worker import Row, Task
from agentkv.progress import Bars, printable

_TEXT_BYTES = 11_000
"""About 2,500 tokens of source or prose, and never more than a context of 8,192 in any language's text."""

_KILL_AFTER_TOKENS = 8

_QUESTIONS = (
    "Here is a file.\n\n{text}\n\nWhat is this file about? Answer in a few sentences.",
    "Which names does it define, and what is each for?",
    "Explain one part of it in more detail.",
    "Write a short example that uses what the file describes.",
)


class _Step(msgspec.Struct):
    """A step that was committed."""

    head: str
    token_ids: list[int]
    row: Row


def run_demo(file: Path | None, model: str, *, as_json: bool) -> int:
    """Run it; 0 if the session was resumed after the kill and every step's tokens are those of `full`, else 1."""
    console = Console(stderr=True, highlight=False)
    inputs = _inputs(file)
    with tempfile.TemporaryDirectory(prefix="agentkv-demo-") as work:
        story = _Story(console, Task(model, f"{work}/store", "demo", "exact", 1, inputs))
        steps = story.until_killed()
        found, repeated = story.resumed(steps[-1].head)
        reference = story.in_full(f"{work}/reference")
    resumed = found == steps[-1].head
    steps += repeated
    equal = [step.token_ids == full.token_ids for step, full in zip(steps, reference, strict=True)]
    if as_json:
        rows = [msgspec.to_builtins(s.row) | {"equals_full": same} for s, same in zip(steps, equal, strict=True)]
        print(json.dumps({"steps": rows, "resumed_after_kill": resumed}))
    else:
        Console(highlight=False).print(_table(steps, equal))
    return 0 if resumed and all(equal) else 1


def _inputs(file: Path | None) -> tuple[str, ...]:
    """The steps' inputs; the first holds the text, cut at a line's end."""
    if file is None:
        import queue  # a whole module of the right length

        file = Path(queue.__file__)
    try:
        text = file.read_bytes()[:_TEXT_BYTES].decode("utf-8", errors="ignore")
    except OSError as error:
        raise InvalidInput(f"--file: {error.strerror or error}: {str(file)!r}") from None
    if not text.strip():
        raise InvalidInput(f"--file: there is no text in {str(file)!r}")
    text = text[: text.rfind("\n") + 1] or text
    return (_QUESTIONS[0].format(text=text.rstrip()), *_QUESTIONS[1:])


class _Story:
    """The three processes, in order, and what is shown of them."""

    def __init__(self, console: Console, whole: Task) -> None:
        self._console = console
        self._whole = whole

    def until_killed(self) -> list[_Step]:
        """The two steps of process A, which is killed in its third."""
        task = msgspec.structs.replace(self._whole, inputs=self._whole.inputs[:3])
        steps: list[_Step] = []
        seen = 0
        with self._process("process A", task) as (process, events):
            for event in events:
                if event["event"] == "step":
                    steps.append(msgspec.convert(event, _Step))
                if event["event"] == "text":
                    seen += event["tokens"] if len(steps) == 2 else 0
                    if seen >= _KILL_AFTER_TOKENS:
                        process.kill()
                        break
                    _let_on(process)
        if process.returncode != -signal.SIGKILL or len(steps) != 2:
            raise AgentKVError("the third step was over before it could be stopped: choose another text")
        self._say(f"\n[red]process A was killed[/red] after {seen} tokens of step 3, which had not been committed")
        return steps

    def resumed(self, head: str) -> tuple[str, list[_Step]]:
        """Where process B found the session, and its two steps; the first insists on `head` (`expect=`)."""
        task = msgspec.structs.replace(self._whole, first=3, inputs=self._whole.inputs[2:], expect=head)
        return self._run_through("process B", task)

    def in_full(self, store: str) -> list[_Step]:
        """All four steps in mode `full`, by process C, which shares nothing with the others."""
        task = msgspec.structs.replace(self._whole, store=store, session="reference", mode="full")
        return self._run_through("process C", task)[1]

    def _run_through(self, name: str, task: Task) -> tuple[str, list[_Step]]:
        """The head at which the session was opened, and the steps taken."""
        head, steps = "", []
        with self._process(name, task) as (process, events):
            for event in events:
                if event["event"] == "open":
                    head = event["head"]
                elif event["event"] == "step":
                    steps.append(msgspec.convert(event, _Step))
                elif event["event"] == "text":
                    _let_on(process)
        return head, steps

    @contextmanager
    def _process(self, name: str, task: Task) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
        """A worker and its events, shown as they come; it is gone afterwards."""
        command = [sys.executable, "-m", "agentkv.demo_worker"]
        # In a session of its own: an interrupt typed at the terminal is this process's business.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(task).decode() + "\n")
            process.stdin.flush()
            self._say(f"\n[bold]{name}[/bold] (pid {process.pid}), mode {task.mode}")
            try:
                with Bars(self._console) as bars:
                    bars.update("load", 0, 1)
                    yield process, self._told(process, task, bars)
            finally:
                process.kill()

    def _told(self, process: subprocess.Popen[str], task: Task, bars: Bars) -> Iterator[dict[str, Any]]:
        """The worker's events. Raises AgentKVError for what went wrong in it."""
        assert process.stdout is not None
        number, at_start = task.first, True
        for line in process.stdout:
            event = json.loads(line)
            match event["event"]:
                case "stage":
                    bars.update(event["stage"], event["done"], event["total"])
                case "open":
                    bars.finish("load")
                    self._say(f"session at {event['head']}")
                case "text":
                    bars.finish("prefill")
                    if at_start:
                        question = task.inputs[number - task.first].splitlines()[-1]
                        self._say(f"\n[bold]step {number}[/bold] [dim]{question}[/dim]")
                    self._console.out(printable(event["text"]), end="")
                    at_start = False
                case "step":
                    number, at_start = number + 1, True
                    self._say("")
                case "error":
                    raise AgentKVError(event["message"])
            yield event
        if process.wait() != 0:
            raise AgentKVError(f"a process of the demo ended with code {process.returncode}")

    def _say(self, text: str) -> None:
        self._console.print(text)


def _let_on(process: subprocess.Popen[str]) -> None:
    """Allow the worker its next event; a worker that has failed says so in its last one."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")


def _table(steps: Sequence[_Step], equal: Sequence[bool]) -> Table:
    title = "One session, killed in its third step and resumed by another process"
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    counts = ("#", "context", "cached", "pre-\nfilled", "loaded", "first\ntoken", "tok/s")
    for name in (*counts, "pro-\nposed", "ac-\ncepted", "KV\nread", "=\nfull"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (step, same) in enumerate(zip(steps, equal, strict=True), 1):
        row = step.row
        table.add_row(
            f"{number}",
            *(f"{count:,}" for count in (row.context, row.cached, row.prefilled, row.loaded)),
            f"{row.ttft_s:.2f}s",
            f"{row.tokens_per_s:.1f}",
            f"{row.proposed}",
            f"{row.accepted}",
            f"{row.kv_read_share:.0%}",
            "yes" if same else "NO",
        )
    return table
