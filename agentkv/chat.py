"""`agentkv chat`: a terminal conversation in a durable session, streamed.

Ctrl-C stops the answer being given and keeps what was said of it (`on_cancel="keep"`); the session goes on. Every
finished or stopped answer is committed, so closing the terminal at any time loses at most the answer in flight.
"""

import asyncio
import signal
import sys

import anyio.to_thread
from rich.console import Console

import agentkv
from agentkv import AgentKVError, DecodingConfig, Done, Round, Session, StepResult, Text
from agentkv.progress import Bars, printable

_DECODING = DecodingConfig(max_new_tokens=512, temperature=0.7, top_p=0.9, repetition_penalty=1.1)


async def chat(model: str, store: str, session_id: str) -> None:
    """Talk until the input ends (Ctrl-D). Raises what `agentkv.open` and `manager.session` raise."""
    console = Console(highlight=False)
    with Bars(console) as bars:
        bars.update("load", 0, 1)
        async with (
            agentkv.open(model, store=store, progress=bars) as manager,
            manager.session(session_id, on_cancel="keep") as session,
        ):
            bars.finish("load")
            tokens = sum(info.tokens for info in await manager.sessions() if info.id == session.id)
            console.print(f"[dim]session {session.id}, {tokens} tokens. Ctrl-C stops an answer, Ctrl-D leaves.[/dim]")
            await _Conversation(session, console, bars).run()


class _Conversation:
    """Lines in, answers out, one at a time; owns what Ctrl-C means meanwhile."""

    def __init__(self, session: Session, console: Console, bars: Bars) -> None:
        self._session = session
        self._console = console
        self._bars = bars
        self._answer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the input ends."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        try:
            while True:
                self._prompt()
                # In a thread: a terminal that waits for a person must not hold up the event loop.
                line = await anyio.to_thread.run_sync(sys.stdin.readline)
                if not line:
                    self._console.print()
                    return
                if line.strip():
                    await self._turn(line.strip())
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _prompt(self) -> None:
        self._console.print("[bold]> [/bold]", end="")

    def _interrupted(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
        else:  # the terminal has dropped the line that was being typed
            self._console.print("\n[dim]Ctrl-D leaves.[/dim]")
            self._prompt()

    async def _turn(self, line: str) -> None:
        before = self._session.head
        self._answer = asyncio.create_task(self._say(line))
        try:
            await asyncio.wait([self._answer])
            if self._answer.cancelled():
                kept = "what was said is kept" if self._session.head != before else "nothing of it is kept"
                self._console.print(f"\n[dim]stopped: {kept}[/dim]")
            else:
                self._answer.result()
        except AgentKVError as error:
            self._console.print(f"[red]{type(error).__name__}:[/red] ", end="")
            self._console.out(error)
        finally:
            if self._answer.cancel():  # this conversation itself is being ended
                await asyncio.wait([self._answer])
            self._bars.finish("prefill")
            self._answer = None

    async def _say(self, line: str) -> None:
        """One step, streamed."""
        read, talking = 0, False
        async with self._session.stream(line, decoding=_DECODING) as stream:
            assert stream.delta is not None
            total = len(stream.delta.token_ids) + stream.carry
            async for event in stream:
                if isinstance(event, Text):
                    talking = True
                    self._bars.finish("prefill")
                    self._console.out(printable(event.text), end="")
                elif isinstance(event, Round) and event.kind == "prefill" and not talking:
                    read += event.tokens
                    self._bars.update("prefill", read, total)
                elif isinstance(event, Done):
                    self._console.print(f"\n[dim]{_summary(event.result)}[/dim]")


def _summary(result: StepResult) -> str:
    usage, trace = result.usage, result.trace
    speed = (usage.output - 1) / trace.decode_seconds if trace.decode_seconds else 0.0
    return (
        f"{usage.output} tokens, {speed:.1f}/s; KV cached {usage.cached}, loaded {usage.loaded}, prefilled "
        f"{usage.prefilled}; drafts accepted {trace.accepted} of {trace.proposed}"
    )
