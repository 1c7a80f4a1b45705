"""Proposers make the drafts of a round. A new one: a class with this protocol and an entry in `proposer_for`.

`begin` returns drafts that need no forward; `segment` the rows of the next proposal forward, until it returns None.
Drafts are sampled like verified tokens, with the same noise and with the drafts before them as history.
"""

from typing import Protocol

import numpy as np
import torch

from agentkv.backends.base import Backend, Segment
from agentkv.generation import Generation
from agentkv.scheduler.compiler import select
from agentkv.scheduler.phase import Decision


class Proposer(Protocol):
    """The drafts of one sequence in one round."""

    drafts: list[int]

    def begin(self, backend: Backend) -> None: ...

    def segment(self) -> Segment | None: ...

    def take(self, logits: torch.Tensor, segment: Segment) -> None:
        """Use the logits [1, vocab] that the forward gave for `segment`."""
        ...


class NoProposer:
    """A full round, alone: nothing is drafted."""

    def __init__(self) -> None:
        self.drafts: list[int] = []

    def begin(self, backend: Backend) -> None:
        pass

    def segment(self) -> Segment | None:
        return None

    def take(self, logits: torch.Tensor, segment: Segment) -> None:
        raise AssertionError("no proposal was asked for")


class LookupProposer(NoProposer):
    """What followed the longest earlier occurrence of the sequence's own last tokens."""

    def __init__(self, draft: list[int]) -> None:
        self.drafts = draft


class SparseProposer:
    """`k` forwards over a selection of the pages, gathered once, and the tail."""

    def __init__(self, generation: Generation, k: int) -> None:
        self.drafts: list[int] = []
        self._generation = generation
        self._k = k

    def begin(self, backend: Backend) -> None:
        generation, table = self._generation, self._generation.sequence.table
        scores = generation.head.scores()
        assert scores is not None, "a sparse round without scores"
        chosen = select(_padded(scores, len(table)), generation.budget, new_since=scores.shape[1])
        physical = np.asarray(table.pages, dtype=np.int64)[chosen]
        generation.draft_buffer = backend.gather(physical, generation.draft_buffer)

    def segment(self) -> Segment | None:
        sequence, done = self._generation.sequence, len(self.drafts)
        if done == self._k:
            return None
        token = self.drafts[-1] if done else sequence.token_ids[-1]
        return Segment(
            [token],
            sequence.kv_len + done,
            sequence.buffer,
            sequence.tail.rows + done,
            sequence.table.runs(),
            draft=self._generation.draft_buffer,
            logits=1,
        )

    def take(self, logits: torch.Tensor, segment: Segment) -> None:
        generation = self._generation
        sequence = generation.sequence
        position = len(sequence.token_ids) + len(self.drafts)
        for draft in self.drafts:
            generation.history.push(draft)
        choice = generation.sampler.sample(logits[0], position, generation.history)
        generation.history.pop(len(self.drafts))
        self.drafts.append(choice.token)
        generation.counters.pages_read += segment.pages_read


class CompanionProposer(NoProposer):
    """A full round beside sparse ones: each of its tokens is final, and it reads all pages at every depth."""

    def __init__(self, generation: Generation, depth: int) -> None:
        super().__init__()
        self._generation = generation
        self._left = depth

    def segment(self) -> Segment | None:
        if not self._left or self._generation.finish_reason is not None:
            return None
        self._left -= 1
        sequence = self._generation.sequence
        return Segment(
            sequence.token_ids[-1:],
            sequence.kv_len,
            sequence.buffer,
            sequence.tail.rows,
            sequence.table.runs(),
            logits=1,
        )

    def take(self, logits: torch.Tensor, segment: Segment) -> None:
        generation = self._generation
        emitted = generation.accept([], logits).tokens
        generation.sequence.add_rows(len(emitted))


def proposer_for(generation: Generation, decision: Decision | None, shadow: list[int], depth: int) -> Proposer:
    """The proposer of a decision (None: there was nothing to decide). `shadow`: lookup's draft; `depth`: the number of
    proposal forwards of the round."""
    if decision is None:
        return NoProposer()
    if decision.kind == "lookup":
        return LookupProposer(shadow[: decision.k])
    if decision.kind == "sparse":
        return SparseProposer(generation, decision.k)
    return CompanionProposer(generation, depth) if depth else NoProposer()


def _padded(scores: np.ndarray, pages: int) -> np.ndarray:
    """Scores [rows, pages]: pages sealed since they were made score nothing (they are selected as such)."""
    return np.pad(scores, ((0, 0), (0, pages - scores.shape[1]))) if scores.shape[1] < pages else scores[:, :pages]


def full_read(generation: Generation, backend: Backend) -> int:
    """(page, layer, KV head) triples one forward over all pages reads."""
    return len(generation.sequence.table) * backend.shape.layers * backend.shape.kv_heads
