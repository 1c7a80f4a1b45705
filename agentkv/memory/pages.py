"""Accounting of page ids: which are free, which are held, by how many tables, and what record each one holds. Pure.

Ids are handed out in runs of neighbours where possible, because a run is read as one view on the CPU.
A page is released when its last holder lets go; `free + held == capacity` at all times (`check`).
`table.py` holds the ids of one sequence; the bytes belong to a backend.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import takewhile

from agentkv.errors import CapacityError


class PagePool:
    """`capacity` page ids, 0 … capacity-1, reference-counted. Used from the compute lane only."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._holders: dict[int, int] = {}
        self._records: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        # Sorted, disjoint, never adjacent free runs [start, stop).
        self._starts: list[int] = [0]
        self._stops: list[int] = [capacity]

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return self.capacity - self.held

    def holders(self, page: int) -> int:
        """How many tables hold `page`; 0 if it is free."""
        return self._holders.get(page, 0)

    def name(self, page: int, record: int) -> None:
        """`page`, which is held, has the bytes of a record: others who want them can hold it, too."""
        assert page in self._holders, f"page {page} is free"
        self._records[page] = record
        self._pages[record] = page

    def resident(self, records: Iterable[int]) -> list[int]:
        """The held pages of the leading records that have one."""
        pages = (self._pages.get(record) for record in records)
        return [page for page in takewhile(lambda page: page is not None, pages) if page is not None]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, continuing the run that ends at page `after` where that is possible.

        Raises CapacityError, having taken nothing, if fewer are free.
        """
        if count > self.free:
            raise CapacityError(f"{count} pages wanted, {self.free} of {self.capacity} free")
        taken: list[int] = []
        while len(taken) < count:
            run, start = self._next_start(after, count - len(taken))
            stop = min(self._stops[run], start + count - len(taken))
            self._cut(run, start, stop)
            taken.extend(range(start, stop))
            after = stop - 1
        for page in taken:
            self._holders[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are held."""
        for page in pages:
            assert page in self._holders, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a holder of each page; the last one frees it."""
        for page in pages:
            assert page in self._holders, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._forget(page)
                self._give(page)

    def check(self) -> None:
        """Assert that free + held = all, and that no page is both."""
        free = [p for a, b in zip(self._starts, self._stops, strict=True) for p in range(a, b)]
        assert len(free) + self.held == self.capacity, (len(free), self.held, self.capacity)
        assert not set(free) & self._holders.keys()
        assert all(count > 0 for count in self._holders.values())
        assert self._records.keys() <= self._holders.keys()
        assert all(self._records[page] == record for record, page in self._pages.items())

    def _forget(self, page: int) -> None:
        record = self._records.pop(page, None)
        if record is not None and self._pages[record] == page:
            del self._pages[record]

    def _next_start(self, after: int | None, count: int) -> tuple[int, int]:
        """(index of a free run, where in it to start taking)."""
        if after is not None:
            run = bisect_left(self._starts, after + 1)
            if run < len(self._starts) and self._starts[run] == after + 1:
                return run, after + 1
        run = max(range(len(self._starts)), key=lambda i: self._stops[i] - self._starts[i])
        start, stop = self._starts[run], self._stops[run]
        middle = (start + stop) // 2
        # A newcomer starts in the middle of a gap, so that the sequence before the gap can go on growing in one run.
        return run, middle if start > 0 and stop - middle >= count else start

    def _cut(self, run: int, start: int, stop: int) -> None:
        first, last = self._starts[run], self._stops[run]
        pieces = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._starts[run : run + 1] = [a for a, _ in pieces]
        self._stops[run : run + 1] = [b for _, b in pieces]

    def _give(self, page: int) -> None:
        run = bisect_right(self._starts, page)
        joins_left = run > 0 and self._stops[run - 1] == page
        joins_right = run < len(self._starts) and self._starts[run] == page + 1
        if joins_left and joins_right:
            self._stops[run - 1] = self._stops.pop(run)
            del self._starts[run]
        elif joins_left:
            self._stops[run - 1] = page + 1
        elif joins_right:
            self._starts[run] = page
        else:
            self._starts.insert(run, page)
            self._stops.insert(run, page + 1)
