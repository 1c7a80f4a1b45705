"""Names on disk: how a namespace, a session id and a number become a fixed-width LMDB key.

Pure: the same operations give the same keys in any process (digests only, no `hash()`, no randomness).
It knows nothing of values; `record.py` and `manifest.py` define those.
"""

import hashlib
import re
from enum import IntEnum
from functools import lru_cache

from agentkv.errors import InvalidInput, InvalidSessionId

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NO_SESSION = bytes(16)  # pages and segments belong to a namespace: sessions share them


class Kind(IntEnum):
    """What a key names. Numbers are part of the format: never reuse one."""

    PAGE = 1
    HEAD_KEYS = 2  # reserved: a head's keys of one page, beside the page
    PREFIX = 3  # reserved: chain hash of token ids -> record id
    SEGMENT = 4
    MANIFEST = 5
    TAIL = 6
    SESSION = 7


def validate_id(text: str) -> str:
    """Returns `text` if it can name a session or a namespace; raises `InvalidSessionId` otherwise."""
    if not isinstance(text, str) or _ID.fullmatch(text) is None:
        raise InvalidSessionId(
            f"ids and namespaces are 1–128 characters of [A-Za-z0-9._-] without a leading dot, not {text!r:.200}"
        )
    return text


def checkpoint_name(session: str, number: int) -> str:
    """The public id of a checkpoint: `session@number` (`@` is in no id). Number 0 is the empty session."""
    return f"{session}@{number}"


def parse_checkpoint(name: str) -> tuple[str, int]:
    """The session id and number of `checkpoint_name`; raises `InvalidInput`."""
    session, _, number = name.partition("@")
    if not re.fullmatch(r"[0-9]{1,18}", number):
        raise InvalidInput(f"{name!r:.200} is not a checkpoint id (session@number)")
    return validate_id(session), int(number)


@lru_cache(maxsize=1024)
def _digest(text: str) -> bytes:
    return hashlib.blake2b(validate_id(text).encode(), digest_size=16).digest()


def _key(namespace: str, session: bytes, kind: Kind, number: int) -> bytes:
    return _digest(namespace) + session + bytes((kind,)) + number.to_bytes(8, "big")


def page_key(namespace: str, record: int) -> bytes:
    """Prefix of a page's group records; see `part`. Also its key in `pending` and `references`."""
    return _key(namespace, _NO_SESSION, Kind.PAGE, record)


def segment_key(namespace: str, segment: int) -> bytes:
    """Key of an immutable segment."""
    return _key(namespace, _NO_SESSION, Kind.SEGMENT, segment)


def manifest_key(namespace: str, session: str, number: int) -> bytes:
    """Key of a session's checkpoint."""
    return _key(namespace, _digest(session), Kind.MANIFEST, number)


def manifest_prefix(namespace: str, session: str) -> bytes:
    """What the keys of all checkpoints of a session begin with; their last 8 bytes are the number."""
    return manifest_key(namespace, session, 0)[:-8]


def number_of(key: bytes) -> int:
    """The number at the end of a key without a part."""
    return int.from_bytes(key[-8:], "big")


def tail_key(namespace: str, session: str, number: int) -> bytes:
    """Prefix of the tail's group records of a checkpoint; see `part`."""
    return _key(namespace, _digest(session), Kind.TAIL, number)


def session_key(namespace: str, session: str) -> bytes:
    """Key of a session's entry: its head and the checkpoints kept."""
    return _key(namespace, _digest(session), Kind.SESSION, 0)


def namespace_prefix(namespace: str) -> bytes:
    """What every key of a namespace begins with."""
    return _digest(namespace)


def kind_of(key: bytes) -> Kind:
    """What the key names."""
    return Kind(key[32])


def part(prefix: bytes, group: int) -> bytes:
    """Key of one layer group of a page or of a tail."""
    return prefix + group.to_bytes(2, "big")
