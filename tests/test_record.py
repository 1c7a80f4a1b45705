"""Formats on disk are fixed by golden bytes, and no damage to them passes for data."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.errors import IdentityMismatch, InvalidInput, InvalidSessionId, StoreDamaged
from agentkv.memory import keys, record
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
from agentkv.memory.record import HEADER_BYTES, PageCodec, check_page
from agentkv.types import Identity, ModelShape, Span

SHAPE = ModelShape(layers=3, q_heads=4, kv_heads=2, head_dim=4, vocab=100, max_positions=512, dtype="bfloat16")
WIDE = ModelShape(layers=5, q_heads=8, kv_heads=8, head_dim=128, vocab=100, max_positions=512)
IDENTITY = Identity("w" * 8, "", "c" * 8, "bfloat16", 16, "t" * 8, "p" * 8)
CODEC = PageCodec(SHAPE, IDENTITY.kv_id)
GOLDEN = Path(__file__).parent / "golden"

SEGMENT = Segment(
    np.arange(40, dtype="<u4").tobytes(),
    np.array([7, 1 << 40], dtype="<u8").tobytes(),
    (Span("turn-1", "user", 0, 12), Span("turn-2", "assistant", 12, 40)),
)
MANIFEST = Manifest(
    namespace="default",
    id="ticket-812",
    number=3,
    parent="ticket-812@2",
    created_at=1_700_000_000.5,
    segments=(4, 9),
    tokens=40,
    pages=2,
    kv_len=39,
    kv_durable_len=39,
    tail_rows=7,
    stored_bytes=12_345,
    identity=IDENTITY,
    seed=42,
    sidecar=b"\x00\x01",
    pinned=True,
    reasoning="keep",
    finish_reason="eos",
)
ENTRY = SessionEntry("default", "ticket-812", 39, 12_345, (Checkpoint(3, 1_700_000_000.5, 40, True),))


def payload(codec: PageCodec, rows: int = 16, seed: int = 0) -> np.ndarray:
    """Deterministic bytes, independent of numpy's generators."""
    size = codec.shape.layers * rows * codec.row_bytes
    values = (np.arange(size, dtype=np.uint64) * 2654435761 + seed * 40503) >> 7
    return values.astype(np.uint8).reshape(codec.shape.layers, -1)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def test_page_record_has_its_golden_bytes():
    (value,) = CODEC.encode(payload(CODEC))
    assert value == golden("page")
    assert np.array_equal(CODEC.decode([golden("page")]), payload(CODEC))
    assert len(value) == CODEC.page_bytes


def test_a_manifest_written_before_it_had_all_its_fields_is_read():
    assert decode_manifest(golden("manifest-0.1.0")) == MANIFEST


@pytest.mark.parametrize(
    ("name", "struct", "encode", "decode"),
    [
        ("segment", SEGMENT, encode_segment, decode_segment),
        ("manifest", MANIFEST, encode_manifest, decode_manifest),
        ("session", ENTRY, encode_session, decode_session),
    ],
)
def test_structs_have_their_golden_bytes(name, struct, encode, decode):
    assert encode(struct) == golden(name)
    assert decode(golden(name)) == struct


def test_keys_have_their_golden_bytes():
    lines = (GOLDEN / "keys.hex").read_text().split()
    assert [key.hex() for key in all_keys()] == lines
    assert len(set(lines)) == len(lines)


def all_keys() -> list[bytes]:
    return [
        keys.page_key("default", 1),
        keys.part(keys.page_key("default", 1), 258),
        keys.segment_key("default", 1),
        keys.manifest_key("default", "ticket-812", 1),
        keys.part(keys.tail_key("default", "ticket-812", 1), 0),
        keys.session_key("default", "ticket-812"),
    ]


