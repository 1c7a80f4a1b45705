"""The store under kills, full disks, damage, forks and foreign readers: the old commit or the new one, never else.

Run as a script it is the child process of its own tests (`python test_store_faults.py COMMAND DIRECTORY`): forking
there keeps forks away from the threads of the test process.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from test_store import CODEC, IDENTITY, ROOT, STORE_BYTES, make, payload, write

from agentkv.errors import (
    AgentKVError,
    SessionNotFound,
    StoreDamaged,
    StoreError,
    StoreForked,
    StoreFull,
    StoreLocked,
)
from agentkv.memory import space
from agentkv.memory.environment import Table
from agentkv.memory.keys import manifest_key, page_key, part, segment_key, session_key, tail_key
from agentkv.memory.reader import read_store
from agentkv.memory.record import PageCodec
from agentkv.memory.store import Store
from agentkv.types import ModelShape

POINTS = (
    "put:begin", "put:written", "put:committed", "commit:begin", "commit:written", "commit:committed", "commit:synced",
)  # fmt: skip
DELETE_POINTS = ("delete:begin", "delete:written", "delete:committed")
BIG = PageCodec(ModelShape(16, 4, 4, 64, 100, 512), IDENTITY.kv_id)  # 0.5 MB a page, in two groups


def open_store(path: Path, store_bytes: int = STORE_BYTES, **change) -> Store:
    return Store.open(path / "store", store_bytes=store_bytes, **change)


def child(command: str, path: Path) -> dict:
    """Runs `COMMANDS[command]` in a process of its own; returns what it reports."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    arguments = [sys.executable, __file__, command, str(path)]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_fork(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child; returns its wait status, 1 << 8 if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_at(store: Store, point: str) -> None:
    store.hook = lambda passed: os.kill(os.getpid(), signal.SIGKILL) if passed == point else None


# -- kills


def kill_at_every_point(path: Path) -> dict:
    """A second step, or a delete, killed at each point: what the reopened store holds."""
    outcomes = {}
    for point in (*POINTS, *DELETE_POINTS):
        place = path / point.replace(":", "-")
        place.mkdir()
        store = open_store(place)
        store.commit(make(pages=write(store, 2), tail=3))
        store.close()

        def step(place: Path = place, point: str = point) -> None:
            store = open_store(place)
            base = store.manifest("n", "a")
            kill_at(store, point)
            if point in DELETE_POINTS:
                store.delete("n", "a")
            else:
                store.commit(make(base=base, pages=[*store.contents(base).records, *write(store, 2)], tail=5))

        status = in_fork(step)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        store = open_store(place)
        outcomes[point] = describe(store)
        store.close()
    return outcomes


def describe(store: Store) -> dict:
    """Everything about session a that a reader can see, checked for consistency."""
    assert store.verify() == []
    statistics = store.statistics()
    report = {"records": statistics["records"], "pending": statistics["pending"], "tokens": 0}
    try:
        manifest = store.manifest("n", "a")
    except SessionNotFound:
        return report
    contents = store.contents(manifest)
    assert manifest.kv_len == manifest.kv_durable_len == len(contents.token_ids) - 1
    for record, found in zip(contents.records, store.read_pages("n", CODEC, contents.records), strict=True):
        assert np.array_equal(found, payload(record))
    assert store.read_tail(manifest, CODEC).shape[1] == manifest.tail_rows * CODEC.row_bytes
    return report | {"tokens": len(contents.token_ids)}


def test_killed_at_any_point_the_store_is_at_the_old_or_the_new_commit(tmp_path):
    outcomes = child("kill_at_every_point", tmp_path)
    old = {"records": 3, "pending": 0, "tokens": 36}
    new = {"records": 6, "pending": 0, "tokens": 70}  # both checkpoints' tails
    gone = {"records": 0, "pending": 0, "tokens": 0}
    assert outcomes == {
        **dict.fromkeys(POINTS[:5], old),
        **dict.fromkeys(POINTS[5:], new),
        **dict.fromkeys(DELETE_POINTS[:2], old),
        DELETE_POINTS[2]: gone,
    }


def kill_again_and_again(path: Path) -> dict:
    """Fifteen processes that write ahead and are killed before they commit."""
    store = open_store(path)
    pages = write(store, 8, BIG)
    store.commit(make(pages=pages))
    store.close()
    sizes = []

    def step() -> None:
        store = open_store(path)
        kill_at(store, "commit:written")
        base = store.manifest("n", "a")
        store.commit(make(base=base, pages=[*store.contents(base).records, *write(store, 4, BIG)]))

    for _ in range(15):
        assert os.WIFSIGNALED(in_fork(step))
        store = open_store(path)
        assert store.verify() == []
        found = store.read_pages("n", BIG, store.contents(store.manifest("n", "a")).records)
        assert all(np.array_equal(page, payload(record, BIG)) for page, record in zip(found, pages, strict=True))
        sizes.append(store.statistics()["file_bytes"])
        store.close()
    return {"sizes": sizes, "used": open_store(path).used_bytes}


