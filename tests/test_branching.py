"""Checkpoints, forks and rollbacks of sessions awake, asleep and in a step: the same KV to the byte, unread."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conftest import open_tiny
from prompts import noise_ids, tokens

from agentkv import CheckpointExpired, InvalidInput, SessionBusy, SessionError, SessionManager, SpeculationConfig

PROMPT = noise_ids(1, 700)
MORE = noise_ids(2, 90)
REPLY = tokens(9)
PAGE_BYTES = 2 * 2 * 2 * 64 * 16 * 4 * 4
"""More than a page of the tiny model takes on disk."""


@pytest_asyncio.fixture
async def manager(tmp_path) -> AsyncIterator[SessionManager]:
    speculation = SpeculationConfig(budget_pages=8)
    async with open_tiny(tmp_path, keep_checkpoints=4, speculation=speculation) as manager:
        yield manager
        assert manager._engine.store.verify() == []


def held(manager: SessionManager) -> int:
    pages = manager.statistics()["pages"]
    manager._engine.pool.check()
    return pages["held"]


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_fork_continues_as_its_source_would(manager, asleep):
    async with manager.session("a") as source:
        await source.step(PROMPT, decoding=REPLY)
        digest, pages = await source.digest(), held(manager)
        if asleep:
            await source.sleep()
        used = manager._engine.store.used_bytes
        assert await source.fork("b") == "b@1"
        assert manager._engine.store.used_bytes - used < 4 * PAGE_BYTES, "pages are shared on disk"
        async with manager.session("b", create=False) as fork:
            assert await fork.digest() == digest
            assert held(manager) == pages, "and in memory"
            results = [await each.step(MORE, decoding=REPLY, mode="exact") for each in (source, fork)]
            assert results[0].token_ids == results[1].token_ids
            assert results[1].usage.prefilled == len(MORE)
    assert held(manager) == 0


async def test_a_fork_of_a_loaded_session_reads_no_page(manager):
    async with manager.session("a") as source:
        await source.step(PROMPT, decoding=REPLY)
        await source.fork("b")
        async with manager.session("b") as fork:
            result = await fork.step(MORE, decoding=REPLY)
            assert result.usage.loaded < 16
            assert result.usage.cached + result.usage.loaded == len(PROMPT) + 8


async def test_source_and_fork_part_and_outlive_each_other(manager):
    async with manager.session("a") as source:
        await source.step(PROMPT, decoding=REPLY)
        await source.fork("b")
        await source.step(MORE, decoding=REPLY)
    await manager.delete("a")
    async with manager.session("b") as fork:
        assert fork.head == "b@1"
        await fork.step([5, 6, 7], decoding=REPLY)
        await fork.sleep()
        alone = await fork.digest()
    async with manager.session("c") as fresh:
        await fresh.step(PROMPT, decoding=REPLY)
        await fresh.step([5, 6, 7], decoding=REPLY)
        assert await fresh.digest() == alone


async def test_a_fork_during_a_step_takes_the_commit_before_it(manager):
    async with manager.session("a") as source:
        await source.step(PROMPT, decoding=REPLY)
        digest = await source.digest()
        async with source.stream(MORE, decoding=REPLY) as stream:
            async for _ in stream:
                await source.fork("b")
                break
        async with manager.session("b") as fork:
            assert await fork.digest() == digest


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("extra", [3, 90, 400])
async def test_a_rollback_restores_the_checkpoint_to_the_byte(manager, asleep, extra):
    async with manager.session("a") as session:
        first = await session.step(PROMPT, decoding=REPLY, mode="full")
        digest, scores = await session.digest(), session._awake.head.scores()
        again = await session.step(MORE, decoding=REPLY)
        assert await session.rollback(first.checkpoint) == "a@3"
        await session.step(noise_ids(3, extra), decoding=REPLY)
        if asleep:
            await session.sleep()
        assert await session.rollback(first.checkpoint) == session.head == "a@5"
        assert await session.digest() == digest
        assert (session._awake.head.scores() is None) == (scores is None)
        result = await session.step(MORE, decoding=REPLY)
        assert result.token_ids == again.token_ids
        assert result.usage.prefilled == len(MORE)
        kept = await session.digest()
        await session.sleep()
        assert await session.digest() == kept
    assert held(manager) == 0


async def test_checkpoints_are_kept_and_others_expire(manager):
    async with manager.session("a") as session:
        with pytest.raises(SessionError, match="no commit"):
            await session.checkpoint()
        results = [await session.step(PROMPT, decoding=REPLY)]
        digest = await session.digest()
        assert await session.checkpoint() == results[0].checkpoint
        results += [await session.step([n + 1], decoding=REPLY) for n in range(5)]
        with pytest.raises(CheckpointExpired):
            await session.rollback(results[1].checkpoint)
        with pytest.raises(CheckpointExpired):
            await session.fork("b", at=results[1].checkpoint)
        await session.fork("b", at=results[0].checkpoint)
        async with manager.session("b") as fork:
            assert await fork.digest() == digest
        await session.rollback(results[0].checkpoint)
        assert await session.digest() == digest


async def test_bad_branches_are_refused_and_change_nothing(manager):
    async with manager.session("a") as session, manager.session("b") as other:
        with pytest.raises(SessionError, match="no commit"):
            await session.fork("c")
        await session.step(PROMPT, decoding=REPLY)
        await other.step([1, 2, 3], decoding=REPLY)
        digest, head = await session.digest(), session.head
        for name in ("b", "a", "", "../c", "x" * 300):
            with pytest.raises(InvalidInput):
                await session.fork(name)
        for checkpoint in ("b@1", "a@9", "a", "a@-1", "a@x", ""):
            with pytest.raises(InvalidInput):
                await session.rollback(checkpoint)
        async with session.stream(MORE, decoding=REPLY) as stream:
            async for _ in stream:
                with pytest.raises(SessionBusy):
                    await session.rollback(head)
                break
        assert (await session.digest(), session.head) == (digest, head)
    with pytest.raises(SessionError):
        await session.fork("d")


async def test_a_rollback_to_before_the_first_step_empties_the_session(manager):
    async with manager.session("a") as session:
        before = session.head
        first = await session.step(PROMPT, decoding=REPLY)
        assert await session.rollback(before) == "a@2"
        assert session.token_ids == ()
        assert (await session.step(PROMPT, decoding=REPLY)).token_ids == first.token_ids
