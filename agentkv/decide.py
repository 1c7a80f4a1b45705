"""What each running generation does next: a prefill chunk, a prefill's last rows, or a decode round of some kind.

Bridges generations to the pure controller (`scheduler/phase.py`), which knows sizes and acceptance only.
Modes: `full` never proposes; `exact` and `sparse` propose whenever they can; `auto` asks the controller.
"""

from collections.abc import Sequence

from agentkv.calibration import Calibration
from agentkv.config import PAGE_TOKENS
from agentkv.generation import Generation
from agentkv.rounds import RoundTimes, Work
from agentkv.scheduler.phase import Controller, Decision, SequenceState
from agentkv.types import ModelShape


def next_works(running: Sequence[Generation], chunk: int) -> list[Work]:
    """One work per generation; those that must prefill more than a tail holds take turns, a chunk per round. The last
    rows ride in the forward of the last chunk. Where nobody else is held up, a chunk is twice as large."""
    if len(running) == 1:
        chunk *= 2
    works, chunked = [], False
    for generation in running:
        _recompute_if_due(generation)
        if generation.complete:
            continue
        sequence, target = generation.sequence, generation.target
        if generation.pending <= sequence.tail.room:
            works.append(Work(generation))
        elif not chunked:
            chunked = True
            chunk_end = _chunk_end(sequence.kv_len, target, chunk)
            works.append(Work(generation, chunk_end, last=target - chunk_end <= sequence.tail.capacity))
    return works


def _chunk_end(kv_len: int, target: int, chunk: int) -> int:
    """Where a prefill chunk ends: a page boundary that leaves the last 16 tokens or more to the verify path."""
    return min(kv_len + chunk, target - PAGE_TOKENS) // PAGE_TOKENS * PAGE_TOKENS


def _recompute_if_due(generation: Generation) -> None:
    """Unverified KV goes back to pending tokens before a verified round, at the end, and every recompute_tokens."""
    sequence = generation.sequence
    if not sequence.provisional:
        return
    due = sequence.provisional >= generation.speculation.recompute_tokens
    if due or generation.finish_reason is not None or not generation.unverified_next:
        generation.begin_recompute()


def decide(works: Sequence[Work], controller: Controller, calibration: Calibration | None, shape: ModelShape) -> None:
    """Give every work that decodes its decision, and say which verifications emit scores."""
    decoding = [work for work in works if work.generation.decoding_now]
    riding = sum(work.rows for work in works if work not in decoding)
    for work in decoding:
        work.shadow = work.generation.shadow_draft()
    for forced in (False, True):
        group = [work for work in decoding if (work.generation.mode in ("exact", "sparse")) == forced]
        for work in group:
            work.state = _state(work, calibration, shape)
        states = [work.state for work in group if work.state is not None]
        for work, decision in zip(group, controller.decide(states, force=forced, prefill_rows=riding), strict=True):
            _settle(work, decision)
    for work in works:
        if work.decision is None and work.last:  # a first selection exists after a prefill
            work.scored = work.generation.can_select_of(work.end // PAGE_TOKENS)


def _settle(work: Work, decision: Decision) -> None:
    """A sparse round needs fresh scores: without them this round is a scored full one."""
    generation = work.generation
    stale = generation.needs_scores
    if decision.kind == "sparse" and stale:
        decision = Decision("full", 0)
        work.scored = True
    work.decision = decision
    work.verified = not (decision.kind == "sparse" and generation.unverified_next)
    work.scored |= decision.kind == "sparse" or (stale and generation.mode == "exact")


def _state(work: Work, calibration: Calibration | None, shape: ModelShape) -> SequenceState:
    generation, k_max = work.generation, work.generation.draft_limit
    kv_bytes = generation.sequence.kv_len * shape.token_bytes
    selected = None
    if generation.can_select:
        dense = len(generation.speculation.dense_layers) / shape.layers
        selected = generation.budget * PAGE_TOKENS * shape.token_bytes * (1 - dense) + kv_bytes * dense
    return SequenceState(
        kv_bytes,
        generation.acceptances,
        selected,
        work.shadow[1],
        k_max,
        # Unverified drafts cost no verification: as many per round as there may be.
        k_max if generation.unverified_next else generation.speculation.k,
        generation.proposers,
        0.0 if calibration is None or selected is None else calibration.sparse_seconds(selected, kv_bytes),
        generation.previous,
    )


def learn(controller: Controller, works: Sequence[Work], times: RoundTimes) -> None:
    """Correct the time model by what was measured, and book a round in which `auto` sequences alone decoded."""
    if controller.time is None:
        return
    for forward in times.forwards:
        if forward.plain:
            controller.time.refine(forward.rows, forward.kv_bytes, forward.seconds)
    states = [work.state for work in works if work.state is not None and work.generation.mode == "auto"]
    if len(states) == len(works):
        controller.observe(states, [len(work.emitted) for work in works], times.seconds)
