"""The only file that knows LMDB: opening a generation, transactions, counted bytes, error translation.

One writer's transactions come one at a time; readers see snapshots. Values are copied or decoded before a
transaction ends. It does not know what the values mean: `store.py` and `publish.py` do.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import lmdb

from agentkv.errors import IdentityMismatch, StoreError, StoreForked, StoreFull, StoreLocked
from agentkv.memory.space import cost, map_bytes, reserve_bytes

STORE_FORMAT: Final = 1


class Table(StrEnum):
    """LMDB databases of a store. Keys are those of `keys.py`, but for META's names."""

    META = "meta"
    RECORDS = "records"  # pages and tails, a value per layer group
    SEGMENTS = "segments"
    MANIFESTS = "manifests"
    SESSIONS = "sessions"
    PENDING = "pending"  # page keys written ahead of their manifest
    REFERENCES = "references"  # page key -> segments that name it; segment key -> manifests that name it


COUNTED: Final = (Table.RECORDS, Table.SEGMENTS, Table.MANIFESTS)
FORMAT_KEY: Final = b"format"
USED_KEY: Final = b"used"


class Transaction:
    """A read or write transaction. Views returned by `view` and `scan` die with it."""

    def __init__(self, raw: lmdb.Transaction, tables: dict[Table, lmdb._Database]) -> None:
        self._raw = raw
        self._tables = tables
        self._used = self.number(USED_KEY)

    @property
    def used_bytes(self) -> int:
        """Counted bytes, as of this transaction."""
        return self._used

    def view(self, table: Table, key: bytes) -> memoryview | None:
        """The value in the map, uncopied."""
        return self._raw.get(key, db=self._tables[table])  # pyright: ignore[reportReturnType]

    def get(self, table: Table, key: bytes) -> bytes | None:
        """A copy of the value."""
        view = self.view(table, key)
        return None if view is None else bytes(view)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Writes a value, over an older one if there is one."""
        self._uncount(table, key)
        if table in COUNTED:
            self._used += cost(len(key), len(value))
        self._raw.put(key, value, db=self._tables[table])

    def delete(self, table: Table, key: bytes) -> bool:
        """Whether there was something to delete."""
        self._uncount(table, key)
        return self._raw.delete(key, db=self._tables[table])

    def scan(self, table: Table, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Entries whose key begins with `prefix`, in order. The table must not change while it runs."""
        with self._raw.cursor(db=self._tables[table]) as cursor:
            found = cursor.set_range(prefix)
            while found:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    return
                yield key, cursor.value()  # pyright: ignore[reportReturnType]
                found = cursor.next()

    def number(self, key: bytes) -> int:
        """A counter of META, 0 if it was never set."""
        value = self.view(Table.META, key)
        return 0 if value is None else int.from_bytes(value, "big")

    def set_number(self, key: bytes, value: int) -> None:
        """Sets a counter of META."""
        self._raw.put(key, value.to_bytes(8, "big"), db=self._tables[Table.META])

    def entries(self, table: Table) -> int:
        """Number of entries."""
        return self._raw.stat(self._tables[table])["entries"]

    def live_bytes(self) -> int:
        """Bytes of LMDB pages in use by the tables."""
        total = 0
        for table in self._tables.values():
            stat = self._raw.stat(table)
            total += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return total

    def finish(self) -> None:
        """Stores the counted bytes; the last thing a write transaction does."""
        self.set_number(USED_KEY, self._used)

    def _uncount(self, table: Table, key: bytes) -> None:
        if table in COUNTED and (old := self.view(table, key)) is not None:
            self._used -= cost(len(key), len(old))


