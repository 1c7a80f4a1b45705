"""The parts that sessions work with. `manager.py` alone builds them; this file only names them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentkv.backends.base import Backend
from agentkv.backup import Backup
from agentkv.config import EngineConfig
from agentkv.executor import Executor
from agentkv.heads.base import Head
from agentkv.lanes import Lane
from agentkv.memory.keys import validate_id
from agentkv.memory.pages import PagePool
from agentkv.memory.record import PageCodec
from agentkv.memory.store import Store
from agentkv.room import Room
from agentkv.transcript import Transcript
from agentkv.types import Identity


@dataclass(frozen=True, slots=True)
class Engine:
    """One model on one device with one store. `compute` and `disk` are the lanes for the backend and the store."""

    config: EngineConfig
    on_mismatch: Literal["refuse", "recompute"]
    backend: Backend
    pool: PagePool
    compute: Lane
    disk: Lane
    executor: Executor
    store: Store
    codec: PageCodec
    backup: Backup
    identity: Identity
    tokenizer: Any
    transcript: Transcript
    end_ids: frozenset[int]
    new_head: Callable[[], Head]
    room: Room

    @staticmethod
    def validate_id(text: str) -> str:
        """A session id or namespace; raises InvalidSessionId."""
        return validate_id(text)
