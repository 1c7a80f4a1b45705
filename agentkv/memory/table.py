"""The page table of one sequence: logical page → page id, record id and whether it is sealed. Pure.

Pages are in order of position: logical page i holds positions [16 i, 16 i + 16). Sealed pages (verified, immutable)
come first; provisional ones (mode="sparse") after them: private, never indexed or backed up, dropped at recomputation.
"""

from collections.abc import Sequence


class PageTable:
    """Parallel lists of page ids and record ids; `runs` gives the neighbours that one view can read."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.records: list[int] = []
        """Record ids of the sealed pages, allotted at sealing; the pages past them are provisional."""
        self._runs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def sealed(self) -> int:
        """Sealed pages; `pages[sealed:]` are provisional."""
        return len(self.records)

    @property
    def last(self) -> int | None:
        """The last page id, which the next one should neighbour."""
        return self.pages[-1] if self.pages else None

    def append(self, page: int, record: int | None) -> None:
        """Add the next page; `record=None` makes it provisional (nothing sealed may follow)."""
        if record is not None:
            assert self.sealed == len(self.pages), "a sealed page after a provisional one"
            self.records.append(record)
        self.pages.append(page)
        if self._runs and sum(self._runs[-1]) == page:
            first, count = self._runs[-1]
            self._runs[-1] = (first, count + 1)
        else:
            self._runs.append((page, 1))

    def truncate(self, count: int) -> list[int]:
        """Keep the first `count` pages; returns the ids let go, for the pool."""
        assert 0 <= count <= len(self.pages)
        dropped = self.pages[count:]
        del self.pages[count:]
        del self.records[count:]
        self._runs = page_runs(self.pages)
        return dropped

    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first page id, count) of each run of neighbouring ids, in order of position."""
        return tuple(self._runs)


def page_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Group page ids into runs (first, count) of consecutive ids, order kept."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
