"""Promises of `agentkv.models.cache`: made once, whole or not at all, and never believed when damaged."""

import logging
import os
import shutil

import pytest

from agentkv.models import resolve
from agentkv.models.cache import cache_directory, file_digest, made_once


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentkv" / "models"


def test_a_cached_model_is_made_once(home):
    first = resolve("tiny")
    stamp = (first.directory / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny") == first
    assert (first.directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert first.directory.parent == home == cache_directory()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "list", "empty"])
def test_a_damaged_cache_is_made_anew(home, damage, caplog):
    directory = resolve("tiny").directory
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    elif damage == "truncate":
        weights.write_bytes(whole[:100])
    elif damage == "remove":
        weights.unlink()
    elif damage == "list":
        (directory / "agentkv-files.json").write_text("{")
    else:
        shutil.rmtree(directory)
        directory.mkdir()
    with caplog.at_level(logging.WARNING, "agentkv.models"):
        assert resolve("tiny").directory == directory
    assert weights.read_bytes() == whole
    assert "damaged" in caplog.text
    assert [p.name for p in home.iterdir() if p.name.startswith(".")] == []


def test_a_failure_leaves_nothing_behind(home):
    def half(directory):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        made_once("half", half)
    assert list(home.iterdir()) == []


def test_two_makers_at_once_agree(home):
    """The second finishes while the first is still at it: one rename stands, and both return it."""

    def outer(directory):
        (directory / "by").write_text("outer")
        inner = made_once("both", lambda d: (d / "by").write_text("inner"))
        assert (inner / "by").read_text() == "inner"

    assert (made_once("both", outer) / "by").read_text() == "inner"
    assert sorted(os.listdir(home)) == ["both", "digests"]


def test_the_cache_follows_the_platforms_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, "", "relative/path"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "agentkv" / "models"


def test_digests_are_remembered_by_stat_and_never_believed_when_damaged(home, tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"one")
    digest = file_digest(file)
    remembered = next((home / "digests").iterdir())
    stat, kept = remembered.read_text().rsplit(" ", 1)
    assert kept == digest

    remembered.write_text(f"{stat} {'0' * 32}")
    assert file_digest(file) == "0" * 32  # believed: it was not read again
    for damage in ("", "x", f"{stat} nonsense", f"{stat} 00", "\ud7ff" * 9, f"0 {stat} {digest}"):
        remembered.write_text(damage)
        assert file_digest(file) == digest
    remembered.write_text(f"{stat} {'0' * 32}")
    size, mtime = file.stat().st_size, file.stat().st_mtime_ns
    file.write_bytes(b"two")
    os.utime(file, ns=(mtime, mtime))  # same size, same mtime: ctime tells
    assert file.stat().st_size == size
    assert file_digest(file) not in (digest, "0" * 32)
