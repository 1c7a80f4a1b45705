"""Looks into a closed store, and changes it, with LMDB alone: as a fault or a stranger would.

`path` is a store's directory; sessions are those of the namespace "default".
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from agentkv.memory.environment import Table
from agentkv.memory.keys import manifest_key, page_key, part, segment_key, session_key
from agentkv.memory.manifest import Manifest, decode_manifest, decode_segment, decode_session, encode_manifest

NAMESPACE = "default"


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[Callable[[Table], Any]]:
    """A transaction: gives each table as something with `get`, `put`, `delete` and `items`."""
    env = lmdb.open(str(path / "gen-1"), max_dbs=len(Table), map_size=1 << 30, create=False)
    try:
        tables = {table: env.open_db(table.encode(), create=False) for table in Table}
        with env.begin(write=write) as raw:
            yield lambda table: _Values(raw, tables[table])
    finally:
        env.close()


class _Values:
    def __init__(self, raw: lmdb.Transaction, table: Any) -> None:
        self._raw, self._table = raw, table

    def __getitem__(self, key: bytes) -> bytes:
        value = self._raw.get(key, db=self._table)
        assert value is not None, key.hex()
        return bytes(value)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._raw.put(key, value, db=self._table)

    def __delitem__(self, key: bytes) -> None:
        assert self._raw.delete(key, db=self._table)

    def items(self) -> dict[bytes, bytes]:
        with self._raw.cursor(db=self._table) as cursor:
            return {bytes(key): bytes(value) for key, value in cursor}


def values(path: Path, table: Table) -> dict[bytes, bytes]:
    """Every entry of a table."""
    with opened(path) as table_of:
        return table_of(table).items()


def head(path: Path, session: str) -> Manifest:
    """The session's last commit."""
    with opened(path) as table_of:
        number = decode_session(table_of(Table.SESSIONS)[session_key(NAMESPACE, session)]).head.number
        return decode_manifest(table_of(Table.MANIFESTS)[manifest_key(NAMESPACE, session, number)])


def head_key(path: Path, session: str) -> bytes:
    """Key of the manifest of the session's last commit."""
    return manifest_key(NAMESPACE, session, head(path, session).number)


def page_keys(path: Path, session: str) -> list[bytes]:
    """Keys of the session's page records (of their first layer group), in order of position."""
    manifest = head(path, session)
    with opened(path) as table_of:
        found = [decode_segment(table_of(Table.SEGMENTS)[segment_key(NAMESPACE, n)]) for n in manifest.segments]
    return [part(page_key(NAMESPACE, record), 0) for segment in found for record in segment.record_ids()]


def change(path: Path, table: Table, key: bytes, edit: Callable[[bytes], bytes] | None) -> None:
    """Put another value in place of the one under `key`; None removes it."""
    with opened(path, write=True) as table_of:
        if edit is None:
            del table_of(table)[key]
        else:
            table_of(table)[key] = edit(table_of(table)[key])


def change_identity(path: Path, session: str, **fields: Any) -> None:
    """Let the session's last commit claim another identity."""

    def edit(value: bytes) -> bytes:
        manifest = decode_manifest(value)
        identity = msgspec.structs.replace(manifest.identity, **fields)
        return encode_manifest(msgspec.structs.replace(manifest, identity=identity))

    change(path, Table.MANIFESTS, head_key(path, session), edit)


def flip(value: bytes) -> bytes:
    """One bit of the last byte."""
    return value[:-1] + bytes([value[-1] ^ 1])


def cut(value: bytes) -> bytes:
    """The last byte is gone."""
    return value[:-1]


def newer(value: bytes) -> bytes:
    """The value as a later format of the library would write it: behind its magic the format and its complement."""
    number = int.from_bytes(value[4:6], "little") + 1
    return value[:4] + number.to_bytes(2, "little") + (number ^ 0xFFFF).to_bytes(2, "little") + value[8:]
