"""One round of a batch: propose → verify → accept. Synchronous; runs on the compute lane.

A packed verification carries whatever rows its sequences need: the carry and drafts, the last rows of a prefill, or a
prefill chunk. `executor.py` decides what each generation does; this file does it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from agentkv.backends.base import Backend, Segment
from agentkv.config import PAGE_TOKENS
from agentkv.errors import AgentKVError
from agentkv.generation import Generation
from agentkv.heads.verification import QUERIES
from agentkv.memory.table import page_runs
from agentkv.proposers import NoProposer, Proposer, full_read, proposer_for
from agentkv.scheduler.phase import Decision, SequenceState
from agentkv.types import Round


@dataclass(eq=False)
class Work:
    """What one generation does in a round.

    Pages up to `chunk_end`, where there is one, are a prefill chunk. The rows behind them go through the verify path
    if this is the `last` chunk: a prefill's last rows, recomputation, or a decode round, which alone has a `decision`.
    `scored`: the verification emits page mass. `verified=False`: the drafts are final as they are. `shadow`: lookup's
    draft at the round's start and its match length. The rest is filled in by the round.
    """

    generation: Generation
    chunk_end: int | None = None
    last: bool = True
    decision: Decision | None = None
    scored: bool = False
    verified: bool = True
    shadow: tuple[list[int], int] = ([], 0)
    state: SequenceState | None = None
    proposer: Proposer = field(default_factory=NoProposer)
    chunk: Segment | None = None
    segment: Segment | None = None
    prefilled: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self._emitted_before = len(self.generation.emitted)

    @property
    def end(self) -> int:
        """Where the generation's KV ends after the round, drafts apart."""
        return self.chunk_end if self.chunk_end is not None and not self.last else self.generation.target

    @property
    def rows(self) -> int:
        """Rows in the verify forward, drafts apart."""
        return self.end - self.generation.sequence.kv_len

    @property
    def emitted(self) -> list[int]:
        """Tokens of this round."""
        return self.generation.emitted[self._emitted_before :]


@dataclass(slots=True)
class Forward:
    """One packed forward that was run. `plain`: neither scored nor with a prefill chunk, so the time model knows it."""

    rows: int
    kv_bytes: int
    seconds: float
    plain: bool


@dataclass(slots=True)
class RoundTimes:
    """Seconds of a round's device work: `begin` (gathering selections) and its forwards."""

    begin: float
    forwards: list[Forward]

    @property
    def seconds(self) -> float:
        return self.begin + sum(forward.seconds for forward in self.forwards)


def run_round(backend: Backend, works: Sequence[Work]) -> RoundTimes:
    """Advance every generation of `works` by one round. A generation whose own part fails carries its error away."""
    started = time.perf_counter()
    depth = max((w.decision.k for w in works if w.decision and w.decision.kind == "sparse"), default=0)
    for work in works:
        work.proposer = proposer_for(work.generation, work.decision, work.shadow[0], depth)
        work.proposer.begin(backend)
    begin = time.perf_counter() - started
    forwards = _propose(backend, works) + _verify(backend, works)
    for work in works:
        with _own_failure(work):
            _conclude(work, time.perf_counter() - started)
    return RoundTimes(begin, forwards)


def _propose(backend: Backend, works: Sequence[Work]) -> list[Forward]:
    forwards = []
    while True:
        sound = [work for work in works if work.generation.error is None]
        asked = [(work, segment) for work in sound if (segment := work.proposer.segment()) is not None]
        if not any(segment.draft is not None for _, segment in asked):
            return forwards
        logits, forward = _forward(backend, [segment for _, segment in asked])
        forwards.append(forward)
        for (work, segment), rows in zip(asked, logits, strict=True):
            with _own_failure(work):
                work.proposer.take(rows, segment)
                if segment.draft is not None:
                    work.generation.counters.pages_full += full_read(work.generation, backend)


def _verify(backend: Backend, works: Sequence[Work]) -> list[Forward]:
    sound = [work for work in works if work.verified and work.generation.error is None and work.rows]
    if not sound:
        return []
    try:
        logits, forward = _forward(backend, [segment for work in sound for segment in _plan_verification(work)])
    except BaseException:
        for work in sound:
            _give_back_pages(work)
        raise
    rows = iter(logits)
    for work in sound:
        chunk_rows = next(rows) if work.chunk else None
        own_rows = next(rows) if work.segment else None
        with _own_failure(work):
            if chunk_rows is not None:
                _finish_chunk(work)
            if own_rows is not None:
                _accept(work, own_rows)
    return [forward]


