"""The user's cache directory: models made once, and digests of files remembered by their stat.

A model directory appears whole, by one rename, with a list of its files' digests; whoever finds it incomplete or
changed makes it anew. What is made, `embedded.py` and `tiny.py` know.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("agentkv.models")

_LIST = "agentkv-files.json"


class Progress(Protocol):
    """Told how far a slow stage is ("download", "convert"); `total` 0 means unknown."""

    def update(self, stage: str, done: int, total: int) -> None: ...


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/agentkv/models`, or below `~/.cache`. (The one variable of the environment that is read.)"""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The convention: a relative path there is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "agentkv" / "models"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cached directory `name`; `make(empty directory)` fills it if it is absent or damaged.

    Two processes may do this at once: both make it, the first rename stands, and the other takes that.
    """
    target = cache_directory() / name
    if _whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        made = work / "made"
        made.mkdir()
        make(made)
        listing = {p.name: file_digest(p) for p in sorted(made.iterdir())}
        (made / _LIST).write_text(json.dumps(listing, sort_keys=True))
        if target.exists() and not _whole(target):
            logger.warning("the cached model %s is damaged and was made anew", target)
            _move_away(target, work / "damaged")
        try:
            made.rename(target)
        except OSError:
            if not _whole(target):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def file_digest(path: Path) -> str:
    """blake2b of the file's bytes, 32 hex digits; remembered by (path, size, mtime_ns, ctime_ns, inode)."""
    path = path.resolve()
    remembered = cache_directory() / "digests" / hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
    before = _stat(path)
    try:
        *stat, digest = remembered.read_text().split()
        if stat == before and len(bytes.fromhex(digest)) == 16:
            return digest
    except (OSError, ValueError):
        pass
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if _stat(path) == before:
        try:
            _write_whole(remembered, " ".join([*before, digest]))
        except OSError as error:  # a read-only home costs a digest per start, not the model
            logger.info("cannot remember the digest of %s: %s", path, error)
    return digest


def _stat(path: Path) -> list[str]:
    stat = path.stat()
    return [str(v) for v in (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)]


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, work = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(work, path)


def _whole(directory: Path) -> bool:
    try:
        listing = json.loads((directory / _LIST).read_text())
        return bool(listing) and all(file_digest(directory / name) == digest for name, digest in listing.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _move_away(target: Path, to: Path) -> None:
    try:
        target.rename(to)
    except FileNotFoundError:  # another process did
        pass
