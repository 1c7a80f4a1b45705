"""What the store promises while nothing goes wrong, and a state machine over all its operations.

`test_store_faults.py` kills, fills, forks and damages it.
"""

import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv.errors import (
    CheckpointExpired,
    IdentityMismatch,
    InvalidInput,
    InvalidSessionId,
    SessionNotFound,
    StaleHead,
    StoreDamaged,
    StoreError,
    StoreLocked,
    StoreUnsafe,
)
from agentkv.memory import directory, environment
from agentkv.memory.manifest import SEGMENT_PAGES, SEGMENT_TOKENS, Commit, Manifest
from agentkv.memory.reader import read_store
from agentkv.memory.record import PageCodec
from agentkv.memory.store import Store
from agentkv.types import Identity, ModelShape, Span

ROOT = Path(__file__).resolve().parents[1]
IDENTITY = Identity("w" * 8, "", "c" * 8, "float32", 16, "t" * 8, "p" * 8)
SHAPE = ModelShape(layers=2, q_heads=1, kv_heads=1, head_dim=2, vocab=100, max_positions=512)
CODEC = PageCodec(SHAPE, IDENTITY.kv_id)
STORE_BYTES = 64 << 20


def payload(record: int, codec: PageCodec = CODEC, rows: int = 16) -> np.ndarray:
    """Bytes that only this record has."""
    return np.random.default_rng(record).integers(0, 256, (codec.shape.layers, rows * codec.row_bytes), np.uint8)


def write(store: Store, count: int, codec: PageCodec = CODEC, namespace: str = "n") -> list[int]:
    """Puts `count` new pages, each with the payload of its record id."""
    records = [store.allot_record() for _ in range(count)]
    store.put_pages(namespace, codec, ((record, payload(record, codec)) for record in records))
    return records


def make(session: str = "a", base: Manifest | None = None, pages: list[int] | tuple = (), tail: int = 0, **change):
    """A commit whose KV is exactly `pages` and `tail` rows, plus the carry."""
    kv_len = len(pages) * 16 + tail
    fields = {
        "namespace": "n", "id": session, "base": base, "unchanged_tokens": 0, "token_ids": list(range(kv_len + 1)),
        "records": list(pages), "spans": [Span("first", "user", 0, 1)], "kv_len": kv_len, "identity": IDENTITY,
        "codec": CODEC, "tail": payload(10_000 + tail, rows=tail) if tail else None, "created_at": 1.0,
    }  # fmt: skip
    return Commit(**(fields | change))


def crash(store: Store) -> None:
    """Leaves the files as a kill would: nothing is flushed, finished or swept."""
    assert store._env is not None
    assert store._lock is not None
    environment.release(store._env)
    store._lock.release()


@pytest.fixture
def store(tmp_path):
    opened = Store.open(tmp_path / "store", store_bytes=STORE_BYTES, keep_checkpoints=3)
    yield opened
    assert opened.verify() == []
    opened.close()