def test_reopening_after_kills_finds_everything_and_the_file_does_not_grow(tmp_path):
    report = child("kill_again_and_again", tmp_path)
    growth = report["sizes"][-1] - report["sizes"][5]
    assert growth < 1 << 20, "each killed process wrote 2 MB ahead: that space is reused"
    assert report["used"] < 5 << 20


def kill_readers(path: Path) -> dict:
    """Two hundred processes that die while they hold a snapshot, beside one that lives."""
    open_store(path).close()

    def read() -> None:
        env = lmdb.open(str(path / "store" / "gen-1"), readonly=True, map_size=0, max_dbs=8)
        snapshot = env.begin()  # kept: a transaction that is garbage gives its slot back
        assert snapshot.id() >= 0
        os.kill(os.getpid(), signal.SIGKILL)

    living = hold_snapshot(path)  # while one lives, LMDB does not begin its table of readers anew
    for _ in range(200):
        assert os.WIFSIGNALED(in_fork(read))
    store = open_store(path)
    assert store._env is not None
    left = store._env._env.readers()
    store.commit(make(pages=write(store, 3)))
    report = describe(store)
    living.communicate()
    return {"living": living.pid, "left": left, "report": report}


def hold_snapshot(path: Path) -> subprocess.Popen:
    """A foreign process with an open read transaction, which ends with its input."""
    script = (
        "import lmdb, sys\n"
        "env = lmdb.open(sys.argv[1], readonly=True, map_size=0, max_dbs=8)\n"
        "with env.begin() as transaction:\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", script, str(path / "store" / "gen-1")]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_killed_readers_do_not_stay(tmp_path):
    report = child("kill_readers", tmp_path)
    holders = {line.split()[0] for line in report["left"].splitlines()[1:] if line.split()[2].isdigit()}
    assert holders == {str(report["living"])}
    assert report["report"]["tokens"] == 49


# -- forks and other processes


def use_after_fork(path: Path) -> dict:
    """A child of a fork uses the parent's store, then ends as a process normally does."""
    store = open_store(path)
    manifest = store.commit(make(pages=write(store, 2)))
    calls = (store.allot_record, store.statistics, store.close, lambda: store.contents(manifest),
             lambda: store.commit(make("b")), lambda: read_store(path / "store"))  # fmt: skip

    def use() -> None:
        for call in calls:
            with pytest.raises(StoreForked):
                call()

    assert in_fork(use) == 0
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # runs finalisers, which must not touch the parent's locks or reader slots
    os.waitpid(pid, 0)
    report = describe(store)
    store.commit(make("c"))
    # A child that outlives its parent's store must not keep the lock.
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    store.close()
    open_store(path).close()
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    return report


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path):
    assert child("use_after_fork", tmp_path)["tokens"] == 33


def open_second(path: Path) -> dict:
    """What another process sees: it may read, not write."""
    try:
        open_store(path)
    except StoreLocked as error:
        refused = str(error)
    store = read_store(path / "store")
    return {"refused": refused, "read": describe(store), "sessions": [s.head for s in store.sessions("n")]}


def test_a_second_process_may_read_but_not_write(tmp_path):
    store = open_store(tmp_path)
    store.commit(make(pages=write(store, 2)))
    report = child("open_second", tmp_path)
    assert str(os.getpid()) in report["refused"]
    assert (report["read"]["tokens"], report["sessions"]) == (33, ["a@1"])
    store.close()


# -- write errors and a full store


@pytest.mark.parametrize("point", ["put:written", "commit:written"])
def test_a_failed_write_leaves_nothing_behind(tmp_path, point):
    store = open_store(tmp_path)
    base = store.commit(make(pages=write(store, 2), tail=3))
    before = store.statistics()

    def fail(passed: str) -> None:
        if passed == point:
            raise OSError(errno.EIO, "injected")

    def step() -> None:
        store.put_pages("n", CODEC, [(record, payload(record))])
        store.commit(make(base=base, pages=[*store.contents(base).records, record]))

    store.hook = fail
    record = store.allot_record()
    with pytest.raises(OSError, match="injected"):
        step()
    store.hook = None
    store.drop_pending("n", [record])
    assert store.statistics() | {"file_bytes": 0} == before | {"file_bytes": 0}
    assert isinstance(store.read_pages("n", CODEC, [record])[0], StoreDamaged)
    assert describe(store)["tokens"] == 36
    step()
    assert store.manifest("n", "a").number == 2
    store.close()


