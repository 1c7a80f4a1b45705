"""The durable tier: sessions' manifests, segments and page records in LMDB. Every call is synchronous.

One call is one transaction (`put_pages`: several of at most 64 MB) and returns with all bytes copied out. Writes
come from one thread, reads may come from another. It decides nothing about memory tiers or sessions in use.
What happens inside a commit is in `publish.py`; the layout of values in `record.py` and `manifest.py`.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Self

import numpy as np

from agentkv.errors import (
    CheckpointExpired,
    IdentityMismatch,
    InvalidInput,
    SessionNotFound,
    StoreDamaged,
    StoreError,
    StoreForked,
    StoreFull,
)
from agentkv.memory.audit import audit
from agentkv.memory.directory import WriterLock
from agentkv.memory.environment import Environment, Table, Transaction, release
from agentkv.memory.keys import (
    checkpoint_name,
    manifest_key,
    manifest_prefix,
    namespace_prefix,
    number_of,
    page_key,
    part,
    segment_key,
    session_key,
    tail_key,
    validate_id,
)
from agentkv.memory.manifest import (
    Checkpoint,
    Commit,
    Contents,
    Manifest,
    SessionEntry,
    decode_manifest,
    decode_segment,
    decode_session,
)
from agentkv.memory.opening import open_store
from agentkv.memory.publish import delete_page, drop_checkpoint, publish, read_session, references
from agentkv.memory.record import PageCodec
from agentkv.memory.space import TRANSACTION_BYTES, cost, reserve_bytes
from agentkv.types import SessionInfo

_log = logging.getLogger("agentkv.store")

_RECORD_KEY = b"next record"


class Store:
    """An open store. Make one with `Store.open`; close it with `close()`.

    Every call raises `StoreForked` in a forked child, and `StoreError` after `close()`.
    `hook`, if set, is called with the name of each point that a write passes (for fault injection in tests).
    """

    def __init__(self, env: Environment, lock: WriterLock | None, store_bytes: int, keep_checkpoints: int) -> None:
        self.hook: Callable[[str], None] | None = None
        self._env: Environment | None = env
        self._lock = lock
        self._pid = os.getpid()
        self._store_bytes = store_bytes
        self._commit_limit = store_bytes + reserve_bytes(store_bytes) // 2
        self._keep_checkpoints = keep_checkpoints
        self._counter = threading.Lock()
        with env.read() as transaction:
            self._next_record = transaction.number(_RECORD_KEY)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        store_bytes: int,
        keep_checkpoints: int = 16,
        writer: bool = True,
        force: bool = False,
    ) -> Self:
        """Opens the store at `path` (a directory, made if need be when writing).

        Raises `StoreLocked` if another writer has it, `StoreUnsafe` for another user's directory or, unless
        `force`, a network file system, `IdentityMismatch("format")` for a newer store. A writer first removes
        what was written ahead of a commit that never came.
        """
        env, lock = open_store(path, store_bytes, writer, force)
        return cls(env, lock, store_bytes, keep_checkpoints)

    def close(self) -> None:
        """Closes the files and lets the next writer in. Idempotent."""
        if self._env is None:
            return
        self._live()
        release(self._env)
        self._env = None
        if self._lock is not None:
            self._lock.release()

    # -- writing

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
            if transaction.used_bytes > self._commit_limit:
                raise StoreFull(f"{transaction.used_bytes} bytes would pass store_bytes={self._store_bytes}")
            self._at("commit:written")
        self._at("commit:committed")
        self._live().sync()
        self._at("commit:synced")
        return manifest

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

    # -- reading

    def manifest(self, namespace: str, session: str, number: int | None = None) -> Manifest:
        """The session's head, or its checkpoint `number`.

        Raises `SessionNotFound`, `CheckpointExpired`, `InvalidInput` for a number that never was (0 included:
        the empty session has no manifest), `StoreDamaged`.
        """
        with self._read() as transaction:
            entry = _require_session(transaction, namespace, session)
            wanted = entry.head.number if number is None else number
            name = checkpoint_name(session, wanted)
            if not 1 <= wanted <= entry.head.number:
                raise InvalidInput(f"{name} was never committed: the head is {entry.head.number}")
            value = transaction.view(Table.MANIFESTS, manifest_key(namespace, session, wanted))
            if value is not None:
                return decode_manifest(value)
            if wanted in (checkpoint.number for checkpoint in entry.checkpoints):
                raise StoreDamaged(f"the manifest of {name} is missing")
            raise CheckpointExpired(f"{name} is no longer kept")

    def contents(self, manifest: Manifest) -> Contents:
        """Its token ids, record ids and spans; raises `CheckpointExpired`, `StoreDamaged`."""
        with self._read() as transaction:
            _require_current(transaction, manifest)
            contents = Contents([], [], [])
            for number in manifest.segments:
                value = transaction.view(Table.SEGMENTS, segment_key(manifest.namespace, number))
                if value is None:
                    raise StoreDamaged(f"segment {number} of {manifest.checkpoint} is missing")
                segment = decode_segment(value)
                contents.token_ids.extend(segment.token_ids())
                contents.records.extend(segment.record_ids())
                contents.spans.extend(segment.spans)
        if len(contents.token_ids) != manifest.tokens or len(contents.records) != manifest.pages:
            raise StoreDamaged(f"the segments of {manifest.checkpoint} do not add up")
        return contents

    def read_pages(self, namespace: str, codec: PageCodec, records: Sequence[int]) -> list[np.ndarray | StoreDamaged]:
        """The payload of each page, or what is wrong with it; never half of one.

        Raises `IdentityMismatch` if the pages are another model's. Holds all of them: read long sessions in parts.
        """
        with self._read() as transaction:
            return [_read_page(transaction, namespace, codec, record) for record in records]

    def read_tail(self, manifest: Manifest, codec: PageCodec) -> np.ndarray:
        """Payload with the `tail_rows` rows after the last sealed page, uint8 [layers, bytes] (0 rows: 0 bytes).

        Raises `CheckpointExpired`, `StoreDamaged`, `IdentityMismatch`.
        """
        with self._read() as transaction:
            _require_current(transaction, manifest)
            if manifest.tail_rows == 0:
                return np.empty((codec.shape.layers, 0), np.uint8)
            prefix = tail_key(manifest.namespace, manifest.id, manifest.number)
            payload = codec.decode([value for _, value in transaction.scan(Table.RECORDS, prefix)])
        if payload.shape[1] != manifest.tail_rows * codec.row_bytes:
            raise StoreDamaged(f"the tail of {manifest.checkpoint} has another number of rows")
        return payload

    def checkpoints(self, namespace: str, session: str) -> list[Checkpoint]:
        """The commits kept, oldest first; the last is the head. Raises `SessionNotFound`."""
        with self._read() as transaction:
            return list(_require_session(transaction, namespace, session).checkpoints)

    def sessions(self, namespace: str) -> list[SessionInfo]:
        """The namespace's sessions by id. A damaged entry, or one of a newer format, is logged and left out: the others
        must stay usable."""
        found = []
        with self._read() as transaction:
            for key, value in transaction.scan(Table.SESSIONS, namespace_prefix(namespace)):
                try:
                    entry = decode_session(value)
                except (StoreDamaged, IdentityMismatch) as error:
                    _log.error("session entry %s: %s", key.hex(), error)
                    continue
                head = checkpoint_name(entry.id, entry.head.number)
                info = (entry.head.tokens, entry.kv_len, entry.stored_bytes, entry.head.created_at)
                found.append(SessionInfo(entry.id, entry.namespace, head, *info))
        return sorted(found, key=lambda info: info.id)

    @property
    def used_bytes(self) -> int:
        """Counted bytes, the ones that `store_bytes` limits."""
        with self._read() as transaction:
            return transaction.used_bytes

    def statistics(self) -> dict[str, int]:
        """Entries by kind, counted bytes, and bytes of the data file."""
        env = self._live()
        with env.read() as transaction:
            tables = (Table.RECORDS, Table.SEGMENTS, Table.MANIFESTS, Table.SESSIONS, Table.PENDING)
            counts = {table.value: transaction.entries(table) for table in tables}
            return counts | {"used_bytes": transaction.used_bytes, "file_bytes": env.file_bytes()}

    def verify(self) -> list[str]:
        """Walks the whole store: what fails its checksum or its recount, one line each; empty if all is sound."""
        return audit(self._live())

    # -- inside

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

    @contextmanager
    def _write(self) -> Iterator[Transaction]:
        env = self._live()
        if self._lock is None:
            raise StoreError("the store is open for reading only")
        with env.write() as transaction:
            yield transaction
            # With the writes, so that no id of a stored page is ever given out again, kill or not.
            transaction.set_number(_RECORD_KEY, self._next_record)

    @contextmanager
    def _read(self) -> Iterator[Transaction]:
        with self._live().read() as transaction:
            yield transaction

    def _live(self) -> Environment:
        if os.getpid() != self._pid:
            raise StoreForked("the store was opened before os.fork(): open it in a new process")
        if self._env is None:
            raise StoreError("the store is closed")
        return self._env

    def _at(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)


def _on_disk(transaction: Transaction, key: bytes) -> bool:
    return transaction.view(Table.PENDING, key) is not None or references(transaction, key) > 0


def _require_session(transaction: Transaction, namespace: str, session: str) -> SessionEntry:
    entry = read_session(transaction, namespace, session)
    if entry is None:
        raise SessionNotFound(f"no session {session!r} in namespace {namespace!r}")
    return entry


def _require_current(transaction: Transaction, manifest: Manifest) -> None:
    """A manifest object may outlive its checkpoint, and a new session may have taken its key."""
    value = transaction.view(Table.MANIFESTS, manifest_key(manifest.namespace, manifest.id, manifest.number))
    if value is None or decode_manifest(value) != manifest:
        raise CheckpointExpired(f"{manifest.checkpoint} is no longer kept")


def _read_page(transaction: Transaction, namespace: str, codec: PageCodec, record: int) -> np.ndarray | StoreDamaged:
    values = [value for _, value in transaction.scan(Table.RECORDS, page_key(namespace, record))]
    if not values:
        return StoreDamaged(f"page record {record} is missing")
    try:
        payload = codec.decode(values)
    except StoreDamaged as error:
        # A new one: the traceback of `error` holds views into the map.
        return StoreDamaged(f"page record {record}: {error}")
    if payload.shape[1] != codec.layer_bytes:
        return StoreDamaged(f"page record {record} is no whole page")
    return payload
