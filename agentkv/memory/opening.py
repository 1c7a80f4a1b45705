"""From a path to an open environment: directory checks, the first generation, the sweep after a kill.

`store.py` calls this once per store; `directory.py` knows the files and `environment.py` LMDB.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentkv.errors import StoreError
from agentkv.memory import directory, environment
from agentkv.memory.directory import GenerationHold, WriterLock
from agentkv.memory.environment import Environment, Table
from agentkv.memory.publish import delete_page


def open_writer(path: str | os.PathLike[str], store_bytes: int, force: bool) -> tuple[Environment, WriterLock]:
    """The environment and the writer's lock; see `Store.open` for what it raises."""
    with _explained(path) as root:
        directory.prepare(root, force)
        lock = WriterLock(root)
    try:
        directory.remove_other_generations(root)
        return _open_writer(root, store_bytes), lock
    except BaseException:
        lock.release()
        raise


def open_reader(path: str | os.PathLike[str], force: bool) -> tuple[Environment, GenerationHold]:
    """The environment of the current generation, which is held; see `read_store` for what it raises."""
    with _explained(path) as root:
        generation, hold = directory.hold_current(root)
        try:
            directory.check(root, force)
            return environment.acquire(generation, 0, writer=False), hold
        except BaseException:
            hold.close()
            raise


@contextmanager
def _explained(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The real path, and errors of the file system as StoreError."""
    try:
        expanded = os.path.expanduser(path)
        if os.fspath(expanded).startswith("~"):
            raise StoreError(f"{os.fspath(path)!r}: there is no such user")
        yield Path(os.path.realpath(expanded))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise StoreError(f"{os.fspath(path)!r} cannot be used as a store: {error}") from error


def _open_writer(root: Path, store_bytes: int) -> Environment:
    generation = directory.current_generation(root)
    fresh = generation is None
    if generation is None:
        generation = root / directory.FIRST_GENERATION
        generation.mkdir(mode=0o700)
    env = environment.acquire(generation, store_bytes, writer=True)
    try:
        with env.write() as transaction:
            for key in [key for key, _ in transaction.scan(Table.PENDING, b"")]:
                delete_page(transaction, key)
        if fresh:
            # Last: CURRENT names only an environment that has its tables and format.
            env.sync()
            directory.set_current(root, generation.name)
    except BaseException:
        environment.release(env)
        raise
    return env
