"""A session as one file, to be carried to another store: safetensors with a sealed msgpack header in its metadata.

Tensors: `tokens` u32 [tokens]; `pages` u8 [pages, layers, K|V bytes of 16 positions]; `tail` u8 [layers, K|V bytes].
A file is a stranger's: everything it claims is checked before anything is written.
"""

import base64
import binascii
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from agentkv.config import PAGE_TOKENS
from agentkv.errors import InvalidInput, SessionNotFound, StoreDamaged
from agentkv.memory.keys import validate_id
from agentkv.memory.manifest import Commit, Manifest
from agentkv.memory.reader import StoreReader
from agentkv.memory.record import MAX_TAIL_ROWS, PageCodec, seal, unseal
from agentkv.memory.store import Store
from agentkv.types import Identity, ModelShape, Span

EXPORT_MAGIC: Final = b"AKVX"
_KEY: Final = "agentkv"
_PART_PAGES: Final = 64
_MAX_TOKENS: Final = 1 << 24
_MAX_HEADER: Final = 32 << 20


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export file says of itself. `digest`: xxh3-128 over tokens, pages and tail, in this order."""

    id: str
    tokens: int
    pages: int
    tail_rows: int
    digest: str
    identity: Identity
    spans: tuple[Span, ...]
    shape: ModelShape | None
    seed: int | None
    reasoning: str
    finish_reason: str
    created_at: float


def export_session(reader: StoreReader, manifest: Manifest, path: Path) -> None:
    """Write a checkpoint to `path`, which must not exist; it appears whole or not at all.

    Raises `InvalidInput`, `StoreDamaged` naming the page, `CheckpointExpired`.
    """
    if path.exists():
        raise InvalidInput(f"{path} exists already")
    contents = reader.contents(manifest)
    tokens = np.asarray(contents.token_ids, "<u4")
    codec = reader.codec(manifest)
    tail = reader.read_tail(manifest, codec) if codec is not None else np.empty((0, 0), np.uint8)
    state = xxhash.xxh3_128(tokens.tobytes())
    for payload in _stored_pages(reader, manifest, codec, contents.records):
        state.update(payload.data)
    state.update(np.ascontiguousarray(tail).data)
    header = Exported(
        id=manifest.id,
        tokens=len(tokens),
        pages=len(contents.records),
        tail_rows=manifest.tail_rows,
        digest=state.hexdigest(),
        identity=manifest.identity,
        spans=tuple(contents.spans),
        shape=None if codec is None else codec.shape,
        seed=manifest.seed,
        reasoning=manifest.reasoning,
        finish_reason=manifest.finish_reason,
        created_at=manifest.created_at,
    )
    pages = _stored_pages(reader, manifest, codec, contents.records)
    _write(path, header, codec, itertools.chain([tokens], pages, [tail]))


def import_session(
    store: Store, path: Path, namespace: str, id: str | None, *, trust_kv: bool, created_at: float
) -> Manifest:
    """Make a new session of an export file: its token ids, whose KV the next step computes, or with `trust_kv` its
    KV as well, which is never shared with sessions that are no forks of it.

    Raises `InvalidInput` if there is such a session, `StoreDamaged` for a file that is not what it claims, `StoreFull`;
    then nothing has been written.
    """
    with _opened(path) as file:
        header = _read_header(file)
        name = validate_id(header.id if id is None else id)
        _require_absent(store, namespace, name)
        codec = _check_sizes(file, header)
        tokens, tail = _check_digest(file, header, finite=trust_kv)
        records: list[int] = []
        if trust_kv and codec is not None:
            records = [store.allot_record() for _ in range(header.pages)]
        commit = Commit(
            namespace=namespace,
            id=name,
            base=None,
            unchanged_tokens=0,
            token_ids=tokens.tolist(),
            records=records,
            spans=header.spans,
            kv_len=header.pages * PAGE_TOKENS + header.tail_rows if trust_kv else 0,
            identity=header.identity,
            codec=codec,
            tail=tail if trust_kv and header.tail_rows else None,
            seed=header.seed,
            reasoning=header.reasoning,
            finish_reason=header.finish_reason,
            created_at=created_at,
            private=True,
        )
        commit.check()
        try:
            if records and codec is not None:
                pages = (page for part in _file_pages(file, header) for page in part)
                store.put_pages(namespace, codec, zip(records, pages, strict=True))
            return store.commit(commit)
        except BaseException:
            store.drop_pending(namespace, records)
            raise


def _stored_pages(
    reader: StoreReader, manifest: Manifest, codec: PageCodec | None, records: list[int]
) -> Iterator[np.ndarray]:
    for start in range(0, len(records), _PART_PAGES):
        assert codec is not None
        part = reader.read_pages(manifest.namespace, codec, records[start : start + _PART_PAGES])
        for payload in part:
            if isinstance(payload, StoreDamaged):
                raise payload
            yield payload


def _tensors(header: Exported, codec: PageCodec | None) -> dict[str, tuple[str, list[int]]]:
    """Name → (dtype, shape) of the tensors that the header describes."""
    layers, page, row = (codec.shape.layers, codec.layer_bytes, codec.row_bytes) if codec is not None else (0, 0, 0)
    return {
        "tokens": ("U32", [header.tokens]),
        "pages": ("U8", [header.pages, layers, page]),
        "tail": ("U8", [layers, header.tail_rows * row]),
    }


def _write(path: Path, header: Exported, codec: PageCodec | None, parts: Iterable[np.ndarray]) -> None:
    """A safetensors file, part by part: the library's writer wants all of it in memory."""
    sealed = base64.b64encode(seal(EXPORT_MAGIC, msgspec.msgpack.encode(header))).decode()
    described: dict[str, Any] = {"__metadata__": {_KEY: sealed}}
    end = 0
    for name, (dtype, shape) in _tensors(header, codec).items():
        start, end = end, end + int(np.prod(shape)) * (4 if dtype == "U32" else 1)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                file.write(np.ascontiguousarray(part).data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise StoreDamaged(f"{path} is no export of a session: {error}") from error


def _read_header(file: Any) -> Exported:
    text = (file.metadata() or {}).get(_KEY, "")
    if not text or len(text) > _MAX_HEADER:
        raise StoreDamaged("the file has no header of an exported session")
    try:
        body = unseal(EXPORT_MAGIC, base64.b64decode(text, validate=True))
        return msgspec.msgpack.decode(body, type=Exported)
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise StoreDamaged(f"the file's header: {error}") from error


def _check_sizes(file: Any, header: Exported) -> PageCodec | None:
    """The declared tensors are exactly those that the header describes."""
    if not (0 < header.tokens <= _MAX_TOKENS and 0 <= header.pages and 0 <= header.tail_rows <= MAX_TAIL_ROWS):
        raise StoreDamaged(f"{header.tokens} tokens, {header.pages} pages and {header.tail_rows} rows make no session")
    if header.pages * PAGE_TOKENS + header.tail_rows > header.tokens:
        raise StoreDamaged("the file holds KV of more positions than it has tokens")
    codec = None
    if header.shape is not None:
        try:
            codec = PageCodec(header.shape, header.identity.kv_id)
        except (KeyError, ZeroDivisionError, OverflowError) as error:
            raise StoreDamaged(f"the file's model shape is none: {error}") from error
    wanted = _tensors(header, codec)
    found = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}
    if found != wanted:
        raise StoreDamaged(f"the file holds {found}, its header says {wanted}")
    return codec


