"""Shared fixtures: one loaded SmolLM2 for the whole run, tiny managers per test, and a watch on the event loop.

All tests and async fixtures share one event loop (pyproject.toml), so that the loaded model can be shared too.
"""

import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from blockbuster import BlockBuster, blockbuster_ctx

import agentkv
from agentkv import EngineConfig, SessionManager, SpeculationConfig, StepResult
from agentkv.backends.base import Segment
from agentkv.result import step_result


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


@pytest.fixture(scope="session")
def tiny_reference() -> Any:
    """The tiny model as plain transformers runs it, with explicit attention."""
    from agentkv.models import load_model, resolve

    model = load_model(resolve("tiny"))
    model.set_attn_implementation("eager")
    return model


def kv_option(model: Any, cache: Any) -> dict[str, Any]:
    """A transformers cache as the keyword argument that this version takes (it was renamed)."""
    renamed = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


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


@contextmanager
def untimed(manager: SessionManager) -> Iterator[None]:
    """A controller that knows no times drafts as long as it may: what `exact` proposes depends on tokens alone."""
    controller = manager._engine.executor._controller
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "time", None)
        yield


def sparse(**options: Any) -> SpeculationConfig:
    """Sparse proposals alone, of four tokens over eight pages unless said otherwise."""
    return SpeculationConfig(**{"k": 4, "budget_pages": 8, "proposers": ("sparse",)} | options)


async def rehearse(session: agentkv.Session, input: Any, **options: Any) -> StepResult:
    """A step that is left before its commit: the result it had; the session goes back to its last commit."""
    async with session.stream(input, **options) as stream:
        generation = stream._generation
        assert generation is not None
        while await generation.next_update() is not None:
            pass
        return step_result(generation, stream, session.head)


@dataclasses.dataclass
class Forward:
    """A packed forward that was run: its segments, and logits per segment."""

    segments: list[Segment]
    logits: list[torch.Tensor]

    @property
    def tails(self) -> set[int]:
        """One per sequence (a prefill chunk and the rows behind it are two segments of one)."""
        return {segment.tail for segment in self.segments}

    @property
    def drafting(self) -> list[Segment]:
        """The segments that read a selection."""
        return [segment for segment in self.segments if segment.draft is not None]


@contextmanager
def recorded(manager: SessionManager) -> Iterator[list[Forward]]:
    """Every packed forward that the manager's backend runs meanwhile."""
    backend, forwards = manager._engine.backend, []

    def forward(segments: list[Segment]) -> list[torch.Tensor]:
        logits = type(backend).forward(backend, segments)
        forwards.append(Forward(list(segments), logits))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "forward", forward)
        yield forwards


def source_text(module: Any, start: int = 0, characters: int | None = None) -> str:
    """Real text: the source of an installed module."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    return text[start : None if characters is None else start + characters]
