"""What a step gives back: a committed generation as a `StepResult`."""

import time
from typing import TYPE_CHECKING

from agentkv.generation import Generation
from agentkv.types import Item, StepResult, Trace, Usage

if TYPE_CHECKING:
    from agentkv.stream import Stream


def step_result(generation: Generation, stream: "Stream", checkpoint: str) -> StepResult:
    """What a committed generation says of itself."""
    counters, finish = generation.counters, generation.finish_reason
    assert finish is not None
    assert stream.delta is not None
    ended, first = time.perf_counter(), generation.first_token or generation.started
    trace = Trace(
        mode=generation.mode,
        rounds=dict(counters.rounds),
        proposed=counters.proposed,
        accepted=counters.accepted,
        kv_read_share=counters.pages_read / counters.pages_full if counters.pages_full else 0.0,
        ties=counters.ties,
        seed=generation.sampler.seed,
        events=tuple(generation.events),
        seconds=ended - generation.started,
        ttft_seconds=first - generation.started,
        decode_seconds=(generation.last_token or first) - first,
    )
    usage = Usage(
        input=len(stream.delta.token_ids),
        output=len(generation.emitted),
        cached=stream.cached,
        prefilled=counters.prefilled - stream.carry,
        loaded=stream.loaded,
    )
    message = Item("assistant", generation.text)
    return StepResult(generation.text, message, tuple(generation.emitted), finish, checkpoint, usage, trace)
