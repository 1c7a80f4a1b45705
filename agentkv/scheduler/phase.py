"""The phase controller: which kind of round pays, per sequence and round, from measured times and acceptance (pure).

Owns the time model of a forward, what is known of acceptance, and the choice `full | lookup | sparse` with k. It knows
neither tokens nor KV: the executor tells it sizes and outcomes. The boundary as a formula: `memory/memory_model.py`.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from agentkv.memory.memory_model import expected_tokens
from agentkv.scheduler.lookup import MATCH_CLASSES, match_class

Kind = Literal["full", "lookup", "sparse"]

ENTER_GAIN = 1.05
"""Predicted speed over `full` from which a sequence leaves it (`auto` must never lose to `full`)."""

SWITCH_GAIN = 1.03
"""Predicted gain for which a sequence changes its proposer. Going back to `full` needs none: it costs nothing."""

_EVIDENCE_TOKENS = 24.0  # weight of the past in an acceptance: a collapse shows within eight rounds
_FORGET = 0.99  # of sparse evidence, per round without it: a collapse is not for ever
_PRIOR_WEIGHT = 2.0
_SPARSE_PRIOR = 0.85
_LOOKUP_PRIORS = (0.35, 0.5, 0.65, 0.85)
_LEAST_SECONDS = 1e-6  # of any forward: keeps ratios finite where the fit passes through the origin
_REFINE_RATE = 0.1
_STALE_RATE = 0.005
_LEDGER_DECAY = 0.999
_LEDGER_SHARE = 0.01
_LEDGER_ROUNDS = 4.0


class TimeModel(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds of one packed forward of `rows` tokens that reads `kv_bytes`: c0 + c1 * kv_bytes, at measured row counts.

    Both coefficients are interpolated linearly between row counts, and extrapolated by the last slope above them.
    `drift` is the logarithm of each row count's correction since the fit. All fields are JSON lists of equal length.
    """

    rows: list[int]
    c0: list[float]
    c1: list[float]
    drift: list[float]

    @staticmethod
    def fit(samples: Iterable[tuple[int, float, float]]) -> "TimeModel":
        """From (rows, kv_bytes, seconds): per row count, least squares with c0, c1 ≥ 0. One size alone fits c0 only."""
        rows, c0, c1 = [], [], []
        for count, group in groupby(sorted(samples), key=lambda sample: sample[0]):
            points = [(size, seconds) for _, size, seconds in group]
            base, slope = _line(points)
            rows.append(count)
            c0.append(base)
            c1.append(slope)
        assert rows, "a fit needs samples"
        return TimeModel(rows, c0, c1, [0.0] * len(rows))

    def seconds(self, rows: int, kv_bytes: float) -> float:
        """Predicted seconds of one forward."""
        seconds = sum(weight * self._at(index, kv_bytes) for index, weight in self._weights(rows))
        # A noisy fit may slope down at its end: more rows than were ever timed cost no less than the most of them.
        return seconds if rows <= self.rows[-1] else max(seconds, self._at(len(self.rows) - 1, kv_bytes))

    def refine(self, rows: int, kv_bytes: float, seconds: float) -> None:
        """Correct the row counts next to `rows` by a measured forward, slowly.

        Predictions of a kind that is not running grow stale, and a wrong belief must never keep `full` from winning:
        the smallest row count (that of `full`) follows others down at once but never up, and while it is the one
        measured the others relax to its correction, so that speculation is tried again some time.
        """
        error = math.log(seconds / self.seconds(rows, kv_bytes))
        error = min(max(error, -1.0), 1.0)  # one stalled forward is not a trend
        for index, weight in self._weights(rows):
            self.drift[index] += _REFINE_RATE * error * min(max(weight, 0.0), 1.0)
        nearest = max(self._weights(rows), key=lambda pair: pair[1])[0]
        if nearest:
            self.drift[0] += _REFINE_RATE * min(0.0, self.drift[nearest] - self.drift[0])
        else:
            for index in range(1, len(self.rows)):
                self.drift[index] += _STALE_RATE * (self.drift[0] - self.drift[index])

    def _at(self, index: int, kv_bytes: float) -> float:
        return max(self.c0[index] + self.c1[index] * kv_bytes, _LEAST_SECONDS) * math.exp(self.drift[index])

    def _weights(self, rows: int) -> tuple[tuple[int, float], ...]:
        """Row counts that `rows` lies between, with their weights (sum 1; one is negative above the largest)."""
        last = len(self.rows) - 1
        if rows <= self.rows[0] or last == 0:
            return ((0, 1.0),)
        upper = next((index for index, count in enumerate(self.rows) if count >= rows), last)
        share = (rows - self.rows[upper - 1]) / (self.rows[upper] - self.rows[upper - 1])
        return ((upper - 1, 1 - share), (upper, share))


