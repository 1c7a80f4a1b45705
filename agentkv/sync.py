"""The blocking facade: the names of `agentkv` without `await`, over an event loop in a thread of its own.

    with agentkv.sync.open("smollm2", store="~/.agentkv") as manager:
        with manager.session("ticket-812") as session:
            print(session.step("Why does the build fail?").text)

Calls may come from any thread; those of one session one at a time (SessionBusy otherwise). Ctrl-C in a step cancels it.
"""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

import agentkv
from agentkv import SessionInfo, StepResult, StreamEvent

_T = TypeVar("_T")


@contextmanager
def open(model: Any = "smollm2", **options: Any) -> "Iterator[SessionManager]":
    """A blocking `SessionManager`; arguments and errors are those of `agentkv.open`. Use in a `with` statement."""
    with (
        start_blocking_portal(name="agentkv") as portal,
        portal.wrap_async_context_manager(agentkv.open(model, **options)) as manager,
    ):
        yield SessionManager(portal, manager)


class SessionManager:
    """`agentkv.SessionManager`, blocking."""

    def __init__(self, portal: BlockingPortal, manager: agentkv.SessionManager) -> None:
        self._portal = portal
        self._manager = manager

    @contextmanager
    def session(self, id: str | None = None, **options: Any) -> "Iterator[Session]":
        """See `agentkv.SessionManager.session`."""
        opening = self._portal.call(partial(self._manager.session, id, **options))
        with self._portal.wrap_async_context_manager(opening) as session:
            yield Session(self._portal, session)

    def sessions(self, namespace: str = "default") -> list[SessionInfo]:
        """See `agentkv.SessionManager.sessions`."""
        return _call(self._portal, self._manager.sessions, namespace)

    def delete(self, id: str, namespace: str = "default") -> None:
        """See `agentkv.SessionManager.delete`."""
        _call(self._portal, self._manager.delete, id, namespace)

    def compact(self) -> tuple[int, int]:
        """See `agentkv.SessionManager.compact`."""
        return _call(self._portal, self._manager.compact)

    def statistics(self) -> dict[str, Any]:
        """See `agentkv.SessionManager.statistics`."""
        return self._portal.call(self._manager.statistics)


class Session:
    """`agentkv.Session`, blocking."""

    def __init__(self, portal: BlockingPortal, session: agentkv.Session) -> None:
        self._portal = portal
        self._session = session
        self.id = session.id
        self.namespace = session.namespace

    @property
    def head(self) -> str:
        """See `agentkv.Session.head`."""
        return self._session.head

    @property
    def token_ids(self) -> tuple[int, ...]:
        """See `agentkv.Session.token_ids`."""
        return self._session.token_ids

    def step(self, input: Any, **options: Any) -> StepResult:
        """See `agentkv.Session.step`."""
        with self.stream(input, **options) as stream:
            for _ in stream:
                pass
        assert stream.result is not None
        return stream.result

    def stream(self, input: Any, **options: Any) -> "Stream":
        """See `agentkv.Session.stream`; iterate it inside a `with` statement."""
        return Stream(self._portal, self._portal.call(partial(self._session.stream, input, **options)))

    def checkpoint(self) -> str:
        """See `agentkv.Session.checkpoint`."""
        return _call(self._portal, self._session.checkpoint)

    def fork(self, new_id: str, at: str | None = None) -> str:
        """See `agentkv.Session.fork`."""
        return _call(self._portal, self._session.fork, new_id, at)

    def rollback(self, checkpoint: str) -> str:
        """See `agentkv.Session.rollback`."""
        return _call(self._portal, self._session.rollback, checkpoint)

    def digest(self) -> str:
        """See `agentkv.Session.digest`."""
        return _call(self._portal, self._session.digest)

    def sleep(self) -> None:
        """See `agentkv.Session.sleep`."""
        _call(self._portal, self._session.sleep)


class Stream:
    """`agentkv.Stream`, blocking: `with session.stream(...) as stream: for event in stream`."""

    def __init__(self, portal: BlockingPortal, stream: agentkv.Stream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def result(self) -> StepResult | None:
        """See `agentkv.Stream.result`."""
        return self._stream.result

    def __enter__(self) -> Self:
        try:
            _call(self._portal, self._stream.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        try:
            return _call(self._portal, self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Cancel the step if it has not been committed. Idempotent."""
        _call(self._portal, self._stream.aclose)


def _call(portal: BlockingPortal, function: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
    """Run `function` on the loop; a Ctrl-C while it is awaited cancels it there."""
    future = portal.start_task_soon(function, *arguments)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
