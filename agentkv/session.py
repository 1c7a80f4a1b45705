"""A session: the durable handle of one conversation. One writer at a time; a step is a transaction.

`step` and `stream` begin a generation (`generation.py`), let the executor advance it, and commit: the manifest
transaction is shielded, and `head` says which commit the session is at. `waking.py` brings its KV into memory.
"""

import logging
import time
from collections.abc import Sequence as Items
from typing import Literal

import anyio
import msgspec

from agentkv.config import MODES, PAGE_TOKENS, DecodingConfig, Every, Mode, Tolerant
from agentkv.engine import Engine
from agentkv.errors import AgentKVError, InvalidInput, SessionBusy, SessionError, SessionNotFound, StaleHead
from agentkv.generation import Generation
from agentkv.lanes import shielded
from agentkv.memory.keys import checkpoint_name, parse_checkpoint
from agentkv.memory.manifest import Commit, Manifest, emptied
from agentkv.result import step_result
from agentkv.room import Room
from agentkv.starting import new_generation
from agentkv.stream import Stream
from agentkv.transcript import StepInput
from agentkv.types import Event, Span, StepResult
from agentkv.waking import Awake, Sidecar, check_identity, digest, truncate, wake

_log = logging.getLogger("agentkv.session")

OnCancel = Literal["rollback", "keep"]


