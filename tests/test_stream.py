"""Streams: what their events say, what leaving one early does, and that a slow consumer stalls nobody."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest
import pytest_asyncio
from conftest import open_tiny

from agentkv import (
    DecodingConfig,
    Done,
    Round,
    Session,
    SessionBusy,
    SessionManager,
    SpeculationConfig,
    StaleHead,
    StreamEvent,
    Text,
)

PROMPT = [3 + i * 7 % 250 for i in range(300)]
DECODING = DecodingConfig(max_new_tokens=40, ignore_eos=True)
names = (f"s{i}" for i in count())


@pytest_asyncio.fixture(scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SessionManager]:
    speculation = SpeculationConfig(k=2, budget_pages=8)
    async with open_tiny(tmp_path_factory.mktemp("tiny"), prefill_chunk=64, speculation=speculation) as manager:
        yield manager


async def collect(session: Session, **options) -> list[StreamEvent]:
    async with session.stream(PROMPT, decoding=DECODING, **options) as stream:
        return [event async for event in stream]


@pytest.mark.parametrize("mode", ["full", "exact", "sparse", "auto"])
@pytest.mark.parametrize("stop", [None, ["e", "zzzz"]])
async def test_events_add_up_to_the_result(tiny, mode, stop):
    async with tiny.session(next(names)) as session:
        events = await collect(session, mode=mode, stop=stop)
    *before, done = events
    assert isinstance(done, Done)
    assert not any(isinstance(event, Done) for event in before)
    result = done.result
    texts = [event for event in before if isinstance(event, Text)]
    rounds = [event for event in before if isinstance(event, Round)]
    assert "".join(event.text for event in texts) == result.text == result.message.content
    assert tuple(token for event in texts for token in event.token_ids) == result.token_ids
    decoding = [event for event in rounds if event.kind != "prefill"]
    recomputed = sum(event.tokens for event in result.trace.events if event.kind == "recompute")
    assert (recomputed > 0) == (mode == "sparse")
    assert sum(event.tokens for event in rounds if event.kind == "prefill") == len(PROMPT) + recomputed
    assert result.usage.prefilled == len(PROMPT) + recomputed
    assert sum(event.proposed for event in decoding) == result.trace.proposed
    assert sum(event.accepted for event in decoding) == result.trace.accepted
    assert sum(event.tokens for event in decoding) == len(result.token_ids) - 1  # prefill gives the first
    assert {kind: sum(e.kind == kind for e in decoding) for kind in result.trace.rounds} == result.trace.rounds
    assert result.finish_reason == ("length" if stop is None else "stop")
    assert session.head == result.checkpoint


async def test_events_are_frozen(tiny):
    async with tiny.session(next(names)) as session:
        events = await collect(session)
    for kind, field in ((Text, "text"), (Round, "tokens"), (Done, "result")):
        event = next(event for event in events if isinstance(event, kind))
        with pytest.raises(AttributeError):
            setattr(event, field, None)


async def test_step_is_the_stream_without_its_events(tiny):
    async with tiny.session(next(names)) as one, tiny.session(next(names)) as other:
        done = (await collect(one, seed=5))[-1]
        result = await other.step(PROMPT, decoding=DECODING, seed=5)
        assert isinstance(done, Done)
        assert (done.result.token_ids, done.result.text) == (result.token_ids, result.text)
        assert await one.digest() == await other.digest()


@pytest.mark.parametrize("on_cancel", ["rollback", "keep"])
@pytest.mark.parametrize("leave", ["break", "raise", "aclose", "never iterated"])
async def test_left_early_it_is_cancelled(tiny, on_cancel, leave):
    async with tiny.session(next(names), on_cancel=on_cancel) as session:
        await session.step([1, 2, 3], decoding=DecodingConfig(max_new_tokens=2, ignore_eos=True))
        head, digest, before = session.head, await session.digest(), session.token_ids
        delivered: list[int] = []

        async def read() -> None:
            async with session.stream(PROMPT, decoding=DECODING) as stream:
                if leave == "never iterated":
                    return
                async for event in stream:
                    delivered.extend(event.token_ids if isinstance(event, Text) else ())
                    if len(delivered) >= 5:
                        if leave == "raise":
                            raise LookupError("the consumer's own")
                        if leave == "break":
                            break
                        await stream.aclose()
                        await stream.aclose()

        if leave == "raise":
            with pytest.raises(LookupError):
                await read()
        else:
            await read()
        assert not session.busy
        if on_cancel == "keep" and delivered:
            kept = session.token_ids[len(before) + len(PROMPT) :]
            assert list(kept[: len(delivered)]) == delivered
            manifest = tiny._engine.store.manifest(session.namespace, session.id)
            assert (manifest.checkpoint, manifest.finish_reason) == (session.head, "cancelled")
        else:
            assert (session.head, session.token_ids) == (head, before)
            assert await session.digest() == digest
        tiny._engine.pool.check()
        with pytest.raises(StaleHead):
            await session.step([4], expect="other@1")
        await session.step([4], decoding=DECODING)


async def test_a_kept_result_is_on_the_stream(tiny):
    async with tiny.session(next(names), on_cancel="keep") as session:
        async with session.stream(PROMPT, decoding=DECODING) as stream:
            async for event in stream:
                if isinstance(event, Text):
                    break
        result = stream.result
        assert result is not None
        assert result.finish_reason == "cancelled"
        assert session.token_ids == (*PROMPT, *result.token_ids)
        assert result.checkpoint == session.head


async def test_a_slow_consumer_stalls_nobody(tiny):
    """It reads one event and then none, while another session's steps begin and end; its own step goes on."""
    async with tiny.session(next(names)) as slow, tiny.session(next(names)) as quick:
        async with slow.stream(PROMPT, decoding=DECODING) as stream:
            first = await anext(stream)
            for _ in range(2):
                result = await asyncio.wait_for(quick.step(PROMPT, decoding=DECODING), 30)
                assert result.usage.output == DECODING.max_new_tokens
            assert stream._generation is not None
            await asyncio.wait_for(stream._generation.released(), 30)  # its own step has been computed meanwhile
            assert not tiny.statistics()["executor"]["running"]
            rest = [event async for event in stream]
        done = rest[-1]
        assert isinstance(first, Round)
        assert isinstance(done, Done)
        assert "".join(event.text for event in rest if isinstance(event, Text)) == done.result.text
    async with tiny.session(next(names)) as alone:
        assert (await alone.step(PROMPT, decoding=DECODING)).token_ids == done.result.token_ids


async def test_after_its_end_a_stream_only_stops(tiny):
    async with tiny.session(next(names)) as session:
        async with session.stream(PROMPT, decoding=DECODING) as stream:
            async for _ in stream:
                pass
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await stream.aclose()
        assert session.head == stream.result.checkpoint


async def test_a_refused_stream_can_be_closed_without_harm(tiny: SessionManager) -> None:
    """Closing what never began leaves alone the step that is in flight."""
    async with tiny.session() as session, session.stream(PROMPT, decoding=DECODING) as running:
        refused = session.stream(PROMPT)
        with pytest.raises(SessionBusy):
            await refused.__aenter__()
        await refused.aclose()
        assert session.busy
        events = [event async for event in running]
    assert isinstance(events[-1], Done)