def _check_digest(file: Any, header: Exported, *, finite: bool) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and tail; every byte has been read once."""
    tokens, tail = file.get_tensor("tokens"), file.get_tensor("tail")
    state = xxhash.xxh3_128(tokens.tobytes())
    for part in _file_pages(file, header):
        state.update(np.ascontiguousarray(part).data)
        if finite:
            _require_finite(part, header)
    state.update(np.ascontiguousarray(tail).data)
    if state.hexdigest() != header.digest:
        raise StoreDamaged("the file's digest differs from its contents")
    if finite:
        _require_finite(tail, header)
    return tokens, tail


def _require_finite(part: np.ndarray, header: Exported) -> None:
    assert header.shape is not None
    if header.shape.dtype == "bfloat16":
        bad = ((np.ascontiguousarray(part).view("<u2") & 0x7F80) == 0x7F80).any()  # all exponent bits: inf or NaN
    else:
        dtype = {"float32": "<f4", "float16": "<f2"}[header.shape.dtype]
        bad = not np.isfinite(np.ascontiguousarray(part).view(dtype)).all()
    if bad:
        raise StoreDamaged("the file's KV holds NaN or infinity")


def _file_pages(file: Any, header: Exported) -> Iterator[np.ndarray]:
    pages = file.get_slice("pages")
    for start in range(0, header.pages, _PART_PAGES):
        yield pages[start : min(start + _PART_PAGES, header.pages)]


def _require_absent(store: Store, namespace: str, id: str) -> None:
    try:
        store.manifest(namespace, id)
    except SessionNotFound:
        return
    raise InvalidInput(f"there is a session {id!r} already")
