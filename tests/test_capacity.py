"""A KV pool that is too small: idle sessions give up their pages first, steps wait their turn, and what can never fit
is refused by itself while the others go on.

On the tiny model a page takes 8 KiB.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import open_tiny

from agentkv import CapacityError, DecodingConfig, EngineConfig, ManagerClosed, Session, SessionManager
from agentkv.models import write_tiny

PAGE_BYTES = 8192
DECODING = DecodingConfig(max_new_tokens=20, ignore_eos=True)


def prompt(pages: int, number: int = 0) -> list[int]:
    """Tokens that need `pages` pages, with DECODING's new ones."""
    return [3 + (i * 7 + number) % 250 for i in range(16 * pages - 20)]


def open_small(path: Path, pages: int, **options: Any) -> Any:
    return open_tiny(path, kv_bytes=pages * PAGE_BYTES, prefill_chunk=64, **options)


async def step(manager: SessionManager, name: str, pages: int, number: int = 0) -> tuple[int, ...]:
    async with manager.session(name) as session:
        return (await session.step(prompt(pages, number), decoding=DECODING)).token_ids


async def test_a_pool_without_a_page(tmp_path):
    model = await asyncio.to_thread(write_tiny, tmp_path / "model", num_hidden_layers=32)
    with pytest.raises(CapacityError, match="kv_bytes"):
        async with open_tiny(tmp_path / "store", model, kv_bytes=1 << 16):
            pass


async def test_a_pool_that_no_machine_has(tmp_path):
    with pytest.raises(CapacityError, match="kv_bytes"):
        async with open_tiny(tmp_path, kv_bytes=1 << 47):
            pass
    assert EngineConfig(kv_bytes=1 << 47).kv_bytes == 1 << 47


async def test_a_step_that_can_never_fit_is_refused_alone(tmp_path):
    async with open_small(tmp_path, 60) as manager:
        async with manager.session("big") as big, manager.session("small") as small:
            await big.step(prompt(10), decoding=DECODING)
            head, digest = big.head, await big.digest()
            other = asyncio.ensure_future(small.step(prompt(20), decoding=DECODING))
            with pytest.raises(CapacityError, match="kv_bytes"):
                await big.step(prompt(70), decoding=DECODING)
            with pytest.raises(CapacityError, match="max_new_tokens"):
                await big.step([1], decoding=DecodingConfig(max_new_tokens=2000, ignore_eos=True))
            assert (big.head, await big.digest()) == (head, digest)
            alone = (await other).token_ids
            await big.step([1, 2], decoding=DECODING)
        manager._engine.pool.check()
        assert manager._engine.pool.held == 0
        assert await step(manager, "again", 20) == alone


async def test_idle_sessions_give_up_their_pages_first(tmp_path):
    """The one that was used longest ago first; it loads them again when it goes on."""
    async with open_small(tmp_path, 64) as manager:
        sessions = [manager.session(name) for name in ("first", "second")]
        async with sessions[0] as first, sessions[1] as second:
            for number, session in enumerate((first, second)):
                await session.step(prompt(24, number), decoding=DECODING)
            digest = await first.digest()
            assert (first.held_pages, second.held_pages) == (23, 23)
            async with manager.session("third") as third:
                await third.step(prompt(30, 3), decoding=DECODING)
                assert (first.held_pages, second.held_pages) == (0, 23)
            result = await first.step([1, 2], decoding=DECODING)
            assert (result.usage.cached, result.usage.loaded) == (0, 24 * 16 - 1)
            assert [event.kind for event in result.trace.events if event.kind == "load"] == ["load"]
            await first.sleep()
            assert digest != await first.digest()
        assert manager._engine.pool.held == 0


@pytest.mark.parametrize("asleep", [False, True])
async def test_steps_that_do_not_fit_together_wait_their_turn(tmp_path, asleep):
    """Five sessions want 24 pages each of 60; waking ones, too, wait for those that are at work."""
    names = [f"s{number}" for number in range(5)]
    async with open_small(tmp_path / "roomy", 200) as manager:
        expected = [await step(manager, name, 24, number) for number, name in enumerate(names)]
        expected_second = [await step(manager, name, 6, number) for number, name in enumerate(names)]
    async with open_small(tmp_path / "tight", 60) as manager:
        opened = [manager.session(name) for name in names]
        sessions: list[Session] = [await handle.__aenter__() for handle in opened]

        async def both(session: Session, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            first = await session.step(prompt(24, number), decoding=DECODING)
            if asleep:
                await session.sleep()
            second = await session.step(prompt(6, number), decoding=DECODING)
            return first.token_ids, second.token_ids

        found = await asyncio.gather(*(both(session, number) for number, session in enumerate(sessions)))
        assert list(found) == list(zip(expected, expected_second, strict=True))
        for handle in opened:
            await handle.__aexit__(None, None, None)
        manager._engine.pool.check()
        assert manager._engine.pool.held == 0


async def wait_for_room(manager: SessionManager, hungry: Session, sleeper: Session) -> "list[asyncio.Task[Any]]":
    """Steps of two sessions: one decodes and was promised nearly all pages, the other waits for room to wake in."""
    await sleeper.step(prompt(24), decoding=DECODING)
    await sleeper.sleep()
    long = DecodingConfig(max_new_tokens=480, ignore_eos=True)
    steps = [asyncio.ensure_future(hungry.step(prompt(20), decoding=long))]
    while not manager.statistics()["executor"]["running"]:  # noqa: ASYNC110 - nothing announces an admission
        await asyncio.sleep(0.001)
    steps.append(asyncio.ensure_future(sleeper.step([1], decoding=DECODING)))
    await asyncio.sleep(0.02)
    assert sleeper.busy
    assert sleeper.held_pages == 0
    return steps


async def test_a_session_that_waits_for_room_can_be_cancelled(tmp_path):
    async with open_small(tmp_path, 60) as manager:
        async with manager.session("hungry") as hungry, manager.session("sleeper") as sleeper:
            running, waiting = await wait_for_room(manager, hungry, sleeper)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not running.done(), "it did not wait for the other to end"
            assert (await running).usage.output == 480
            result = await sleeper.step([1], decoding=DECODING)
            assert (result.usage.loaded, result.usage.output) == (24 * 16 - 1, DECODING.max_new_tokens)


async def test_closing_does_not_wait_for_room(tmp_path):
    async with open_small(tmp_path, 60) as manager:
        async with manager.session("sleeper") as sleeper, manager.session("hungry") as hungry:
            steps = await wait_for_room(manager, hungry, sleeper)
            await manager.close()
            for step in steps:
                with pytest.raises(ManagerClosed):
                    await step


async def test_a_consumer_who_is_away_is_not_waited_for(tmp_path):
    """It holds pages of a step that nobody takes to its end; waiting for it could last for ever."""
    async with open_small(tmp_path, 60) as manager:
        async with manager.session("away") as away, manager.session("other") as other:
            async with away.stream(prompt(40), decoding=DECODING) as stream:
                await anext(stream)
                with pytest.raises(CapacityError):
                    await asyncio.wait_for(other.step(prompt(30), decoding=DECODING), 30)
                async for _ in stream:
                    pass
            await other.step(prompt(30), decoding=DECODING)
            assert away.held_pages == 0
