"""Compaction: deleted bytes go back to the disk, killed anywhere nothing is lost, and readers never read wrong.

Run as a script it is the child process of its own tests (`python test_compact.py COMMAND DIRECTORY [POINT]`).
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from test_store import CODEC, ROOT, STORE_BYTES, make, payload, write

from agentkv.errors import StoreFull
from agentkv.memory.reader import StoreReader, read_store
from agentkv.memory.store import Store

POINTS = ("compact:begin", "compact:copied", "compact:named", "compact:removed")


def opened(path: Path) -> Store:
    return Store.open(path, store_bytes=STORE_BYTES)


def fill(store: Store, names: list[str]) -> None:
    for name in names:
        store.commit(make(name, None, write(store, 20), 3))


def require_sound(store: StoreReader, names: list[str]) -> None:
    assert [info.id for info in store.sessions("n")] == sorted(names)
    for name in names:
        manifest = store.manifest("n", name)
        records = store.contents(manifest).records
        for record, page in zip(records, store.read_pages("n", CODEC, records), strict=True):
            assert np.array_equal(page, payload(record))
        assert store.read_tail(manifest, CODEC).shape[1] == 3 * CODEC.row_bytes


def generations(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.glob("gen-*"))


def child(command: str, path: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    line = [sys.executable, __file__, command, str(path), *arguments]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_c28_deleted_sessions_give_their_bytes_back(tmp_path):
    store = opened(tmp_path)
    names = [f"s{n:02}" for n in range(30)]
    fill(store, names)
    for name in names[3:]:
        store.delete("n", name)
    before, after = store.compact()
    assert after < before / 5
    assert (tmp_path / "gen-2" / "data.mdb").stat().st_size == after
    assert generations(tmp_path) == ["gen-2"]
    require_sound(store, names[:3])
    assert store.verify() == []
    fill(store, ["new"])
    assert store.compact()[1] > after
    store.close()
    store = opened(tmp_path)
    require_sound(store, [*names[:3], "new"])
    store.close()


def test_what_was_written_ahead_survives_a_compaction(tmp_path):
    store = opened(tmp_path)
    pages = write(store, 4)
    store.compact()
    store.commit(make("a", None, pages, 3))
    require_sound(store, ["a"])
    assert store.verify() == []
    store.close()


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_the_old_or_the_new_generation_opens(tmp_path, point):
    store = opened(tmp_path)
    fill(store, ["a", "b", "c"])
    store.delete("n", "b")
    store.close()
    with child("killed", tmp_path, point) as killed:
        assert killed.wait(timeout=60) == -signal.SIGKILL
    store = opened(tmp_path)
    assert len(generations(tmp_path)) == 1
    require_sound(store, ["a", "c"])
    assert store.verify() == []
    store.compact()
    require_sound(store, ["a", "c"])
    store.close()


def test_a_full_disk_is_said_beforehand(tmp_path, monkeypatch):
    store = opened(tmp_path)
    fill(store, ["a"])

    class Usage(NamedTuple):
        free: int = 1 << 20

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(StoreFull, match="free"):
        store.compact()
    assert generations(tmp_path) == ["gen-1"]
    require_sound(store, ["a"])
    store.close()


def test_a_copy_that_fails_leaves_the_store_as_it_was(tmp_path):
    store = opened(tmp_path)
    fill(store, ["a"])

    def fail(point: str) -> None:
        if point == "compact:copied":
            raise OSError("the disk is gone")

    store.hook = fail
    with pytest.raises(OSError, match="gone"):
        store.compact()
    store.hook = None
    assert generations(tmp_path) == ["gen-1"]
    require_sound(store, ["a"])
    store.close()


def test_a_reader_of_another_process_reads_right_through_twenty_compactions(tmp_path):
    store = opened(tmp_path)
    fill(store, ["a", "b"])
    with child("read", tmp_path) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        for turn in range(20):
            fill(store, [f"t{turn}"])
            if turn:
                store.delete("n", f"t{turn - 1}")
            store.compact()
            reader.stdin.write(f"t{turn}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"sound t{turn}\n"
    assert reader.returncode == 0
    store.compact()
    assert generations(tmp_path) == ["gen-22"], "the last reader is gone, and with it the generations it held"
    store.close()


def test_a_generation_that_is_being_read_stays_until_then(tmp_path):
    store = opened(tmp_path)
    fill(store, ["a"])
    reader = read_store(tmp_path)
    with reader._read() as snapshot:
        store.compact()
        assert generations(tmp_path) == ["gen-1", "gen-2"]
        assert snapshot.used_bytes > 0
    require_sound(reader, ["a"])
    store.compact()
    assert generations(tmp_path) == ["gen-2", "gen-3"]
    reader.close()
    store.close()
    opened(tmp_path).close()
    assert generations(tmp_path) == ["gen-3"]


def main() -> None:
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "killed":
        store = opened(path)
        store.hook = lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == sys.argv[3] else None
        store.compact()
    else:
        reader = read_store(path)
        for line in sys.stdin:
            require_sound(reader, ["a", "b", line.strip()])
            print("sound", line.strip(), flush=True)
        reader.close()


if __name__ == "__main__":
    main()
