"""Packed forwards against plain transformers: every row of a mixed batch gets the logits of its own sequence alone."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentkv.backends.base import Segment
from agentkv.backends.model import TorchBackend
from agentkv.config import PAGE_TOKENS
from agentkv.memory.pages import PagePool
from agentkv.memory.sequence import Sequence
from agentkv.memory.tail import tail_capacity
from agentkv.models import load_model, resolve, write_tiny

LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48)
NOISE = 2e-4
"""fp32 noise of a logit of the tiny model (their standard deviation is 4); a wrong key moves it by far more."""


class Rig:
    """A tiny model twice: under our backend, and as transformers runs it."""

    def __init__(self, directory: Path, kv_heads: int) -> None:
        files = resolve(write_tiny(directory, seed=kv_heads, num_key_value_heads=kv_heads))
        self.plain = load_model(files)
        self.backend = TorchBackend(load_model(files), files.shape, pages=64, tail_capacity=tail_capacity(8))
        self.pool = PagePool(self.backend.pages)
        self.vocab = files.shape.vocab
        self._records = itertools.count()

    def ids(self, seed: int, count: int) -> list[int]:
        return torch.randint(self.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def sequence(self, ids: list[int]) -> Sequence:
        """A sequence with the KV of all of `ids`: whole pages by a prefill chunk, the rest into the tail."""
        sequence = Sequence(self.pool, self.backend, self.backend.tail_capacity, self._records.__next__, list(ids))
        if pages := sequence.take_pages(len(ids) // PAGE_TOKENS):
            self.backend.forward([Segment(ids[: PAGE_TOKENS * len(pages)], 0, sequence.buffer, 0, (), into=pages)])
            sequence.add_pages(pages)
        if rest := ids[sequence.kv_len :]:
            self.backend.forward([self.rows(sequence, rest)])
            sequence.add_rows(len(rest))
        assert sequence.kv_len == len(ids)
        return sequence

    def rows(self, sequence: Sequence, tokens: list[int], **options: object) -> Segment:
        """The next rows of a sequence."""
        table, tail = sequence.table, sequence.tail
        return Segment(tokens, sequence.kv_len, sequence.buffer, tail.rows, table.runs(), **options)  # type: ignore[arg-type]

    def expected(self, ids: list[int], rows: int) -> torch.Tensor:
        """Logits [rows, vocab] of the last `rows` tokens, in one plain forward."""
        with torch.inference_mode():
            return self.plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -rows:]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Rig]]:
    """Rigs by KV heads, made once; on one thread, which is all that so small a model can use."""
    made: dict[int, Rig] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def rig(kv_heads: int) -> Rig:
        if kv_heads not in made:
            made[kv_heads] = Rig(tmp_path_factory.mktemp(f"heads-{kv_heads}"), kv_heads)
        return made[kv_heads]

    yield rig
    torch.set_num_threads(threads)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() < NOISE)


def mixed_batch(rig: Rig, length: int) -> list[tuple[Segment, list[int]]]:
    """Segments of every kind, each of its own sequence with `length` positions, and the ids up to their last row."""
    made: list[tuple[Segment, list[int]]] = []

    def add(count: int, **options: object) -> Sequence:
        ids = rig.ids(1000 * length + len(made), length + count)
        sequence = rig.sequence(ids[:length])
        made.append((rig.rows(sequence, ids[length:], logits=count, **options), ids))
        return sequence

    boundary = (length // PAGE_TOKENS + 3) * PAGE_TOKENS
    chunk = add(boundary - length)
    made[-1][0].into = chunk.take_pages(boundary // PAGE_TOKENS - len(chunk.table))
    add(5, scored=4)
    add(1)
    add(31 - length % PAGE_TOKENS, scored=4)
    add(9)
    reader = add(1)
    if reader.table.pages:
        # A selection of all pages, in another order for every KV head, is the same attention.
        orders = [
            np.random.default_rng(head).permutation(reader.table.pages) for head in range(rig.backend.selection_rows)
        ]
        made[-1][0].draft = rig.backend.gather(np.stack(orders), None)
    return made


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_a_mixed_batch_equals_each_alone(rigs: Callable[[int], Rig], kv_heads: int, length: int) -> None:
    rig = rigs(kv_heads)
    batch = mixed_batch(rig, length)
    expected = [rig.expected(ids, segment.logits) for segment, ids in batch]
    packed = rig.backend.forward([segment for segment, _ in batch])
    masses = [segment.mass for segment, _ in batch]
    assert all(near(found, wanted) for found, wanted in zip(packed, expected, strict=True))
    for (segment, _), wanted, mass in zip(batch, expected, masses, strict=True):
        [alone] = rig.backend.forward([segment])
        assert near(alone, wanted)
        assert (mass is None) == (not segment.scored)
        if mass is not None and segment.mass is not None:
            assert torch.allclose(mass, segment.mass, atol=1e-5)
    rig.pool = PagePool(rig.backend.pages)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_a_chunk_beside_other_rows_leaves_the_right_kv(rigs: Callable[[int], Rig], kv_heads: int) -> None:
    """The tail's rows go into the chunk's first page; what reads the pages next finds every position."""
    rig = rigs(kv_heads)
    ids = rig.ids(5, 49)
    sequence, other = rig.sequence(ids[:21]), rig.sequence(rig.ids(6, 40))
    chunk = rig.rows(sequence, ids[21:48], into=(pages := sequence.take_pages(2)))
    rig.backend.forward([rig.rows(other, [1, 2, 3], logits=3, scored=3), chunk, rig.rows(other, [4], logits=1)])
    sequence.add_pages(pages)
    assert (sequence.kv_len, sequence.tail.rows) == (48, 0)
    [found] = rig.backend.forward([rig.rows(sequence, ids[48:], logits=1)])
    assert near(found, rig.expected(ids, 1))
    rig.pool = PagePool(rig.backend.pages)


def test_a_missing_page_or_a_shifted_position_is_far_above_the_noise(rigs: Callable[[int], Rig]) -> None:
    """The test of the tests above: their tolerance sees the smallest faults that matter."""
    rig = rigs(2)
    ids = rig.ids(9, 49)
    sequence = rig.sequence(ids[:48])
    expected = rig.expected(ids, 1)
    good, shifted, short = (rig.rows(sequence, ids[48:], logits=1) for _ in range(3))
    shifted.position += 1
    short.runs = ((short.runs[0][0] + 1, short.runs[0][1] - 1),)
    assert near(rig.backend.forward([good])[0], expected)
    for faulty in (shifted, short):
        assert (rig.backend.forward([faulty])[0] - expected).abs().max() > 20 * NOISE
    rig.pool = PagePool(rig.backend.pages)
