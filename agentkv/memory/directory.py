"""The store's directory: who may use it, which generation is current, and who writes.

    PATH/CURRENT        the name of the current generation
    PATH/gen-N/         an LMDB environment; readers of other processes hold it (flock, shared)
    PATH/writer.lock    held (flock) by the one writer; holds its pid

Knows nothing of LMDB; `environment.py` opens the generation found here.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import Final

from agentkv.errors import StoreDamaged, StoreError, StoreLocked, StoreUnsafe

_log = logging.getLogger("agentkv.store")

NETWORK_FILE_SYSTEMS: Final = frozenset(
    "afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs "
    "lustre ncpfs nfs nfs4 ocfs2 smb2 smb3 smbfs".split()
)
_GENERATION: Final = re.compile(r"gen-[1-9][0-9]*")
_OURS: Final = re.compile(r"CURRENT|CURRENT\.new|writer\.lock|gen-[1-9][0-9]*")
FIRST_GENERATION: Final = "gen-1"


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that holds `path` ("" where the system does not tell)."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for fields in (line.split() for line in lines):
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        # Later mounts hide earlier ones at the same point.
        if path.is_relative_to(point) and len(Path(point).parts) >= best:
            best, kind = len(Path(point).parts), fields[2]
    return kind


def prepare(path: Path, force: bool) -> None:
    """Makes the directory (0700) or checks that it is ours and local; raises `StoreUnsafe`.

    `force` skips only the check of the file system.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check(path, force)
    strangers = [entry.name for entry in path.iterdir() if _OURS.fullmatch(entry.name) is None]
    if strangers and not (path / "CURRENT").exists():
        raise StoreUnsafe(f"{path} holds other files ({min(strangers)}) and is not a store")
    os.chmod(path, 0o700)


def check(path: Path, force: bool) -> None:
    """Raises `StoreUnsafe` where another user owns `path` or, unless `force`, it is on a network file system."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise StoreUnsafe(f"{path} belongs to user {owner}, not to {os.geteuid()}")
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS and not force:
        raise StoreUnsafe(f"{path} is on {kind}: LMDB's locks and map are unreliable there (force=True to insist)")


def current_generation(path: Path) -> Path | None:
    """The generation that CURRENT names, None before the first one is complete."""
    try:
        name = (path / "CURRENT").read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    if _GENERATION.fullmatch(name) is None or not (path / name).is_dir():
        raise StoreDamaged(f"{path}/CURRENT names {name!r:.80}, which is no generation")
    return path / name


def set_current(path: Path, generation: str) -> None:
    """Names the current generation, atomically and durably."""
    temporary = path / "CURRENT.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, generation.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path / "CURRENT")
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def next_generation(path: Path, current: Path) -> Path:
    """The path of the generation after `current`; what an interrupted compaction left there is removed."""
    generation = path / f"gen-{int(current.name.removeprefix('gen-')) + 1}"
    if generation.exists():
        shutil.rmtree(generation)
    return generation


def remove_other_generations(path: Path) -> None:
    """Removes generations that CURRENT does not name (all of them before the first is complete), but for those that a
    reader still holds: a later call finds them."""
    keep = current_generation(path)
    for entry in path.iterdir():
        if _GENERATION.fullmatch(entry.name) and entry != keep:
            try:
                hold = GenerationHold(entry, exclusive=True)
            except BlockingIOError:
                _log.info("%s is still being read", entry)
                continue
            with contextlib.closing(hold):
                shutil.rmtree(entry)


class GenerationHold:
    """A lock on a generation: shared while it is read, exclusive while it is removed. BlockingIOError if that fails."""

    def __init__(self, generation: Path, *, exclusive: bool = False) -> None:
        self._descriptor = os.open(generation, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Lets go. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def hold_current(path: Path) -> tuple[Path, GenerationHold]:
    """The current generation, held for reading. Raises `StoreError` where there is none."""
    while True:
        generation = current_generation(path)
        if generation is None:
            raise StoreError(f"there is no store at {path}")
        try:
            hold = GenerationHold(generation)
        except (BlockingIOError, FileNotFoundError):
            continue  # it is being removed: CURRENT names another by now
        if current_generation(path) == generation:
            return generation, hold
        hold.close()


class WriterLock:
    """The exclusive right to write to a store; raises `StoreLocked` naming the process that has it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            if not isinstance(error, BlockingIOError):
                raise StoreError(f"cannot lock {path}: {error}") from error
            raise StoreLocked(f"process {holder} writes to {path}") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _forget_in_children(self)

    def release(self) -> None:
        """Lets the next writer in. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_held: weakref.WeakSet[WriterLock] | None = None


def _forget_in_children(lock: WriterLock) -> None:
    # A forked child shares the lock's file: unless it closes its copy, it would hold the lock after our death.
    global _held
    if _held is None:
        _held = held = weakref.WeakSet()
        os.register_at_fork(after_in_child=lambda: [inherited.release() for inherited in list(held)])
    _held.add(lock)
