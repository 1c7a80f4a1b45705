"""What has been reported committed is there after any kill, and a failed write leaves the last commit."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from conftest import open_tiny
from kill_worker import COMMIT_POINTS, POINTS, engine_of, manager_of, script, session_of, work

from agentkv import DecodingConfig, Session, SessionManager, StoreFull

SHORT = DecodingConfig(max_new_tokens=6, ignore_eos=True)


# -- kills


def check_lives(report: dict[str, Any]) -> None:
    """Each life begins at the last reported commit or exactly one newer; every commit is the uninterrupted run's."""
    reference = {line["commit"]: line["tokens"] for line in report["reference"]}
    conversations = max(reference)
    newest: dict[str, dict[str, Any]] = {}
    last = {"commit": 0}
    for lines in report["lives"]:
        for line in lines:
            if line["kind"] == "opened":
                assert (line["problems"], line["pending"]) == ([], 0)
        for place, line in enumerate(line for line in lines if line["kind"] == "at"):
            number = line["commit"]
            if place == 0:
                assert number - last["commit"] in (0, 1)
                if number == last["commit"] and number:
                    assert line == last
            else:
                assert number == last["commit"] + 1
            if number:
                assert line["tokens"] == reference[(number - 1) % conversations + 1]
                assert line["carry"] == 1
            newest[session_of(number)] = last = line
    assert newest
    found = {line["head"].partition("@")[0]: line for line in report["last"]}
    for session, line in newest.items():
        if line["head"] == found[session]["head"] and line["commit"]:
            assert line["digest"] == found[session]["digest"]
        else:
            assert session == session_of(last["commit"] + 1), "only the last kill may have hit an unreported commit"