def _plan_verification(work: Work) -> list[Segment]:
    """Make the segments of this work in the verify forward, in order of position."""
    generation, sequence = work.generation, work.generation.sequence
    start, rows, runs = sequence.kv_len, sequence.tail.rows, sequence.table.runs()
    if work.chunk_end is not None:
        into = sequence.take_pages(work.chunk_end // PAGE_TOKENS - len(sequence.table))
        tokens = sequence.token_ids[start : work.chunk_end]
        work.chunk = Segment(tokens, start, sequence.buffer, rows, runs, into=into)
        start, rows, runs = work.chunk_end, 0, tuple(page_runs([*sequence.table.pages, *into]))
    if work.last:
        drafts = work.proposer.drafts
        tokens = sequence.token_ids[start : work.end] + drafts
        work.segment = Segment(tokens, start, sequence.buffer, rows, runs)
        work.segment.logits = 0 if generation.finish_reason is not None else len(drafts) + 1
        work.segment.scored = min(len(tokens), len(drafts) + QUERIES) if work.scored else 0
    return [segment for segment in (work.chunk, work.segment) if segment is not None]


def _finish_chunk(work: Work) -> None:
    assert work.chunk is not None
    assert work.chunk.into is not None
    work.generation.sequence.add_pages(list(work.chunk.into))
    work.prefilled = len(work.chunk.tokens)


def _give_back_pages(work: Work) -> None:
    """The forward that should have filled a chunk's pages failed."""
    if work.chunk is not None and work.chunk.into is not None:
        work.generation.sequence.pool.release(work.chunk.into)


def _accept(work: Work, rows: torch.Tensor) -> None:
    """Keep the longest matching prefix of the drafts and the bonus token; seal what has filled."""
    generation, sequence, segment = work.generation, work.generation.sequence, work.segment
    assert segment is not None
    drafts = work.proposer.drafts
    known = len(segment.tokens) - len(drafts)
    emitted, accepted = 0, 0
    if work.decision is None:
        work.prefilled += known - generation.mid_step  # but for the carry: its KV is new
    if generation.finish_reason is None:
        outcome = generation.accept(drafts, rows)
        emitted, accepted = len(outcome.tokens), outcome.accepted
    # A stop inside the accepted window truncates KV with the tokens: the last one kept becomes the carry.
    sequence.add_rows(known + max(emitted - 1, 0))
    if segment.mass is not None:
        first = len(segment.tokens) - segment.scored
        generation.observe(segment.mass[: max(known + accepted - first, 1)].numpy())
    work.accepted = accepted


def _conclude(work: Work, seconds: float) -> None:
    """Unverified drafts become final; count the round and tell the stream."""
    generation, decision, drafts = work.generation, work.decision, work.proposer.drafts
    if not work.verified:
        work.accepted = len(generation.emit(drafts))
        generation.sequence.add_rows(work.accepted, verified=False)
    if decision is not None:
        generation.counters.count(decision.kind, len(drafts), work.accepted)
        generation.previous = decision.kind
        if work.verified:
            generation.acceptances.observe_sparse(len(drafts) * (decision.kind == "sparse"), work.accepted)
            generation.acceptances.observe_lookup(*work.shadow, work.emitted)
    generation.end_recompute()
    generation.counters.prefilled += work.prefilled
    rows = len(work.emitted) if decision else work.prefilled
    generation.tell(Round(decision.kind if decision else "prefill", rows, len(drafts), work.accepted, seconds))


@contextmanager
def _own_failure(work: Work) -> Iterator[None]:
    """What fails for one generation alone is raised in its step; the others of the batch go on."""
    try:
        yield
    except AgentKVError as error:
        work.generation.error = error


def _forward(backend: Backend, segments: list[Segment]) -> tuple[list[torch.Tensor], Forward]:
    started = time.perf_counter()
    logits = backend.forward(segments)
    seconds = time.perf_counter() - started
    page_bytes = backend.shape.token_bytes * PAGE_TOKENS // (backend.shape.layers * backend.shape.kv_heads)
    plain = not any(s.scored or s.into is not None for s in segments)
    rows = sum(len(s.tokens) for s in segments)
    return logits, Forward(rows, sum(s.pages_read for s in segments) * page_bytes, seconds, plain)
