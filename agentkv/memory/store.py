"""The durable tier: sessions' manifests, segments and page records in LMDB. Every call is synchronous.

One call is one transaction (`put_pages`: several of at most 64 MB) and returns with all bytes copied out. Writes
come from one thread, reads (`reader.py`) from any. It decides nothing about memory tiers or sessions in use.
What happens inside a commit is in `publish.py`; the layout of values in `record.py` and `manifest.py`.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Self

import numpy as np

from agentkv.errors import InvalidInput, SessionNotFound, StoreFull
from agentkv.memory.directory import WriterLock, next_generation, remove_other_generations, set_current
from agentkv.memory.environment import Environment, Table, Transaction, acquire, release
from agentkv.memory.keys import manifest_prefix, number_of, page_key, part, session_key, validate_id
from agentkv.memory.manifest import Commit, Manifest
from agentkv.memory.opening import open_writer
from agentkv.memory.publish import branch, delete_page, drop_checkpoint, pin, publish, references
from agentkv.memory.reader import StoreReader, require_current
from agentkv.memory.record import PageCodec
from agentkv.memory.space import TRANSACTION_BYTES, cost, reserve_bytes

_RECORD_KEY = b"next record"


class Store(StoreReader):
    """An open store. Make one with `Store.open`; close it with `close()`.

    Every call raises `StoreForked` in a forked child, and `StoreError` after `close()`.
    `hook`, if set, is called with the name of each point that a write passes (for fault injection in tests).
    """

    def __init__(self, env: Environment, lock: WriterLock, store_bytes: int, keep_checkpoints: int) -> None:
        super().__init__(env)
        self.hook: Callable[[str], None] | None = None
        self._lock = lock
        self._store_bytes = store_bytes
        self._commit_limit = store_bytes + reserve_bytes(store_bytes) // 2
        self._keep_checkpoints = keep_checkpoints
        self._counter = threading.Lock()
        with env.read() as transaction:
            self._next_record = transaction.number(_RECORD_KEY)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, store_bytes: int, keep_checkpoints: int = 16, force: bool = False
    ) -> Self:
        """Opens the store at `path` (a directory, made if need be) as its one writer.

        Raises `StoreLocked` if another writer has it, `StoreUnsafe` for another user's directory or, unless
        `force`, a network file system, `IdentityMismatch("format")` for a newer store. What was written ahead of a
        commit that never came is removed first.
        """
        env, lock = open_writer(path, store_bytes, force)
        return cls(env, lock, store_bytes, keep_checkpoints)

    def close(self) -> None:
        """Closes the files and lets the next writer in. Idempotent."""
        super().close()
        self._lock.release()

    def allot_record(self) -> int:
        """The next record id: unique in the store for ever, once something is stored under it. Any thread."""
        self._live()
        with self._counter:
            record = self._next_record
            self._next_record += 1
            return record

    def put_pages(self, namespace: str, codec: PageCodec, pages: Iterable[tuple[int, np.ndarray]]) -> int:
        """Writes (record id, payload) pages ahead of the commit that will name them; returns counted bytes.

        Pages already on disk are skipped, so a failed call can be repeated. Raises `StoreFull`: the pages of
        that transaction are absent, those of earlier ones are kept until they are committed or dropped.
        """
        validate_id(namespace)
        group_cost = cost(len(part(page_key(namespace, 0), 0)), -(-codec.page_bytes // codec.groups)) + 4096
        page_cost = group_cost * codec.groups
        source, total = iter(pages), 0
        while batch := list(islice(source, max(1, TRANSACTION_BYTES // page_cost))):
            self._at("put:begin")
            with self._write() as transaction:
                total += self._put_batch(transaction, namespace, codec, batch, page_cost)
                self._at("put:written")
            self._at("put:committed")
        return total

    def drop_pending(self, namespace: str, records: Iterable[int]) -> None:
        """Deletes those of the pages that no commit has named; the others stay."""
        with self._write() as transaction:
            for key in [page_key(namespace, record) for record in records]:
                if transaction.view(Table.PENDING, key) is not None:
                    delete_page(transaction, key)

    def commit(self, commit: Commit) -> Manifest:
        """Publishes a step: one transaction, durable when this returns.

        Raises `StaleHead` if `commit.base` is not the session's head, `InvalidInput` for contradictions or a
        record that is not on disk, `StoreFull` past the reserve; the previous commit then stands.
        """
        commit.check()
        self._at("commit:begin")
        with self._write() as transaction:
            manifest = publish(transaction, commit, self._keep_checkpoints)
            self._check_limit(transaction)
            self._at("commit:written")
        self._at("commit:committed")
        self._live().sync()
        self._at("commit:synced")
        return manifest

    def branch(self, source: Manifest, session: str, created_at: float) -> Manifest:
        """Publishes the state of `source` as the next commit of `session`: of its own (a rollback), or as the first of
        a new one in its namespace (a fork). Pages and segments are shared, only the tail is copied.

        Raises `CheckpointExpired`, `InvalidInput` if another session has the id, `StoreFull`.
        """
        self._at("branch:begin")
        with self._write() as transaction:
            require_current(transaction, source)
            manifest = branch(transaction, source, session, created_at, self._keep_checkpoints)
            self._check_limit(transaction)
            self._at("branch:written")
        self._at("branch:committed")
        self._live().sync()
        return manifest

    def pin(self, manifest: Manifest) -> Manifest:
        """Keeps a checkpoint until its session is deleted; returns its manifest. Raises `CheckpointExpired`."""
        with self._write() as transaction:
            require_current(transaction, manifest)
            pinned = pin(transaction, manifest)
        self._live().sync()
        return pinned

    def compact(self) -> tuple[int, int]:
        """Copies what is live into a new generation and goes over to it, which gives deleted bytes back to the disk;
        returns the bytes of the data file before and after. Killed at any point, the old or the new generation opens.

        Raises `StoreFull` if the disk has no room for the copy. The old generation goes with its last reader.
        """
        env = self._live()
        root, before, needed = env.generation.parent, env.file_bytes(), env.live_bytes()
        free = shutil.disk_usage(root).free
        if free < needed + reserve_bytes(0):
            raise StoreFull(f"compacting needs {needed + reserve_bytes(0)} bytes of disk, {free} are free")
        generation = next_generation(root, env.generation)
        self._at("compact:begin")
        try:
            env.copy(generation)
            self._at("compact:copied")
            compacted = acquire(generation, self._store_bytes, writer=True)
        except BaseException:
            shutil.rmtree(generation, ignore_errors=True)
            raise
        set_current(root, generation.name)
        self._at("compact:named")
        self._env = compacted
        release(env)
        remove_other_generations(root)
        self._at("compact:removed")
        return before, compacted.file_bytes()

    def delete(self, namespace: str, session: str) -> None:
        """Deletes all checkpoints of a session and what they alone referenced; raises `SessionNotFound`.

        Uses the reserve, so it works on a full store, and while readers hold older snapshots.
        """
        self._at("delete:begin")
        with self._write() as transaction:
            key = session_key(namespace, session)
            if not transaction.delete(Table.SESSIONS, key):
                raise SessionNotFound(f"no session {session!r} in namespace {namespace!r}")
            manifests = [key for key, _ in transaction.scan(Table.MANIFESTS, manifest_prefix(namespace, session))]
            for manifest in manifests:
                drop_checkpoint(transaction, namespace, session, number_of(manifest))
            self._at("delete:written")
        self._at("delete:committed")
        self._live().sync()

    def _put_batch(
        self,
        transaction: Transaction,
        namespace: str,
        codec: PageCodec,
        batch: list[tuple[int, np.ndarray]],
        page_cost: int,
    ) -> int:
        before = transaction.used_bytes
        keyed = [(page_key(namespace, record), record, payload) for record, payload in batch]
        fresh = [page for page in keyed if not _on_disk(transaction, page[0])]
        needed = len(fresh) * page_cost
        if before + needed > self._store_bytes:
            raise StoreFull(f"{before} bytes are used and {needed} more would pass store_bytes={self._store_bytes}")
        self._live().require_room(transaction, needed)
        for key, record, payload in fresh:
            if not 0 <= record < self._next_record:
                raise InvalidInput(f"record id {record} was not allotted")
            assert payload.shape == (codec.shape.layers, codec.layer_bytes), "a page has 16 rows"
            transaction.put(Table.PENDING, key, b"")
            for group, value in enumerate(codec.encode(payload)):
                transaction.put(Table.RECORDS, part(key, group), value)
        return transaction.used_bytes - before

    def _check_limit(self, transaction: Transaction) -> None:
        if transaction.used_bytes > self._commit_limit:
            raise StoreFull(f"{transaction.used_bytes} bytes would pass store_bytes={self._store_bytes}")

    @contextmanager
    def _write(self) -> Iterator[Transaction]:
        with self._using() as env, env.write() as transaction:
            yield transaction
            # With the writes, so that no id of a stored page is ever given out again, kill or not.
            transaction.set_number(_RECORD_KEY, self._next_record)

    def _at(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)


def _on_disk(transaction: Transaction, key: bytes) -> bool:
    return transaction.view(Table.PENDING, key) is not None or references(transaction, key) > 0
