"""How long forwards take on this machine: measured once per model, device and versions, then cached.

The controller's time model is fitted from a few forwards at three lengths; until it exists, `auto` runs `full`.
"""

import os
import platform
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers

from agentkv.backends.base import Backend, Segment
from agentkv.config import PAGE_TOKENS
from agentkv.memory.pages import PagePool
from agentkv.memory.table import page_runs
from agentkv.scheduler.phase import TimeModel

_ROWS = (1, 2, 3, 5, 9)
_LENGTHS = (256, 1024, 2048)
_REPEATS = 3


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time models of plain forwards and of those that emit page scores; seconds per byte of gathering."""

    plain: TimeModel
    scored: TimeModel
    gather_seconds_per_byte: float

    def sparse_seconds(self, selection_bytes: float, kv_bytes: float) -> float:
        """What a sparse round costs beside its forwards: gathering the selection, scoring the verification."""
        rows = 5
        scoring = self.scored.seconds(rows, kv_bytes) - self.plain.seconds(rows, kv_bytes)
        return max(scoring, 0.0) + self.gather_seconds_per_byte * selection_bytes


def calibrate(backend: Backend, pool: PagePool) -> Calibration:
    """Time forwards over borrowed pages (their content does not matter). Runs on the compute lane."""
    tail = backend.open_tail()
    longest = min(_LENGTHS[-1] // PAGE_TOKENS, pool.free, backend.shape.max_positions // PAGE_TOKENS - 1)
    pages = pool.take(longest)
    try:
        for page in pages:
            backend.write_page(page, backend.read_tail(tail, PAGE_TOKENS) * 0)
        lengths = sorted({max(1, longest * length // _LENGTHS[-1]) for length in _LENGTHS})
        samples: dict[bool, list[tuple[int, float, float]]] = {False: [], True: []}
        for rows in _ROWS:
            for count in lengths:
                for scored in (False, True):
                    seconds = _median_seconds(backend, tail, pages[:count], rows, scored)
                    samples[scored].append((rows, count * PAGE_TOKENS * backend.shape.token_bytes, seconds))
        return Calibration(
            TimeModel.fit(samples[False]), TimeModel.fit(samples[True]), _gather_seconds_per_byte(backend, pages)
        )
    finally:
        pool.release(pages)
        backend.close_tail(tail)


def load(path: Path) -> Calibration | None:
    """A cached calibration, or None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None


def save(path: Path, calibration: Calibration) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(calibration))
    Path(name).replace(path)


def cache_name(kv_id: bytes, threads: int) -> str:
    """File name for a model on this machine with these versions."""
    facts = (platform.processor(), platform.machine(), os.cpu_count(), threads, torch.__version__)
    digest = blake2b(repr((kv_id.hex(), *facts, transformers.__version__)).encode(), digest_size=16)
    return f"times-{digest.hexdigest()}.json"


def _median_seconds(backend: Backend, tail: int, pages: list[int], rows: int, scored: bool) -> float:
    times = []
    for _ in range(_REPEATS):
        segment = Segment(
            [0] * rows,
            len(pages) * PAGE_TOKENS,
            tail,
            0,
            tuple(page_runs(pages)),
            logits=rows,
            scored=rows if scored else 0,
        )
        started = time.perf_counter()
        backend.forward([segment])
        times.append(time.perf_counter() - started)
    return sorted(times)[_REPEATS // 2]


def _gather_seconds_per_byte(backend: Backend, pages: list[int]) -> float:
    wanted = np.tile(np.asarray(pages[::2], dtype=np.int64), (backend.selection_rows, 1))
    draft = backend.gather(wanted, None)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        backend.gather(wanted, draft)
    read = wanted.shape[1] * PAGE_TOKENS * backend.shape.token_bytes
    return (time.perf_counter() - started) / _REPEATS / max(read, 1)
