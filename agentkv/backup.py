"""Write-ahead of sealed pages: from the pool to the store, behind the step that sealed them.

Pages queued here are held by their sequence. Before a sequence lets a page go it calls `drop` (uncommitted pages) or
has committed, which waits for `landed`: so no page is freed or reused under the disk lane.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import anyio

from agentkv.backends.base import Backend
from agentkv.lanes import Lane, shielded
from agentkv.memory.record import PageCodec
from agentkv.memory.sequence import Sequence
from agentkv.memory.store import Store

_BATCH_PAGES = 64


@dataclass(frozen=True, slots=True)
class _Queued:
    namespace: str
    record: int
    page: int


class Backup:
    """One queue per manager, served in order on the disk lane."""

    def __init__(self, backend: Backend, store: Store, codec: PageCodec, lane: Lane) -> None:
        self._backend = backend
        self._store = store
        self._codec = codec
        self._lane = lane
        self._queue: deque[_Queued] = deque()
        self._outstanding: set[int] = set()
        self._failed: dict[int, Exception] = {}
        self._changed = anyio.Event()

    async def serve(self) -> None:
        """Write what is queued, for ever; ends by cancellation, after the batch in hand."""
        while True:
            if not self._queue:
                await self._changed.wait()
                continue
            await shielded(self._write(self._next_batch()))

    def offer(self, namespace: str, sequence: Sequence) -> None:
        """Queue the sequence's sealed pages that have not been offered yet."""
        table = sequence.table
        for index in range(sequence.offered, table.sealed):
            self._queue.append(_Queued(namespace, table.records[index], table.pages[index]))
            self._outstanding.add(table.records[index])
        sequence.offered = table.sealed
        self._notify()

    async def landed(self, records: Iterable[int]) -> None:
        """Return once all `records` are on disk. Raises what kept one of them off it (StoreFull, …)."""
        wanted = set(records)
        while wanted & self._outstanding:
            await self._changed.wait()
        for record in wanted & self._failed.keys():
            raise self._failed[record]

    def is_durable(self, record: int) -> bool:
        """Whether an offered record is on disk."""
        return record not in self._outstanding and record not in self._failed

    async def drop(self, namespace: str, records: Iterable[int]) -> None:
        """Forget uncommitted pages: take them out of the queue, or off the disk again."""
        gone = set(records)
        if not gone:
            return
        queued = {entry.record for entry in self._queue if entry.record in gone}
        self._queue = deque(entry for entry in self._queue if entry.record not in queued)
        self._outstanding -= queued
        while gone & self._outstanding:
            await self._changed.wait()
        for record in gone & self._failed.keys():
            del self._failed[record]
        await self._lane.run(self._store.drop_pending, namespace, sorted(gone - queued))

    def retry(self, sequence: Sequence) -> None:
        """Let failed pages be offered again (a commit that found the store full may be repeated)."""
        for index, record in enumerate(sequence.table.records):
            if self._failed.pop(record, None) is not None:
                sequence.offered = min(sequence.offered, index)

    def _next_batch(self) -> list[_Queued]:
        """Pages of one namespace; from here on they can no longer be dropped from the queue, only off the disk."""
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < _BATCH_PAGES and self._queue[0].namespace == batch[0].namespace:
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, batch: list[_Queued]) -> None:
        try:
            await self._lane.run(self._put, batch)
        except Exception as error:  # of any kind: this task must outlive it, and the commits that wait must hear of it
            self._failed.update((entry.record, error) for entry in batch)
        finally:
            self._outstanding.difference_update(entry.record for entry in batch)
            self._notify()

    def _put(self, batch: list[_Queued]) -> int:
        pages = ((entry.record, self._backend.read_page(entry.page)) for entry in batch)
        return self._store.put_pages(batch[0].namespace, self._codec, pages)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