class StoreMachine(RuleBasedStateMachine):
    """Any order of puts, commits, forks, rollbacks, deletes, crashes and reopens equals a model of dicts."""

    sessions = Bundle("sessions")
    keep = 3

    @initialize()
    def start(self):
        self.directory = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.model: dict[str, list[tuple[Manifest, Commit]]] = {}
        self.pending: list[int] = []
        self.names = (f"s{i}" for i in itertools.count())
        self.seen_records: set[int] = set()
        self.open()

    def open(self):
        self.store = Store.open(self.directory, store_bytes=STORE_BYTES, keep_checkpoints=self.keep)

    def teardown(self):
        if hasattr(self, "store"):
            for name in list(self.model):
                self.read_back(name)
            for name in list(self.model):
                self.store.delete("n", name)
            self.store.drop_pending("n", self.pending)
            statistics = self.store.statistics()
            assert statistics.pop("file_bytes") > 0
            assert set(statistics.values()) == {0}, "everything deleted: nothing may remain"
            self.store.close()
            shutil.rmtree(self.directory)

    def publish(self, commit: Commit):
        self.keep_commit(self.store.commit(commit), commit)

    def keep_commit(self, manifest: Manifest, commit: Commit):
        kept = self.model.setdefault(commit.id, [])
        assert manifest.number == (kept[-1][0].number + 1 if kept else 1)
        kept.append((manifest, commit))
        self.model[commit.id] = [pair for pair in kept[: -self.keep] if pair[0].pinned] + kept[-self.keep :]
        self.pending = [record for record in self.pending if record not in set(commit.records)]

    @rule(count=st.sampled_from([1, 2, 5, 260]))
    def put(self, count):
        records = write(self.store, count)
        assert not self.seen_records & set(records), "a record id was given out twice"
        self.seen_records |= set(records)
        self.pending += records

    @rule(target=sessions, tail=st.integers(0, 15), pinned=st.booleans())
    def create(self, tail, pinned):
        name = next(self.names)
        self.publish(make(name, None, self.pending, tail, pinned=pinned))
        return name

    @precondition(lambda self: self.model)
    @rule(name=sessions, extra=st.sampled_from([0, 1, 20, 5000]), tail=st.integers(0, 15), pinned=st.booleans())
    def extend(self, name, extra, tail, pinned):
        if name not in self.model:
            return
        base, old = self.model[name][-1]
        records = [*old.records, *self.pending]
        tokens = [*old.token_ids, *range(len(old.token_ids), len(records) * 16 + tail + 1 + extra)]
        spans = [*old.spans, Span("more", "user", len(tokens) - 1, len(tokens))]
        change = {"token_ids": tokens, "spans": spans, "unchanged_tokens": len(old.token_ids), "pinned": pinned}
        self.publish(make(name, base, records, tail, **change))

    @precondition(lambda self: self.model)
    @rule(name=sessions, back=st.integers(0, 2), share=st.floats(0, 1))
    def commit_less(self, name, back, share):
        if name not in self.model:
            return
        kept = self.model[name]
        old = kept[-1 - min(back, len(kept) - 1)][1]
        records = old.records[: int(len(old.records) * share)]
        tokens = old.token_ids[: len(records) * 16 + 1]
        change = {"token_ids": tokens, "unchanged_tokens": len(tokens)}
        self.publish(make(name, kept[-1][0], records, **change))

    @precondition(lambda self: self.model)
    @rule(target=sessions, name=sessions, back=st.integers(0, 2))
    def fork(self, name, back):
        new = next(self.names)
        if name in self.model:
            self.branch(name, new, back)
        return new

    @precondition(lambda self: self.model)
    @rule(name=sessions, back=st.integers(0, 2))
    def roll_back(self, name, back):
        if name in self.model:
            self.branch(name, name, back)

    def branch(self, name, new, back):
        kept = self.model[name]
        source, commit = kept[-1 - min(back, len(kept) - 1)]
        manifest = self.store.branch(source, new, 1.0)
        assert manifest.parent == source.checkpoint
        self.keep_commit(manifest, msgspec.structs.replace(commit, id=new, base=source, created_at=1.0, pinned=False))

    @precondition(lambda self: self.model)
    @rule(name=sessions, back=st.integers(0, 2))
    def pin(self, name, back):
        if name in self.model:
            kept = self.model[name]
            place = max(len(kept) - 1 - back, 0)
            manifest, commit = kept[place]
            kept[place] = (self.store.pin(manifest), msgspec.structs.replace(commit, pinned=True))

    @precondition(lambda self: self.model)
    @rule(name=sessions)
    def commit_on_a_stale_base(self, name):
        if name not in self.model:
            return
        before = self.store.statistics()
        older = self.model[name][0][0] if len(self.model[name]) > 1 else None
        with pytest.raises(StaleHead):
            self.store.commit(make(name, older, self.pending))
        assert self.store.statistics() == before

    @rule(name=sessions)
    def delete(self, name):
        if self.model.pop(name, None) is None:
            with pytest.raises(SessionNotFound):
                self.store.delete("n", name)
        else:
            self.store.delete("n", name)

    @rule(count=st.integers(1, 3))
    def drop_pending(self, count):
        committed = [record for kept in self.model.values() for _, commit in kept for record in commit.records[:1]]
        self.store.drop_pending("n", [*self.pending[:count], *committed])
        self.pending = self.pending[count:]

    @rule(clean=st.booleans())
    def reopen(self, clean):
        self.store.close() if clean else crash(self.store)
        self.open()
        self.pending = []

    @precondition(lambda self: self.model)
    @rule(name=sessions)
    def read_back(self, name):
        if name not in self.model:
            return
        assert [c.number for c in self.store.checkpoints("n", name)] == [m.number for m, _ in self.model[name]]
        for manifest, commit in self.model[name]:
            assert self.store.manifest("n", name, manifest.number) == manifest
            contents = self.store.contents(manifest)
            assert contents.token_ids == list(commit.token_ids)
            assert contents.records == list(commit.records)
            assert contents.spans == list(commit.spans)
            ends = contents.records[:2] + contents.records[-2:]
            for record, found in zip(ends, self.store.read_pages("n", CODEC, ends), strict=True):
                assert np.array_equal(found, payload(record))
            tail = self.store.read_tail(manifest, CODEC)
            assert tail.tobytes() == (b"" if commit.tail is None else commit.tail.tobytes())

    @invariant()
    def recount(self):
        if not hasattr(self, "store"):
            return
        assert self.store.verify() == []
        kept = [pair for pairs in self.model.values() for pair in pairs]
        live = {record for _, commit in kept for record in commit.records} | set(self.pending)
        statistics = self.store.statistics()
        assert statistics["records"] == len(live) + sum(commit.tail is not None for _, commit in kept)
        assert statistics["pending"] == len(self.pending)
        assert statistics["manifests"] == len(kept)
        assert [info.id for info in self.store.sessions("n")] == sorted(self.model)


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
TestStoreMachine = StoreMachine.TestCase


