"""THE LOOP. One task per manager advances every running generation, a round at a time:

    admit → prefill chunk → decide → propose → verify and accept → publish

`decide.py` turns the running generations into the works of a round, `rounds.py` does them on the compute lane. What
becomes of a finished generation (commit, rollback) is its session's business.
"""

import logging

from agentkv.backends.base import Backend
from agentkv.backup import Backup
from agentkv.calibration import Calibration
from agentkv.config import PAGE_TOKENS, EngineConfig
from agentkv.decide import decide, learn, next_works
from agentkv.errors import CapacityError, ManagerClosed
from agentkv.generation import Generation
from agentkv.lanes import Lane
from agentkv.room import Room
from agentkv.rounds import run_round
from agentkv.scheduler.phase import Controller

_log = logging.getLogger("agentkv.executor")


class Executor:
    """Runs generations together in packed rounds; each is admitted once the pool can hold it to its end."""

    def __init__(
        self,
        backend: Backend,
        room: Room,
        lane: Lane,
        controller: Controller,
        calibration: Calibration | None,
        config: EngineConfig,
        backup: Backup,
    ) -> None:
        self._backend = backend
        self._room = room
        self._lane = lane
        self._controller = controller
        self._calibration = calibration
        self._config = config
        self._backup = backup
        self._waiting = room.waiting
        self._running = room.running
        self._withdrawn: set[int] = set()
        self._closed = False

    async def serve(self) -> None:
        """The loop; ends by cancellation."""
        try:
            while True:
                await self._admit()
                await self._lane.run(self._round)
                self._publish()
        finally:
            self._close()

    def submit(self, generation: Generation) -> None:
        """Queue a generation; its updates come through `generation.next_update`."""
        if self._closed:
            raise ManagerClosed("the manager has been closed")
        self._waiting.append(generation)
        self._room.change()

    async def withdraw(self, generation: Generation) -> None:
        """Take a generation out; returns when no round can touch its sequence any more. Idempotent."""
        if generation in self._waiting:
            self._waiting.remove(generation)
            self._room.change()
        elif generation in self._running:
            self._withdrawn.add(id(generation))
            await generation.released()

    def statistics(self) -> dict[str, int]:
        """Generations running and waiting."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    async def _admit(self) -> None:
        """Wait until something runs; take in, in order of arrival, what the pool can hold to its end."""
        while True:
            for generation in list(self._waiting):
                if await self._fits(generation):
                    self._waiting.remove(generation)
                    self._running.append(generation)
                elif self._room.may_grow:
                    break
                # Else those that wait hold what is missing: one behind may fit, and its end makes room.
            if self._running:
                return
            if not self._waiting or self._room.may_grow:
                await self._room.changed()
            else:
                await self._refuse_if_hopeless(self._waiting[0])

    async def _fits(self, generation: Generation) -> bool:
        """Whether every page the generation may come to hold can be had."""
        fits = await self._room.make(generation.page_limit - len(generation.sequence.table))
        return fits and generation in self._waiting  # it may have been withdrawn meanwhile

    async def _refuse_if_hopeless(self, generation: Generation) -> None:
        """Fail what nobody's end can make room for."""
        if await self._fits(generation) or self._room.may_grow or generation not in self._waiting:
            return
        self._waiting.remove(generation)
        generation.error = CapacityError(
            f"{generation.page_limit} pages of {PAGE_TOKENS} tokens wanted, the pool has {self._room.capacity}: "
            "raise EngineConfig.kv_bytes, lower max_new_tokens or close sessions"
        )
        generation.publish(over=True)
        self._room.change()

    def _round(self) -> None:
        """One round of all that run (compute lane). What fails here fails the steps in it, not the manager."""
        try:
            works = next_works(self._running, self._config.prefill_chunk)
            decide(works, self._controller, self._calibration, self._backend.shape)
            learn(self._controller, works, run_round(self._backend, works))
        except Exception as error:
            _log.exception("a round failed; its %d steps are rolled back", len(self._running))
            for generation in self._running:
                generation.error = error

    def _publish(self) -> None:
        """Hand out what the round brought; let go of generations that are complete, failed or withdrawn."""
        for generation in list(self._running):
            over = generation.complete or generation.error is not None or id(generation) in self._withdrawn
            if over:
                self._running.remove(generation)
                self._withdrawn.discard(id(generation))
            self._backup.offer(generation.namespace, generation.sequence)
            generation.publish(over=over)
            if over:
                self._room.change()

    def _close(self) -> None:
        self._closed = True
        for generation in (*self._waiting, *self._running):
            generation.error = generation.error or ManagerClosed("the manager was closed during the step")
            generation.publish(over=True)
        self._waiting.clear()
        self._running.clear()
