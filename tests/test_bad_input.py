"""Bad input gets an error of the documented tree and loses nothing: same digest before and after, the next step works.

What a wrong model, store, argument or input is told. Options are in `test_options.py`, the store in `test_store*.py`.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from conftest import open_tiny

import agentkv
from agentkv import (
    AgentKVError,
    ContextOverflow,
    DecodingConfig,
    EngineConfig,
    Every,
    InvalidInput,
    InvalidSessionId,
    Item,
    ModelNotFound,
    NotSupported,
    Session,
    SessionBusy,
    SessionManager,
    SessionNotFound,
    StaleHead,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnsafe,
    Tolerant,
    UnsupportedModel,
)
from agentkv.errors import ManagerClosed, SessionError
from agentkv.models import write_tiny

SHORT = DecodingConfig(max_new_tokens=3, ignore_eos=True)


@pytest_asyncio.fixture(scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SessionManager]:
    async with open_tiny(tmp_path_factory.mktemp("tiny")) as manager:
        yield manager


@pytest_asyncio.fixture(scope="module")
async def session(tiny: SessionManager) -> AsyncIterator[Session]:
    """A session with a commit, used by many tests: each must leave it as it was."""
    async with tiny.session("victim") as session:
        await session.step([3, 1, 4, 1, 5] * 9, decoding=SHORT)
        yield session


async def refused(
    session: Session, error: type[AgentKVError], *args: Any, match: str | None = None, **options: Any
) -> None:
    """The step raises `error` and changes nothing: neither the session nor what it can do next."""
    head, digest = session.head, await session.digest()
    options = {"decoding": SHORT} | options
    with pytest.raises(error, match=match):
        await session.step(*args, **options)
    assert (session.head, await session.digest(), session.busy) == (head, digest, False)
    async with session.stream([7, 8], decoding=SHORT) as stream:  # left before its commit
        async for event in stream:
            if isinstance(event, agentkv.Text):
                break
    assert session.head == head
    session._engine.pool.check()


# Models


HYBRID_OR_RECURRENT = [
    {"model_type": "mamba", "state_size": 16},
    {"model_type": "rwkv", "attention_hidden_size": 64},
    {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
    {"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16},
    {"model_type": "llama", "layer_types": ["recurrent", "full_attention"]},
]
WINDOWS_OR_LATENT = [
    {"model_type": "mistral", "sliding_window": 1024},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024},
    {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536},
    {"model_type": "gpt_oss", "attention_chunk_size": 128},
]


def _directory(path: Path, config: dict[str, Any]) -> Path:
    write_tiny(path)
    fields = msgspec.json.decode((path / "config.json").read_bytes()) | config
    (path / "config.json").write_bytes(msgspec.json.encode(fields))
    return path


@pytest.mark.parametrize("config", HYBRID_OR_RECURRENT, ids=lambda config: config["model_type"])
async def test_c85_models_with_recurrent_state_are_refused(tmp_path, config):
    with pytest.raises(UnsupportedModel, match=r"recurrent|model_type|layer_types|not text"):
        async with open_tiny(tmp_path / "store", await asyncio.to_thread(_directory, tmp_path / "model", config)):
            pass


@pytest.mark.parametrize("config", WINDOWS_OR_LATENT, ids=lambda config: config["model_type"])
async def test_c86_models_with_windows_or_latent_attention_are_refused(tmp_path, config):
    with pytest.raises(UnsupportedModel, match=r"window|layer_types|latent|chunked"):
        async with open_tiny(tmp_path / "store", await asyncio.to_thread(_directory, tmp_path / "model", config)):
            pass


@pytest.mark.parametrize("model", ["nope", "./nope", "~nobody/model", "", "a/b/c", "x\0y"])
async def test_unknown_models(tmp_path, model):
    with pytest.raises(ModelNotFound):
        async with open_tiny(tmp_path / "store", model):
            pass
    async with open_tiny(tmp_path / "store") as manager:  # the store was let go of
        assert await manager.sessions() == []


# Sessions


BAD_IDS = ["", "a/b", "..", ".hidden", "a\\b", "a" * 300, "a" * 129, "ü", "a\0b", "a b", "a\n", "a@1", 3, b"a", ["a"]]


@pytest.mark.parametrize("name", BAD_IDS, ids=lambda name: repr(name)[:12])
async def test_bad_session_ids_and_namespaces(tiny, name):
    before = await tiny.sessions()
    for use in (lambda: tiny.session(name), lambda: tiny.session("fine", namespace=name)):
        with pytest.raises(InvalidSessionId):
            use()
    for call in (lambda: tiny.delete(name), lambda: tiny.delete("fine", name), lambda: tiny.sessions(name)):
        with pytest.raises(InvalidSessionId):
            await call()
    assert await tiny.sessions() == before


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "a" * 128, "-", "_"])
async def test_good_ids(tiny, name):
    async with tiny.session(name, namespace=name) as session:
        assert session.head == f"{name}@0"


@pytest.mark.parametrize(
    ("options", "error"),
    [({"reasoning": "drop"}, NotSupported), ({"tools": []}, NotSupported), ({"on_cancel": "ask"}, InvalidInput)],
)
async def test_session_options(tiny, options, error):
    with pytest.raises(error):
        tiny.session("a", **options)


async def test_a_session_is_open_once(tiny, session):
    with pytest.raises(SessionBusy):
        async with tiny.session(session.id):
            pass
    with pytest.raises(SessionBusy):
        await tiny.delete(session.id)
    await refused(session, StaleHead, [1], expect="victim@9")


async def test_sessions_that_are_not_there(tiny):
    with pytest.raises(SessionNotFound):
        await tiny.delete("missing")
    with pytest.raises(SessionNotFound):
        async with tiny.session("missing", create=False):
            pass
    async with tiny.session("missing"):
        pass
    with pytest.raises(SessionNotFound):  # number 0, the empty session, is not stored
        await tiny.delete("missing")


async def test_a_closed_session_and_a_closed_manager(tmp_path):
    async with open_tiny(tmp_path) as manager:
        async with manager.session("a") as session:
            await session.step([1, 2], decoding=SHORT)
        for use in (lambda: session.step([1]), session.digest):
            with pytest.raises(SessionError, match="closed"):
                await use()
    with pytest.raises(ManagerClosed):
        manager.session("a")
    with pytest.raises(ManagerClosed):
        async with manager:
            pass
    with pytest.raises(ManagerClosed):
        agentkv.open("tiny").session("a")


async def test_two_steps_at_once(tiny, session):
    head = session.head
    async with session.stream([1, 2], decoding=SHORT) as stream:
        for use in (lambda: session.step([5]), session.digest):
            with pytest.raises(SessionBusy):
                await use()
        events = [event async for event in stream]
    assert isinstance(events[-1], agentkv.Done)
    assert session.head != head


# Steps


@pytest.mark.parametrize(
    "given",
    [
        "", [], {}, None, 3, 1.5, b"bytes", ..., {1, 2}, range(3), [1.5], [True], [None], [[1]], [[]], [1, "a"],
        [-1], [10**6], [1 << 80], np.array([1.5]), np.array([[1]]), np.array(3), np.array([], dtype=int), "\ud800",
        [{"role": "user"}], {"role": "user", "content": "x"}, [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": "x", "more": 1}], [{"role": "user", "content": 3}], [Item("robot", "x")],  # type: ignore[arg-type]
        [Item("user", None)], [Item("user", "x", name=3)],  # type: ignore[arg-type]
    ],
    ids=lambda given: repr(given)[:40],
)  # fmt: skip
async def test_inputs_that_cannot_be_appended(session, given):
    await refused(session, InvalidInput, given)


@pytest.mark.parametrize(
    "options",
    [
        {"decoding": {"temperature": 1}}, {"decoding": 3}, {"mode": "fast"}, {"mode": None}, {"verify": 3},
        {"verify": 3, "mode": "exact"}, {"verify": Tolerant(2)}, {"verify": Every(2), "mode": "sparse"}, {"seed": -1},
        {"seed": True}, {"seed": 1.5}, {"seed": 1 << 64}, {"stop": 3}, {"stop": ""}, {"stop": ["a", ""]},
        {"stop": [1]}, {"decoding": DecodingConfig(logit_bias={10**7: 1.0})},
    ],
    ids=lambda options: str(options)[:60],
)  # fmt: skip
async def test_options_of_a_step_that_cannot_be(session, options):
    await refused(session, InvalidInput, "x", **options)


async def test_a_stale_head_runs_nothing(tiny, session):
    forwards = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny._engine.backend, "forward", forwards.append)
        for expect in ("victim@0", "other@1", "", 3):
            with pytest.raises(StaleHead) as caught:
                await session.step([1], expect=expect)
            assert caught.value.head == session.head
    assert forwards == []


async def test_the_models_context_is_a_limit(tmp_path):
    model = await asyncio.to_thread(write_tiny, tmp_path / "model", max_position_embeddings=160)
    endless = DecodingConfig(max_new_tokens=1000, ignore_eos=True)
    async with open_tiny(tmp_path / "store", model) as manager, manager.session("a") as session:
        for length in (160, 161, 1000):
            with pytest.raises(ContextOverflow, match="160"):
                await session.step([1] * length)
        await session.step([1] * 100, decoding=SHORT)
        for text in ([1] * 57, "word " * 200):
            await refused(session, ContextOverflow, text)
        result = await session.step([1] * 20, decoding=endless)
        assert result.finish_reason == "length"
        assert len(session.token_ids) == 160
        head, digest = session.head, await session.digest()
        with pytest.raises(ContextOverflow):
            await session.step([1])
        assert (session.head, await session.digest()) == (head, digest)


# Stores


async def test_a_second_writer(tmp_path):
    script = (
        "import asyncio, sys, agentkv\n"
        "async def main():\n"
        "    try:\n"
        "        async with agentkv.open('tiny', store=sys.argv[1]): print('opened')\n"
        "    except agentkv.AgentKVError as error: print(type(error).__name__)\n"
        "asyncio.run(main())\n"
    )
    async with open_tiny(tmp_path) as manager, manager.session("a") as session:
        await session.step([1, 2, 3], decoding=SHORT)
        run = [sys.executable, "-c", script, str(tmp_path)]
        other = await asyncio.to_thread(
            subprocess.run, run, capture_output=True, text=True, cwd=Path(agentkv.__file__).parents[1], timeout=120
        )
        assert other.stdout.strip() == "StoreLocked", other.stderr
        with pytest.raises(StoreLocked):
            async with open_tiny(tmp_path):
                pass
        await session.step([4], decoding=SHORT)


async def test_places_that_are_no_store(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, error in [
        (tmp_path / "file", StoreError),
        (tmp_path / "file" / "below", StoreError),
        ("a\0b", StoreError),
        ("~nobody-here/store", StoreError),
        (tmp_path, StoreUnsafe),
    ]:
        with pytest.raises(error):
            async with agentkv.open("tiny", store=path, config=EngineConfig(threads=1, kv_bytes=1 << 20)):
                pass
    assert (tmp_path / "file").read_text() == "x"


async def test_a_full_store(tmp_path):
    async with open_tiny(tmp_path, store_bytes=1 << 20) as manager:
        async with manager.session("other") as other:
            await other.step([9] * 320, decoding=SHORT)
        async with manager.session("a") as session:
            await session.step([1, 2] * 200, decoding=SHORT)
            await refused(session, StoreFull, [5, 6, 7] * 800)
            await manager.delete("other")
            await session.step([5, 6] * 160, decoding=SHORT)
            digest = await session.digest()
            await session.sleep()
            assert await session.digest() == digest
    async with open_tiny(tmp_path, store_bytes=1 << 20) as manager:
        assert [info.id for info in await manager.sessions()] == ["a"]


async def test_c21_the_map_is_resized_only_when_no_transaction_lives(tmp_path):
    """A reader of another process holds its snapshot while the store is opened larger and outgrows its old limit."""
    script = (
        "import sys\n"
        "from agentkv.memory.reader import read_store\n"
        "store = read_store(sys.argv[1])\n"
        "with store._env.read() as transaction:\n"
        "    before = transaction.used_bytes\n"
        "    print('reading', flush=True); sys.stdin.readline()\n"
        "    assert transaction.used_bytes == before and store.manifest('default', 'a').number >= 1\n"
        "    assert transaction.live_bytes() > 0\n"
        "print('sound' if store.verify() == [] else 'damaged')\n"
    )
    async with open_tiny(tmp_path, store_bytes=1 << 20) as manager, manager.session("a") as session:
        await session.step([1, 2] * 200, decoding=SHORT)
        digest = await session.digest()
        small = manager._engine.store._live()._env.info()["map_size"]
    child = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(agentkv.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "reading\n"
        async with open_tiny(tmp_path, store_bytes=16 << 20) as manager:
            large = manager._engine.store._live()._env.info()["map_size"]
            assert large > small
            async with manager.session("b") as session:
                await session.step([5, 6, 7] * 1000, decoding=SHORT)
            async with manager.session("a") as session:
                await session.step([1] * 30, decoding=SHORT)
            assert manager.statistics()["store"]["used_bytes"] > 2 << 20
            assert manager._engine.store._live()._env.info()["map_size"] == large
            output, _ = await asyncio.to_thread(child.communicate, "\n", 60)
            assert (output, child.returncode) == ("sound\n", 0)
            assert manager._engine.store.verify() == []
            assert digest
    finally:
        child.kill()
        child.wait()