# -- commits


def test_a_session_without_tokens_can_be_committed_and_read(store):
    manifest = store.commit(make(token_ids=[], kv_len=0, spans=[]))
    assert (manifest.number, manifest.checkpoint, manifest.segments) == (1, "a@1", ())
    assert store.contents(store.manifest("n", "a")).token_ids == []
    assert store.read_tail(manifest, CODEC).shape == (2, 0)


def test_a_commit_writes_what_is_new_and_shares_the_rest(store):
    pages = write(store, 3 * SEGMENT_PAGES)
    first = store.commit(make(pages=pages))
    before = store.used_bytes
    more = [*pages, *write(store, 1)]
    tokens = len(pages) * 16
    second = store.commit(make(base=first, pages=more, unchanged_tokens=tokens))
    assert second.segments[:3] == first.segments[:3]
    assert second.segments[3] != first.segments[3]
    assert store.used_bytes - before < 5_000
    assert second.parent == "a@1"
    assert store.contents(second).records == more


def test_a_page_replaced_under_unchanged_tokens_is_not_shared_away(store):
    pages = write(store, SEGMENT_PAGES)
    first = store.commit(make(pages=pages))
    pages[7] = write(store, 1)[0]
    second = store.commit(make(base=first, pages=pages, unchanged_tokens=SEGMENT_TOKENS))
    assert store.contents(second).records == pages
    assert second.segments[0] != first.segments[0]


def test_checkpoints_past_the_kept_ones_expire_unless_pinned(store):
    manifest, used = None, []
    for step in range(8):
        pages = [] if manifest is None else store.contents(manifest).records[-3:]
        pages = [*pages, *write(store, 1)]
        manifest = store.commit(make(base=manifest, pages=pages, tail=5, pinned=step == 1))
        used.append(store.used_bytes)
    assert [checkpoint.number for checkpoint in store.checkpoints("n", "a")] == [2, 6, 7, 8]
    assert store.contents(store.manifest("n", "a", 2)).records
    with pytest.raises(CheckpointExpired):
        store.manifest("n", "a", 5)
    for number in (0, -1, 9):
        with pytest.raises(InvalidInput):
            store.manifest("n", "a", number)
    assert used[-1] - used[-2] <= used[1] - used[0], "expired checkpoints are freed"


def test_a_manifest_object_does_not_outlive_its_checkpoint(store):
    first = store.commit(make(pages=write(store, 1), tail=3))
    store.delete("n", "a")
    other = store.commit(make(pages=write(store, 2), tail=3))
    assert other.checkpoint == first.checkpoint
    for read in (store.contents, lambda manifest: store.read_tail(manifest, CODEC)):
        with pytest.raises(CheckpointExpired):
            read(first)
    with pytest.raises(StaleHead):
        store.commit(make(base=first))


def test_a_fork_lives_on_when_its_source_is_deleted(store):
    pages = write(store, SEGMENT_PAGES + 3)
    source = store.commit(make(pages=pages, tail=4))
    before = store.statistics()["records"]
    fork = store.branch(source, "b", 1.0)
    assert (fork.number, fork.parent, fork.segments) == (1, "a@1", source.segments)
    assert store.statistics()["records"] == before + 1, "only the tail was copied"
    with pytest.raises(InvalidInput, match="already"):
        store.branch(source, "b", 1.0)
    store.delete("n", "a")
    found = store.read_pages("n", CODEC, store.contents(fork).records)
    assert all(np.array_equal(page, payload(record)) for page, record in zip(found, pages, strict=True))
    with pytest.raises(CheckpointExpired):
        store.branch(source, "c", 1.0)


