"""What the executor asks of a device: packed forwards over sealed pages ⊕ tail, and page bytes in and out.

A forward is `input_ids [1, tokens]`; only `Segment`s tell sequences apart. `torch_attention.py` is the CPU form and the
reference; `model.py` runs the transformers modules over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from agentkv.types import ModelShape

Runs = tuple[tuple[int, int], ...]
"""(first page id, count) of neighbouring pages, in order of position."""


@dataclass(slots=True)
class Segment:
    """One sequence's rows in a packed forward.

    `tokens` start at `position`; their K and V are written to the tail buffer from row `tail_rows` on, or, for a
    prefill chunk, together with the tail's rows to the pages `into`. Attention reads the sealed pages `runs` (or, in
    layers that are not dense, the gathered `draft`), then the tail causally. `logits` and `scored` count trailing rows.
    A chunk may be followed by the segment of the rows behind it, which reads the chunk's pages.
    """

    tokens: Sequence[int]
    position: int
    tail: int
    tail_rows: int
    runs: Runs
    draft: Any | None = None
    into: Sequence[int] | None = None
    logits: int = 0
    scored: int = 0
    pages_read: int = field(default=0, init=False)
    """Sealed (page, layer, KV head) triples that attention read: counted where they are read."""
    mass: torch.Tensor | None = field(default=None, init=False)
    """fp32 [scored, kv_heads, pages]: attention mass per sealed page, mean over the group, summed over layers."""


class Backend(Protocol):
    """A device with a KV pool of `pages` pages and tail buffers of `tail_capacity` rows. Used from the compute lane."""

    shape: ModelShape
    pages: int
    tail_capacity: int
    selection_rows: int
    """Rows of a selection: kv_heads, or 1 if one set serves all heads."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """One packed forward; per segment fp32 logits [segment.logits, vocab]. Fills `pages_read` and `mass`."""
        ...

    def gather(self, pages: np.ndarray, draft: Any | None) -> Any:
        """Copy the page ids [selection_rows, budget] into a draft buffer (the given one, if it fits) and return it."""
        ...

    def open_tail(self) -> int: ...

    def close_tail(self, tail: int) -> None: ...

    def seal(self, tail: int, page: int) -> None: ...

    def unseal(self, page: int, tail: int, rows: int) -> None: ...

    def read_page(self, page: int) -> np.ndarray:
        """A copy as uint8 [layers, layer_bytes], each layer [K|V][kv_head][position][dim]: the layout of records."""
        ...

    def write_page(self, page: int, payload: np.ndarray) -> None: ...

    def read_tail(self, tail: int, rows: int) -> np.ndarray: ...

    def write_tail(self, tail: int, payload: np.ndarray, rows: int) -> None: ...

    def close(self) -> None: ...
