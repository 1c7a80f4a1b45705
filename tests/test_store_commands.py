"""`agentkv sessions` as a user runs it, beside a manager and without one."""

import asyncio
import json
from pathlib import Path

import pytest
from conftest import open_tiny
from prompts import noise_ids, tokens

from agentkv.cli import main

PROMPT = noise_ids(5, 100)


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    return ["--store", str(tmp_path)]


async def fill(path: Path) -> str:
    async with open_tiny(path) as manager:
        async with manager.session("a") as session:
            await session.step(PROMPT, decoding=tokens(4))
            digest = await session.digest()
            await session.step([1], decoding=tokens(4))
        async with manager.session("other", namespace="x") as session:
            await session.step([1, 2], decoding=tokens(2))
    return digest


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["sessions", *arguments])


async def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert await command(*arguments) == 0
    return capsys.readouterr().out


async def test_sessions_are_listed_shown_forked_rolled_back_and_removed(tmp_path, store, capsys):
    digest = await fill(tmp_path)
    assert [info["id"] for info in json.loads(await output(capsys, "ls", "--json", *store))] == ["a"]
    assert [i["id"] for i in json.loads(await output(capsys, "ls", "--json", "--namespace", "x", *store))] == ["other"]
    assert "a@2" in await output(capsys, "ls", *store)
    shown = json.loads(await output(capsys, "show", "a", "--json", *store))
    assert [each["id"] for each in shown["checkpoints"]] == ["a@1", "a@2"]
    assert (shown["head"], shown["parent"], shown["tokens"]) == ("a@2", "a@1", len(PROMPT) + 9)
    assert "a@1" in await output(capsys, "show", "a", *store)
    assert await output(capsys, "fork", "a", "b", "--at", "a@1", *store) == "b@1\n"
    assert await output(capsys, "rollback", "a", "a@1", *store) == "a@3\n"
    async with open_tiny(tmp_path) as manager:
        for name in ("a", "b"):
            async with manager.session(name, create=False) as session:
                assert await session.digest() == digest
    assert await output(capsys, "rm", "b", *store) == ""
    assert [info["id"] for info in json.loads(await output(capsys, "ls", "--json", *store))] == ["a"]


async def test_reading_goes_on_beside_a_manager_and_changing_does_not(tmp_path, store, capsys):
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        await session.step(PROMPT, decoding=tokens(4))
        assert "a@1" in await output(capsys, "ls", *store)
        assert await command("rm", "a", *store) == 1
        assert "writes to" in capsys.readouterr().err
        await session.step([1], decoding=tokens(4))
        assert session.head == "a@2"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "nobody"], ["fork", "a", "a"], ["fork", "a", "../b"], ["fork", "a", "b", "--at", "a@9"],
        ["rollback", "a", "b@1"], ["rm", "nobody"], ["ls", "--namespace", ".."],
    ],
)  # fmt: skip
async def test_errors_are_one_line_and_exit_1(tmp_path, store, capsys, arguments):
    await fill(tmp_path)
    assert await command(*arguments, *store) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("agentkv: ")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_store_that_is_not_there_is_not_made(tmp_path, capsys):
    for arguments in (["ls"], ["rm", "a"]):
        assert main(["sessions", *arguments, "--store", str(tmp_path / "none")]) == 1
    assert "no store" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