class Session:
    """Use as `async with manager.session(id) as session`. All calls belong to one event loop.

    Cancelled at any await, the session equals its last commit (`on_cancel="rollback"`) or, with "keep", the last
    verified token, which is committed with `finish_reason="cancelled"`.
    """

    def __init__(self, engine: Engine, id: str, namespace: str, on_cancel: OnCancel, reasoning: str) -> None:
        self.id = id
        self.namespace = namespace
        self.last_used = time.monotonic()
        self._engine = engine
        self._on_cancel: OnCancel = on_cancel
        self._reasoning = reasoning
        self._manifest: Manifest | None = None
        self._awake: Awake | None = None
        self._stream: Stream | None = None
        self._waking = anyio.Lock()
        self._opened = False
        self._going_back = False
        self._closed_by: AgentKVError | None = None

    # The handle

    @property
    def head(self) -> str:
        """Id of the last commit (`session@number`; number 0 is the empty session)."""
        return self._manifest.checkpoint if self._manifest else checkpoint_name(self.id, 0)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids in memory: those of the last commit, and during a step what it has appended. () while asleep."""
        return tuple(self._awake.sequence.token_ids) if self._awake else ()

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return self._stream is not None

    @property
    def room(self) -> Room:
        """The promises over the KV pool that it takes part in."""
        return self._engine.room

    @property
    def at_work(self) -> bool:
        """Whether it holds pages for a step that goes on by itself (its end frees them)."""
        return self._stream is not None and self._stream.at_work and self.held_pages > 0

    @property
    def held_pages(self) -> int:
        """Pages of the KV pool that the session holds; 0 while it is asleep."""
        return len(self._awake.sequence.table) if self._awake else 0

    async def open(self, create: bool) -> None:
        """Read the head (the manager calls this). Raises SessionNotFound, IdentityMismatch."""
        engine = self._engine
        try:
            self._manifest = await engine.disk.run(engine.store.manifest, self.namespace, self.id)
        except SessionNotFound:
            if not create:
                raise
        else:
            check_identity(self._manifest.identity, engine)
        self._opened = True

    async def step(
        self,
        input: StepInput,
        *,
        decoding: DecodingConfig | None = None,
        mode: Mode = "auto",
        verify: Tolerant | Every | None = None,
        seed: int | None = None,
        stop: str | Items[str] | None = None,
        expect: str | None = None,
    ) -> StepResult:
        """Append `input`, generate until a stop, commit, and return the result.

        `input`: text of a user turn, items (role, content; tool results), or token ids, appended verbatim.
        `expect`: the head this step builds on (StaleHead otherwise, nothing run). `seed`: 64 bits; None draws one.
        Raises InvalidInput, ContextOverflow, CapacityError, SessionBusy, StoreFull; the last commit then stands.
        """
        async with self.stream(
            input, decoding=decoding, mode=mode, verify=verify, seed=seed, stop=stop, expect=expect
        ) as stream:
            async for _ in stream:
                pass
        assert stream.result is not None
        return stream.result

    def stream(
        self,
        input: StepInput,
        *,
        decoding: DecodingConfig | None = None,
        mode: Mode = "auto",
        verify: Tolerant | Every | None = None,
        seed: int | None = None,
        stop: str | Items[str] | None = None,
        expect: str | None = None,
    ) -> Stream:
        """The same step as an async iterator of frozen events: Text, Round and, once committed, Done.

        Use as `async with session.stream(...) as stream`; leaving it early cancels the step.
        """
        if mode not in MODES:
            raise InvalidInput(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if verify is not None and mode != "exact":
            raise InvalidInput("verify= loosens mode='exact' and goes with no other mode")
        if not isinstance(verify, Tolerant | Every | None):
            raise InvalidInput(f"verify must be Tolerant(n) or Every(n), not {verify!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise InvalidInput(f"seed must be a whole number of 64 bits, not {seed!r}")
        decoding = DecodingConfig() if decoding is None else decoding
        if not isinstance(decoding, DecodingConfig):
            raise InvalidInput(f"decoding must be a DecodingConfig, not {decoding!r}")
        stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
        if not isinstance(stops, list | tuple):
            raise InvalidInput(f"stop must be a string or a list of strings, not {stop!r}")
        return Stream(self, input, decoding, mode, verify, seed, tuple(stops), expect)

    async def digest(self) -> str:
        """xxh3-128 (hex) over the token ids and every KV byte of the last commit, loading it if need be."""
        self._require_free()
        awake = await self._wake()
        return await self._engine.compute.run(digest, self._engine, awake)

    async def checkpoint(self) -> str:
        """Keep the last commit until the session is deleted, however many follow; returns its id.

        Raises SessionError if nothing has been committed.
        """
        manifest = self._require_commit()
        pinned = await shielded(self._engine.disk.run(self._engine.store.pin, manifest))
        if self._manifest is manifest:
            self._manifest = pinned
        return pinned.checkpoint

    async def fork(self, new_id: str, at: str | None = None) -> str:
        """Start session `new_id` from this one's last commit, or from checkpoint `at`; returns its head.

        Pages are shared, in the store and in memory. During a step it is the commit before it that is forked.
        Raises InvalidInput if there is a session `new_id`, CheckpointExpired, SessionError if nothing is committed.
        """
        engine = self._engine
        if engine.validate_id(new_id) == self.id:
            raise InvalidInput(f"a fork of {self.id!r} needs an id of its own")
        source = self._require_commit() if at is None else await self._kept(at)
        forked = await shielded(engine.disk.run(engine.store.branch, source, new_id, time.time()))
        return forked.checkpoint

    async def rollback(self, checkpoint: str) -> str:
        """Go back to a checkpoint of this session. That is a commit, too: a new head, which is returned, with the
        tokens, KV and sidecars of the old one. (Number 0, the head of a session without commits, empties it.)

        Raises SessionBusy, CheckpointExpired, InvalidInput, StoreFull.
        """
        self._require_free()
        self._going_back = True  # nobody may build on the old head meanwhile
        try:
            empty = checkpoint == checkpoint_name(self.id, 0)
            source = None if empty else await self._kept(checkpoint)
            async with self._waking:
                await shielded(self._branch_back(source))
        finally:
            self._going_back = False
        return self.head

    async def _branch_back(self, source: Manifest | None) -> None:
        engine, now = self._engine, time.time()
        if source is not None:
            self._manifest = await engine.disk.run(engine.store.branch, source, self.id, now)
        elif self._manifest is not None:
            empty = emptied(self._manifest, engine.identity, now)
            self._manifest = await engine.disk.run(engine.store.commit, empty)
        if self._awake is not None:
            before, self._awake = self._awake, None
            try:
                self._awake = await wake(engine, self._manifest)  # while `before` still holds the pages they share
            except AgentKVError:
                _log.warning("session %r went back and is asleep", self.id, exc_info=True)
            finally:
                await self._let_go(before)

    async def _kept(self, checkpoint: str) -> Manifest:
        """The manifest of a checkpoint of this session."""
        session, number = parse_checkpoint(checkpoint)
        if session != self.id:
            raise InvalidInput(f"{checkpoint} is no checkpoint of session {self.id!r}")
        return await self._engine.disk.run(self._engine.store.manifest, self.namespace, self.id, number)

    def _require_commit(self) -> Manifest:
        if not self._opened:
            raise self._closed_by or SessionError(f"session {self.id!r} is not open: use `async with`")
        if self._manifest is None:
            raise SessionError(f"session {self.id!r} has no commit yet")
        return self._manifest

    async def sleep(self) -> None:
        """Let go of all memory; the next step loads the last commit. No effect while a step is in flight."""
        if self._awake is not None and not self.busy:
            awake, self._awake = self._awake, None
            await shielded(self._let_go(awake))

    async def _let_go(self, awake: Awake) -> None:
        await self._engine.backup.drop(self.namespace, awake.sequence.table.records[awake.committed_pages :])
        await self._engine.compute.run(awake.sequence.close)
        self._engine.room.change()

    async def close(self, reason: AgentKVError | None = None) -> None:
        """Cancel a step in flight (it raises `reason`) and let go of all memory. Idempotent."""
        self._opened = False
        self._closed_by = self._closed_by or reason or SessionError(f"session {self.id!r} has been closed")
        try:
            if self._stream is not None:
                await self._stream.interrupt(self._closed_by)
        finally:
            await shielded(self._sleep_for_good())

    async def _sleep_for_good(self) -> None:
        async with self._waking:
            await self.sleep()

    # What a stream does with its session

    def acquire(self, stream: Stream, expect: str | None) -> None:
        """Make `stream` the session's writer. Raises SessionBusy, StaleHead."""
        self._require_free()
        if expect is not None and expect != self.head:
            raise StaleHead(expect, self.head)
        self._stream = stream

    def release(self) -> None:
        """The stream has come to its end, one way or the other."""
        self._stream = None
        self.last_used = time.monotonic()
        self._engine.room.change()

    async def begin(self, stream: Stream) -> Generation:
        """Wake the session, append the stream's input and hand the generation to the executor."""
        awake = await self._wake()
        generation = await new_generation(self._engine, self.namespace, awake, stream)
        self._engine.executor.submit(generation)
        return generation

    async def commit(self, generation: Generation, stream: Stream) -> StepResult:
        """Publish a complete generation; durable as `EngineConfig.durability` says when this returns."""
        awake, delta = self._awake, stream.delta
        assert awake is not None
        assert delta is not None
        assert generation.complete
        started = time.perf_counter()
        stop = len(awake.sequence.token_ids)
        count = len(awake.spans) + len(delta.spans)
        reply = Span(f"item-{count}", "assistant", stop - len(generation.emitted), stop)
        spans = [*awake.spans, *delta.spans, reply]
        commit = await self._prepare_commit(awake, generation, spans)
        # From here on the step is published whatever happens to the caller; `head` tells.
        manifest = await shielded(self._publish(commit, awake, spans))
        size = manifest.kv_durable_len * self._engine.backend.shape.token_bytes
        generation.note(Event("commit", "manifest published", stop, size, time.perf_counter() - started))
        return step_result(generation, stream, manifest.checkpoint)

    async def _publish(self, commit: Commit, awake: Awake, spans: list[Span]) -> Manifest:
        engine = self._engine
        manifest = await engine.disk.run(engine.store.commit, commit)
        self._manifest = manifest
        awake.spans, awake.sound_tokens = spans, manifest.kv_durable_len
        awake.committed_pages, awake.loaded, awake.events = len(commit.records), 0, []
        return manifest

    async def _prepare_commit(self, awake: Awake, generation: Generation, spans: list[Span]) -> Commit:
        engine, sequence = self._engine, awake.sequence
        engine.backup.offer(self.namespace, sequence)
        records = sequence.table.records
        if engine.config.durability == "kv":
            await engine.backup.landed(records)
        durable = next((i for i, r in enumerate(records) if not engine.backup.is_durable(r)), len(records))
        tail = None
        if durable == len(records) and sequence.tail.rows:
            tail = await engine.compute.run(engine.backend.read_tail, sequence.buffer, sequence.tail.rows)
        return Commit(
            namespace=self.namespace,
            id=self.id,
            base=self._manifest,
            unchanged_tokens=min(awake.sound_tokens, self._manifest.tokens if self._manifest else 0),
            token_ids=sequence.token_ids,
            records=records[:durable],
            spans=spans,
            kv_len=sequence.kv_len,
            identity=engine.identity,
            codec=engine.codec,
            tail=tail,
            seed=generation.sampler.seed,
            sidecar=msgspec.msgpack.encode(Sidecar(awake.head.export(), awake.acceptances)),
            reasoning=self._reasoning,
            finish_reason=generation.finish_reason or "",
            created_at=time.time(),
        )

    async def abandon(self, generation: Generation | None, stream: Stream, *, keep: bool) -> StepResult | None:
        """End a step that was not seen through: keep what is verified if `keep` and `on_cancel` say so (its result is
        returned), else, or where that fails, go back to the last commit. Must not be cancelled."""
        kept = None
        try:
            if generation is not None:
                await self._engine.executor.withdraw(generation)
                wanted = keep and self._on_cancel == "keep" and generation.error is None
                if wanted and generation.emitted and not self._is_committed():
                    kept = await self._keep(generation, stream)
        finally:
            if kept is None:
                await self._rollback()
        return kept

    async def _keep(self, generation: Generation, stream: Stream) -> StepResult:
        generation.cut_short()
        if not generation.complete:  # unverified KV is recomputed first
            self._engine.executor.submit(generation)
            await generation.released()
            if generation.error is not None:
                raise generation.error
        return await self.commit(generation, stream)

    def _is_committed(self) -> bool:
        assert self._awake is not None
        return self._manifest is not None and self._manifest.tokens == len(self._awake.sequence.token_ids)

    async def _rollback(self) -> None:
        """Make the sequence equal the last commit; its uncommitted pages leave queue, disk and memory."""
        awake, engine = self._awake, self._engine
        if awake is None:
            return
        tokens, kv_len = (self._manifest.tokens, self._manifest.kv_len) if self._manifest else (0, 0)
        uncommitted = awake.sequence.table.records[kv_len // PAGE_TOKENS :]
        await engine.backup.drop(self.namespace, uncommitted)
        await engine.compute.run(truncate, awake, tokens, kv_len)

    async def _wake(self) -> Awake:
        async with self._waking:
            if self._awake is None:
                self._awake = await wake(self._engine, self._manifest)
            return self._awake

    def _require_free(self) -> None:
        if not self._opened:
            raise self._closed_by or SessionError(f"session {self.id!r} is not open: use `async with`")
        if self._stream is not None or self._going_back:
            raise SessionBusy(f"session {self.id!r} has a step or a rollback in flight")
