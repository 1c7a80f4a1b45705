"""The tail of one sequence: how many verified rows its unfilled page has. Pure; the rows live in a backend's buffer.

Row r of the tail is position `first + r`, where `first` = 16 x pages. Behind the verified rows, a forward may write the
carry and drafts; they count only once verified. `sequence.py` puts table, tail and token ids together.
"""

from agentkv.config import PAGE_TOKENS

_PREFILL_ROWS = 2 * PAGE_TOKENS - 1
"""A prefill cut at a page boundary leaves up to 31 rows for the verify path."""


def tail_capacity(k_max: int) -> int:
    """Rows a tail buffer needs: an unfilled page, and the carry with `k_max` drafts or a prefill's last rows."""
    return PAGE_TOKENS + max(k_max + 1, _PREFILL_ROWS)


class Tail:
    """Verified rows of a tail buffer with `capacity` rows."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows = 0

    @property
    def room(self) -> int:
        """Rows that a forward may still write."""
        return self.capacity - self.rows

    def extend(self, count: int) -> None:
        """`count` more rows are verified."""
        assert 0 <= count <= self.room, (count, self.room)
        self.rows += count

    def truncate(self, rows: int) -> None:
        """Forget verified rows past `rows`."""
        assert 0 <= rows <= self.rows, (rows, self.rows)
        self.rows = rows

    def pop_page(self) -> bool:
        """Take the first 16 rows off if they are there: the caller copies them to a page and shifts the rest."""
        if self.rows < PAGE_TOKENS:
            return False
        self.rows -= PAGE_TOKENS
        return True
