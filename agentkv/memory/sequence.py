"""A sequence: token ids with the KV that has been computed for them, in memory.

Invariants: `kv_len` = 16 x pages + tail rows ≤ len(token_ids); once a step has generated,
`kv_len == len(token_ids) - 1` (the last token is the carry). What lies between is pending: it is prefilled next.
Used from the compute lane only.
It does not know sessions or disks; `store.py` and the session move its pages to and from records.
"""

from collections.abc import Callable
from typing import Protocol

from agentkv.config import PAGE_TOKENS
from agentkv.memory.pages import PagePool
from agentkv.memory.table import PageTable
from agentkv.memory.tail import Tail


class PageMemory(Protocol):
    """What a sequence asks of the backend that holds its bytes."""

    def open_tail(self) -> int: ...

    def close_tail(self, tail: int) -> None: ...

    def seal(self, tail: int, page: int) -> None:
        """Copy the tail's first 16 rows to `page` in all layers and shift the rows behind them to the front."""
        ...

    def unseal(self, page: int, tail: int, rows: int) -> None:
        """Copy the first `rows` rows of `page` to the front of the tail."""
        ...


class Sequence:
    """Token ids, page table and tail of one conversation that is awake."""

    def __init__(
        self, pool: PagePool, memory: PageMemory, capacity: int, allot_record: Callable[[], int], token_ids: list[int]
    ) -> None:
        self.pool = pool
        self.memory = memory
        self.token_ids = token_ids
        self.table = PageTable()
        self.tail = Tail(capacity)
        self.buffer = memory.open_tail()
        self.verified_len = 0
        """KV positions [0, verified_len) come from full attention; those behind are provisional (mode="sparse")."""
        self.offered = 0
        """Sealed pages handed to the backup so far."""
        self._allot_record = allot_record

    @property
    def kv_len(self) -> int:
        """Positions whose K and V are there, provisional ones included."""
        return PAGE_TOKENS * len(self.table) + self.tail.rows

    @property
    def pending(self) -> int:
        """Tokens whose KV is not there: 1 (the carry) while decoding, more before a prefill."""
        return len(self.token_ids) - self.kv_len

    @property
    def provisional(self) -> int:
        """KV positions that verification has not rewritten."""
        return self.kv_len - self.verified_len

    def take_pages(self, count: int) -> list[int]:
        """Take pages for a prefill chunk, neighbours of the table's last one where possible."""
        return self.pool.take(count, self.table.last)

    def add_pages(self, pages: list[int]) -> None:
        """A prefill chunk has filled `pages`, the tail's rows first: they are sealed, and the tail is empty."""
        assert not self.provisional
        for page in pages:
            self._append_sealed(page, self._allot_record())
        self.tail.truncate(0)
        self.verified_len = self.kv_len

    def restore(self, pages: list[int], records: list[int], tail_rows: int) -> None:
        """Take over `pages` and tail rows whose bytes come from records that are on disk; a part may follow a part."""
        assert not self.tail.rows
        for page, record in zip(pages, records, strict=True):
            self._append_sealed(page, record)
        self.tail.extend(tail_rows)
        self.verified_len = self.kv_len
        self.offered = self.table.sealed

    def add_rows(self, count: int, *, verified: bool = True) -> None:
        """`count` rows behind the tail's rows count from now on; full pages are sealed (or made provisional)."""
        assert not (verified and self.provisional), "verified rows behind provisional ones"
        self.tail.extend(count)
        if verified:
            self.verified_len += count
        while self.tail.pop_page():
            [page] = self.take_pages(1)
            self.memory.seal(self.buffer, page)
            if verified:
                self._append_sealed(page, self._allot_record())
            else:
                self.table.append(page, None)

    def share(self, records: list[int]) -> int:
        """Hold the pages of the leading `records` that are in memory already; returns how many they are."""
        pages = self.pool.resident(records)
        self.pool.retain(pages)
        self.restore(pages, records[: len(pages)], 0)
        return len(pages)

    def _append_sealed(self, page: int, record: int) -> None:
        self.table.append(page, record)
        self.pool.name(page, record)

    def truncate_kv(self, length: int) -> None:
        """Keep the KV of the first `length` positions; rows of a page cut in two go back to the tail."""
        assert 0 <= length <= self.kv_len, (length, self.kv_len)
        pages, rows = divmod(length, PAGE_TOKENS)
        if pages < len(self.table):
            if rows:
                self.memory.unseal(self.table.pages[pages], self.buffer, rows)
            self.pool.release(self.table.truncate(pages))
            self.tail.rows = rows
        else:
            self.tail.truncate(rows)
        self.verified_len = min(self.verified_len, length)
        self.offered = min(self.offered, self.table.sealed)

    def drop_provisional(self) -> int:
        """Give up the unverified KV, to be recomputed as pending tokens; returns how many positions."""
        count = self.provisional
        self.truncate_kv(self.verified_len)
        return count

    def close(self) -> None:
        """Release pages and tail; the sequence is unusable afterwards."""
        self.pool.release(self.table.truncate(0))
        self.memory.close_tail(self.buffer)