def test_a_record_that_is_not_on_disk_cannot_be_named(store):
    pages = write(store, 2)
    before = store.statistics()
    with pytest.raises(InvalidInput, match="not on disk"):
        store.commit(make(pages=[*pages, store.allot_record()]))
    assert store.statistics() == before
    with pytest.raises(SessionNotFound):
        store.manifest("n", "a")


def test_durable_length_counts_pages_and_then_the_tail(store):
    pages = write(store, 2)
    whole = store.commit(make("a", pages=pages, tail=5))
    gap = store.commit(msgspec.structs.replace(make("b", pages=pages, tail=5), records=pages[:1]))
    assert (whole.kv_len, whole.kv_durable_len, whole.tail_rows) == (37, 37, 5)
    assert (gap.kv_len, gap.kv_durable_len, gap.tail_rows) == (37, 16, 5)


# -- pages


def test_pages_are_written_once_and_only_under_allotted_ids(store):
    (record,) = write(store, 1)
    assert store.put_pages("n", CODEC, [(record, payload(99))]) == 0
    assert np.array_equal(store.read_pages("n", CODEC, [record])[0], payload(record))
    with pytest.raises(InvalidInput, match="allotted"):
        store.put_pages("n", CODEC, [(record + 1, payload(0))])
    store.drop_pending("n", [record])
    assert store.statistics()["records"] == 0


def test_namespaces_do_not_see_each_other(store):
    pages = write(store, 1)
    store.commit(make(pages=pages))
    assert isinstance(store.read_pages("m", CODEC, pages)[0], StoreDamaged)
    assert store.sessions("m") == []
    for call in (store.manifest, store.delete, store.checkpoints):
        with pytest.raises(SessionNotFound):
            call("m", "a")
    with pytest.raises(InvalidInput, match="not on disk"):
        store.commit(make(pages=pages, namespace="m"))
    with pytest.raises(StaleHead):
        store.commit(make(base=store.manifest("n", "a"), namespace="m"))
    with pytest.raises(InvalidSessionId):
        store.put_pages("../m", CODEC, [])


def test_another_models_pages_are_refused(store):
    pages = write(store, 1)
    manifest = store.commit(make(pages=pages, tail=2))
    other = PageCodec(SHAPE, bytes(16))
    with pytest.raises(IdentityMismatch):
        store.read_pages("n", other, pages)
    with pytest.raises(IdentityMismatch):
        store.read_tail(manifest, other)


def test_page_transactions_stay_below_64_mb(tmp_path):
    codec = PageCodec(ModelShape(28, 2, 2, 128, 100, 512), IDENTITY.kv_id)  # 0.9 MB a page
    store = Store.open(tmp_path / "store", store_bytes=1 << 30)
    page = payload(0, codec)
    steps = [0]
    store.hook = lambda point: steps.append(store.used_bytes) if point == "put:committed" else None
    written = store.put_pages("n", codec, ((store.allot_record(), page) for _ in range(230)))
    assert written == steps[-1] > 200 << 20
    sizes = [after - before for before, after in itertools.pairwise(steps)]
    assert len(sizes) == 4
    assert max(sizes) <= 64 << 20
    store.close()


# -- opening


def test_ids_are_never_given_out_again(tmp_path):
    store = Store.open(tmp_path / "store", store_bytes=STORE_BYTES)
    pages = write(store, 3)
    store.drop_pending("n", pages)
    crash(store)
    store = Store.open(tmp_path / "store", store_bytes=STORE_BYTES)
    assert store.allot_record() > max(pages)
    store.close()


def test_directory_and_files_are_private(store, tmp_path):
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert modes.pop("gen-1") == stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert modes == dict.fromkeys(("CURRENT", "writer.lock", "data.mdb", "lock.mdb"), 0o600)


def test_another_users_directory_is_refused(tmp_path, monkeypatch):
    Store.open(tmp_path / "store", store_bytes=STORE_BYTES).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreUnsafe, match="belongs to user"):
        Store.open(tmp_path / "store", store_bytes=STORE_BYTES, force=True)
    with pytest.raises(StoreUnsafe, match="belongs to user"):
        read_store(tmp_path / "store", force=True)


def test_a_network_file_system_is_refused_unless_forced(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "file_system", lambda path: "nfs4")
    with pytest.raises(StoreUnsafe, match="nfs4"):
        Store.open(tmp_path / "store", store_bytes=STORE_BYTES)
    Store.open(tmp_path / "store", store_bytes=STORE_BYTES, force=True).close()


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nhost:/x /home nfs4 rw 0 0\nb /home/a\\040b tmpfs rw 0 0\nb /homes xfs rw 0 0\n"
    )
    for path, kind in (("/home/c", "nfs4"), ("/home/a b/c", "tmpfs"), ("/etc", "ext4"), ("/homes", "xfs")):
        assert directory.file_system(Path(path), mounts) == kind
    assert directory.file_system(Path("/"), tmp_path / "absent") == ""


