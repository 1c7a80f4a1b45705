"""The structs of the durable tier: segments, manifests, session entries, and the commit that makes them. Pure.

A manifest names a commit; its token ids, record ids and spans live in immutable segments of 256 pages, which
later manifests share. Structs are stored as msgpack maps behind `record.seal`: a field added with a default
needs no new format. `publish.py` writes them in a transaction.
"""

import math
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np

from agentkv.config import PAGE_TOKENS
from agentkv.errors import InvalidInput, StoreDamaged
from agentkv.memory.keys import checkpoint_name, validate_id
from agentkv.memory.record import MAX_TAIL_ROWS, Buffer, PageCodec, seal, unseal
from agentkv.types import Identity, Span

SEGMENT_PAGES: Final = 256
SEGMENT_TOKENS: Final = SEGMENT_PAGES * PAGE_TOKENS
MAX_SIDECAR_BYTES: Final = 256 << 10

SEGMENT_MAGIC: Final = b"AKVS"
MANIFEST_MAGIC: Final = b"AKVM"
SESSION_MAGIC: Final = b"AKVH"

_T = TypeVar("_T")


class Segment(msgspec.Struct, frozen=True):
    """4,096 positions (the last segment of a manifest: fewer). `tokens` are u32, `records` u64, little-endian.

    `records` are the record ids of its durable pages, a prefix; `spans` the transcript spans that start in it.
    """

    tokens: bytes
    records: bytes
    spans: tuple[Span, ...] = ()

    @property
    def complete(self) -> bool:
        """Nothing will be added: every position has its token, every page its record."""
        return len(self.tokens) == 4 * SEGMENT_TOKENS and len(self.records) == 8 * SEGMENT_PAGES

    def record_ids(self) -> list[int]:
        """Record ids of its pages, in order of position."""
        return np.frombuffer(self.records, "<u8").tolist()

    def token_ids(self) -> list[int]:
        """Token ids, in order of position."""
        return np.frombuffer(self.tokens, "<u4").tolist()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One commit of a session, as stored. Positions and rows count tokens; `created_at` is Unix seconds.

    `number` grows by one per commit of the session (0 is the empty session, which has no manifest); `parent` is
    the id of the checkpoint it was built on, "" for the first. `kv_len` positions had KV at the commit, of
    which the first `kv_durable_len` are on disk; `pages` counts its page records, `stored_bytes` its bytes on disk,
    shared pages included. `tail_rows` follow the last sealed page. `sidecar` is opaque here.
    """

    namespace: str
    id: str
    number: int
    parent: str
    created_at: float
    segments: tuple[int, ...]
    tokens: int
    pages: int
    kv_len: int
    kv_durable_len: int
    tail_rows: int
    stored_bytes: int
    identity: Identity
    seed: int | None = None
    sidecar: bytes = b""
    pinned: bool = False
    reasoning: str = ""
    finish_reason: str = ""
    private: bool = False
    """Its KV came from a file, or was computed over such KV: no session but its forks may use it."""

    @property
    def checkpoint(self) -> str:
        """Its public id, `session@number`."""
        return checkpoint_name(self.id, self.number)


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """A kept commit, as the session entry lists it."""

    number: int
    created_at: float
    tokens: int
    pinned: bool


class SessionEntry(msgspec.Struct, frozen=True):
    """A session's head and kept checkpoints, oldest first; the last one is the head."""

    namespace: str
    id: str
    kv_len: int
    stored_bytes: int
    checkpoints: tuple[Checkpoint, ...]

    @property
    def head(self) -> Checkpoint:
        """The last commit."""
        return self.checkpoints[-1]