def test_a_later_version_may_add_fields_to_a_struct():
    class Wider(Manifest, frozen=True, kw_only=True):
        tools: str = "some"

    wider = Wider(**{name: getattr(MANIFEST, name) for name in MANIFEST.__struct_fields__})
    assert decode_manifest(record.seal(b"AKVM", msgspec.msgpack.encode(wider))) == MANIFEST


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 7),
    kv_heads=st.integers(1, 9),
    head_dim=st.sampled_from([1, 4, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    rows=st.integers(1, 47),
)
def test_decode_returns_what_was_encoded(layers, kv_heads, head_dim, dtype, rows):
    codec = PageCodec(ModelShape(layers, kv_heads, kv_heads, head_dim, 10, 100, dtype), bytes(range(16)))
    data = payload(codec, rows)
    values = codec.encode(data)
    assert len(values) == codec.groups
    found = codec.decode([memoryview(value) for value in values])
    assert np.array_equal(found, data)
    assert found.flags.owndata or found.base is None
    for value in values:
        check_page(value)
        assert len(value) <= max(record.GROUP_BYTES * rows / 16, codec.row_bytes * rows) + HEADER_BYTES


def test_groups_aim_at_256_kib():
    codec = PageCodec(WIDE, bytes(16))
    assert (codec.layers_per_group, codec.groups) == (2, 3)
    sizes = [len(value) - HEADER_BYTES for value in codec.encode(payload(codec))]
    assert sizes == [256 << 10, 256 << 10, 128 << 10]


def test_any_flipped_byte_of_a_page_is_damage():
    codec = PageCodec(ModelShape(1, 1, 1, 1, 10, 100), IDENTITY.kv_id)
    (value,) = codec.encode(payload(codec))
    for position in range(len(value)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(value)
            broken[position] ^= flip
            with pytest.raises(StoreDamaged):
                codec.decode([broken])
            with pytest.raises(StoreDamaged):
                check_page(broken)


@pytest.mark.parametrize(("encode", "decode", "struct"), [
    (encode_segment, decode_segment, SEGMENT),
    (encode_manifest, decode_manifest, MANIFEST),
    (encode_session, decode_session, ENTRY),
])  # fmt: skip
def test_any_flipped_or_cut_byte_of_a_struct_is_damage(encode, decode, struct):
    value = encode(struct)
    for position in range(len(value)):
        broken = bytearray(value)
        broken[position] ^= 0x10
        with pytest.raises(StoreDamaged):
            decode(broken)
        with pytest.raises(StoreDamaged):
            decode(value[:position])
    with pytest.raises(StoreDamaged):
        decode(value + b"\x00")


def test_a_cut_or_extended_page_is_damage():
    values = PageCodec(WIDE, bytes(16)).encode(payload(PageCodec(WIDE, bytes(16))))
    codec = PageCodec(WIDE, bytes(16))
    for cut in (0, 1, 7, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(values[1]) - 1):
        with pytest.raises(StoreDamaged, match=r"length|magic"):
            codec.decode([values[0], values[1][:cut], values[2]])
    with pytest.raises(StoreDamaged, match="length"):
        codec.decode([values[0], values[1] + b"\x00", values[2]])


def test_missing_swapped_and_mixed_groups_are_damage():
    codec = PageCodec(WIDE, bytes(16))
    values, short = codec.encode(payload(codec)), codec.encode(payload(codec, rows=5))
    with pytest.raises(StoreDamaged, match="2 layer groups of 3"):
        codec.decode(values[:2])
    with pytest.raises(StoreDamaged, match="group is 2, not 0"):
        codec.decode([values[1], values[0], values[2]])
    with pytest.raises(StoreDamaged, match="rows"):
        codec.decode([values[0], short[1], values[2]])


@pytest.mark.parametrize(
    ("name", "change"),
    [("layers", 4), ("kv_heads", 1), ("head_dim", 8), ("dtype", "float16")],
)
def test_a_header_that_contradicts_the_model_is_named(name, change):
    other = PageCodec(msgspec.structs.replace(SHAPE, **{name: change}), CODEC.kv_id)
    with pytest.raises(StoreDamaged, match=name):
        CODEC.decode(other.encode(payload(other)))


def test_another_models_page_is_refused_not_called_damaged():
    other = PageCodec(SHAPE, msgspec.structs.replace(IDENTITY, weights="x").kv_id)
    with pytest.raises(IdentityMismatch) as caught:
        CODEC.decode(other.encode(payload(other)))
    assert caught.value.field == "kv_id"


def test_kv_id_covers_what_decides_kv_and_nothing_else():
    base = IDENTITY.kv_id
    for field in ("weights", "adapter", "config", "dtype"):
        assert msgspec.structs.replace(IDENTITY, **{field: "other"}).kv_id != base
    assert msgspec.structs.replace(IDENTITY, page_size=32).kv_id != base
    for field in ("tokenizer", "template", "head"):
        assert msgspec.structs.replace(IDENTITY, **{field: "other"}).kv_id == base


def test_a_newer_format_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(record, "FORMAT", record.FORMAT + 1)
    newer_page, newer_manifest = CODEC.encode(payload(CODEC)), encode_manifest(MANIFEST)
    monkeypatch.undo()
    for decode, value in ((CODEC.decode, newer_page), (decode_manifest, newer_manifest)):
        with pytest.raises(IdentityMismatch) as caught:
            decode(value)
        assert (caught.value.field, caught.value.stored) == ("format", "2")


@pytest.mark.parametrize("text", ["", ".", ".x", "a/b", "ä", "a b", "a@1", "x" * 129, "a\n", "../a", None, 3])
def test_ids_that_cannot_name_a_session(text):
    with pytest.raises(InvalidSessionId):
        keys.validate_id(text)


def test_checkpoint_names_round_trip_and_refuse_others():
    assert keys.parse_checkpoint(keys.checkpoint_name("a.b-c_1", 17)) == ("a.b-c_1", 17)
    for name in ("a", "a@", "@1", "a@-1", "a@1@2", "a@٣", ".a@1"):
        with pytest.raises(InvalidInput):
            keys.parse_checkpoint(name)


def commit(**change) -> Commit:
    fields = {
        "namespace": "n", "id": "a", "base": None, "unchanged_tokens": 0, "token_ids": list(range(41)),
        "records": [1, 2], "spans": [], "kv_len": 40, "identity": IDENTITY, "codec": CODEC,
        "tail": payload(CODEC, rows=8),
    }  # fmt: skip
    return Commit(**(fields | change))


@pytest.mark.parametrize(
    "change",
    [
        {"kv_len": 42},
        {"kv_len": -1},
        {"kv_len": 39},  # the tail would start inside a page
        {"records": [1, 2, 3]},  # pages and tail overlap
        {"unchanged_tokens": 42},
        {"sidecar": bytes((256 << 10) + 1)},
        {"spans": [Span("b", "user", 5, 9), Span("a", "user", 0, 5)]},
        {"spans": [Span("a", "user", 40, 42)]},
        {"spans": [Span("a", "user", 9, 8)]},
        {"token_ids": [], "kv_len": 0, "records": [], "tail": None, "spans": [Span("a", "user", 0, 0)]},
        {"namespace": "../n"},
        {"id": ".a"},
        {"created_at": float("nan")},
        {"token_ids": [-1] * 41},
        {"token_ids": [1 << 32] * 41},
        {"records": [-1, 2]},
    ],
)
def test_contradictory_commits_are_refused(change):
    def check(commit: Commit) -> None:
        commit.check()
        commit.split()

    check(commit())
    with pytest.raises(InvalidInput):
        check(commit(**change))


def test_tail_rows_are_durable_only_behind_durable_pages():
    assert commit().kv_durable_len == 40
    assert commit(records=[1]).kv_durable_len == 16
    assert commit(tail=None).kv_durable_len == 32
    assert commit(records=[], kv_len=8).kv_durable_len == 8
    assert commit(records=[], kv_len=16, tail=None).kv_durable_len == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(length=st.integers(0, 3 * SEGMENT_TOKENS + 5), starts=st.lists(st.integers(0, 3 * SEGMENT_TOKENS), max_size=6))
def test_segments_hold_everything_once_and_in_order(length, starts):
    spans = [Span(str(i), "user", min(s, length), length) for i, s in enumerate(sorted(starts))] if length else []
    pages = list(range(length // 16))
    segments = commit(token_ids=range(length), records=pages, kv_len=length, tail=None, spans=spans).split()
    assert [token for segment in segments for token in segment.token_ids()] == list(range(length))
    assert [number for segment in segments for number in segment.record_ids()] == pages
    assert [span for segment in segments for span in segment.spans] == spans
    assert all(segment.complete for segment in segments[:-1])
