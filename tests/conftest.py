"""Shared fixtures: one loaded SmolLM2 for the whole run, tiny managers per test, and a watch on the event loop.

All tests and async fixtures share one event loop (pyproject.toml), so that the loaded model can be shared too.
"""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from blockbuster import BlockBuster, blockbuster_ctx

import agentkv
from agentkv import EngineConfig, SessionManager, SpeculationConfig


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """Blocking calls made by agentkv on the event loop raise."""
    with blockbuster_ctx("agentkv") as blockbuster:
        yield blockbuster


@pytest.fixture(scope="session", autouse=True)
def pinned_threads() -> None:
    torch.set_num_threads(2)


@pytest_asyncio.fixture(scope="session")
async def smol(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SessionManager]:
    """SmolLM2 over a temporary store, opened once."""
    config = EngineConfig(threads=2)
    async with agentkv.open("smollm2", store=tmp_path_factory.mktemp("smol"), config=config) as manager:
        yield manager


@pytest.fixture(scope="session")
def reference() -> Any:
    """SmolLM2 as plain transformers runs it, for `generate` (pass attention_mask: the prompt holds the pad token)."""
    from agentkv.models import load_model, resolve

    return load_model(resolve("smollm2"))


@asynccontextmanager
async def open_tiny(store: Path, model: str | Path = "tiny", **options: Any) -> AsyncIterator[SessionManager]:
    """The tiny model over `store`, on one thread. `options`: fields of EngineConfig, or arguments of agentkv.open."""
    arguments = {name: options.pop(name) for name in ("on_mismatch",) if name in options}
    config = EngineConfig(**{"threads": 1, "kv_bytes": 64 << 20, "store_bytes": 256 << 20} | options)
    async with agentkv.open(model, store=store, config=config, **arguments) as manager:
        yield manager


@contextmanager
def speculating(session: agentkv.Session, **options: Any) -> Iterator[None]:
    """Give one open session other SpeculationConfig options for a while (a manager has one for all)."""
    before = session._engine
    config = EngineConfig(threads=before.config.threads, speculation=SpeculationConfig(**options))
    session._engine = dataclasses.replace(before, config=config)
    try:
        yield
    finally:
        session._engine = before


def source_text(module: Any, start: int = 0, characters: int | None = None) -> str:
    """Real text: the source of an installed module."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    return text[start : None if characters is None else start + characters]
