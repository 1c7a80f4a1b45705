"""A session's way into memory: from its manifest to a live sequence. The way back, the commit, is in `session.py`.

Damage and foreign KV never install anything half: the longest sound prefix of pages is taken, and what is missing stays
pending, to be recomputed from the stored ids by the next step's prefill. Each such repair is an event of that step.
"""

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from agentkv.config import PAGE_TOKENS
from agentkv.engine import Engine
from agentkv.errors import IdentityMismatch, StoreDamaged
from agentkv.heads.base import Head
from agentkv.memory.manifest import Manifest
from agentkv.memory.sequence import Sequence
from agentkv.scheduler.lookup import SuffixIndex
from agentkv.scheduler.phase import Acceptances
from agentkv.types import Event, Identity, Span

_PART_PAGES = 64


class Sidecar(msgspec.Struct, frozen=True):
    """The per-commit sidecar: what makes the next rounds fast, never what they say."""

    head: bytes = b""
    acceptances: Acceptances = msgspec.field(default_factory=Acceptances)


@dataclass
class Awake:
    """A session in memory."""

    sequence: Sequence
    head: Head
    lookup: SuffixIndex
    acceptances: Acceptances
    spans: list[Span]
    loaded: int = 0
    """KV positions read from the store by waking; reported by the next committed step, as are the events."""
    committed_pages: int = 0
    """Leading pages whose records the last commit names; those behind are written ahead, or queued for it."""
    sound_tokens: int = 0
    """Tokens whose records in the manifest are still those of the table (recomputed pages get new records)."""
    events: list[Event] = field(default_factory=list)


def check_identity(stored: Identity, engine: Engine) -> Event | None:
    """Refuse a session of another model or text by name; with on_mismatch="recompute", say what follows instead."""
    found = stored.difference(engine.identity)
    if found is None:
        return None
    name, old, new = found
    if engine.on_mismatch == "refuse" or stored.tokenizer != engine.identity.tokenizer:
        if engine.on_mismatch == "recompute":
            name, old, new = "tokenizer", stored.tokenizer, engine.identity.tokenizer
        raise IdentityMismatch(name, old, new)
    if stored.kv_id != engine.identity.kv_id:
        return Event("identity", f"{name} differs: KV is recomputed from the stored token ids")
    return Event("identity", f"{name} differs: the session goes on over its stored token ids")


async def wake(engine: Engine, manifest: Manifest | None) -> Awake:
    """Load a session's commit (None: a new session) into pages, on the lanes. Raises CapacityError, StoreDamaged."""
    if manifest is None:
        return await engine.compute.make(_start, _close, engine, [], [], Sidecar())
    started = time.perf_counter()
    contents = await engine.disk.run(engine.store.contents, manifest)
    if contents.token_ids and max(contents.token_ids) >= engine.backend.shape.vocab:  # only an import could hold it
        beyond = f"token id {max(contents.token_ids)} is beyond the vocabulary of {engine.backend.shape.vocab}"
        raise StoreDamaged(f"{manifest.checkpoint}: {beyond}")
    sidecar = _read_sidecar(manifest)
    event = check_identity(manifest.identity, engine)
    foreign = manifest.identity.kv_id != engine.identity.kv_id
    records = [] if foreign else contents.records
    awake = await engine.compute.make(_start, _close, engine, contents.token_ids, contents.spans, sidecar)
    if event is not None:
        awake.events.append(event)
    try:
        shared = await engine.compute.run(awake.sequence.share, records)
        async with engine.room.promised(len(records) - shared):
            await _load(engine, manifest, records[shared:], awake, foreign=foreign)
    except BaseException:
        await engine.compute.finish(_close, awake)
        raise
    if not foreign and (behind := manifest.kv_len - manifest.kv_durable_len):
        reason = f"KV from position {manifest.kv_durable_len} on was not on disk: recomputed from ids"
        awake.events.append(Event("recompute", reason, behind))
    awake.loaded = awake.sequence.kv_len - shared * PAGE_TOKENS
    awake.sound_tokens = awake.sequence.kv_len
    awake.committed_pages = len(awake.sequence.table)
    loaded_bytes = awake.loaded * engine.backend.shape.token_bytes
    if awake.loaded:
        seconds = time.perf_counter() - started
        awake.events.append(Event("load", "KV read from the store", awake.loaded, loaded_bytes, seconds))
    return awake


