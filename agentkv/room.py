"""Room in the KV pool: whoever begins is first promised every page it may come to hold, so nothing runs out midway.

Pages of idle sessions are taken back first; then one waits for sessions at work, whose end frees more; where that
cannot help either, it is a CapacityError. `executor.py` admits generations with it, `waking.py` sessions that wake.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from agentkv.errors import CapacityError
from agentkv.generation import Generation
from agentkv.memory.pages import PagePool


class Room:
    """Promises over one pool. `running` and `waiting` generations are kept up by the executor.

    `reclaim` puts idle sessions to sleep until so many more pages are free; `at_work` says whether a session holds
    pages and is at something that will end by itself (a stream whose consumer is away is not).
    """

    def __init__(self, pool: PagePool, reclaim: Callable[[int], Awaitable[None]], at_work: Callable[[], bool]) -> None:
        self.capacity = pool.capacity
        self.running: list[Generation] = []
        self.waiting: list[Generation] = []
        self._pool = pool
        self._reclaim = reclaim
        self._at_work = at_work
        self._waking = 0
        self._changed = anyio.Event()

    @property
    def spare(self) -> int:
        """Free pages that nobody has been promised."""
        return self._pool.free - self._waking - sum(g.page_limit - len(g.sequence.table) for g in self.running)

    @property
    def may_grow(self) -> bool:
        """Whether somebody at work may still free pages."""
        return bool(self.running or self._waking) or self._at_work()

    async def make(self, pages: int) -> bool:
        """Whether `pages` more can be had now, idle sessions' pages included. True holds until the next await."""
        while self.spare < pages:
            unchanged = self._changed
            await self._reclaim(pages - self.spare)
            if self.spare < pages and not unchanged.is_set():
                return False
        return True

    @asynccontextmanager
    async def promised(self, pages: int) -> AsyncIterator[None]:
        """Room for a session that wakes, from its first page to the end of the block. Raises CapacityError."""
        while not await self.make(pages):
            if not (self.may_grow or self.waiting):
                raise CapacityError(
                    f"{pages} pages wanted, {self.spare} of {self.capacity} are neither held nor promised: raise "
                    "EngineConfig.kv_bytes or close sessions"
                )
            await self._changed.wait()
        self._waking += pages
        try:
            yield
        finally:
            self._waking -= pages
            self.change()

    def change(self) -> None:
        """Pages may have been freed, or somebody has ended: whoever waits looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Return at the next `change`."""
        await self._changed.wait()
