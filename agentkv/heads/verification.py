"""The default head: attention mass per page that the last verification itself spent on accepted queries.

Nothing is trained and nothing extra is computed; it costs one scored pass after unscored ones.
"""

import msgspec
import numpy as np

QUERIES = 4
"""Queries averaged: the mean of the last four verified ones was measured (Qwen2.5-Coder-1.5B, SmolLM2)."""

_SIDECAR_PAGES = 4096
"""At most this many top pages per row go into a sidecar (≤ 256 KiB)."""


class _Sidecar(msgspec.Struct, array_like=True):
    pages: int
    rows: int
    cut: bool
    ids: bytes  # u32 [rows, kept], only if cut
    scores: bytes  # fp16 [rows, kept]


class VerificationHead:
    """`heads.base.Head` from verification attention. `rows`: kv_heads, or 1 to average the heads."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._scores: np.ndarray | None = None

    def observe(self, mass: np.ndarray) -> None:
        mean = mass[-QUERIES:].mean(0)
        self._scores = mean if self._rows > 1 else mean.mean(0, keepdims=True)

    def scores(self) -> np.ndarray | None:
        return self._scores

    def truncate(self, pages: int) -> None:
        if self._scores is not None:
            self._scores = self._scores[:, :pages]

    def export(self) -> bytes:
        if self._scores is None:
            return b""
        rows, pages = self._scores.shape
        kept, ids = self._scores, b""
        cut = pages > _SIDECAR_PAGES
        if cut:
            top = np.sort(np.argpartition(-self._scores, _SIDECAR_PAGES - 1)[:, :_SIDECAR_PAGES])
            kept, ids = np.take_along_axis(self._scores, top, 1), top.astype("<u4").tobytes()
        return msgspec.msgpack.encode(_Sidecar(pages, rows, cut, ids, kept.astype("<f2").tobytes()))

    def restore(self, sidecar: bytes) -> None:
        self._scores = None
        if not sidecar:
            return
        side = msgspec.msgpack.decode(sidecar, type=_Sidecar)
        if side.rows != self._rows:
            return
        kept = np.frombuffer(side.scores, "<f2").astype(np.float32).reshape(side.rows, -1)
        self._scores = kept
        if side.cut:
            self._scores = np.zeros((side.rows, side.pages), np.float32)
            np.put_along_axis(
                self._scores, np.frombuffer(side.ids, "<u4").reshape(side.rows, -1).astype(np.int64), kept, 1
            )
