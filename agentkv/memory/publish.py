"""What changes inside a transaction: a commit is published, branched off or pinned, a manifest dropped, a page freed.

References: a manifest counts on its segments, a segment on its page records; what nobody counts on is deleted in
the same transaction. A record is either in `pending` or referenced, never both. `store.py` runs these.
"""

import logging

import msgspec

from agentkv.errors import InvalidInput, StaleHead, StoreDamaged
from agentkv.memory.environment import Table, Transaction
from agentkv.memory.keys import checkpoint_name, manifest_key, page_key, part, segment_key, session_key, tail_key
from agentkv.memory.manifest import (
    SEGMENT_TOKENS,
    Checkpoint,
    Commit,
    Manifest,
    Segment,
    SessionEntry,
    decode_manifest,
    decode_segment,
    decode_session,
    encode_manifest,
    encode_segment,
    encode_session,
)
from agentkv.memory.space import cost

_log = logging.getLogger("agentkv.store")

SEGMENT_KEY = b"next segment"


def publish(transaction: Transaction, commit: Commit, keep_checkpoints: int) -> Manifest:
    """Writes segments, tail and manifest, moves the head, drops checkpoints that are no longer kept.

    Raises `StaleHead` if `commit.base` is not the head, `InvalidInput` if a record is not on disk.
    """
    entry = read_session(transaction, commit.namespace, commit.id)
    _check_head(transaction, commit, entry)
    number = entry.head.number + 1 if entry else 1
    segments = _place_segments(transaction, commit)
    tail_bytes = _write_tail(transaction, commit, number)
    manifest = Manifest(
        namespace=commit.namespace,
        id=commit.id,
        number=number,
        parent=commit.base.checkpoint if commit.base else "",
        created_at=commit.created_at,
        segments=segments,
        tokens=len(commit.token_ids),
        pages=len(commit.records),
        kv_len=commit.kv_len,
        kv_durable_len=commit.kv_durable_len,
        tail_rows=commit.tail_rows,
        stored_bytes=tail_bytes + sum(_segment_bytes(transaction, commit.namespace, segment) for segment in segments),
        identity=commit.identity,
        seed=commit.seed,
        sidecar=commit.sidecar,
        pinned=commit.pinned,
        reasoning=commit.reasoning,
        finish_reason=commit.finish_reason,
        private=commit.private or (commit.base is not None and commit.base.private),
    )
    key = manifest_key(commit.namespace, commit.id, number)
    transaction.put(Table.MANIFESTS, key, encode_manifest(manifest))
    _move_head(transaction, entry, manifest, keep_checkpoints)
    return manifest


def branch(
    transaction: Transaction, source: Manifest, session: str, created_at: float, keep_checkpoints: int
) -> Manifest:
    """Publishes the state of `source` as the next commit of `session`: its own, or a new one. O(segments): pages are
    shared, only the tail is copied.

    Raises `InvalidInput` if another session has the id, `StoreDamaged` if the tail is missing.
    """
    entry = read_session(transaction, source.namespace, session)
    if entry is not None and session != source.id:
        raise InvalidInput(f"there is a session {session!r} already")
    number = entry.head.number + 1 if entry else 1
    for segment in source.segments:
        _hold(transaction, segment_key(source.namespace, segment))
    _copy_tail(transaction, source, session, number)
    manifest = msgspec.structs.replace(
        source, id=session, number=number, parent=source.checkpoint, created_at=created_at, pinned=False
    )
    transaction.put(Table.MANIFESTS, manifest_key(source.namespace, session, number), encode_manifest(manifest))
    _move_head(transaction, entry, manifest, keep_checkpoints)
    return manifest