@pytest.mark.parametrize(
    ("kills", "inside", "seed"), [(100, 30, 1), pytest.param(1000, 300, 2, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(0)
def test_c9_c14_killed_at_random_instants_nothing_reported_is_lost(tmp_path, kills, inside, seed):
    """C14: tokens and KV agree (`carry`). C9: what was committed is found again."""
    report = work("kills", kills * 10, path=tmp_path / "store", model="tiny", kills=kills, inside=inside, seed=seed)
    check_lives(report)
    assert len(report["lives"]) >= kills
    assert report["inside"] >= inside
    assert max(line["commit"] for lines in report["lives"] for line in lines if line["kind"] == "at") > kills


@pytest.mark.model
def test_smollm2_killed_at_random_instants_nothing_reported_is_lost(tmp_path):
    report = work("kills", path=tmp_path / "store", model="smollm2", kills=5, inside=2, seed=3)
    check_lives(report)
    assert len(report["lives"]) >= 5
    assert report["inside"] >= 2


def test_c14_killed_at_every_point_of_a_commit_it_is_the_old_or_the_new_one(tmp_path):
    outcomes = work("kill_points", path=tmp_path)
    assert len(outcomes) == 2 * len(POINTS)
    for name, outcome in outcomes.items():
        before, point = int(name[0]), name[2:]
        old, found, new = outcome["old"], outcome["found"], outcome["new"]
        assert (old["commit"], new["commit"]) == (before, before + 1), name
        wanted = new if point in COMMIT_POINTS[2:] else old
        assert found == wanted, f"{name}: neither pages nor bytes are left of a commit that was not"
        assert (new["problems"], new["pending"], new["carry"]) == ([], 0, 1)


async def test_kv_that_was_not_on_disk_in_time_is_recomputed_and_the_trace_says_so(tmp_path):
    """durability="tokens": the killed process had returned from a step whose pages were still waiting."""
    report = await run_sync(lambda: work("kill_before_backup", path=tmp_path))
    first, second = report["lines"]
    async with manager_of(tmp_path) as manager:
        [info] = await manager.sessions()
        assert (info.head, info.tokens, info.kv_len) == ("s0@2", second["count"], second["count"] - 1)
        async with manager.session("s0", create=False) as session:
            result = await session.step([7, 8, 9], decoding=SHORT, mode="full")
            [event] = [event for event in result.trace.events if event.kind == "recompute"]
            assert 0 < event.tokens == info.kv_len - result.usage.loaded
            assert result.usage.loaded >= (first["count"] - 1) // 16 * 16, "the first step's pages had been named"
            assert result.usage.prefilled == event.tokens + 3
            again = await session.step([7], decoding=SHORT)
            assert "recompute" not in [event.kind for event in again.trace.events]
        async with manager.session("uninterrupted") as session:
            tokens, options = script(1)
            await session.step(tokens, **options)
            await session.step(list(range(200)), decoding=DecodingConfig(max_new_tokens=4, ignore_eos=True))
            wanted = await session.step([7, 8, 9], decoding=SHORT, mode="full")
        assert result.token_ids == wanted.token_ids


# -- writes that fail


async def state(manager: SessionManager, session: Session) -> dict[str, Any]:
    """All of a session, and the space it takes in memory and on disk."""
    digest = await session.digest()
    statistics = await run_sync(manager.statistics)
    problems = await run_sync(engine_of(manager).store.verify)
    assert problems == []
    del statistics["store"]["file_bytes"]
    space = {name: statistics[name] for name in ("pages", "store")}
    return {"head": session.head, "digest": digest, "tokens": session.token_ids} | space


@pytest.mark.parametrize("error", [StoreFull("injected"), OSError(errno.EIO, "injected")], ids=["ours", "system"])
@pytest.mark.parametrize("point", ["put:begin", "put:written", "put:committed", "commit:begin", "commit:written"])
async def test_c11_a_failed_write_fails_the_step_and_leaves_the_last_commit(tmp_path, point, error):
    async with open_tiny(tmp_path) as manager:
        async with manager.session("undisturbed") as session:
            await session.step(list(range(40)), decoding=SHORT)
            wanted = await session.step(list(range(60)), decoding=SHORT)
        async with manager.session("a") as session:
            await session.step(list(range(40)), decoding=SHORT)
            before = await state(manager, session)

            def fail(passed: str) -> None:
                if passed == point:
                    raise error

            engine_of(manager).store.hook = fail
            with pytest.raises(type(error), match="injected"):
                await session.step(list(range(60)), decoding=SHORT)
            engine_of(manager).store.hook = None
            assert await state(manager, session) == before
            again = await session.step(list(range(60)), decoding=SHORT)
            assert again.token_ids == wanted.token_ids
            assert again.checkpoint == session.head == "a@2"
            digest = await session.digest()
            await session.sleep()
            assert await session.digest() == digest, "what is on disk is what was in memory"


@contextmanager
def snapshot_held(path: Path) -> Iterator[None]:
    """Another process has a read transaction open."""
    script = (
        "import lmdb, sys\n"
        "with lmdb.open(sys.argv[1], readonly=True, map_size=0, max_dbs=8).begin():\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", script, str(path / "gen-1")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        yield
        assert reader.poll() is None
        reader.communicate()


async def fill(manager: SessionManager, session: Session) -> None:
    """Step until the store is full; the session is then at its last commit, whatever was written ahead is gone."""
    for _ in range(30):
        before = await state(manager, session)
        try:
            await session.step([token % 256 for token in range(400)], decoding=SHORT, mode="full")
        except StoreFull:
            break
    else:
        pytest.fail("the store never was full")
    assert await state(manager, session) == before
    assert before["head"] != f"{session.id}@0"


async def test_c22_a_full_store_keeps_its_commits_and_still_deletes_while_another_process_reads(tmp_path):
    async with open_tiny(tmp_path, store_bytes=1 << 20) as manager, manager.session("kept") as kept:
        await kept.step(list(range(40)), decoding=SHORT)
        digest = await kept.digest()
        async with manager.session("big") as session:
            await fill(manager, session)
        with snapshot_held(tmp_path):
            with pytest.raises(StoreFull):
                await kept.step([1] * 600, decoding=SHORT)
            assert (kept.head, await kept.digest()) == ("kept@1", digest)
            for _ in range(3):
                await manager.delete("big")
                async with manager.session("big") as session:
                    await fill(manager, session)
            await manager.delete("big")
            result = await kept.step([1] * 600, decoding=SHORT)
        assert result.checkpoint == "kept@2"
        assert [info.id for info in await manager.sessions()] == ["kept"]


# -- forks and dead readers


def test_c23_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path):
    report = work("use_after_fork", path=tmp_path)
    assert report["status"] == 0
    assert len(report["raised"]) == 9
    assert {line["error"] for line in report["raised"]} == {"StoreForked"}
    assert report["before"] == report["after"]
    assert report["head"] == "s0@2"


def test_c25_two_hundred_killed_readers_leave_nothing_behind(tmp_path):
    report = work("kill_readers", path=tmp_path, readers=200)
    assert len(report["readers"]) <= 2
    assert [line["commit"] for line in report["lines"]] == [1, 2]
    assert report["lines"][-1]["problems"] == []
