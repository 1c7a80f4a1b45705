"""agentkv: agent sessions whose KV cache lives across turns, processes and memory tiers.

    async with agentkv.open("smollm2", store="~/.agentkv") as manager:
        async with manager.session("ticket-812") as session:
            result = await session.step("Why does the build fail?")

Importing this package loads neither torch, transformers nor lmdb; opening a manager does, off the event loop.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentkv.config import DecodingConfig, EngineConfig, Every, Mode, SpeculationConfig, Tolerant
from agentkv.errors import (
    AgentKVError,
    BackendUnavailable,
    CapacityError,
    CheckpointExpired,
    ContextOverflow,
    IdentityMismatch,
    InvalidInput,
    InvalidSessionId,
    ManagerClosed,
    ModelError,
    ModelNotFound,
    NotSupported,
    SessionBusy,
    SessionError,
    SessionNotFound,
    StaleHead,
    StoreDamaged,
    StoreError,
    StoreForked,
    StoreFull,
    StoreLocked,
    StoreUnsafe,
    TemplateError,
    UnsupportedModel,
)
from agentkv.manager import SessionManager
from agentkv.types import (
    CheckpointInfo,
    Done,
    Event,
    Item,
    Round,
    SessionDetails,
    SessionInfo,
    StepResult,
    StreamEvent,
    Text,
    Trace,
    Usage,
)

if TYPE_CHECKING:
    from agentkv.models import Progress
    from agentkv.offline import SessionStore
    from agentkv.session import Session
    from agentkv.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "AgentKVError",
    "BackendUnavailable",
    "CapacityError",
    "CheckpointExpired",
    "CheckpointInfo",
    "ContextOverflow",
    "DecodingConfig",
    "Done",
    "EngineConfig",
    "Event",
    "Every",
    "IdentityMismatch",
    "InvalidInput",
    "InvalidSessionId",
    "Item",
    "ManagerClosed",
    "Mode",
    "ModelError",
    "ModelNotFound",
    "NotSupported",
    "Round",
    "Session",
    "SessionBusy",
    "SessionDetails",
    "SessionError",
    "SessionInfo",
    "SessionManager",
    "SessionNotFound",
    "SessionStore",
    "SpeculationConfig",
    "StaleHead",
    "StepResult",
    "StoreDamaged",
    "StoreError",
    "StoreForked",
    "StoreFull",
    "StoreLocked",
    "StoreUnsafe",
    "Stream",
    "StreamEvent",
    "TemplateError",
    "Text",
    "Tolerant",
    "Trace",
    "UnsupportedModel",
    "Usage",
    "open",
    "open_store",
]


def open(
    model: str | Path = "smollm2",
    *,
    store: str | Path | None = None,
    config: EngineConfig | None = None,
    on_mismatch: Literal["refuse", "recompute"] = "refuse",
    progress: "Progress | None" = None,
) -> SessionManager:
    """A manager of sessions of `model`, to be used as `async with agentkv.open(...) as manager`.

    `model`: "smollm2" (embedded: fetched and converted once), "tiny" (a seeded random test double), a directory, or a
    Hugging Face id "org/name[@revision]". `store`: a directory, made if need be (None: a temporary one, which says so).
    `on_mismatch="recompute"`: sessions of another model are recomputed from their token ids instead of refused.
    `progress.update(stage, done, total)` is told about downloads, conversion and the like.
    """
    return SessionManager(
        model, store=store, config=config or EngineConfig(), on_mismatch=on_mismatch, progress=progress
    )


def open_store(path: str | Path, *, write: bool = False, store_bytes: int | None = None) -> "SessionStore":
    """The store at `path` without a model, to look at or change its sessions: `with agentkv.open_store(path) as store`.

    Reading goes on beside a manager; `write=True` makes it the one writer. `store_bytes`: as in `EngineConfig`.
    Raises StoreError where there is no store, StoreLocked, StoreUnsafe.
    """
    from agentkv.offline import open_existing

    return open_existing(path, write=write, store_bytes=store_bytes)


def __getattr__(name: str) -> Any:
    """Public names whose modules need torch or lmdb: loaded when asked for."""
    if name == "SessionStore":
        from agentkv.offline import SessionStore

        return SessionStore
    if name == "Session":
        from agentkv.session import Session

        return Session
    if name == "Stream":
        from agentkv.stream import Stream

        return Stream
    raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