def pin(transaction: Transaction, manifest: Manifest) -> Manifest:
    """Keeps a checkpoint for as long as its session is kept."""
    pinned = msgspec.structs.replace(manifest, pinned=True)
    transaction.put(
        Table.MANIFESTS, manifest_key(manifest.namespace, manifest.id, manifest.number), encode_manifest(pinned)
    )
    entry = read_session(transaction, manifest.namespace, manifest.id)
    assert entry is not None
    checkpoints = tuple(
        msgspec.structs.replace(c, pinned=True) if c.number == manifest.number else c for c in entry.checkpoints
    )
    updated = msgspec.structs.replace(entry, checkpoints=checkpoints)
    transaction.put(Table.SESSIONS, session_key(manifest.namespace, manifest.id), encode_session(updated))
    return pinned


def read_session(transaction: Transaction, namespace: str, session: str) -> SessionEntry | None:
    """The session's entry; raises `StoreDamaged`."""
    value = transaction.view(Table.SESSIONS, session_key(namespace, session))
    return None if value is None else decode_session(value)


def is_stored(transaction: Transaction, manifest: Manifest) -> bool:
    """Whether a manifest object is one of the store's still (it may have been pinned since)."""
    value = transaction.view(Table.MANIFESTS, manifest_key(manifest.namespace, manifest.id, manifest.number))
    return value is not None and msgspec.structs.replace(decode_manifest(value), pinned=manifest.pinned) == manifest


def drop_checkpoint(transaction: Transaction, namespace: str, session: str, number: int) -> None:
    """Deletes a manifest, its tail, and what it alone referenced."""
    key = manifest_key(namespace, session, number)
    value = transaction.view(Table.MANIFESTS, key)
    try:
        segments = decode_manifest(value).segments if value is not None else ()
    except StoreDamaged as error:
        # Refusing would make the session undeletable; its pages stay.
        _log.warning("dropping %s, which is damaged: its pages are not freed (%s)", (session, number), error)
        segments = ()
    for segment in segments:
        _release_segment(transaction, namespace, segment)
    _delete_records(transaction, tail_key(namespace, session, number))
    transaction.delete(Table.MANIFESTS, key)


def delete_page(transaction: Transaction, key: bytes) -> None:
    """Deletes a page's records and its entry in `pending`."""
    _delete_records(transaction, key)
    transaction.delete(Table.PENDING, key)


def references(transaction: Transaction, key: bytes) -> int:
    """How many segments name a page, or manifests a segment."""
    value = transaction.view(Table.REFERENCES, key)
    return 0 if value is None else int.from_bytes(value, "big")


def _check_head(transaction: Transaction, commit: Commit, entry: SessionEntry | None) -> None:
    base = commit.base
    head = checkpoint_name(commit.id, entry.head.number if entry else 0)
    if base is None:
        if entry is not None:
            raise StaleHead(checkpoint_name(commit.id, 0), head)
        return
    # Numbers alone would take a manifest of a deleted session of the same name for the new one's.
    if base.checkpoint != head or not is_stored(transaction, base):
        raise StaleHead(base.checkpoint, head)


def _place_segments(transaction: Transaction, commit: Commit) -> tuple[int, ...]:
    """Ids of the commit's segments, each with one more reference; new ones are written."""
    placed = []
    shared = commit.base.segments if commit.base else ()
    for index, segment in enumerate(commit.split()):
        value = encode_segment(segment)
        unchanged = segment.complete and (index + 1) * SEGMENT_TOKENS <= commit.unchanged_tokens
        if unchanged and index < len(shared):
            key = segment_key(commit.namespace, shared[index])
            # Compared, not believed: a page recomputed after damage has a new record id under unchanged tokens.
            if transaction.view(Table.SEGMENTS, key) == value:
                _hold(transaction, key)
                placed.append(shared[index])
                continue
        placed.append(_write_segment(transaction, commit.namespace, segment, value))
    return tuple(placed)


def _write_segment(transaction: Transaction, namespace: str, segment: Segment, value: bytes) -> int:
    number = transaction.number(SEGMENT_KEY)
    transaction.set_number(SEGMENT_KEY, number + 1)
    key = segment_key(namespace, number)
    for record in segment.record_ids():
        page = page_key(namespace, record)
        if not transaction.delete(Table.PENDING, page) and references(transaction, page) == 0:
            raise InvalidInput(f"page record {record} is not on disk: a manifest names only records that are")
        _hold(transaction, page)
    transaction.put(Table.SEGMENTS, key, value)
    _hold(transaction, key)
    return number