class Environment:
    """An open LMDB environment; shared by the stores of a process, because LMDB cannot open a file twice."""

    def __init__(self, generation: Path, store_bytes: int, writer: bool) -> None:
        data = generation / "data.mdb"
        file_bytes = data.stat().st_size if data.exists() else 0
        self.generation = generation
        self.writer = writer
        self.users = 0
        self.pid = os.getpid()
        self._reserve = reserve_bytes(store_bytes)
        with _translated():
            self._env = lmdb.open(
                str(generation),
                # 0: a reader takes the size that the writer chose.
                map_size=map_bytes(store_bytes, file_bytes) if writer else 0,
                readonly=not writer,
                create=writer,
                mode=0o600,
                max_dbs=len(Table),
                max_readers=512,
                metasync=False,
                meminit=False,
            )
        try:
            with _translated():
                # Slots of killed readers would keep their snapshots' pages for ever.
                self._env.reader_check()
                self._tables = {table: self._env.open_db(table.encode(), create=writer) for table in Table}
            self._check_format()
        except BaseException:
            self._env.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot."""
        with _translated(), self._env.begin(buffers=True) as raw:
            yield Transaction(raw, self._tables)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Commits when the block ends, keeps nothing when it raises."""
        with _translated(), self._env.begin(write=True, buffers=True) as raw:
            transaction = Transaction(raw, self._tables)
            yield transaction
            transaction.finish()

    def sync(self) -> None:
        """Makes everything committed durable: with `metasync=False` the newest meta page may not be yet."""
        with _translated():
            self._env.sync()

    def copy(self, generation: Path) -> None:
        """Writes what is live to a new directory, durably."""
        generation.mkdir(mode=0o700)
        with _translated():
            self._env.copy(str(generation), compact=True)
        for name in (generation / "data.mdb", generation):
            descriptor = os.open(name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        (generation / "data.mdb").chmod(0o600)

    def live_bytes(self) -> int:
        """Bytes of the pages in use by the tables."""
        with self.read() as transaction:
            return transaction.live_bytes()

    def file_bytes(self) -> int:
        """Bytes of the data file in use at most; it never shrinks."""
        with _translated():
            return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def require_room(self, transaction: Transaction, needed: int) -> None:
        """Raises `StoreFull` if writing `needed` bytes of pages could eat the reserve of the map.

        Past the line only recycled pages may serve, which LMDB has when no reader holds an older snapshot.
        """
        with _translated():
            info = self._env.info()
            file_bytes = self.file_bytes()
            if file_bytes + needed <= info["map_size"] - self._reserve:
                return
            free = file_bytes - transaction.live_bytes()
            if free < 2 * needed or _oldest_snapshot(self._env.readers()) < info["last_txnid"]:
                raise StoreFull("the store's file cannot grow further, and readers hold the freed pages")

    def close(self) -> None:
        """Closes the files."""
        self._env.close()

    def _check_format(self) -> None:
        with self.read() as transaction:
            found = transaction.number(FORMAT_KEY)
        if found == 0 and self.writer:
            with self.write() as transaction:
                transaction.set_number(FORMAT_KEY, STORE_FORMAT)
        elif found != STORE_FORMAT:
            raise IdentityMismatch("format", str(found), str(STORE_FORMAT))


_open: dict[Path, Environment] = {}
_open_lock = threading.Lock()


def acquire(generation: Path, store_bytes: int, writer: bool) -> Environment:
    """The process's environment of a generation, opened if need be. Each call needs one `release`."""
    with _open_lock:
        environment = _open.get(generation)
        if environment is not None and environment.pid != os.getpid():
            raise StoreForked(f"{generation} was open when this process was forked: open it in a new process")
        if environment is None:
            environment = _open[generation] = Environment(generation, store_bytes, writer)
        elif writer and not environment.writer:
            raise StoreLocked(f"this process already has {generation} open for reading: close that first")
        environment.users += 1
        return environment


def hold(environment: Environment) -> bool:
    """One more user of an open environment, to be released; False if it has been closed meanwhile."""
    with _open_lock:
        environment.users += environment.users > 0
        return environment.users > 0


def release(environment: Environment) -> None:
    """Closes the environment with its last user."""
    with _open_lock:
        environment.users -= 1
        if environment.users == 0:
            del _open[environment.generation]
            environment.close()


def _oldest_snapshot(readers: str) -> int:
    """From LMDB's table of readers: lines of pid, thread, and transaction id or "-"."""
    ids = [fields[2] for fields in (line.split() for line in readers.splitlines()) if len(fields) == 3]
    return min((int(number) for number in ids if number.isdigit()), default=1 << 63)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DiskError) as error:
        raise StoreFull(f"no room left for the store: {error}") from error
    except lmdb.Error as error:
        raise StoreError(f"LMDB: {error}") from error
