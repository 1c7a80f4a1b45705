"""From a step's arguments to a generation: the delta appended, the sampler and detokenizer made, limits checked."""

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio.to_thread

from agentkv.backends.sampling import Sampler
from agentkv.detokenize import Detokenizer
from agentkv.engine import Engine
from agentkv.errors import ContextOverflow
from agentkv.generation import Generation
from agentkv.transcript import Delta
from agentkv.types import Event
from agentkv.waking import Awake

if TYPE_CHECKING:
    from agentkv.stream import Stream


async def new_generation(engine: Engine, namespace: str, awake: Awake, stream: "Stream") -> Generation:
    """Append the stream's input to the awake session and make its generation. Sets `stream.delta`.

    Raises InvalidInput, TemplateError, ContextOverflow; then nothing has been appended.
    """
    token_ids = awake.sequence.token_ids
    last = token_ids[-1] if token_ids else None

    def render() -> Delta:
        return engine.transcript.delta(
            stream.input, started=bool(token_ids), last_token=last, first_item=len(awake.spans)
        )

    shape = engine.backend.shape
    delta = await anyio.to_thread.run_sync(render)
    length = len(token_ids) + len(delta.token_ids)
    if length >= shape.max_positions:
        raise ContextOverflow(
            f"{len(token_ids)} tokens and {len(delta.token_ids)} new ones leave no room to generate in the model's "
            f"context of {shape.max_positions}"
        )
    cached = awake.sequence.kv_len - awake.loaded
    stream.start_from(delta.shifted(len(token_ids)), cached, awake.loaded, carry=last is not None)
    seed = secrets.randbits(64) if stream.seed is None else stream.seed
    sampler = Sampler(stream.decoding, seed, shape.vocab)
    build: Callable[[], Generation] = lambda: Generation(  # noqa: E731
        namespace=namespace,
        sequence=awake.sequence,
        sampler=sampler,
        decoding=stream.decoding,
        detokenizer=Detokenizer(engine.tokenizer, stream.stop),
        speculation=engine.config.speculation,
        mode=stream.mode,
        verify=stream.verify,
        head=awake.head,
        lookup=awake.lookup,
        acceptances=awake.acceptances,
        end_ids=engine.end_ids,
        limit=shape.max_positions,
        events=[*awake.events, *_loosened(stream)],
        started=stream.started,
    )
    return await engine.compute.run(_append_and_build, awake, delta.token_ids, build)


def _loosened(stream: "Stream") -> list[Event]:
    """What the trace says of `verify=`: the mode alone would promise the output of `full`."""
    if stream.verify is None:
        return []
    return [Event("verify", f"{stream.verify!r} loosens verification: the output may differ from that of full")]


def _append_and_build(awake: Awake, token_ids: list[int], build: Callable[[], Generation]) -> Generation:
    awake.sequence.token_ids.extend(token_ids)
    awake.lookup.extend(token_ids)
    return build()