class Estimate(msgspec.Struct, forbid_unknown_fields=True):
    """Decayed counts of drafted tokens that were tried and accepted (a censored geometric law, with a prior)."""

    prior: float
    accepted: float = 0.0
    trials: float = 0.0

    @property
    def a(self) -> float:
        """Probability that one drafted token is accepted."""
        return (self.accepted + _PRIOR_WEIGHT * self.prior) / (self.trials + _PRIOR_WEIGHT)

    def observe(self, proposed: int, accepted: int) -> None:
        """One round: tokens after the first rejected one were not tried."""
        assert 0 <= accepted <= proposed
        trials = accepted + (accepted < proposed)
        self.scale((1 - 1 / _EVIDENCE_TOKENS) ** trials)
        self.accepted += accepted
        self.trials += trials

    def scale(self, factor: float) -> None:
        """Weaken the evidence; what is left is nearer to the prior."""
        self.accepted *= factor
        self.trials *= factor


class Acceptances(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a sequence's drafts: one estimate for `sparse`, one per class of match length for `lookup`."""

    sparse: Estimate = msgspec.field(default_factory=lambda: Estimate(_SPARSE_PRIOR))
    lookup: list[Estimate] = msgspec.field(default_factory=lambda: [Estimate(prior) for prior in _LOOKUP_PRIORS])

    def observe_sparse(self, proposed: int, accepted: int) -> None:
        """Outcome of a sparse round of this sequence; `proposed=0` in every other round, which ages the evidence."""
        if proposed:
            self.sparse.observe(proposed, accepted)
        else:
            self.sparse.scale(_FORGET)

    def observe_lookup(self, draft: Sequence[int], match_length: int, emitted: Sequence[int]) -> None:
        """Compare what lookup drafted, or would have drafted, with the tokens that a round of any kind emitted.

        This costs nothing, so lookup needs no trial rounds. Give the draft of the round's start, its match length
        (nothing is learned below the minimum) and all emitted tokens.
        """
        level = match_class(match_length)
        tried = min(len(draft), len(emitted))
        if level is None or not tried:
            return
        equal = next((index for index in range(tried) if draft[index] != emitted[index]), tried)
        self.lookup[level].observe(tried, equal)


class Decision(NamedTuple):
    """The kind of a sequence's part of a round, and how many tokens it drafts (0 for `full`)."""

    kind: Kind
    k: int


FULL = Decision("full", 0)


class SequenceState(msgspec.Struct, frozen=True):
    """What `Controller.decide` needs of one sequence.

    `kv_bytes`: KV that a full or verify forward reads. `selection_bytes`: that a proposal reads; None if sparse is not
    possible (fewer pages than the budget, no scores). `lookup_length`: match length of the present draft, 0 if none.
    `k_max`: most tokens to draft, 0 near the end of a step. `k`: fixes sparse rounds (capped by `k_max`).
    `proposers`: those allowed, in order of preference. `sparse_seconds`: extra cost of a sparse round (gathering its
    selection; the scored pass, where one is due). `previous`: kind of this sequence's last round.
    """

    kv_bytes: float
    acceptances: Acceptances
    selection_bytes: float | None = None
    lookup_length: int = 0
    k_max: int = 8
    k: int | None = None
    proposers: tuple[Literal["lookup", "sparse"], ...] = ("lookup", "sparse")
    sparse_seconds: float = 0.0
    previous: Kind = "full"

    def a(self, kind: Kind) -> float:
        """Acceptance of a proposer, now."""
        if kind == "sparse":
            return self.acceptances.sparse.a
        level = match_class(self.lookup_length)
        assert level is not None
        return self.acceptances.lookup[level].a

    def options(self) -> list[tuple[Decision, ...]]:
        """Per proposer that can run now, in order of preference: its decisions, by ascending k."""
        found: list[tuple[Decision, ...]] = []
        for kind in self.proposers:
            able = self.selection_bytes is not None if kind == "sparse" else self.lookup_length >= MATCH_CLASSES[0]
            if able and self.k_max >= 1:
                fixed = min(self.k, self.k_max) if kind == "sparse" and self.k else None
                ks = (fixed,) if fixed else range(1, self.k_max + 1)
                found.append(tuple(Decision(kind, k) for k in ks))
        return found

    def worth(self, choice: Decision, *, settled: bool) -> float:
        """Expected tokens of the verify forward; unless `settled`, less by the gain that a change must promise."""
        if choice.kind == "full":
            return 1.0
        tokens = expected_tokens(choice.k, self.a(choice.kind))
        if settled or choice.kind == self.previous:
            return tokens
        return tokens / (ENTER_GAIN if self.previous == "full" else SWITCH_GAIN)


class Controller:
    """Chooses the rounds of all sequences of one manager. `time` is None until the machine has been timed."""

    def __init__(self, time: TimeModel | None = None) -> None:
        self.time = time
        self._spent = 0.0  # seconds of recent rounds, decayed
        self._saved = 0.0  # seconds that they saved over `full`

    def decide(self, states: Sequence[SequenceState], *, force: bool = False, prefill_rows: int = 0) -> list[Decision]:
        """One decision per sequence, for the round's most expected tokens per second.

        A round runs max k proposal forwards over its sparse sequences (a sparse one reads its selection until its k is
        done; a full one reads all its pages and each of its tokens is final; lookup ones idle), then one verify
        forward, in which `prefill_rows` ride along. One sequence is decided exactly; a batch by coordinate ascent.
        `force` (mode "exact"): every sequence drafts with the first proposer that can run. Not timed yet: full, or if
        forced the longest draft.
        """
        if not states:
            return []
        options = [state.options() for state in states]
        if force:
            options = [option[:1] or [(FULL,)] for option in options]
            start = [option[0][-1] for option in options]
        else:
            options = [[(FULL,), *option] for option in options]
            start = [FULL] * len(states)
        if self.time is None or (not force and self._overdrawn(states)):
            return start
        starts = [start]
        if not force and len(states) > 1:
            # Sparse sequences share proposal forwards, so it may pay only if several go together: start there, too.
            starts += [
                [next((ks[-1] for ks in option if ks[0].kind == kind), FULL) for option in options]
                for kind in ("lookup", "sparse")
            ]
        worth = [
            {choice: state.worth(choice, settled=force) for ks in option for choice in ks}
            for state, option in zip(states, options, strict=True)
        ]
        ascents = [self._ascend(states, worth, begin, prefill_rows) for begin in starts]
        return max(ascents, key=lambda result: result[0])[1]

    def round_seconds(
        self, states: Sequence[SequenceState], decisions: Sequence[Decision], prefill_rows: int = 0
    ) -> float:
        """Predicted seconds of a round: its proposal forwards, its verify forward, and what sparse rounds add."""
        assert self.time is not None
        pairs = list(zip(states, decisions, strict=True))
        sparse = [(choice.k, state) for state, choice in pairs if choice.kind == "sparse"]
        seconds = sum(state.sparse_seconds for _, state in sparse)
        full_rows, full_bytes = 0, 0.0
        if sparse:
            full_rows = sum(choice.kind == "full" for choice in decisions)
            full_bytes = sum(state.kv_bytes for state, choice in pairs if choice.kind == "full")
        done = 0
        for k in sorted({k for k, _ in sparse}):
            reads = [state.selection_bytes or 0.0 for own, state in sparse if own >= k]
            seconds += (k - done) * self.time.seconds(full_rows + len(reads), full_bytes + sum(reads))
            done = k
        rows = len(pairs) + sum(choice.k for choice in decisions) + prefill_rows
        return seconds + self.time.seconds(rows, sum(state.kv_bytes for state in states))

    def observe(self, states: Sequence[SequenceState], emitted: Sequence[int], seconds: float) -> None:
        """Book a decode round (without prefill rows): the tokens emitted per sequence, and its measured seconds.

        The ledger bounds what wrong beliefs can cost: once recent rounds took more than `full` would have, by 1 % and
        four full steps, `decide` answers full until full rounds have paid that off. Gains are credited up to 1 % only,
        so that a long good run does not pay for a long bad one.
        """
        if self.time is None or not states:
            return
        full = self._full_seconds(states) * sum(emitted) / len(states)
        self._spent = self._spent * _LEDGER_DECAY + full
        self._saved = min(self._saved * _LEDGER_DECAY + full - seconds, _LEDGER_SHARE * self._spent)

    def _full_seconds(self, states: Sequence[SequenceState]) -> float:
        assert self.time is not None
        return self.time.seconds(len(states), sum(state.kv_bytes for state in states))

    def _overdrawn(self, states: Sequence[SequenceState]) -> bool:
        return self._saved < -_LEDGER_SHARE * self._spent - _LEDGER_ROUNDS * self._full_seconds(states)

    def _ascend(
        self,
        states: Sequence[SequenceState],
        worth: Sequence[dict[Decision, float]],
        start: list[Decision],
        prefill_rows: int,
    ) -> tuple[float, list[Decision]]:
        """Change one sequence at a time to its best decision until none improves: exact for one sequence."""
        best = list(start)
        best_rate = self._rate(states, worth, best, prefill_rows)
        improved = True
        while improved:
            improved = False
            for index, own in enumerate(worth):
                for choice in own:
                    trial = [*best[:index], choice, *best[index + 1 :]]
                    rate = self._rate(states, worth, trial, prefill_rows)
                    if rate > best_rate * (1 + 1e-9):
                        best, best_rate, improved = trial, rate, True
            if len(states) == 1:
                break
        return best_rate, best

    def _rate(
        self,
        states: Sequence[SequenceState],
        worth: Sequence[dict[Decision, float]],
        decisions: Sequence[Decision],
        prefill_rows: int,
    ) -> float:
        """Expected tokens per second. Full sequences gain a token from every proposal forward, too."""
        depth = max((choice.k for choice in decisions if choice.kind == "sparse"), default=0)
        tokens = sum(own[choice] for own, choice in zip(worth, decisions, strict=True))
        tokens += depth * sum(choice.kind == "full" for choice in decisions)
        return tokens / self.round_seconds(states, decisions, prefill_rows)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares through (bytes, seconds) with base ≥ 0 and slope ≥ 0."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0:
        return mean_y, 0.0
    if mean_y - slope * mean_x < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return mean_y - slope * mean_x, slope