def _start(engine: Engine, token_ids: list[int], spans: list[Span], sidecar: Sidecar) -> Awake:
    """An awake session without KV (compute lane)."""
    backend = engine.backend
    sequence = Sequence(engine.pool, backend, backend.tail_capacity, engine.store.allot_record, list(token_ids))
    head = engine.new_head()
    head.restore(sidecar.head)
    return Awake(sequence, head, SuffixIndex(token_ids), sidecar.acceptances, list(spans))


def _read_sidecar(manifest: Manifest) -> Sidecar:
    try:
        return msgspec.msgpack.decode(manifest.sidecar, type=Sidecar) if manifest.sidecar else Sidecar()
    except msgspec.MsgspecError:
        return Sidecar()  # of another version: it only saves time


async def _load(engine: Engine, manifest: Manifest, records: list[int], awake: Awake, *, foreign: bool) -> None:
    """Read `records`, the pages behind those it shares: the longest sound prefix, and the tail if all are sound."""
    sequence, sound, first = awake.sequence, True, len(awake.sequence.table)
    for start in range(0, len(records), _PART_PAGES):
        part = records[start : start + _PART_PAGES]
        payloads = await engine.disk.run(engine.store.read_pages, manifest.namespace, engine.codec, part)
        good = _sound_prefix(payloads, first + start, awake)
        await engine.compute.run(_install, engine, sequence, good, part)
        if len(good) < len(part):
            sound = False
            break
    if sound and not foreign and manifest.tail_rows:
        try:
            tail = await engine.disk.run(engine.store.read_tail, manifest, engine.codec)
        except StoreDamaged as error:
            awake.events.append(Event("repair", f"{error}; recomputed from ids", manifest.tail_rows))
        else:
            await engine.compute.run(engine.backend.write_tail, sequence.buffer, tail, manifest.tail_rows)
            sequence.restore([], [], manifest.tail_rows)
    awake.head.truncate(len(sequence.table))


def _sound_prefix(payloads: list[np.ndarray | StoreDamaged], start: int, awake: Awake) -> list[np.ndarray]:
    good: list[np.ndarray] = []
    for payload in payloads:
        if isinstance(payload, StoreDamaged):
            position = (start + len(good)) * PAGE_TOKENS
            lost = len(awake.sequence.token_ids) - 1 - position
            awake.events.append(Event("repair", f"{payload}; KV from position {position} on recomputed from ids", lost))
            break
        good.append(payload)
    return good


def _install(engine: Engine, sequence: Sequence, payloads: list[np.ndarray], records: list[int]) -> None:
    """Take pages for a part; they are the sequence's at once, so that whatever happens next gives them back."""
    pages = engine.pool.take(len(payloads), sequence.table.last)
    sequence.restore(pages, records[: len(pages)], 0)
    for page, payload in zip(pages, payloads, strict=True):
        engine.backend.write_page(page, payload)


def _close(awake: Awake) -> None:
    awake.sequence.close()


def truncate(awake: Awake, tokens: int, kv_len: int) -> None:
    """Back to a commit of `tokens` tokens with `kv_len` KV positions (compute lane)."""
    sequence = awake.sequence
    sequence.truncate_kv(min(sequence.kv_len, kv_len))
    del sequence.token_ids[tokens:]
    awake.lookup.truncate(tokens)
    awake.head.truncate(len(sequence.table))


def digest(engine: Engine, awake: Awake) -> str:
    """xxh3-128 (hex) over the token ids and every KV byte (compute lane)."""
    sequence = awake.sequence
    state = xxhash.xxh3_128(np.asarray(sequence.token_ids, "<u4").tobytes())
    for page in sequence.table.pages:
        state.update(engine.backend.read_page(page).data)
    if sequence.tail.rows:
        state.update(engine.backend.read_tail(sequence.buffer, sequence.tail.rows).data)
    return state.hexdigest()