def _write_tail(transaction: Transaction, commit: Commit, number: int) -> int:
    if commit.tail is None:
        return 0
    assert commit.codec is not None
    total = 0
    prefix = tail_key(commit.namespace, commit.id, number)
    for group, value in enumerate(commit.codec.encode(commit.tail)):
        key = part(prefix, group)
        transaction.put(Table.RECORDS, key, value)
        total += cost(len(key), len(value))
    return total


def _copy_tail(transaction: Transaction, source: Manifest, session: str, number: int) -> None:
    if not source.tail_rows:
        return
    old, new = tail_key(source.namespace, source.id, source.number), tail_key(source.namespace, session, number)
    groups = [bytes(value) for _, value in transaction.scan(Table.RECORDS, old)]
    if not groups:
        raise StoreDamaged(f"the tail of {source.checkpoint} is missing")
    for group, value in enumerate(groups):
        transaction.put(Table.RECORDS, part(new, group), value)


def _move_head(transaction: Transaction, entry: SessionEntry | None, manifest: Manifest, keep_checkpoints: int) -> None:
    head = Checkpoint(manifest.number, manifest.created_at, manifest.tokens, manifest.pinned)
    checkpoints = (*(entry.checkpoints if entry else ()), head)
    recent = checkpoints[-keep_checkpoints:]
    kept = tuple(c for c in checkpoints[:-keep_checkpoints] if c.pinned) + recent
    for checkpoint in checkpoints[:-keep_checkpoints]:
        if not checkpoint.pinned:
            drop_checkpoint(transaction, manifest.namespace, manifest.id, checkpoint.number)
    updated = SessionEntry(manifest.namespace, manifest.id, manifest.kv_len, manifest.stored_bytes, kept)
    transaction.put(Table.SESSIONS, session_key(manifest.namespace, manifest.id), encode_session(updated))


def _segment_bytes(transaction: Transaction, namespace: str, segment: int) -> int:
    key = segment_key(namespace, segment)
    value = transaction.view(Table.SEGMENTS, key)
    assert value is not None
    records = decode_segment(value).record_ids()
    page_bytes = 0
    if records:
        # Pages of a session are of one size: one scan stands for all.
        entries = transaction.scan(Table.RECORDS, page_key(namespace, records[0]))
        page_bytes = sum(cost(len(k), len(v)) for k, v in entries)
    return cost(len(key), len(value)) + page_bytes * len(records)


def _hold(transaction: Transaction, key: bytes) -> None:
    transaction.put(Table.REFERENCES, key, (references(transaction, key) + 1).to_bytes(4, "big"))


def _let_go(transaction: Transaction, key: bytes) -> bool:
    """Whether that was the last reference."""
    count = references(transaction, key)
    if count > 1:
        transaction.put(Table.REFERENCES, key, (count - 1).to_bytes(4, "big"))
        return False
    transaction.delete(Table.REFERENCES, key)
    return True


def _release_segment(transaction: Transaction, namespace: str, number: int) -> None:
    key = segment_key(namespace, number)
    if not _let_go(transaction, key):
        return
    value = transaction.view(Table.SEGMENTS, key)
    try:
        records = decode_segment(value).record_ids() if value is not None else []
    except StoreDamaged as error:
        _log.warning("dropping segment %d, which is damaged: its pages are not freed (%s)", number, error)
        records = []
    for record in records:
        page = page_key(namespace, record)
        if _let_go(transaction, page):
            delete_page(transaction, page)
    transaction.delete(Table.SEGMENTS, key)


def _delete_records(transaction: Transaction, prefix: bytes) -> None:
    for key in [key for key, _ in transaction.scan(Table.RECORDS, prefix)]:
        transaction.delete(Table.RECORDS, key)