def run_out_of_disk(path: Path) -> dict:
    """The file may not grow (as on a full disk): writes fail, reads and the last commit do not."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store(path)
    base = store.commit(make(pages=write(store, 2), tail=3))
    limit = (path / "store" / "gen-1" / "data.mdb").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    failures = []
    for _ in range(3):
        try:
            write(store, 4, BIG)
        except StoreError as error:
            failures.append(str(error))
    report = describe(store)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.commit(make(base=base, pages=[*store.contents(base).records, *write(store, 1)]))
    return {"failures": len(failures), "at the limit": report, "after": describe(store)}


def test_a_write_that_the_system_refuses_leaves_the_last_commit(tmp_path):
    report = child("run_out_of_disk", tmp_path)
    assert report["failures"] == 3
    assert report["at the limit"] == {"records": 3, "pending": 0, "tokens": 36}
    assert report["after"]["tokens"] == 49


def fill(store: Store) -> list[int]:
    """Puts pages until the store is full."""
    pages: list[int] = []
    while True:
        try:
            pages += write(store, 1, BIG)
        except StoreFull:
            return pages


@pytest.fixture
def small_reserve(monkeypatch):
    """256 MB of reserve would hide what happens at its edge."""
    monkeypatch.setattr(space, "_MIN_RESERVE", 4 << 20)


@pytest.mark.usefixtures("small_reserve")
def test_a_full_store_refuses_pages_keeps_its_commits_and_deletes(tmp_path):
    store = open_store(tmp_path, 16 << 20)
    kept = store.commit(make("a", pages=write(store, 2), tail=3))
    pages = fill(store)
    filled = store.commit(make("b", pages=pages))  # a manifest may use the reserve
    before = store.statistics()
    with pytest.raises(StoreFull):
        write(store, 1, BIG)
    assert store.statistics() == before
    assert describe(store)["tokens"] == 36
    assert store.contents(filled).records == pages
    store.delete("n", "b")
    assert write(store, 5, BIG)
    assert store.manifest("n", "a") == kept
    assert store.verify() == []
    store.close()


@pytest.mark.usefixtures("small_reserve")
def test_deletes_work_on_a_full_store_while_another_process_reads(tmp_path):
    store = open_store(tmp_path, 16 << 20)
    store.commit(make("a", pages=write(store, 2), tail=3))
    reader = hold_snapshot(tmp_path)
    # Fill and delete until the reader's snapshot has used up the map: the reserve must be there each time.
    refused = 0
    for _ in range(12):
        pages = fill(store)
        refused += not pages
        store.commit(make("b", pages=pages))
        store.delete("n", "b")
        assert store.used_bytes < 1 << 20
    assert refused >= 3, "the map was never used up"
    assert describe(store)["tokens"] == 36
    reader.communicate()
    store.close()
    store = open_store(tmp_path, 16 << 20)
    assert len(fill(store)) > 20, "the space is back when the reader has gone"
    store.close()


@pytest.mark.usefixtures("small_reserve")
def test_manifests_stop_before_the_reserve_is_gone(tmp_path):
    store = open_store(tmp_path, 1 << 20)
    base = None
    while True:
        try:
            base = store.commit(make(base=base, pinned=True, sidecar=bytes(250 << 10)))
        except StoreFull:
            break
    assert base is not None
    assert 3 < base.number < 16, "1 MB, and half of the reserve"
    assert store.manifest("n", "a") == base
    store.delete("n", "a")
    assert store.used_bytes == 0
    store.close()


@pytest.mark.usefixtures("small_reserve")
def test_a_store_that_outgrew_its_limit_still_deletes(tmp_path):
    store = open_store(tmp_path, 128 << 20)
    store.commit(make("a", pages=write(store, 160, BIG)))
    store.close()
    store = open_store(tmp_path, 1 << 20)
    reader = hold_snapshot(tmp_path)  # so that the delete has to write pages at the end of the file
    with pytest.raises(StoreFull):
        write(store, 1)
    store.delete("n", "a")
    reader.communicate()
    assert write(store, 1)
    store.close()


def test_the_map_is_never_resized_while_readers_are_open(tmp_path):
    store = open_store(tmp_path, 256 << 20)
    store.commit(make(pages=write(store, 2)))
    assert store._env is not None
    size = store._env._env.info()["map_size"]
    reader = hold_snapshot(tmp_path)
    with store._env.read() as snapshot:
        for step in range(4):
            store.commit(make(f"b{step}", pages=write(store, 60, BIG)))
        assert snapshot.entries(Table.MANIFESTS) == 1
    assert store._env._env.info()["map_size"] == size
    assert reader.poll() is None
    reader.communicate()
    store.close()


def test_rewriting_does_not_fragment_the_file(tmp_path):
    store = open_store(tmp_path, keep_checkpoints=1)
    base = None
    for _ in range(100):
        base = store.commit(make(base=base, pages=write(store, 4, BIG), tail=3))
    statistics = store.statistics()
    assert statistics["file_bytes"] <= 4 * statistics["used_bytes"]  # two generations of pages, and their successor
    store.close()


# -- damage


def damage(store: Store, table: Table, key: bytes, change: Callable[[bytes], bytes] | None) -> None:
    """Changes (or with None deletes) a value behind the store's back."""
    env = store._env
    assert env is not None
    with env._env.begin(write=True) as raw:
        value = raw.get(key, db=env._tables[table])
        assert value is not None
        if change is None:
            raw.delete(key, db=env._tables[table])
        else:
            raw.put(key, change(bytes(value)), db=env._tables[table])


def flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize("change", [None, flip, lambda value: value[:-1], lambda value: b""])
@pytest.mark.parametrize("group", [0, 1])
def test_a_damaged_page_is_that_pages_damage_only(tmp_path, change, group):
    store = open_store(tmp_path)
    pages = write(store, 4, BIG)
    manifest = store.commit(make(pages=pages))
    damage(store, Table.RECORDS, part(page_key("n", pages[1]), group), change)
    found = store.read_pages("n", BIG, pages)
    assert isinstance(found[1], StoreDamaged)
    assert found[1].__traceback__ is None
    assert str(pages[1]) in str(found[1])
    for index in (0, 2, 3):
        assert np.array_equal(found[index], payload(pages[index], BIG))
    assert store.verify() != []
    # Recomputed under a new id, the session goes on, and nothing of the damaged page stays.
    pages[1] = write(store, 1, BIG)[0]
    repaired = store.commit(make(base=manifest, pages=pages, unchanged_tokens=65))
    assert all(isinstance(page, np.ndarray) for page in store.read_pages("n", BIG, store.contents(repaired).records))
    store.delete("n", "a")
    assert store.statistics()["records"] == 0
    store.close()


@pytest.mark.parametrize("change", [None, flip, lambda value: value[:-1]])
def test_damage_to_a_session_is_refused_by_reason_and_spares_the_others(tmp_path, change):
    for table, key, read in (
        (Table.SEGMENTS, lambda m: segment_key("n", m.segments[0]), lambda store, m: store.contents(m)),
        (Table.MANIFESTS, lambda m: manifest_key("n", "a", 1), lambda store, m: store.manifest("n", "a")),
        (Table.RECORDS, lambda m: part(tail_key("n", "a", 1), 0), lambda store, m: store.read_tail(m, CODEC)),
    ):
        store = open_store(tmp_path)
        manifest = store.commit(make(pages=write(store, 2), tail=3))
        other = store.commit(make("b", pages=write(store, 2), tail=3))
        damage(store, table, key(manifest), change)
        with pytest.raises(StoreDamaged):
            read(store, manifest)
        assert len(store.contents(other).token_ids) == 36
        assert [info.id for info in store.sessions("n")] == ["a", "b"]
        store.delete("n", "a")
        store.delete("n", "b")
        assert store.sessions("n") == []
        store.close()


def test_a_damaged_session_entry_is_left_out_of_the_list_and_can_be_deleted(tmp_path):
    store = open_store(tmp_path)
    store.commit(make("a", pages=write(store, 2)))
    store.commit(make("b", pages=write(store, 2)))
    damage(store, Table.SESSIONS, session_key("n", "a"), flip)
    assert [info.id for info in store.sessions("n")] == ["b"]
    with pytest.raises(StoreDamaged):
        store.manifest("n", "a")
    store.delete("n", "a")
    assert store.verify() == []
    assert store.statistics()["manifests"] == 1
    store.close()


def test_a_damaged_segment_is_not_shared_on(tmp_path):
    store = open_store(tmp_path)
    pages = write(store, 256)
    first = store.commit(make(pages=pages))
    damage(store, Table.SEGMENTS, segment_key("n", first.segments[0]), flip)
    second = store.commit(make(base=first, pages=pages, unchanged_tokens=4096))
    assert second.segments[0] != first.segments[0]
    assert store.contents(second).records == pages
    store.close()


def test_a_file_that_is_no_database_is_an_error_of_ours(tmp_path):
    open_store(tmp_path).close()
    (tmp_path / "store" / "gen-1" / "data.mdb").write_bytes(b"x" * 8192)
    with pytest.raises(AgentKVError):
        open_store(tmp_path)
    (tmp_path / "store" / "gen-1" / "data.mdb").unlink()
    open_store(tmp_path).close()  # the failed opening left no lock behind


COMMANDS = (kill_at_every_point, kill_again_and_again, kill_readers, use_after_fork, open_second, run_out_of_disk)

if __name__ == "__main__":
    work = {command.__name__: command for command in COMMANDS}[sys.argv[1]]
    print(json.dumps(work(Path(sys.argv[2]))))
