"""A process of the demo: it opens a session, takes its steps, and tells its parent all it does, a JSON line each.

The parent (`demo.py`) sends the task as the first line, then an empty line for every piece of text it has seen: the
worker waits for each of them, so it is never further in a step than its parent knows, and a kill falls inside it.
"""

import asyncio
import json
import sys
from typing import Any

import anyio.to_thread
import msgspec

import agentkv
from agentkv import AgentKVError, DecodingConfig, Mode, Round, Session, StepResult, Text

_DECODING = DecodingConfig(max_new_tokens=64, temperature=0.3, top_p=0.9, repetition_penalty=1.1)


class Task(msgspec.Struct, frozen=True):
    """What a worker does. Its first step is number `first` and must find the session at `expect` (None: anywhere)."""

    model: str
    store: str
    session: str
    mode: Mode
    first: int
    inputs: tuple[str, ...]
    expect: str | None = None


class Row(msgspec.Struct, frozen=True):
    """What a step cost. `context`: tokens there were when its first token was chosen."""

    context: int
    cached: int
    prefilled: int
    loaded: int
    ttft_s: float
    tokens_per_s: float
    proposed: int
    accepted: int
    kv_read_share: float


class _Reporter:
    """Lines to the parent; also `progress=` of `agentkv.open`."""

    def tell(self, event: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()

    def update(self, stage: str, done: int, total: int) -> None:
        self.tell("stage", stage=stage, done=done, total=total)


def main() -> int:
    """Take a task from stdin and do it."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    reporter = _Reporter()
    try:
        asyncio.run(_work(task, reporter))
    except AgentKVError as error:
        reporter.tell("error", message=str(error))
        return 1
    return 0


async def _work(task: Task, reporter: _Reporter) -> None:
    async with (
        agentkv.open(task.model, store=task.store, progress=reporter) as manager,
        manager.session(task.session) as session,
    ):
        reporter.tell("open", head=session.head)
        expect = task.expect
        for number, text in enumerate(task.inputs, task.first):
            await _step(session, task.mode, number, text, expect, reporter)
            expect = session.head


async def _step(session: Session, mode: Mode, number: int, text: str, expect: str | None, reporter: _Reporter) -> None:
    read = 0
    async with session.stream(text, decoding=_DECODING, mode=mode, seed=number, expect=expect) as stream:
        assert stream.delta is not None
        total = len(stream.delta.token_ids) + stream.carry
        async for event in stream:
            if isinstance(event, Text):
                reporter.tell("text", text=event.text, tokens=len(event.token_ids))
                await anyio.to_thread.run_sync(sys.stdin.readline)
            elif isinstance(event, Round) and event.kind == "prefill":
                read += event.tokens
                reporter.update("prefill", read, total)
    assert stream.result is not None
    row = _row(stream.result, len(session.token_ids))
    reporter.tell("step", head=session.head, token_ids=stream.result.token_ids, row=msgspec.to_builtins(row))


def _row(result: StepResult, tokens: int) -> Row:
    usage, trace = result.usage, result.trace
    return Row(
        context=tokens - usage.output,
        cached=usage.cached,
        prefilled=usage.prefilled,
        loaded=usage.loaded,
        ttft_s=trace.ttft_seconds,
        tokens_per_s=(usage.output - 1) / trace.decode_seconds if trace.decode_seconds else 0.0,
        proposed=trace.proposed,
        accepted=trace.accepted,
        kv_read_share=trace.kv_read_share,
    )


if __name__ == "__main__":
    sys.exit(main())