def test_a_directory_with_other_files_is_no_store(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(StoreUnsafe, match=r"thesis\.txt"):
        Store.open(tmp_path, store_bytes=STORE_BYTES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_opening_removes_generations_that_are_not_named(tmp_path):
    store = Store.open(tmp_path, store_bytes=STORE_BYTES)
    store.commit(make())
    store.close()
    (tmp_path / "gen-2").mkdir()
    (tmp_path / "gen-2" / "data.mdb").write_bytes(b"half a copy")
    store = Store.open(tmp_path, store_bytes=STORE_BYTES)
    assert not (tmp_path / "gen-2").exists()
    assert store.manifest("n", "a").number == 1
    store.close()


def test_a_first_opening_that_was_killed_is_begun_anew(tmp_path):
    Store.open(tmp_path, store_bytes=STORE_BYTES).close()
    (tmp_path / "CURRENT").unlink()
    (tmp_path / "gen-1" / "data.mdb").write_bytes(b"")
    with pytest.raises(StoreError, match="no store"):
        read_store(tmp_path)
    store = Store.open(tmp_path, store_bytes=STORE_BYTES)
    assert store.verify() == []
    store.close()


@pytest.mark.parametrize("content", ["", "gen-7\n", "../elsewhere\n", "\x00\xff"])
def test_a_damaged_current_file_is_reported_and_nothing_removed(tmp_path, content):
    Store.open(tmp_path, store_bytes=STORE_BYTES).close()
    (tmp_path / "CURRENT").write_text(content)
    with pytest.raises(StoreDamaged, match="CURRENT"):
        Store.open(tmp_path, store_bytes=STORE_BYTES)
    assert (tmp_path / "gen-1" / "data.mdb").exists()


def test_a_newer_store_is_refused_and_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "STORE_FORMAT", 2)
    Store.open(tmp_path, store_bytes=STORE_BYTES).close()
    monkeypatch.undo()
    before = (tmp_path / "gen-1" / "data.mdb").read_bytes()
    for call in (lambda: Store.open(tmp_path, store_bytes=STORE_BYTES), lambda: read_store(tmp_path)):
        with pytest.raises(IdentityMismatch) as caught:
            call()
        assert (caught.value.field, caught.value.stored) == ("format", "2")
    assert (tmp_path / "gen-1" / "data.mdb").read_bytes() == before


def test_one_writer_and_readers_that_share_its_environment(store, tmp_path):
    manifest = store.commit(make(pages=write(store, 1)))
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        Store.open(tmp_path / "store", store_bytes=STORE_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    reader = read_store(tmp_path / "link")
    assert reader.manifest("n", "a") == manifest
    reader.close()
    assert store.manifest("n", "a") == manifest


def test_closing_is_idempotent_and_final(tmp_path):
    store = Store.open(tmp_path, store_bytes=STORE_BYTES)
    store.close()
    store.close()
    for call in (store.allot_record, store.statistics, lambda: store.sessions("n"), lambda: store.commit(make())):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_reads_from_another_thread_leave_no_reader_behind(store):
    pages = write(store, 4)
    manifest = store.commit(make(pages=pages))

    def read() -> None:
        for _ in range(500):
            store.read_pages("n", CODEC, pages)
            store.contents(manifest)

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        manifest_b = store.commit(make(f"b{store.allot_record()}"))
        store.delete("n", manifest_b.id)
    thread.join()
    assert store._env is not None
    assert len(store._env._env.readers().splitlines()) <= 3  # a heading and a slot for each thread


_DETERMINISM = """
import hashlib, sys, tempfile
from test_store import *
directory = tempfile.mkdtemp()
store = Store.open(directory, store_bytes=STORE_BYTES)
first = store.commit(make(pages=write(store, 300), tail=3, sidecar=b"x"))
store.branch(first, "b", 1.0)
with store._env.read() as transaction:
    for table in environment.Table:
        for key, value in transaction.scan(table, b""):
            print(table, key.hex(), hashlib.sha256(value).hexdigest())
store.close()
shutil.rmtree(directory)
"""


def test_same_operations_give_same_keys_and_values_in_any_process():
    printed = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-c", _DETERMINISM], env=env, capture_output=True, text=True, check=True, timeout=120
        )
        printed.append(done.stdout)
    assert len(printed[0].splitlines()) > 300
    assert printed[0] == printed[1]
