"""One step in progress: what its sequence is, how its tokens are chosen, where it stops, what it has cost so far.

A generation is advanced by `rounds.py` on the compute lane and read by the executor and its session between rounds.
Whether tokens are still to be prefilled is not stored: it is `sequence.pending`.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import anyio
import numpy as np
import torch

from agentkv.backends.sampling import Accepted, Sampler
from agentkv.config import PAGE_TOKENS, DecodingConfig, Every, Mode, SpeculationConfig, Tolerant
from agentkv.detokenize import Detokenizer
from agentkv.heads.base import Head
from agentkv.memory.sequence import Sequence
from agentkv.scheduler.compiler import budget_pages
from agentkv.scheduler.lookup import SuffixIndex
from agentkv.scheduler.phase import Acceptances, Kind
from agentkv.types import Event, FinishReason, Round, Text

_FRESH_TOKENS = 64
"""Scores this old still choose as well (32–64 tokens stale loses little: measured); older ones cost a scored pass."""


@dataclass(slots=True)
class Counters:
    """Sums over the rounds of a step; `pages_*` are (page, layer, KV head) triples counted by attention."""

    rounds: Counter[str] = field(default_factory=Counter)
    proposed: int = 0
    accepted: int = 0
    ties: int = 0
    pages_read: int = 0
    pages_full: int = 0
    prefilled: int = 0

    def count(self, kind: Kind, proposed: int, accepted: int) -> None:
        """One decode round."""
        self.rounds[kind] += 1
        self.proposed += proposed
        self.accepted += accepted


@dataclass(eq=False)
class Generation:
    """A sequence, the rules of this step, and its progress. `limit` is the sequence length it may not pass."""

    namespace: str
    sequence: Sequence
    sampler: Sampler
    decoding: DecodingConfig
    detokenizer: Detokenizer
    speculation: SpeculationConfig
    mode: Mode
    verify: Tolerant | Every | None
    head: Head
    lookup: SuffixIndex
    acceptances: Acceptances
    end_ids: frozenset[int]
    limit: int

    emitted: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    counters: Counters = field(default_factory=Counters)
    events: list[Event] = field(default_factory=list)
    previous: Kind = "full"
    error: Exception | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.history = self.sampler.history(self.sequence.token_ids)
        self.budget = budget_pages(-(-len(self.sequence.token_ids) // PAGE_TOKENS), self.speculation.budget_pages)
        self.scored_len = 0
        """Positions there were when pages were last scored."""
        self.draft_buffer: object | None = None
        self._recompute: tuple[int, float] | None = None
        self._outbox: deque[Text | Round] = deque()
        self._changed = anyio.Event()
        self._over = False

    # What the next round has to do

    @property
    def target(self) -> int:
        """KV positions wanted: up to the carry once generation is over, the carry included while it goes on."""
        return len(self.sequence.token_ids) - (self.finish_reason is not None)

    @property
    def pending(self) -> int:
        """Positions to compute before the next token can be chosen (1 while decoding)."""
        return self.target - self.sequence.kv_len

    @property
    def complete(self) -> bool:
        """Generated to a stop, and every KV row comes from full attention."""
        return self.finish_reason is not None and self.sequence.verified_len == self.target

    @property
    def decoding_now(self) -> bool:
        return self.finish_reason is None and self.pending == 1

    @property
    def mid_step(self) -> bool:
        """Whether tokens have been generated and more will be: the last token is the carry."""
        return bool(self.emitted) and self.finish_reason is None

    @property
    def proposers(self) -> tuple[Literal["lookup", "sparse"], ...]:
        """Those that this step's mode lets rounds use."""
        if self.mode == "full":
            return ()
        # Behind provisional rows only more of them can come, until they are recomputed.
        unverified = self.mode == "sparse" or self.sequence.provisional
        return ("sparse",) if unverified else self.speculation.proposers

    @property
    def can_select(self) -> bool:
        """Whether a sparse proposal would read less than everything."""
        return self.can_select_of(len(self.sequence.table))

    def can_select_of(self, pages: int) -> bool:
        """The same, once there are `pages` pages."""
        return "sparse" in self.proposers and pages > self.budget

    @property
    def needs_scores(self) -> bool:
        """Whether a sparse round would have to wait for a scored pass (provisional rows outlive their scores)."""
        if not self.can_select or self.sequence.provisional:
            return False
        return self.head.scores() is None or self.sequence.kv_len - self.scored_len > _FRESH_TOKENS

    @property
    def unverified_next(self) -> bool:
        """Whether the drafts of the next sparse round are final."""
        if self.mode == "sparse":
            return True
        return isinstance(self.verify, Every) and (self.counters.rounds["sparse"] + 1) % self.verify.n != 0

    @property
    def draft_limit(self) -> int:
        """Most tokens the next round may draft: a verification emits one more behind them, and unverified ones must not
        become more than `recompute_tokens`."""
        left = min(self.decoding.max_new_tokens - len(self.emitted), self.limit - len(self.sequence.token_ids))
        unverified_left = self.speculation.recompute_tokens - self.sequence.provisional
        left = min(left, unverified_left) if self.unverified_next else left - 1
        return max(min(self.speculation.k_max, left), 0)

    @property
    def page_limit(self) -> int:
        """Pages the sequence may come to hold in this step."""
        wanted = len(self.sequence.token_ids) + self.decoding.max_new_tokens - len(self.emitted)
        return -(-min(wanted, self.limit) // PAGE_TOKENS)

    def shadow_draft(self) -> tuple[list[int], int]:
        """What lookup would draft now, and its match length: used by a lookup round, scored for free in others."""
        return self.lookup.propose(self.draft_limit) if "lookup" in self.proposers else ([], 0)

    # What a round has brought

    def observe(self, mass: np.ndarray) -> None:
        """Page mass of accepted queries from a scored forward, [queries, kv_heads, pages]."""
        self.head.observe(mass)
        self.scored_len = self.sequence.kv_len

    def accept(self, drafts: list[int], rows: torch.Tensor) -> Accepted:
        """Verify `drafts` against target rows [k + 1, vocab] and emit; the outcome ends at the first stop."""
        tolerant = self.verify.n if isinstance(self.verify, Tolerant) else None
        found = self.sampler.accept(drafts, rows, len(self.sequence.token_ids), self.history, tolerant)
        kept = self.emit(found.tokens)
        self.counters.ties += sum(margin < self.sampler.tie_bound for margin in found.margins[: len(kept)])
        return Accepted(kept, min(found.accepted, len(kept)), found.margins[: len(kept)])

    def emit(self, tokens: list[int]) -> list[int]:
        """Append final tokens up to the first stop; returns those kept. KV rows are the caller's business."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            text += self.detokenizer.push(token)
            self.finish_reason = self._stop_reason(token, len(kept))
            if self.finish_reason is not None:
                text += self.detokenizer.finish()
                break
        self.sequence.token_ids.extend(kept)
        self.lookup.extend(kept)
        self.emitted.extend(kept)
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.text += text
        self._outbox.append(Text(text, tuple(kept)))
        return kept

    def cut_short(self) -> None:
        """The caller is gone: what has been emitted is the step, and held-back text is text after all."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self.text += self.detokenizer.finish()
        self._over = False

    def _stop_reason(self, token: int, new: int) -> FinishReason | None:
        """Why generation ends with `token`, the last of `new` tokens not yet appended."""
        if token in self.end_ids and not self.decoding.ignore_eos:
            return "eos"
        if self.detokenizer.stopped is not None:
            return "stop"
        full = len(self.sequence.token_ids) + new >= self.limit
        return "length" if full or len(self.emitted) + new >= self.decoding.max_new_tokens else None

    def begin_recompute(self) -> None:
        """Unverified KV goes back to pending tokens; `end_recompute` puts the price into the trace."""
        tokens = self.sequence.drop_provisional()
        self.head.truncate(len(self.sequence.table))
        self._recompute = (tokens, time.perf_counter())

    def end_recompute(self) -> None:
        """To be called after each round: notes the recomputation that has come to its end, if one has."""
        if self._recompute is not None and (self.complete or self.decoding_now):
            tokens, started = self._recompute
            self._recompute = None
            reason = "unverified KV replaced by a full-attention forward"
            self.note(Event("recompute", reason, tokens, seconds=time.perf_counter() - started))

    def note(self, event: Event) -> None:
        """Nothing is silent: put it into the step's trace."""
        self.events.append(event)

    def tell(self, update: Text | Round) -> None:
        """Queue a stream event; delivered by `publish`."""
        self._outbox.append(update)

    # Between the executor and the session, on the event loop

    def publish(self, *, over: bool = False) -> None:
        """Wake whoever waits; `over` once the executor has let go of the generation."""
        self._over = self._over or over
        self._changed.set()
        self._changed = anyio.Event()

    async def next_update(self) -> Text | Round | None:
        """The next stream event, or None when the generation is over. Raises what made it fail."""
        while not self._outbox:
            if self._over:
                if self.error is not None:
                    raise self.error
                return None
            await self._changed.wait()
        return self._outbox.popleft()

    async def released(self) -> None:
        """Return once the executor has let go of the generation."""
        while not self._over:
            await self._changed.wait()
