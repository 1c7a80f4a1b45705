"""Walks a whole store and recounts it: every checksum, every reference, the counted bytes.

Slow by design: for tests and for a person who wants to know. It repairs nothing. `store.py` opens the store.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from agentkv.errors import AgentKVError
from agentkv.memory.environment import COUNTED, Environment, Table, Transaction
from agentkv.memory.keys import Kind, kind_of, manifest_key, page_key, part, segment_key, session_key, tail_key
from agentkv.memory.manifest import Manifest, Segment, SessionEntry, decode_manifest, decode_segment, decode_session
from agentkv.memory.record import Buffer, check_page
from agentkv.memory.space import cost


def audit(env: Environment) -> list[str]:
    """What is wrong, one line each; empty for a sound store."""
    with env.read() as transaction:
        problems: list[str] = []
        manifests = _decoded(transaction, Table.MANIFESTS, decode_manifest, problems)
        segments = _decoded(transaction, Table.SEGMENTS, decode_segment, problems)
        _decoded(transaction, Table.RECORDS, check_page, problems)
        entries = _decoded(transaction, Table.SESSIONS, decode_session, problems)
        problems += _check_sessions(manifests, entries)
        problems += _check_references(transaction, manifests, segments)
        problems += _check_records(transaction, manifests)
        counted = sum(cost(len(k), len(v)) for table in COUNTED for k, v in transaction.scan(table, b""))
        if counted != transaction.used_bytes:
            problems.append(f"{counted} bytes are used, {transaction.used_bytes} are counted")
        return problems


def _decoded(
    transaction: Transaction, table: Table, decode: Callable[[Buffer], Any], problems: list[str]
) -> dict[bytes, Any]:
    found = {}
    for key, value in transaction.scan(table, b""):
        try:
            found[key] = decode(value)
        except AgentKVError as error:
            problems.append(f"{table} {key.hex()}: {error}")
    return found


def _check_sessions(manifests: dict[bytes, Manifest], entries: dict[bytes, SessionEntry]) -> list[str]:
    """Each manifest is listed by its session, and each listed one is there."""
    listed = []
    for key, entry in entries.items():
        if key != session_key(entry.namespace, entry.id):
            return [f"the entry of {entry.id} is under another's key"]
        listed += [manifest_key(entry.namespace, entry.id, checkpoint.number) for checkpoint in entry.checkpoints]
    if sorted(listed) != sorted(manifests):
        return [f"sessions list {len(listed)} checkpoints, {len(manifests)} manifests are there"]
    return []


def _check_references(
    transaction: Transaction, manifests: dict[bytes, Manifest], segments: dict[bytes, Segment]
) -> list[str]:
    """Stored counts equal a recount: manifests per segment, segments per page."""
    counts: Counter[bytes] = Counter()
    seen: dict[bytes, str] = {}
    for manifest in manifests.values():
        for number in manifest.segments:
            key = segment_key(manifest.namespace, number)
            counts[key] += 1
            seen[key] = manifest.namespace
    for key in [key for key in seen if key in segments]:
        counts.update(page_key(seen[key], record) for record in segments[key].record_ids())
    stored = {key: int.from_bytes(value, "big") for key, value in transaction.scan(Table.REFERENCES, b"")}
    problems = []
    if stored != dict(counts):
        wrong = [key.hex() for key in stored.keys() | counts.keys() if stored.get(key) != counts.get(key)]
        problems.append(f"{len(wrong)} reference counts are wrong: {min(wrong)}")
    if set(seen) != set(segments):
        problems.append(f"{len(set(seen) ^ set(segments))} segments are lost or leaked")
    return problems


def _check_records(transaction: Transaction, manifests: dict[bytes, Manifest]) -> list[str]:
    """Each record belongs to a referenced or pending page, or to a manifest's tail; each of those has records."""
    pages = {key for table in (Table.REFERENCES, Table.PENDING) for key, _ in transaction.scan(table, b"")}
    pages = {key for key in pages if kind_of(key) is Kind.PAGE}
    tails = {tail_key(m.namespace, m.id, m.number) for m in manifests.values() if m.tail_rows}
    stored = {key[: -len(part(b"", 0))] for key, _ in transaction.scan(Table.RECORDS, b"")}
    wanted = pages | tails
    if stored != wanted:
        return [f"{len(wanted - stored)} pages or tails are missing, {len(stored - wanted)} are leaked"]
    return []
