"""The session manager: what `agentkv.open` gives. It owns the engine and the open sessions.

`building.py` makes the parts, off the loop; importing this file is light, so the heavy imports happen there too.
"""

import logging
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

import anyio
import anyio.to_thread

from agentkv.config import EngineConfig
from agentkv.errors import AgentKVError, InvalidInput, ManagerClosed, NotSupported, SessionBusy
from agentkv.lanes import shielded
from agentkv.types import SessionInfo

if TYPE_CHECKING:
    from agentkv.engine import Engine
    from agentkv.models import Progress
    from agentkv.session import OnCancel, Session

_log = logging.getLogger("agentkv.manager")

OnMismatch = Literal["refuse", "recompute"]


class SessionManager:
    """Sessions of one model over one store. Use as `async with agentkv.open(...) as manager`."""

    def __init__(
        self,
        model: str | Path,
        *,
        store: str | Path | None,
        config: EngineConfig,
        on_mismatch: OnMismatch,
        progress: "Progress | None",
    ) -> None:
        if not isinstance(model, str | Path):
            raise InvalidInput(f"model must be a name or a path, not {model!r}")
        if not isinstance(store, str | Path | None):
            raise InvalidInput(f"store must be a path or None, not {store!r}")
        if not isinstance(config, EngineConfig):
            raise InvalidInput(f"config must be an EngineConfig, not {config!r}")
        if on_mismatch not in ("refuse", "recompute"):
            raise InvalidInput(f"on_mismatch must be 'refuse' or 'recompute', not {on_mismatch!r}")
        self.model = model
        self.config = config
        self._store = store
        self._on_mismatch: OnMismatch = on_mismatch
        self._progress = progress
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._sessions: dict[tuple[str, str], Session] = {}
        self._used = False
        self._closing = False
        self._closed_once = anyio.Lock()

    async def __aenter__(self) -> Self:
        """Load the model, open the store, start the loop. Raises ModelError, StoreError, IdentityMismatch."""
        if self._used:
            raise ManagerClosed("a manager is entered once: call agentkv.open again")
        self._used = True
        stack = self._stack
        try:
            path = await self._store_path(stack)
            building = await anyio.to_thread.run_sync(_import_building)
            self._engine = await building.build_engine(
                stack, self.model, path, self.config, self._on_mismatch, self._reclaim, self._at_work, self._progress
            )
        except BaseException:
            await shielded(stack.aclose())
            raise
        stack.push_async_callback(self._close_sessions)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel steps in flight (they raise ManagerClosed), close sessions, lanes and the store. Idempotent."""
        self._closing = True
        await shielded(self._close())

    async def _close(self) -> None:
        async with self._closed_once:  # a second caller waits for the first
            try:
                await self._stack.aclose()
            finally:
                self._engine = None

    def session(
        self,
        id: str | None = None,
        *,
        create: bool = True,
        namespace: str = "default",
        reasoning: str = "keep",
        on_cancel: "OnCancel" = "rollback",
        tools: Any = None,
    ) -> "OpenSession":
        """A durable session, resumed or (with `create`) started: `async with manager.session(id) as session`.

        `id=None` makes one up. Raises InvalidSessionId, NotSupported; on entering SessionNotFound, SessionBusy,
        IdentityMismatch.
        """
        if reasoning != "keep":
            raise NotSupported(f"reasoning={reasoning!r}: this version keeps reasoning in the session")
        if tools is not None:
            raise NotSupported("tools=: this version does not render tools")
        if on_cancel not in ("rollback", "keep"):
            raise InvalidInput(f"on_cancel must be 'rollback' or 'keep', not {on_cancel!r}")
        engine = self._require_engine()
        from agentkv.session import Session

        engine.validate_id(namespace)
        name = engine.validate_id(uuid4().hex if id is None else id)
        return OpenSession(self._sessions, Session(engine, name, namespace, on_cancel, reasoning), create)

    async def sessions(self, namespace: str = "default") -> list[SessionInfo]:
        """Committed sessions of a namespace, by id."""
        engine = self._require_engine()
        return await engine.disk.run(engine.store.sessions, engine.validate_id(namespace))

    async def delete(self, id: str, namespace: str = "default") -> None:
        """Delete a session and every checkpoint of it. Raises SessionNotFound, SessionBusy while it is open."""
        engine = self._require_engine()
        engine.validate_id(namespace)
        if (namespace, engine.validate_id(id)) in self._sessions:
            raise SessionBusy(f"session {id!r} is open")
        await engine.disk.finish(engine.store.delete, namespace, id)

    async def compact(self) -> tuple[int, int]:
        """Give the bytes of deleted sessions back to the disk; returns the data file's bytes before and after.

        Commits wait meanwhile. Raises StoreFull if the disk has no room for a copy of what is live.
        """
        engine = self._require_engine()
        return await engine.disk.finish(engine.store.compact)

    def statistics(self) -> dict[str, Any]:
        """A snapshot: sessions by state, pages, rounds in flight, the store's counts and bytes."""
        engine = self._require_engine()
        sessions = list(self._sessions.values())
        return {
            "sessions": {
                "open": len(sessions),
                "awake": sum(session.held_pages > 0 for session in sessions),
                "busy": sum(session.busy for session in sessions),
            },
            "pages": {"capacity": engine.pool.capacity, "held": engine.pool.held, "free": engine.pool.free},
            "executor": engine.executor.statistics(),
            "store": engine.store.statistics(),
        }

    async def _store_path(self, stack: AsyncExitStack) -> Path:
        if self._store is not None:
            return Path(self._store)
        directory = await anyio.to_thread.run_sync(lambda: tempfile.TemporaryDirectory(prefix="agentkv-"))
        stack.push_async_callback(anyio.to_thread.run_sync, directory.cleanup)
        _log.warning("no store= was given: sessions live in %s and are deleted on close", directory.name)
        return Path(directory.name)

    async def _reclaim(self, pages: int) -> None:
        """Put idle sessions to sleep, the longest unused first, until `pages` more are free or none is left."""
        engine = self._engine
        assert engine is not None
        goal = engine.pool.free + pages
        for session in sorted(self._sessions.values(), key=lambda session: session.last_used):
            if engine.pool.free >= goal:
                return
            await session.sleep()

    def _at_work(self) -> bool:
        return any(session.at_work for session in self._sessions.values())

    async def _close_sessions(self) -> None:
        # All at once: one may be waiting for room that another's end makes.
        async with anyio.create_task_group() as group:
            for session in self._sessions.values():
                group.start_soon(self._close_session, session)
        self._sessions.clear()

    async def _close_session(self, session: "Session") -> None:
        try:
            await session.close(ManagerClosed("the manager has been closed"))
        except AgentKVError:
            _log.exception("the step in flight of session %r could not be kept", session.id)

    def _require_engine(self) -> "Engine":
        if self._engine is None or self._closing:
            raise ManagerClosed("the manager is not open: use `async with agentkv.open(...)`")
        return self._engine


class OpenSession:
    """`async with manager.session(...) as session`: registers the handle, so that a session has one at a time."""

    def __init__(self, registry: "dict[tuple[str, str], Session]", session: "Session", create: bool) -> None:
        self._registry = registry
        self._session = session
        self._create = create
        self._key = (session.namespace, session.id)

    async def __aenter__(self) -> "Session":
        if self._key in self._registry:
            raise SessionBusy(f"session {self._session.id!r} is already open in this manager")
        self._registry[self._key] = self._session
        try:
            await self._session.open(self._create)
        except BaseException:
            del self._registry[self._key]
            raise
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._session.close()
        finally:
            if self._registry.get(self._key) is self._session:
                del self._registry[self._key]


def _import_building() -> Any:
    from agentkv import building

    return building
