"""Lanes: one thread each, work in order. The only file that knows threads (and, later, streams and events).

A call that has been handed to a lane always runs to its end: a caller that is cancelled waits for it before the
cancellation goes on, so nothing that the thread touches is freed under it.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import anyio

from agentkv.errors import ManagerClosed, StoreForked

P = ParamSpec("P")
R = TypeVar("R")


async def settled(future: asyncio.Future[R]) -> asyncio.Future[R]:
    """Wait until `future` is done, whatever cancellations arrive meanwhile, and return it, its outcome unread.

    anyio's shield keeps its own cancellations out; asyncio's (task.cancel, timeouts) arrive anyway and are absorbed:
    the caller raises afterwards.
    """
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
    if not future.cancelled():
        future.exception()  # mark as retrieved
    return future


async def shielded(work: Coroutine[Any, Any, R]) -> R:
    """Run `work` to its end whatever happens to the caller; a cancellation is raised after it."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise


class Lane:
    """A named thread that runs one call at a time, first come, first served."""

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"agentkv-{name}", initializer=prepare)
        self._closed = False
        self._pid = os.getpid()

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` on the lane's thread and return its result.

        Cancelled before the thread has begun, the call is withdrawn; afterwards its end is awaited first.
        """
        return await self.make(function, None, *args, **kwargs)

    async def make(
        self, function: Callable[P, R], undo: Callable[[R], object] | None, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Like `run`, for a call that takes or opens something: what a cancelled caller cannot get is undone."""
        if os.getpid() != self._pid:  # the thread stayed in the parent: nobody would ever run the call
            raise StoreForked("the manager was opened before os.fork(): open another one, in a new process")
        if self._closed:
            raise ManagerClosed(f"the {self.name} lane has been closed")
        future = self._pool.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                await settled(asyncio.wrap_future(future))
                if undo is not None and future.exception() is None:
                    await self.finish(undo, future.result())
            raise

    async def finish(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `run`, but never withdrawn: it runs to its end, and a cancellation is raised after it."""
        return await shielded(self.run(function, *args, **kwargs))

    async def close(self) -> None:
        """Let the queue run dry and end the thread. Idempotent."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
