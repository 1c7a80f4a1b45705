"""A store without its model: list, show, fork, roll back and delete sessions. Blocking; for tools and scripts.

Reading goes on beside a manager that has the store open; changing it needs the writer's lock, as a manager does.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from agentkv.config import EngineConfig
from agentkv.errors import InvalidInput, StoreError
from agentkv.memory.keys import parse_checkpoint, validate_id
from agentkv.memory.manifest import Manifest
from agentkv.memory.reader import StoreReader, read_store
from agentkv.memory.store import Store
from agentkv.memory.transport import export_session, import_session
from agentkv.types import CheckpointInfo, SessionDetails, SessionInfo


class SessionStore:
    """What `agentkv.open_store` gives: `with agentkv.open_store(path) as store`."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self._reader.close()

    def sessions(self, namespace: str = "default") -> list[SessionInfo]:
        """Committed sessions of a namespace, by id."""
        return self._reader.sessions(validate_id(namespace))

    def session(self, id: str, namespace: str = "default") -> SessionDetails:
        """One session: its checkpoints, who computed its KV, its transcript's spans. Raises SessionNotFound."""
        head = self._reader.manifest(validate_id(namespace), validate_id(id))
        checkpoints = self._reader.checkpoints(namespace, id)
        return SessionDetails(
            id=id,
            namespace=namespace,
            head=head.checkpoint,
            parent=head.parent,
            tokens=head.tokens,
            kv_len=head.kv_len,
            kv_durable_len=head.kv_durable_len,
            bytes=head.stored_bytes,
            identity=head.identity,
            reasoning=head.reasoning,
            finish_reason=head.finish_reason,
            checkpoints=tuple(
                CheckpointInfo(f"{id}@{each.number}", each.tokens, each.pinned, each.created_at) for each in checkpoints
            ),
            spans=tuple(self._reader.contents(head).spans),
        )

    def fork(self, id: str, new_id: str, at: str | None = None, namespace: str = "default") -> str:
        """Start session `new_id` from the head of `id` or from its checkpoint `at`; returns the new head."""
        if validate_id(new_id) == id:
            raise InvalidInput(f"a fork of {id!r} needs an id of its own")
        return self._writer.branch(self._kept(namespace, id, at), new_id, time.time()).checkpoint

    def rollback(self, id: str, checkpoint: str, namespace: str = "default") -> str:
        """Go back to a checkpoint, which is a commit, too; returns the new head."""
        return self._writer.branch(self._kept(namespace, id, checkpoint), id, time.time()).checkpoint

    def delete(self, id: str, namespace: str = "default") -> None:
        """Delete a session and every checkpoint of it. Raises SessionNotFound."""
        self._writer.delete(validate_id(namespace), validate_id(id))

    def export(self, id: str, path: str | Path, at: str | None = None, namespace: str = "default") -> None:
        """Write a session's head, or its checkpoint `at`, to one file. Raises InvalidInput if `path` exists."""
        export_session(self._reader, self._kept(namespace, id, at), Path(path))

    def import_(
        self, path: str | Path, id: str | None = None, *, trust_kv: bool = False, namespace: str = "default"
    ) -> str:
        """Make a session of an exported one; returns its head. `id`: another than it had.

        Its KV is computed anew by its next step, unless `trust_kv` takes what the file holds: that KV steers what the
        model says, so take it only from those whose word you take. Raises StoreDamaged for a file that is not what it
        claims, InvalidInput if there is such a session, StoreFull; nothing is written then.
        """
        validate_id(namespace)
        options = {"trust_kv": trust_kv, "created_at": time.time()}
        return import_session(self._writer, Path(path), namespace, id, **options).checkpoint

    def compact(self) -> tuple[int, int]:
        """Give the bytes of what was deleted back to the disk; returns the data file's bytes before and after.

        Raises StoreFull if the disk has no room for a copy of what is live.
        """
        return self._writer.compact()

    def _kept(self, namespace: str, id: str, checkpoint: str | None) -> Manifest:
        validate_id(namespace)
        if checkpoint is None:
            return self._reader.manifest(namespace, validate_id(id))
        session, number = parse_checkpoint(checkpoint)
        if session != id:
            raise InvalidInput(f"{checkpoint} is no checkpoint of session {id!r}")
        return self._reader.manifest(namespace, id, number)

    @property
    def _writer(self) -> Store:
        if not isinstance(self._reader, Store):
            raise StoreError("the store is open for reading only")
        return self._reader


def open_existing(path: str | Path, *, write: bool, store_bytes: int | None) -> SessionStore:
    """See `agentkv.open_store`."""
    if not write:
        return SessionStore(read_store(path))
    read_store(path).close()  # opening as a writer would make a new store
    limit = EngineConfig().store_bytes if store_bytes is None else store_bytes
    return SessionStore(Store.open(path, store_bytes=limit, keep_checkpoints=EngineConfig().keep_checkpoints))
