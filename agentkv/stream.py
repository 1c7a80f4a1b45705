"""One step as an async iterator of frozen events. It owns the step from its first await to its commit or rollback.

A class with `__aenter__`, `__anext__` and `aclose`, not a generator: leaving it at any point runs its clean-up in the
task that leaves (PEP 789).
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from agentkv.config import DecodingConfig, Every, Mode, Tolerant
from agentkv.errors import AgentKVError
from agentkv.generation import Generation
from agentkv.lanes import shielded
from agentkv.transcript import Delta, StepInput
from agentkv.types import Done, StepResult, StreamEvent

if TYPE_CHECKING:
    from agentkv.session import Session

_log = logging.getLogger("agentkv.stream")


class Stream:
    """`async with session.stream(...) as stream: async for event in stream`.

    `result` is set after Done, and after a step that was cancelled and kept.
    """

    def __init__(
        self,
        session: "Session",
        input: StepInput,
        decoding: DecodingConfig,
        mode: Mode,
        verify: Tolerant | Every | None,
        seed: int | None,
        stop: tuple[str, ...],
        expect: str | None,
    ) -> None:
        self.input = input
        self.decoding = decoding
        self.mode: Mode = mode
        self.verify: Tolerant | Every | None = verify
        self.seed = seed
        self.stop = stop
        self.started = 0.0
        self.result: StepResult | None = None
        self.delta: Delta | None = None
        """What the step appended, its spans counted from the session's first token."""
        self.cached = 0
        self.loaded = 0
        self.carry = False
        """Whether the session had a last token whose KV this step's prefill completes."""
        self._session = session
        self._expect = expect
        self._generation: Generation | None = None
        self._entered = False
        self._over = True  # until it is the session's writer
        self._changing = anyio.Lock()
        """Held while the session changes: begin, commit, and the end of an unfinished step."""
        self._interruption: AgentKVError | None = None
        self._attention = 0
        """Calls in progress: while it is 0, the consumer is away."""

    def start_from(self, delta: Delta, cached: int, loaded: int, *, carry: bool) -> None:
        """What the step builds on: KV positions in memory, those that waking has just loaded, and the carry."""
        self.delta, self.cached, self.loaded, self.carry = delta, cached, loaded, carry

    async def __aenter__(self) -> Self:
        assert not self._entered, "a stream is entered once"
        self._entered = True
        self.started = time.perf_counter()
        self._session.acquire(self, self._expect)
        self._over = False
        with self._attended():
            try:
                async with self._changing:
                    self._generation = await self._session.begin(self)
                self._raise_if_interrupted()
            except BaseException as error:
                await self._leave(error)
                raise
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event; raises what made the step fail, once, after it has been rolled back."""
        assert self._entered, "a stream is iterated inside `async with`"
        event = None
        if not self._over:
            assert self._generation is not None
            with self._attended():
                try:
                    event = await self._generation.next_update() or await self._commit(self._generation)
                except BaseException as error:
                    await self._leave(error)
                    raise
        if event is None:
            self._raise_if_interrupted()
            raise StopAsyncIteration
        return event

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave(error if isinstance(error, asyncio.CancelledError) else None)

    async def aclose(self) -> None:
        """Cancel the step if it has not been committed. Idempotent."""
        await self._leave(None)

    async def interrupt(self, error: AgentKVError) -> None:
        """Cancel the step from another task, wherever its own task is; there, the next await raises `error`."""
        if not self._over:
            self._interruption = error
            await self._leave(None)

    @property
    def at_work(self) -> bool:
        """Whether the step goes on by itself: somebody awaits it (a consumer may be away), and it has its room."""
        return self._attention > 0 and self._generation not in self._session.room.waiting

    @contextmanager
    def _attended(self) -> Iterator[None]:
        self._attention += 1
        try:
            yield
        finally:
            self._attention -= 1
            self._session.room.change()  # a consumer who is away is waited for no longer

    async def _commit(self, generation: Generation) -> Done | None:
        """None if another task has ended the step."""
        async with self._changing:
            if self._over:
                return None
            self.result = await self._session.commit(generation, self)
            self._over, self._interruption = True, None
            self._session.release()
            return Done(self.result)

    def _raise_if_interrupted(self) -> None:
        if self._interruption is not None:
            error, self._interruption = self._interruption, None
            raise error

    async def _leave(self, error: BaseException | None) -> None:
        """End the step unfinished: by cancellation or by being left early (None), or by a failure."""
        with self._attended():
            await shielded(self._end(error))

    async def _end(self, error: BaseException | None) -> None:
        cancelled = isinstance(error, asyncio.CancelledError)
        async with self._changing:
            if self._over:
                return
            self._over = True
            try:
                self.result = await self._session.abandon(self._generation, self, keep=cancelled or error is None)
            except AgentKVError:
                if not cancelled:
                    raise
                # A cancellation is never replaced by another error: the session is at its last commit.
                _log.exception("a cancelled step could not be kept")
            finally:
                self._session.release()
                if self._generation is not None:
                    self._generation.publish(over=True)  # whoever still waits for an update
