"""What KV looks like on disk: one record per (page, layer group), behind a checked header. Pure.

The layout belongs to no backend: per layer [K|V][kv_head][position][dim], little-endian elements.
`seal`/`unseal` put the same checked preamble before the structs of `manifest.py`. `store.py` keeps the bytes.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from agentkv.config import PAGE_TOKENS
from agentkv.errors import IdentityMismatch, StoreDamaged
from agentkv.types import ModelShape

Buffer = bytes | bytearray | memoryview

FORMAT: Final = 1
GROUP_BYTES: Final = 256 << 10
"""A record's aim: large enough to read at link speed, small enough not to fragment LMDB's free list."""

MAX_TAIL_ROWS: Final = 47
"""Capacity of a tail: an unfilled page, and up to 31 rows of a prefill cut at a page boundary."""

PAGE_MAGIC: Final = b"AKVP"
DTYPE_CODES: Final = {"float32": 1, "bfloat16": 2, "float16": 3}

# magic, format, ~format: a flipped byte in the format is damage, and not taken for a newer version.
_PREAMBLE: Final = struct.Struct("<4sHH")
# kv_id; layers, first layer and layers of this group, kv heads, head dim, rows; dtype, unused; body checksum
_PAGE: Final = struct.Struct("<16sHHHHHHB3x16s")
_CHECK: Final = struct.Struct("<8s")
HEADER_BYTES: Final = _PREAMBLE.size + _PAGE.size + _CHECK.size


def seal(magic: bytes, body: bytes) -> bytes:
    """`body` behind preamble and checksum."""
    return _preamble(magic) + xxhash.xxh3_128_digest(body) + body


def unseal(magic: bytes, value: Buffer) -> bytes:
    """The body of `seal`; raises `StoreDamaged`, or `IdentityMismatch("format")` for a newer format."""
    view = memoryview(value)
    _check_preamble(magic, view)
    start = _PREAMBLE.size + 16
    body = bytes(view[start:])
    if len(view) < start or xxhash.xxh3_128_digest(body) != view[_PREAMBLE.size : start]:
        raise StoreDamaged(f"{magic.decode()}: checksum differs")
    return body


def check_page(value: Buffer) -> None:
    """Checks a page or tail record without knowing its model; raises `StoreDamaged`."""
    view = memoryview(value)
    if xxhash.xxh3_128_digest(view[HEADER_BYTES:]) != _read_header(view)[-1]:
        raise StoreDamaged("page record: checksum of the body differs")


class PageCodec:
    """Encodes pages and tails of one model, identified by `kv_id` (16 bytes)."""

    def __init__(self, shape: ModelShape, kv_id: bytes) -> None:
        assert len(kv_id) == 16
        self.shape = shape
        self.kv_id = kv_id
        self.row_bytes = 2 * shape.kv_heads * shape.head_dim * shape.itemsize
        self.layer_bytes = self.row_bytes * PAGE_TOKENS
        self.layers_per_group = max(1, GROUP_BYTES // self.layer_bytes)
        self.groups = -(-shape.layers // self.layers_per_group)
        self.page_bytes = shape.layers * self.layer_bytes + self.groups * HEADER_BYTES

    def encode(self, payload: np.ndarray) -> list[bytes]:
        """One value per layer group.

        `payload` is C-contiguous uint8 [layers, K|V bytes of `rows` positions]; rows are 16 for a page, 1..47
        for a tail, and follow from the size.
        """
        rows, rest = divmod(payload.shape[1], self.row_bytes)
        assert payload.dtype == np.uint8, "payloads are bytes"
        assert payload.flags.c_contiguous, "payloads are C-contiguous"
        assert payload.shape[0] == self.shape.layers, "payloads hold every layer"
        assert rest == 0, "payloads hold whole rows"
        assert 1 <= rows <= MAX_TAIL_ROWS, "payloads hold 1..47 rows"
        values = []
        for group in range(self.groups):
            body = payload[self._layers(group)].data.cast("B")
            values.append(b"".join((self._header(group, rows, xxhash.xxh3_128_digest(body)), body)))
        return values

    def decode(self, values: Sequence[Buffer]) -> np.ndarray:
        """The payload of `encode`, in a new array.

        Raises `StoreDamaged` naming what is wrong, `IdentityMismatch` for another kv_id or a newer format.
        """
        if len(values) != self.groups:
            raise StoreDamaged(f"page record: {len(values)} layer groups of {self.groups} are there")
        payload: np.ndarray | None = None
        rows = 0
        for group, value in enumerate(values):
            view = memoryview(value)
            found, digest = self._check_header(view, group)
            if payload is None:
                rows = found
                payload = np.empty((self.shape.layers, rows * self.row_bytes), np.uint8)
            elif found != rows:
                raise StoreDamaged(f"page record: group {group} holds {found} rows, group 0 {rows}")
            target = payload[self._layers(group)]
            body = view[HEADER_BYTES:]
            if len(body) != target.nbytes:
                raise StoreDamaged(f"page record: length of group {group} is {len(body)} bytes, not {target.nbytes}")
            # The copy is what is checked: it cannot change after the check, as the map could.
            target[:] = np.frombuffer(body, np.uint8).reshape(target.shape)
            if xxhash.xxh3_128_digest(target.data.cast("B")) != digest:
                raise StoreDamaged(f"page record: checksum of group {group} differs")
        assert payload is not None
        return payload

    def _layers(self, group: int) -> slice:
        first = group * self.layers_per_group
        return slice(first, min(first + self.layers_per_group, self.shape.layers))

    def _fields(self, group: int, rows: int) -> dict[str, int]:
        layers = self._layers(group)
        return {
            "layers": self.shape.layers,
            "group": layers.start,
            "layers of the group": layers.stop - layers.start,
            "kv_heads": self.shape.kv_heads,
            "head_dim": self.shape.head_dim,
            "rows": rows,
            "dtype": DTYPE_CODES[self.shape.dtype],
        }

    def _header(self, group: int, rows: int, digest: bytes) -> bytes:
        header = _preamble(PAGE_MAGIC) + _PAGE.pack(self.kv_id, *self._fields(group, rows).values(), digest)
        return header + _CHECK.pack(xxhash.xxh3_64_digest(header))

    def _check_header(self, view: memoryview, group: int) -> tuple[int, bytes]:
        stored_id, *fields, digest = _read_header(view)
        if stored_id != self.kv_id:
            raise IdentityMismatch("kv_id", stored_id.hex(), self.kv_id.hex())
        rows = fields[5]
        for (name, wanted), found in zip(self._fields(group, rows).items(), fields, strict=True):
            if found != wanted:
                raise StoreDamaged(f"page record: {name} is {found}, not {wanted}")
        if not 1 <= rows <= MAX_TAIL_ROWS:
            raise StoreDamaged(f"page record: it claims {rows} rows")
        return rows, digest


def codec_of(value: Buffer) -> PageCodec:
    """The codec that a page or tail record was encoded with (its shape lacks what KV does not tell: heads of queries,
    vocabulary, context). Raises `StoreDamaged`, `IdentityMismatch("format")`."""
    kv_id, layers, _, _, kv_heads, head_dim, _, code, _ = _read_header(memoryview(value))
    dtype = next((name for name, number in DTYPE_CODES.items() if number == code), None)
    if dtype is None or not layers * kv_heads * head_dim:
        raise StoreDamaged("page record: its shape is none")
    return PageCodec(ModelShape(layers, kv_heads, kv_heads, head_dim, 0, 0, dtype), kv_id)


def _preamble(magic: bytes) -> bytes:
    return _PREAMBLE.pack(magic, FORMAT, FORMAT ^ 0xFFFF)


def _check_preamble(magic: bytes, view: memoryview) -> None:
    name = magic.decode()
    if len(view) < _PREAMBLE.size:
        raise StoreDamaged(f"{name}: length is {len(view)} bytes")
    found, stored, complement = _PREAMBLE.unpack_from(view)
    if found != magic:
        raise StoreDamaged(f"{name}: magic is {found!r}")
    if stored ^ complement != 0xFFFF or stored == 0:
        raise StoreDamaged(f"{name}: format field is damaged")
    if stored > FORMAT:
        raise IdentityMismatch("format", str(stored), str(FORMAT))


def _read_header(view: memoryview) -> tuple:
    """kv_id, the seven numbers of `PageCodec._fields`, body checksum."""
    _check_preamble(PAGE_MAGIC, view)
    if len(view) < HEADER_BYTES:
        raise StoreDamaged(f"page record: length is {len(view)} bytes")
    checked = HEADER_BYTES - _CHECK.size
    if xxhash.xxh3_64_digest(view[:checked]) != view[checked:HEADER_BYTES]:
        raise StoreDamaged("page record: checksum of the header differs")
    return _PAGE.unpack_from(view, _PREAMBLE.size)
