"""The exception tree. Everything agentkv raises on purpose is an `AgentKVError`.

AgentKVError
├── InvalidInput (ValueError)        an argument or option that can never work
│   └── InvalidSessionId
├── NotSupported                     a documented option that this version does not have
├── ModelError
│   ├── ModelNotFound                no such directory, id or file
│   ├── UnsupportedModel             its layers, files or config cannot be run correctly
│   └── BackendUnavailable           nothing here serves this device, dtype or shape
├── TemplateError                    the chat template cannot render these items
├── SessionError
│   ├── SessionNotFound
│   ├── SessionBusy                  another step is writing to it
│   ├── StaleHead                    `expect=` is not the session's head
│   ├── CheckpointExpired            no longer kept
│   └── ContextOverflow              the step would pass the model's context
├── CapacityError                    the KV pool cannot hold it
├── IdentityMismatch                 stored under another model, tokenizer, template or format
├── StoreError
│   ├── StoreFull                    the previous commit stands
│   ├── StoreLocked                  another writer holds it
│   ├── StoreForked                  used in a forked child
│   ├── StoreUnsafe                  owner, permissions or file system
│   └── StoreDamaged                 bytes that fail their checksum
└── ManagerClosed
"""


class AgentKVError(Exception):
    """Base of every error agentkv raises on purpose."""


class InvalidInput(AgentKVError, ValueError):
    """An argument or option that can never work; nothing was changed."""


class InvalidSessionId(InvalidInput):
    """Session ids and namespaces are 1–128 characters of `[A-Za-z0-9._-]`, no leading dot."""


class NotSupported(AgentKVError):
    """A documented option that this version does not have."""


class ModelError(AgentKVError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """No such directory, hub id or file."""


class UnsupportedModel(ModelError):
    """Its layers, files or config cannot be run correctly; the message names the field."""


class BackendUnavailable(ModelError):
    """Nothing here serves this device, dtype or shape."""


class TemplateError(AgentKVError):
    """The chat template cannot render these items, or exceeds its time or size limit."""


class SessionError(AgentKVError):
    """The session cannot do this; its last commit stands."""


class SessionNotFound(SessionError):
    """No committed session has this id in this namespace."""


class SessionBusy(SessionError):
    """Another step, or another handle, is writing to the session."""


class StaleHead(SessionError):
    """`expect=` names another checkpoint than the session's head."""

    def __init__(self, expected: str, head: str) -> None:
        super().__init__(f"the session's head is {head!r}, not {expected!r}: the step was not run")
        self.expected = expected
        self.head = head


class CheckpointExpired(SessionError):
    """The checkpoint is no longer kept."""


class ContextOverflow(SessionError):
    """The step would pass the model's context length."""


class CapacityError(AgentKVError):
    """The KV pool cannot hold what the step needs."""


class IdentityMismatch(AgentKVError):
    """The session was stored under another identity.

    `field` is one of weights, adapter, config, dtype, page_size, tokenizer, template, format.
    """

    def __init__(self, field: str, stored: str, found: str) -> None:
        super().__init__(f"{field} differs: stored {stored}, found {found}")
        self.field = field
        self.stored = stored
        self.found = found


class StoreError(AgentKVError):
    """The store cannot do this; what was committed stands."""


class StoreFull(StoreError):
    """`store_bytes` is used up; the previous commit stands, and deletes still work."""


class StoreLocked(StoreError):
    """Another process, or another manager of this one, writes to the store."""


class StoreForked(StoreError):
    """The store was opened before `os.fork()`; open it in a new process."""


class StoreUnsafe(StoreError):
    """Owned by another user, or on a network file system."""


class StoreDamaged(StoreError):
    """Stored bytes are missing or fail their checksum."""


class ManagerClosed(AgentKVError):
    """The manager has been closed."""
