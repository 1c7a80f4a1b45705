"""Sessions as files: what is exported is what is imported, and a stranger's file changes nothing."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from prompts import noise_ids, tokens

import agentkv.sync
from agentkv import AgentKVError, EngineConfig, InvalidInput, SessionNotFound, StoreDamaged, StoreFull, StoreLocked
from agentkv.memory.record import seal, unseal
from agentkv.memory.store import Store
from agentkv.memory.transport import EXPORT_MAGIC, Exported

PROMPT = noise_ids(6, 1200)
MORE = noise_ids(7, 40)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, str, tuple[int, ...]]:
    """A file, the digest of its session, and what the session says next."""
    with opened(tmp_path / "a") as manager, manager.session("talk") as session:
        session.step(PROMPT, decoding=tokens(9), mode="full")
        session.fork("other")
        digest = session.digest()
        found = session.step(MORE, decoding=tokens(9), mode="full")
    path = tmp_path / "talk.agentkv"
    with agentkv.open_store(tmp_path / "a") as store:
        store.export("talk", path, "talk@1")
    return path, digest, found.token_ids


def opened(path: Path):
    config = EngineConfig(threads=1, kv_bytes=64 << 20, store_bytes=1 << 28)
    return agentkv.sync.open("tiny", store=path, config=config)


def bring(directory: Path, path: Path, **options) -> str:
    """Import into the store at `directory`, made if need be."""
    Store.open(directory, store_bytes=1 << 28).close()
    with agentkv.open_store(directory, write=True, store_bytes=options.pop("store_bytes", 1 << 28)) as store:
        try:
            return store.import_(path, **options)
        finally:
            assert store._reader.verify() == []
            assert store._reader.statistics()["pending"] == 0


@pytest.mark.parametrize("trust_kv", [False, True])
def test_an_imported_session_goes_on_as_the_exported_one(tmp_path, exported, trust_kv):
    path, digest, next_tokens = exported
    assert bring(tmp_path / "b", path, trust_kv=trust_kv, id="mine") == "mine@1"
    with opened(tmp_path / "b") as manager, manager.session("mine", create=False) as session:
        if trust_kv:
            assert session.digest() == digest
        result = session.step(MORE, decoding=tokens(9), mode="full")
        assert result.token_ids == next_tokens
        assert result.usage.prefilled == len(MORE) + (0 if trust_kv else len(PROMPT) + 8)
        session.fork("fork")
        assert manager._manager._engine.store.manifest("default", "fork").private


def test_an_export_is_whole_or_not_there(tmp_path, exported):
    path, _, _ = exported
    with agentkv.open_store(tmp_path / "a") as store:
        before = path.read_bytes()
        with pytest.raises(InvalidInput, match="exists"):
            store.export("talk", path)
        with pytest.raises(SessionNotFound):
            store.export("nobody", tmp_path / "x")
        with pytest.raises(OSError, match="nowhere"):
            store.export("talk", tmp_path / "nowhere" / "x")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", path.name]


def test_an_id_that_is_taken_and_a_store_in_use_are_refused(tmp_path, exported):
    path, _, _ = exported
    with pytest.raises(InvalidInput, match="already"):
        bring(tmp_path / "a", path)
    with pytest.raises(StoreFull):
        bring(tmp_path / "b", path, trust_kv=True, store_bytes=1 << 16)
    with opened(tmp_path / "c"):
        with pytest.raises(StoreLocked):
            bring(tmp_path / "c", path)


# Hostile files


def parts(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def claiming(path: Path, **change) -> None:
    """Another header under a right checksum."""
    header, body = parts(path)
    stored = unseal(EXPORT_MAGIC, base64.b64decode(header["__metadata__"]["agentkv"]))
    claim = msgspec.to_builtins(msgspec.msgpack.decode(stored, type=Exported)) | change
    header["__metadata__"]["agentkv"] = base64.b64encode(seal(EXPORT_MAGIC, msgspec.msgpack.encode(claim))).decode()
    write(path, header, body)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def not_finite(path: Path) -> None:
    """A NaN in the KV, under a right digest."""
    header, body = parts(path)
    start, _ = header["pages"]["data_offsets"]
    body = body[: start + 400] + np.float32("nan").tobytes() + body[start + 404 :]
    write(path, header, body)
    claiming(path, digest=xxhash.xxh3_128_hexdigest(body))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "header of 10 GB": lambda path: path.write_bytes(struct.pack("<Q", 10 << 30) + path.read_bytes()[8:]),
    "no header": lambda path: write(path, {k: v for k, v in parts(path)[0].items() if k[0] != "_"}, parts(path)[1]),
    "flipped token": lambda path: flip(path, len(path.read_bytes()) - len(parts(path)[1]) + 5),
    "flipped last byte": lambda path: flip(path, -1),
    "path in its name": lambda path: claiming(path, id="../../etc/passwd"),
    "more tokens": lambda path: claiming(path, tokens=1 << 40),
    "negative pages": lambda path: claiming(path, pages=-1),
    "fewer pages": lambda path: claiming(path, pages=3),
    "rows of a page": lambda path: claiming(path, tail_rows=48),
    "another dtype": lambda path: claiming(path, shape={**shape(path), "dtype": "float16"}),
    "no dtype": lambda path: claiming(path, shape={**shape(path), "dtype": "int4"}),
    "no layers": lambda path: claiming(path, shape={**shape(path), "layers": 0}),
    "negative heads": lambda path: claiming(path, shape={**shape(path), "kv_heads": -4}),
    "many layers": lambda path: claiming(path, shape={**shape(path), "layers": 1 << 50}),
    "spans outside": lambda path: claiming(path, spans=[["x", "user", 5, 1 << 30]]),
    "NaN": not_finite,
}


def shape(path: Path) -> dict:
    stored = unseal(EXPORT_MAGIC, base64.b64decode(parts(path)[0]["__metadata__"]["agentkv"]))
    return msgspec.to_builtins(msgspec.msgpack.decode(stored, type=Exported).shape)


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_is_written(tmp_path, exported, fault):
    path, _, _ = exported
    HOSTILE[fault](path)
    with pytest.raises((StoreDamaged, InvalidInput)):
        bring(tmp_path / "b", path, trust_kv=True)
    with agentkv.open_store(tmp_path / "b") as store:
        assert store.sessions() == []


def test_ids_beyond_the_vocabulary_stop_the_session_by_name(tmp_path, exported):
    path, _, _ = exported
    header, body = parts(path)
    body = np.uint32(70000).tobytes() + body[4:]
    write(path, header, body)
    claiming(path, digest=xxhash.xxh3_128_hexdigest(body))
    bring(tmp_path / "b", path)
    with opened(tmp_path / "b") as manager, manager.session("talk") as session:
        with pytest.raises(AgentKVError, match="70000 is beyond the vocabulary"):
            session.step([1], decoding=tokens(2))
