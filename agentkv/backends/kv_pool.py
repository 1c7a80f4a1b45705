"""Bytes of pages and tails in CPU memory, laid out for views: `[layer][kv_head][page][position][dim]`, K and V apart.

A run of neighbouring pages is a view `[kv_heads, 16 * count, dim]` of a layer without a copy. The pool is reserved as
address space and touched only as pages fill. Which page belongs to whom is `memory`'s business, not this file's.
"""

import numpy as np
import torch

from agentkv.config import PAGE_TOKENS
from agentkv.errors import CapacityError
from agentkv.types import ModelShape

KV = tuple[torch.Tensor, torch.Tensor]


class KVPool:
    """`pages` pages and any number of tail buffers of `tail_capacity` rows."""

    def __init__(self, shape: ModelShape, pages: int, tail_capacity: int) -> None:
        self.shape = shape
        self.tail_capacity = tail_capacity
        self.dtype = getattr(torch, shape.dtype)
        size = (shape.layers, shape.kv_heads, pages, PAGE_TOKENS, shape.head_dim)
        try:
            self.k, self.v = torch.empty(size, dtype=self.dtype), torch.empty(size, dtype=self.dtype)
        except RuntimeError as error:
            raise CapacityError(f"{pages} pages of KV cannot be reserved: lower EngineConfig.kv_bytes") from error
        self._tails: dict[int, KV] = {}
        self._spare: list[KV] = []

    def run(self, layer: int, first: int, count: int) -> KV:
        """K and V views [kv_heads, 16 * count, dim] of pages first … first + count - 1."""
        shape = (self.shape.kv_heads, PAGE_TOKENS * count, self.shape.head_dim)
        k = self.k[layer, :, first : first + count].view(shape)
        return k, self.v[layer, :, first : first + count].view(shape)

    def tail(self, tail: int) -> KV:
        """K and V buffers [layers, kv_heads, tail_capacity, dim] of an open tail."""
        return self._tails[tail]

    def open_tail(self) -> int:
        number = next(n for n in range(len(self._tails) + 1) if n not in self._tails)
        shape = (self.shape.layers, self.shape.kv_heads, self.tail_capacity, self.shape.head_dim)
        self._tails[number] = (
            self._spare.pop()
            if self._spare
            else (torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype))
        )
        return number

    def close_tail(self, tail: int) -> None:
        self._spare.append(self._tails.pop(tail))

    def seal(self, tail: int, page: int) -> None:
        for pool, rows in zip((self.k, self.v), self._tails[tail], strict=True):
            pool[:, :, page] = rows[:, :, :PAGE_TOKENS]
            rows[:, :, :-PAGE_TOKENS] = rows[:, :, PAGE_TOKENS:].clone()

    def unseal(self, page: int, tail: int, rows: int) -> None:
        for pool, buffer in zip((self.k, self.v), self._tails[tail], strict=True):
            buffer[:, :, :rows] = pool[:, :, page, :rows]

    def read_page(self, page: int) -> np.ndarray:
        return _to_bytes(self.k[:, :, page], self.v[:, :, page])

    def write_page(self, page: int, payload: np.ndarray) -> None:
        _from_bytes(payload, self.k[:, :, page], self.v[:, :, page])

    def read_tail(self, tail: int, rows: int) -> np.ndarray:
        k, v = self._tails[tail]
        return _to_bytes(k[:, :, :rows], v[:, :, :rows])

    def write_tail(self, tail: int, payload: np.ndarray, rows: int) -> None:
        k, v = self._tails[tail]
        _from_bytes(payload, k[:, :, :rows], v[:, :, :rows])


def _to_bytes(k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    """uint8 [layers, K|V kv_heads rows dim] from two [layers, kv_heads, rows, dim]."""
    both = torch.stack((k, v), dim=1)
    return both.view(both.shape[0], -1).view(torch.uint8).numpy()


def _from_bytes(payload: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> None:
    layers, heads, rows, dim = k.shape
    both = torch.from_numpy(payload).view(k.dtype).view(layers, 2, heads, rows, dim).numpy()
    # numpy copies on this thread alone: thousands of small torch copies spend their time waking the other threads.
    k.numpy()[:] = both[:, 0]
    v.numpy()[:] = both[:, 1]
