"""Resuming costs loading, nothing else: what is prefilled is what is new, in this process or another."""

import pytest
from anyio.to_thread import run_sync
from conftest import open_tiny
from kill_worker import manager_of, script, work
from store_surgery import values

from agentkv import DecodingConfig, SessionBusy, SessionNotFound
from agentkv.memory.environment import Table

DECODING = DecodingConfig(max_new_tokens=8, ignore_eos=True)
LONG = [token % 250 for token in range(600)]


async def test_another_process_resumes_by_loading_only(tmp_path):
    report = await run_sync(lambda: work("steps", path=tmp_path, commits=4))
    last = report["lines"][-1]
    async with manager_of(tmp_path) as manager:
        [info] = await manager.sessions()
        async with manager.session("s0", create=False) as session:
            assert (session.head, await session.digest()) == (last["head"], last["digest"])
        async with manager.session("s0", create=False) as session:
            tokens, options = script(5)
            third = await session.step(tokens, **options)
            kv_len = len(session.token_ids) - 1
            fourth = await session.step([9, 8, 7], decoding=DECODING)
        assert (third.usage.cached, third.usage.loaded) == (0, info.kv_len)
        assert third.usage.prefilled == third.usage.input == len(tokens)
        assert (fourth.usage.cached, fourth.usage.loaded, fourth.usage.prefilled) == (kv_len, 0, 3)
        async with manager.session("uninterrupted") as session:
            *_, wanted = [await session.step(tokens, **options) for tokens, options in map(script, range(1, 6))]
        assert third.token_ids == wanted.token_ids


async def test_text_resumed_is_never_rendered_or_encoded_again(tmp_path):
    """The stored ids are a prefix of what follows, and only the new turn's ids are prefilled."""
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        await session.step("the first question", decoding=DECODING)
        before = session.token_ids
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        result = await session.step("the second one", decoding=DECODING)
        assert session.token_ids[: len(before)] == before
        assert result.usage.prefilled == result.usage.input == len(session.token_ids) - len(before) - 8
        assert result.usage.loaded == len(before) - 1


async def test_c9_after_a_kill_pages_are_found_again_and_not_written_again(tmp_path):
    report = await run_sync(lambda: work("killed_steps", path=tmp_path, commits=4))
    reported = report["lines"][-1]
    async with manager_of(tmp_path) as manager:
        store = await run_sync(lambda: manager.statistics()["store"])
        [info] = await manager.sessions()
        async with manager.session("s0", create=False) as session:
            result = await session.step([1, 2, 3], decoding=DECODING)
        assert result.usage.loaded == info.kv_len > 0
        after = await run_sync(lambda: manager.statistics()["store"])
    new_pages = (len([1, 2, 3]) + 8 + info.kv_len) // 16 - info.kv_len // 16
    assert reported["count"] <= info.tokens
    assert after["records"] == store["records"] + new_pages + 1, "new pages, and the new commit's tail"
    assert after["pending"] == 0


async def test_c9_reopening_writes_nothing(tmp_path):
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        await session.step(LONG, decoding=DECODING)
    before = {table: await run_sync(values, tmp_path, table) for table in Table}
    size = (tmp_path / "gen-1" / "data.mdb").stat().st_size
    for _ in range(5):
        async with open_tiny(tmp_path) as manager, manager.session("a", create=False) as session:
            await session.digest()
    assert {table: await run_sync(values, tmp_path, table) for table in Table} == before
    assert (tmp_path / "gen-1" / "data.mdb").stat().st_size == size


async def test_c9_a_step_after_reopening_writes_its_own_pages_only(tmp_path):
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        await session.step(LONG, decoding=DECODING)
    before = await run_sync(values, tmp_path, Table.RECORDS)
    for number in range(1, 4):
        async with open_tiny(tmp_path) as manager, manager.session("a") as session:
            await session.step([1, 2, 3], decoding=DECODING)
            pages = (len(session.token_ids) - 1) // 16
        after = await run_sync(values, tmp_path, Table.RECORDS)
        assert {key: after[key] for key in before} == before
        tails = sum(1 for key in after if key[16:32] != bytes(16))
        assert len(after) == pages + tails
        assert tails <= number + 1, "a tail per commit"


async def test_c14_at_every_commit_the_last_token_alone_has_no_kv(tmp_path):
    """Whatever ends the step: length, a stop string, an end token, a full or a partly accepted window."""
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        for number in range(12):
            mode = ("full", "exact", "auto", "sparse")[number % 4]
            tokens = [(number * 31 + i) % 250 for i in range(1 + 7 * number)]
            decoding = DecodingConfig(max_new_tokens=1 + number, ignore_eos=number % 3 > 0, temperature=number % 2)
            await session.step(tokens, decoding=decoding, mode=mode, seed=number, stop="e" if number % 5 == 4 else None)
            [info] = await manager.sessions()
            assert info.tokens == len(session.token_ids)
            assert info.kv_len == info.tokens - 1
            assert info.head == session.head == f"a@{number + 1}"


async def test_c2_a_session_without_a_step_is_opened_closed_and_opened_again(tmp_path):
    for _ in range(2):
        async with open_tiny(tmp_path) as manager:
            for _ in range(2):
                async with manager.session("empty") as session:
                    assert (session.head, session.token_ids, session.held_pages) == ("empty@0", (), 0)
                    await session.digest()
                    await session.sleep()
            assert await manager.sessions() == []
            with pytest.raises(SessionNotFound):
                await manager.session("empty", create=False).__aenter__()
    async with open_tiny(tmp_path) as manager, manager.session("empty") as session:
        result = await session.step([1, 2, 3], decoding=DECODING)
        assert (result.checkpoint, result.usage.prefilled) == ("empty@1", 3)


async def test_c2_a_missing_session_does_not_touch_a_live_one(tmp_path):
    async with open_tiny(tmp_path) as manager, manager.session("live") as live:
        await live.step(LONG[:100], decoding=DECODING)
        before, pages = await live.digest(), manager.statistics()["pages"]
        for _ in range(2):
            with pytest.raises(SessionNotFound):
                await manager.session("missing", create=False).__aenter__()
        with pytest.raises(SessionNotFound):
            await manager.session("live", create=False, namespace="elsewhere").__aenter__()
        with pytest.raises(SessionBusy):
            await manager.session("live").__aenter__()
        assert (live.head, await live.digest(), manager.statistics()["pages"]) == ("live@1", before, pages)
        assert manager.statistics()["sessions"]["open"] == 1
        assert (await live.step([1], decoding=DECODING)).usage.cached == len(live.token_ids) - 8 - 1 - 1
