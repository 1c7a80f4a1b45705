"""From a path to an open environment: directory checks, the first generation, the sweep after a kill.

`store.py` calls this once per store; `directory.py` knows the files and `environment.py` LMDB.
"""

import os
from pathlib import Path

from agentkv.errors import StoreError
from agentkv.memory import directory, environment
from agentkv.memory.directory import WriterLock
from agentkv.memory.environment import Environment, Table
from agentkv.memory.publish import delete_page


def open_store(
    path: str | os.PathLike[str], store_bytes: int, writer: bool, force: bool
) -> tuple[Environment, WriterLock | None]:
    """The environment, and the writer's lock; see `Store.open` for what it raises."""
    try:
        expanded = os.path.expanduser(path)
        if os.fspath(expanded).startswith("~"):
            raise StoreError(f"{os.fspath(path)!r}: there is no such user")
        root = Path(os.path.realpath(expanded))
        if not writer:
            return _open_reader(root, store_bytes, force), None
        directory.prepare(root, force)
        lock = WriterLock(root)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise StoreError(f"{os.fspath(path)!r} cannot be used as a store: {error}") from error
    try:
        directory.remove_other_generations(root)
        return _open_writer(root, store_bytes), lock
    except BaseException:
        lock.release()
        raise


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


def _open_reader(root: Path, store_bytes: int, force: bool) -> Environment:
    generation = directory.current_generation(root)
    if generation is None:
        raise StoreError(f"there is no store at {root}")
    directory.check(root, force)
    return environment.acquire(generation, store_bytes, writer=False)
