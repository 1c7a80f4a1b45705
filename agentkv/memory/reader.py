"""What a store tells: manifests, contents, pages, lists. For its writer and for readers in other processes.

One call is one transaction, and returns with all bytes copied out. Any thread. `store.py` adds what changes a store.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from agentkv.errors import (
    CheckpointExpired,
    IdentityMismatch,
    InvalidInput,
    SessionNotFound,
    StoreDamaged,
    StoreError,
    StoreForked,
)
from agentkv.memory.audit import audit
from agentkv.memory.directory import GenerationHold, current_generation
from agentkv.memory.environment import Environment, Table, Transaction, hold, release
from agentkv.memory.keys import (
    checkpoint_name,
    manifest_key,
    namespace_prefix,
    page_key,
    segment_key,
    tail_key,
)
from agentkv.memory.manifest import (
    Checkpoint,
    Contents,
    Manifest,
    SessionEntry,
    decode_manifest,
    decode_segment,
    decode_session,
)
from agentkv.memory.opening import open_reader
from agentkv.memory.publish import is_stored, read_session
from agentkv.memory.record import PageCodec, codec_of
from agentkv.types import SessionInfo

_log = logging.getLogger("agentkv.store")


class StoreReader:
    """A store open for reading, beside a writer in another process. Close it with `close()`.

    Every call raises `StoreForked` in a forked child, and `StoreError` after `close()`.
    """

    def __init__(self, env: Environment, hold: GenerationHold | None = None) -> None:
        self._env: Environment | None = env
        self._hold = hold
        self._pid = os.getpid()
        self._following = threading.Lock()

    def close(self) -> None:
        """Closes the files. Idempotent."""
        if self._env is not None:
            self._live()
            release(self._env)
            self._env = None
        if self._hold is not None:
            self._hold.close()

    def manifest(self, namespace: str, session: str, number: int | None = None) -> Manifest:
        """The session's head, or its checkpoint `number`.

        Raises `SessionNotFound`, `CheckpointExpired`, `InvalidInput` for a number that never was (0 included:
        the empty session has no manifest), `StoreDamaged`.
        """
        with self._read() as transaction:
            entry = require_session(transaction, namespace, session)
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
            require_current(transaction, manifest)
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

    def codec(self, manifest: Manifest) -> PageCodec | None:
        """What its pages and tail are encoded with; None if it has neither. Raises `StoreDamaged`."""
        contents = self.contents(manifest)
        key = tail_key(manifest.namespace, manifest.id, manifest.number)
        if contents.records:
            key = page_key(manifest.namespace, contents.records[0])
        elif not manifest.tail_rows:
            return None
        with self._read() as transaction:
            for _, value in transaction.scan(Table.RECORDS, key):
                return codec_of(value)
        raise StoreDamaged(f"{manifest.checkpoint} has lost its first page")

    def read_tail(self, manifest: Manifest, codec: PageCodec) -> np.ndarray:
        """Payload with the `tail_rows` rows after the last sealed page, uint8 [layers, bytes] (0 rows: 0 bytes).

        Raises `CheckpointExpired`, `StoreDamaged`, `IdentityMismatch`.
        """
        with self._read() as transaction:
            require_current(transaction, manifest)
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
            return list(require_session(transaction, namespace, session).checkpoints)

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
        with self._using() as env, env.read() as transaction:
            tables = (Table.RECORDS, Table.SEGMENTS, Table.MANIFESTS, Table.SESSIONS, Table.PENDING)
            counts = {table.value: transaction.entries(table) for table in tables}
            return counts | {"used_bytes": transaction.used_bytes, "file_bytes": env.file_bytes()}

    def verify(self) -> list[str]:
        """Walks the whole store: what fails its checksum or its recount, one line each; empty if all is sound."""
        with self._using() as env:
            return audit(env)

    @contextmanager
    def _read(self) -> Iterator[Transaction]:
        with self._using() as env, env.read() as transaction:
            yield transaction

    @contextmanager
    def _using(self) -> Iterator[Environment]:
        """The current generation's environment, which stays open meanwhile."""
        self._follow()
        while not hold(env := self._live()):
            pass  # a compaction has just replaced it
        try:
            yield env
        finally:
            release(env)

    def _follow(self) -> None:
        """Go over to the generation that CURRENT names: a writer may have compacted the store."""
        env = self._live()
        if self._hold is not None and current_generation(env.generation.parent) != env.generation:
            with self._following:
                if self._env is env:
                    old = self._hold
                    self._env, self._hold = open_reader(env.generation.parent, force=True)
                    release(env)
                    old.close()

    def _live(self) -> Environment:
        if os.getpid() != self._pid:
            raise StoreForked("the store was opened before os.fork(): open it in a new process")
        if self._env is None:
            raise StoreError("the store is closed")
        return self._env


def read_store(path: str | os.PathLike[str], *, force: bool = False) -> StoreReader:
    """Opens the store at `path` for reading. Raises `StoreError` where there is none, `StoreUnsafe` for another
    user's directory or, unless `force`, a network file system, `IdentityMismatch("format")` for a newer store."""
    return StoreReader(*open_reader(path, force))


def require_session(transaction: Transaction, namespace: str, session: str) -> SessionEntry:
    """The session's entry; raises `SessionNotFound`, `StoreDamaged`."""
    entry = read_session(transaction, namespace, session)
    if entry is None:
        raise SessionNotFound(f"no session {session!r} in namespace {namespace!r}")
    return entry


def require_current(transaction: Transaction, manifest: Manifest) -> None:
    """A manifest object may outlive its checkpoint, and a new session may have taken its key: `CheckpointExpired`."""
    if not is_stored(transaction, manifest):
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
