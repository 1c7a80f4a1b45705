"""Heads score pages: what the next proposals of a sequence should read.

A head belongs to one sequence and survives its steps through a sidecar (per commit). To add one: one file with this
protocol, one entry where `manager.py` builds heads. It does not know budgets; `scheduler/compiler.py` selects.
"""

from typing import Protocol

import numpy as np


class Head(Protocol):
    """Page scores of one sequence. Rows: kv_heads, or 1 where one set serves all heads."""

    def observe(self, mass: np.ndarray) -> None:
        """Take fp32 page mass [queries, kv_heads, pages] of the last accepted queries of a scored forward."""
        ...

    def scores(self) -> np.ndarray | None:
        """fp32 [rows, pages seen]; None before the first observation. Later pages are unscored."""
        ...

    def truncate(self, pages: int) -> None:
        """Forget pages from `pages` on: the sequence was rolled back or recomputed."""
        ...

    def export(self) -> bytes:
        """The sidecar of this commit (≤ 256 KiB); `restore` takes it back."""
        ...

    def restore(self, sidecar: bytes) -> None: ...