class Contents(msgspec.Struct, frozen=True):
    """What a manifest's segments hold: every token id, the record ids of its pages, every span."""

    token_ids: list[int]
    records: list[int]
    spans: list[Span]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A step to publish. `token_ids`, `records` and `spans` are whole, not what was added.

    `base` is the manifest it builds on: the session's head (None for a new session).
    Segments of `base` that end at or before `unchanged_tokens` are reused where they are byte for byte the same.
    `records` has the record id of each durable page, a contiguous prefix. `tail` is a payload of `codec` with
    the rows from the last page boundary to `kv_len`, None if there are none.
    """

    namespace: str
    id: str
    base: Manifest | None
    unchanged_tokens: int
    token_ids: Sequence[int]
    records: Sequence[int]
    spans: Sequence[Span]
    kv_len: int
    identity: Identity
    codec: PageCodec | None = None
    tail: np.ndarray | None = None
    seed: int | None = None
    sidecar: bytes = b""
    pinned: bool = False
    reasoning: str = ""
    finish_reason: str = ""
    created_at: float = 0.0
    private: bool = False

    @property
    def tail_rows(self) -> int:
        """Positions in `tail`."""
        if self.tail is None:
            return 0
        assert self.codec is not None, "a tail needs its codec"
        return self.tail.shape[1] // self.codec.row_bytes

    @property
    def kv_durable_len(self) -> int:
        """End of the contiguous durable prefix: tail rows count only when every page before them is durable."""
        paged = len(self.records) * PAGE_TOKENS
        return self.kv_len if paged == self.kv_len - self.tail_rows else paged

    def check(self) -> None:
        """Raises `InvalidInput` where the parts contradict each other."""
        validate_id(self.namespace)
        validate_id(self.id)
        paged, tail_start = len(self.records) * PAGE_TOKENS, self.kv_len - self.tail_rows
        _require(math.isfinite(self.created_at), "created_at must be finite")
        _require(len(self.sidecar) <= MAX_SIDECAR_BYTES, f"a sidecar is at most {MAX_SIDECAR_BYTES} bytes")
        _require(0 <= self.kv_len <= len(self.token_ids), "kv_len must lie within the tokens")
        _require(self.tail_rows <= MAX_TAIL_ROWS, f"a tail has at most {MAX_TAIL_ROWS} rows")
        _require(paged <= tail_start, "pages and tail must not pass kv_len or overlap")
        _require(self.tail is None or tail_start % PAGE_TOKENS == 0, "a tail starts at a page boundary")
        _require(0 <= self.unchanged_tokens <= len(self.token_ids), "unchanged_tokens must lie within the tokens")
        starts = [span.start for span in self.spans]
        _require(starts == sorted(starts), "spans must be in order of their start")
        _require(
            all(0 <= s.start <= s.stop <= len(self.token_ids) for s in self.spans), "spans must lie within the tokens"
        )
        _require(not self.spans or len(self.token_ids) > 0, "spans need tokens")

    def split(self) -> list[Segment]:
        """Its tokens, records and spans as segments; raises `InvalidInput` for ids out of range."""
        tokens = _integers(self.token_ids, "<u4", "token ids")
        records = _integers(self.records, "<u8", "record ids")
        count = -(-len(tokens) // SEGMENT_TOKENS)
        spans: list[list[Span]] = [[] for _ in range(count)]
        for span in self.spans:
            # An empty span at the very end starts in no position: it stays with the last one.
            spans[min(span.start // SEGMENT_TOKENS, count - 1)].append(span)
        return [
            Segment(
                tokens[i * SEGMENT_TOKENS : (i + 1) * SEGMENT_TOKENS].tobytes(),
                records[i * SEGMENT_PAGES : (i + 1) * SEGMENT_PAGES].tobytes(),
                tuple(spans[i]),
            )
            for i in range(count)
        ]


def emptied(base: Manifest, identity: Identity, created_at: float) -> Commit:
    """The commit that leaves nothing of `base`, the session's head, but what it was opened with."""
    return Commit(
        namespace=base.namespace,
        id=base.id,
        base=base,
        unchanged_tokens=0,
        token_ids=(),
        records=(),
        spans=(),
        kv_len=0,
        identity=identity,
        reasoning=base.reasoning,
        created_at=created_at,
    )


def encode_segment(segment: Segment) -> bytes:
    """The stored value."""
    return seal(SEGMENT_MAGIC, msgspec.msgpack.encode(segment))


def decode_segment(value: Buffer) -> Segment:
    """Raises `StoreDamaged`, or `IdentityMismatch("format")`."""
    return _decode(SEGMENT_MAGIC, value, Segment)


def encode_manifest(manifest: Manifest) -> bytes:
    """The stored value."""
    return seal(MANIFEST_MAGIC, msgspec.msgpack.encode(manifest))


def decode_manifest(value: Buffer) -> Manifest:
    """Raises `StoreDamaged`, or `IdentityMismatch("format")`."""
    return _decode(MANIFEST_MAGIC, value, Manifest)


def encode_session(entry: SessionEntry) -> bytes:
    """The stored value."""
    return seal(SESSION_MAGIC, msgspec.msgpack.encode(entry))


def decode_session(value: Buffer) -> SessionEntry:
    """Raises `StoreDamaged`, or `IdentityMismatch("format")`."""
    return _decode(SESSION_MAGIC, value, SessionEntry)


def _decode(magic: bytes, value: Buffer, struct: type[_T]) -> _T:
    body = unseal(magic, value)
    try:
        return msgspec.msgpack.decode(body, type=struct)
    except msgspec.MsgspecError as error:
        raise StoreDamaged(f"{magic.decode()}: {error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)


def _integers(values: Sequence[int], dtype: str, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.int64)
    limit = np.iinfo(dtype).max
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= limit:
        raise InvalidInput(f"{what} must lie in 0..{limit}")
    return array.astype(dtype)
