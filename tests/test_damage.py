"""Damage in the store is recomputed from token ids and reported, or refused by name; other sessions go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from conftest import open_tiny
from kill_worker import engine_of
from store_surgery import change, cut, flip, head, head_key, page_keys

from agentkv import AgentKVError, DecodingConfig, SessionManager, StepResult, StoreDamaged
from agentkv.memory.environment import Table
from agentkv.memory.keys import part, segment_key, session_key, tail_key

INPUTS = ([token % 251 for token in range(90)], list(range(30)), list(range(60, 100)))
DECODING = DecodingConfig(max_new_tokens=12, ignore_eos=True)
EDITS: dict[str, Callable[[bytes], bytes] | None] = {
    "flipped": flip,
    "cut": cut,
    "empty": lambda _: b"",
    "missing": None,
}
every_edit = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)


async def converse(manager: SessionManager, session: str, steps: slice) -> list[StepResult]:
    async with manager.session(session) as opened:
        return [await opened.step(tokens, decoding=DECODING, mode="exact") for tokens in INPUTS[steps]]


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """Two sessions of two steps, and a third step's undamaged outcome in a third session."""
    async with open_tiny(tmp_path) as manager:
        await converse(manager, "a", slice(2))
        await converse(manager, "b", slice(2))
        await converse(manager, "sound", slice(3))
    return tmp_path


async def tokens_of(manager: SessionManager, session: str) -> tuple[int, ...]:
    async with manager.session(session, create=False) as opened:
        await opened.digest()
        return opened.token_ids


async def check_repaired(store: Path, damaged: int, tail: bool = False) -> None:
    """`a` goes on from ids where page `damaged` (or the tail) was, says so once, and is sound again afterwards."""
    before = await run_sync(head, store, "a")
    async with open_tiny(store) as manager:
        wanted = await tokens_of(manager, "sound")
        with anyio.fail_after(60):
            [result] = await converse(manager, "a", slice(2, 3))
        [repair] = [event for event in result.trace.events if event.kind == "repair"]
        loaded = before.kv_len // 16 * 16 if tail else 16 * damaged
        assert (result.usage.cached, result.usage.loaded) == (0, loaded)
        assert repair.tokens == before.kv_len - loaded
        assert "recomputed from ids" in repair.reason
        assert result.usage.prefilled == repair.tokens + len(INPUTS[2])
        assert await tokens_of(manager, "a") == wanted
        [other] = await converse(manager, "b", slice(2, 3))
        assert "repair" not in [event.kind for event in other.trace.events]
        assert other.usage.prefilled == len(INPUTS[2])
        assert await tokens_of(manager, "b") == wanted
        engine_of(manager).pool.check()
        assert manager.statistics()["pages"]["held"] == 0
    async with open_tiny(store) as manager, manager.session("a") as session:
        again = await session.step([1, 2, 3], decoding=DECODING)
        assert "repair" not in [event.kind for event in again.trace.events]
        assert again.usage.prefilled == 3


@every_edit
@pytest.mark.parametrize("damaged", [0, 3, -1], ids=["first", "middle", "last"])
async def test_c1_c13_c15_a_damaged_page_is_recomputed_and_other_sessions_do_not_notice(store, damaged, edit):
    keys = await run_sync(page_keys, store, "a")
    assert len(keys) > 6
    await run_sync(change, store, Table.RECORDS, keys[damaged], edit)
    await check_repaired(store, damaged % len(keys))


@every_edit
async def test_a_damaged_tail_is_recomputed(store, edit):
    manifest = await run_sync(head, store, "a")
    assert manifest.tail_rows > 0
    key = part(tail_key("default", "a", manifest.number), 0)
    await run_sync(change, store, Table.RECORDS, key, edit)
    await check_repaired(store, 0, tail=True)


async def test_c13_every_page_damaged_the_step_still_finishes(store):
    for key in await run_sync(page_keys, store, "a"):
        await run_sync(change, store, Table.RECORDS, key, cut)
    await check_repaired(store, 0)


def entry_key(_: Path) -> tuple[Table, bytes]:
    return Table.SESSIONS, session_key("default", "a")


def manifest_key(store: Path) -> tuple[Table, bytes]:
    return Table.MANIFESTS, head_key(store, "a")


def last_segment_key(store: Path) -> tuple[Table, bytes]:
    return Table.SEGMENTS, segment_key("default", head(store, "a").segments[-1])


# (A session whose entry is missing is no session: that is no damage that could be told.)
@pytest.mark.parametrize(
    ("place", "edit"),
    [
        pytest.param(place, edit, id=f"{place.__name__}-{name}")
        for place in (entry_key, manifest_key, last_segment_key)
        for name, edit in EDITS.items()
        if (place, name) != (entry_key, "missing")
    ],
)
async def test_damaged_token_ids_are_refused_and_other_sessions_go_on(store, place, edit):
    """Without its ids a session cannot be recomputed: nothing is guessed, nothing is begun anew under its name."""
    table, key = await run_sync(place, store)
    await run_sync(change, store, table, key, edit)
    async with open_tiny(store) as manager:
        wanted = await tokens_of(manager, "sound")
        with pytest.raises(StoreDamaged):
            await converse(manager, "a", slice(2, 3))
        assert manager.statistics()["pages"]["held"] == 0
        await converse(manager, "b", slice(2, 3))
        assert await tokens_of(manager, "b") == wanted
        await manager.delete("a")
        [fresh] = (await converse(manager, "a", slice(3)))[2:]
        assert fresh.checkpoint == "a@3"
        assert await tokens_of(manager, "a") == wanted


async def test_a_file_that_is_no_database_is_refused_at_open(store: Path):
    data = store / "gen-1" / "data.mdb"
    await run_sync(lambda: data.write_bytes(b"x" * 8192))
    manager: Any = open_tiny(store)
    with pytest.raises(AgentKVError):
        await manager.__aenter__()
