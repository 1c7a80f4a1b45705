"""The phase controller's parts, and its decisions against brute force."""

import math
import random
from collections.abc import Callable
from itertools import product

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentkv.memory.memory_model import bandwidth_margin, break_even_kv_bytes, expected_tokens, gain
from agentkv.scheduler.phase import (
    FULL,
    Acceptances,
    Controller,
    Decision,
    Estimate,
    SequenceState,
    TimeModel,
)

few = settings(max_examples=100, derandomize=True, deadline=None)

ROWS = (1, 2, 3, 5, 9, 17, 33, 65, 129)


# The boundary, as formulas


@few
@given(st.integers(0, 20), st.floats(0, 1))
def test_expected_tokens_is_the_mean_of_a_censored_run(k: int, a: float) -> None:
    mean = sum((j + 1) * a**j * (1 - a) for j in range(k)) + (k + 1) * a**k
    assert expected_tokens(k, a) == pytest.approx(mean, abs=1e-6 if a > 0.999999 else 1e-9)


@few
@given(st.integers(1, 20), st.floats(0.01, 0.99), st.floats(0, 1), st.floats(1, 1e3), st.floats(1, 1e3))
def test_gain_and_the_byte_form_agree_where_only_bytes_cost(
    k: int, a: float, s: float, kv: float, weights: float
) -> None:
    h = (expected_tokens(k, a) - 1) / k
    speed = gain(k, a, weights + s * kv, weights + kv, weights + kv)
    margin = bandwidth_margin(h, s, kv, weights)
    # Saved time per draft, relative to a full step.
    assert margin / (weights + kv) == pytest.approx(
        (speed - 1) * (k * (weights + s * kv) / (weights + kv) + 1) / k, abs=1e-9
    )
    edge = break_even_kv_bytes(h, s, weights)
    if math.isinf(edge):
        assert margin < 0 or h == s == 1
    else:
        assert bandwidth_margin(h, s, edge, weights) == pytest.approx(0, abs=1e-6 * weights)
        assert bandwidth_margin(h, s, edge * 1.01 + 1e-9, weights) > 0


# Time


def test_fit_recovers_a_line_per_row_count_and_interpolates() -> None:
    truth = {1: (4.0, 2e-9), 5: (5.0, 2e-9), 9: (7.0, 4e-9)}
    model = TimeModel.fit((rows, size, c0 + c1 * size) for rows, (c0, c1) in truth.items() for size in (1e8, 5e8, 2e9))
    for rows, (c0, c1) in truth.items():
        assert model.seconds(rows, 1e9) == pytest.approx(c0 + c1 * 1e9)
    assert model.seconds(3, 1e9) == pytest.approx((6 + 7) / 2)
    assert model.seconds(13, 1e9) == pytest.approx(11 + (11 - 7))
    assert msgspec.json.decode(msgspec.json.encode(model), type=TimeModel) == model


@few
@given(st.lists(st.tuples(st.sampled_from([1, 4]), st.floats(0, 1e9), st.floats(1e-6, 1)), min_size=1, max_size=12))
@example([(1, 0.0, 1e-6), (1, 5e8, 1e-6), (1, 1e9, 1.0)])  # a line that starts below zero
def test_fit_is_never_negative(samples: list[tuple[int, float, float]]) -> None:
    model = TimeModel.fit(samples)
    assert min(*model.c0, *model.c1) >= 0
    assert all(model.seconds(rows, size) > 0 for rows, size, _ in samples)


def test_a_fit_that_slopes_down_at_its_end_never_makes_more_rows_cheaper() -> None:
    model = TimeModel.fit([(1, 1e6, 0.004), (5, 1e6, 0.008), (9, 1e6, 0.002)])
    assert model.seconds(20, 1e6) == model.seconds(9, 1e6) == pytest.approx(0.002)
    model.refine(20, 1e6, 0.01)
    assert model.seconds(20, 1e6) > 0.002


def test_refine_follows_a_slower_machine() -> None:
    model = TimeModel.fit((rows, size, 1 + size) for rows in (1, 5) for size in (1.0, 2.0))
    for _ in range(100):
        model.refine(1, 1.0, 4.0)
        model.refine(5, 1.0, 6.0)
    assert model.seconds(1, 1.0) == pytest.approx(4, rel=0.02)
    assert model.seconds(5, 1.0) == pytest.approx(6, rel=0.05)
    model.refine(1, 1.0, 4000.0)  # one stall
    assert model.seconds(1, 1.0) < 4.5


def test_a_stale_time_never_speaks_for_speculation_for_long() -> None:
    model = TimeModel.fit((rows, 1.0, 2.0) for rows in (1, 5))
    for _ in range(50):
        model.refine(5, 1.0, 3.0)
    assert model.seconds(1, 1.0) == 2.0  # full is not believed slower unmeasured
    model = TimeModel.fit((rows, 1.0, 2.0) for rows in (1, 5))
    for _ in range(50):
        model.refine(5, 1.0, 1.0)
    assert model.seconds(1, 1.0) < 1.05  # but faster it is
    for _ in range(1000):
        model.refine(1, 1.0, 2.0)
    assert model.seconds(5, 1.0) == pytest.approx(2.0, rel=0.02)  # what did not run is forgotten, and tried again


# Acceptance


def test_acceptance_counts_tries_not_proposals() -> None:
    estimate = Estimate(prior=0.5)
    rng = random.Random(4)
    seen = []
    for _ in range(4000):
        run = next((j for j in range(8) if rng.random() > 0.7), 8)
        estimate.observe(8, run)
        seen.append(estimate.a)
    assert sum(seen[100:]) / len(seen[100:]) == pytest.approx(0.7, abs=0.04)  # accepted / proposed would say 0.28


def test_acceptance_notices_a_collapse_within_a_few_rounds() -> None:
    known = Acceptances()
    for _ in range(50):
        known.observe_sparse(8, 8)
    assert known.sparse.a > 0.95
    for _ in range(8):
        known.observe_sparse(8, 0)
    assert known.sparse.a < 0.75
    for _ in range(1000):
        known.observe_sparse(0, 0)
    assert known.sparse.a == pytest.approx(Acceptances().sparse.a, abs=0.02)


def test_lookup_learns_from_rounds_that_did_not_use_it() -> None:
    known = Acceptances()
    for _ in range(60):
        known.observe_lookup([7, 8, 9], 12, [7])  # a full round: one token was emitted, and it was the draft's
        known.observe_lookup([7, 8, 9], 3, [1, 2, 3, 4])
        known.observe_lookup([], 0, [1])
    untouched = Acceptances()
    assert known.lookup[2].a > 0.95
    assert known.lookup[0].a < 0.05
    assert known.lookup[1] == untouched.lookup[1]
    assert known.sparse == untouched.sparse
    known = Acceptances()
    known.observe_lookup([1, 2, 3, 4], 20, [1, 2, 9])
    assert (known.lookup[3].accepted, known.lookup[3].trials) == (2, 3)
    assert msgspec.json.decode(msgspec.json.encode(known), type=Acceptances) == known


# Decisions against brute force

Cost = Callable[[int, float], float]


def truth_rate(
    states: list[SequenceState], decisions: tuple[Decision, ...], cost: Cost, a: Callable[[SequenceState, str], float]
) -> tuple[float, float]:
    """(expected tokens, seconds) of a round, forward by forward."""
    depth = max([0, *(d.k for d in decisions if d.kind == "sparse")])
    seconds = sum(s.sparse_seconds for s, d in zip(states, decisions, strict=True) if d.kind == "sparse")
    tokens = 0.0
    for forward in range(depth):
        rows, size = 0, 0.0
        for state, decision in zip(states, decisions, strict=True):
            if decision.kind == "full":
                rows, size, tokens = rows + 1, size + state.kv_bytes, tokens + 1
            elif decision.kind == "sparse" and forward < decision.k:
                assert state.selection_bytes is not None
                rows, size = rows + 1, size + state.selection_bytes
        seconds += cost(rows, size)
    seconds += cost(sum(d.k + 1 for d in decisions), sum(s.kv_bytes for s in states))
    for state, decision in zip(states, decisions, strict=True):
        tokens += 1 if decision.kind == "full" else sum(a(state, decision.kind) ** j for j in range(decision.k + 1))
    return tokens, seconds


def discounted(states: list[SequenceState], decisions: tuple[Decision, ...], cost: Cost) -> float:
    """Believed tokens per second, less what a change of kind must promise."""
    total, seconds = truth_rate(states, decisions, cost, lambda state, kind: state.a(kind))  # type: ignore[arg-type]
    for state, decision in zip(states, decisions, strict=True):
        if decision.kind not in ("full", state.previous):
            own = expected_tokens(decision.k, state.a(decision.kind))
            total -= own * (1 - 1 / (1.05 if state.previous == "full" else 1.03))
    return total / seconds


@st.composite
def machines(draw: st.DrawFn) -> tuple[TimeModel, Cost]:
    base = draw(st.floats(0.5, 10))
    row = draw(st.floats(0, 1)) * base / 5
    byte = draw(st.sampled_from([1e-9, 1e-8, 3e-8]))
    extra = draw(st.floats(0, 0.05))

    def cost(rows: int, size: float) -> float:
        return base + row * rows + byte * size * (1 + extra * rows)

    return TimeModel.fit((r, b, cost(r, b)) for r in ROWS for b in (1e7, 5e8, 2e9)), cost


@st.composite
def states(draw: st.DrawFn, k_max: int) -> SequenceState:
    kv = draw(st.sampled_from([1e7, 2e8, 1e9]))
    known = Acceptances(Estimate(draw(st.floats(0.05, 1))), [Estimate(draw(st.floats(0.05, 1))) for _ in range(4)])
    return SequenceState(
        kv,
        known,
        selection_bytes=draw(st.sampled_from([None, 0.05 * kv, 0.1 * kv])),
        lookup_length=draw(st.sampled_from([0, 2, 3, 7, 12, 40])),
        k_max=draw(st.integers(0, k_max)),
        k=draw(st.none() | st.integers(1, k_max)),
        proposers=draw(st.sampled_from([("lookup", "sparse"), ("sparse", "lookup"), ("lookup",), ()])),
        sparse_seconds=draw(st.sampled_from([0.0, 0.5])),
        previous=draw(st.sampled_from(["full", "lookup", "sparse"])),
    )


def allowed(state: SequenceState) -> list[Decision]:
    found = [FULL]
    for k in range(1, state.k_max + 1):
        if "lookup" in state.proposers and state.lookup_length >= 3:
            found.append(Decision("lookup", k))
        fixed = state.k is None or k == min(state.k, state.k_max)
        if "sparse" in state.proposers and state.selection_bytes is not None and fixed:
            found.append(Decision("sparse", k))
    return found


@few
@given(machines(), states(k_max=12))
def test_one_sequence_is_decided_exactly(machine: tuple[TimeModel, Cost], state: SequenceState) -> None:
    model, cost = machine
    chosen = Controller(model).decide([state])
    assert chosen[0] in allowed(state)
    best = max(discounted([state], (choice,), cost) for choice in allowed(state))
    assert discounted([state], tuple(chosen), cost) == pytest.approx(best, rel=1e-6)


def random_batch(rng: random.Random) -> tuple[Cost, list[SequenceState]]:
    base, byte, extra = rng.uniform(0.1, 10), rng.choice([1e-9, 1e-8, 3e-8]), rng.uniform(0, 0.05)
    row = rng.random() * base / 5
    batch = []
    for _ in range(rng.choice([2, 3])):
        kv = rng.choice([1e7, 2e8, 1e9, 3e9])
        batch.append(
            SequenceState(
                kv,
                Acceptances(Estimate(rng.uniform(0.05, 1)), [Estimate(rng.uniform(0.05, 1)) for _ in range(4)]),
                selection_bytes=rng.choice([None, 0.05 * kv, 0.1 * kv]),
                lookup_length=rng.choice([0, 3, 7, 12, 40]),
                k_max=rng.randint(1, 4),
                sparse_seconds=rng.choice([0.0, 0.5]),
                previous=rng.choice(["full", "lookup", "sparse"]),  # type: ignore[arg-type]
            )
        )
    return lambda rows, size: base + row * rows + byte * size * (1 + extra * rows), batch


def test_a_batch_is_decided_nearly_exactly() -> None:
    """Of 200 batches 96 % get the best of all combinations; the rest lose little, and none falls below all-full."""
    rng, exact = random.Random(8), 0
    for _ in range(200):
        cost, batch = random_batch(rng)
        model = TimeModel.fit((r, b, cost(r, b)) for r in ROWS for b in (1e7, 5e8, 2e9))
        chosen = tuple(Controller(model).decide(batch))
        share = discounted(batch, chosen, cost) / max(
            discounted(batch, choice, cost) for choice in product(*map(allowed, batch))
        )
        exact += share > 1 - 1e-6
        assert share > 0.85
        believed, seconds = truth_rate(batch, chosen, cost, lambda state, kind: state.a(kind))  # type: ignore[arg-type]
        plain, full_seconds = truth_rate(batch, (FULL,) * len(batch), cost, lambda *_: 1.0)
        assert believed / seconds >= plain / full_seconds * (1 - 1e-9)
    assert exact >= 192


@few
@given(machines(), st.lists(states(k_max=4), max_size=3), st.booleans())
def test_forced_rounds_draft_wherever_they_can(
    machine: tuple[TimeModel, Cost], batch: list[SequenceState], timed: bool
) -> None:
    for state, choice in zip(batch, Controller(machine[0] if timed else None).decide(batch, force=True), strict=True):
        kinds = {option.kind for option in allowed(state)} - {"full"}
        expected = next((kind for kind in state.proposers if kind in kinds), "full")
        assert choice.kind == expected
        assert choice in allowed(state)
        if not timed and choice.kind == "lookup":
            assert choice.k == state.k_max


def test_an_untimed_machine_runs_full() -> None:
    state = SequenceState(1e9, Acceptances(), selection_bytes=1e7, lookup_length=40)
    assert Controller().decide([state, state]) == [FULL, FULL]
    assert Controller().decide([]) == []


def test_riding_prefill_rows_are_part_of_the_price() -> None:
    """Where rows are what costs, a verify forward that is long anyway makes drafts relatively cheap."""
    model = TimeModel.fit((r, b, 1.0 + 0.3 * r + 1e-9 * b) for r in ROWS for b in (1e6, 1e9))
    known = Acceptances(lookup=[Estimate(0.5) for _ in range(4)])
    state = SequenceState(1e6, known, lookup_length=5)
    assert Controller(model).decide([state])[0].k < Controller(model).decide([state], prefill_rows=128)[0].k


def test_hysteresis_enters_with_five_percent_and_leaves_freely() -> None:
    def decide(a: float, previous: str) -> str:
        # k = 1, verify = full: the gain is 1 + a.
        model = TimeModel.fit((r, 1e6, 1.0) for r in (1, 2))
        known = Acceptances(lookup=[Estimate(a) for _ in range(4)])
        state = SequenceState(1e6, known, lookup_length=3, k_max=1, previous=previous)  # type: ignore[arg-type]
        return Controller(model).decide([state])[0].kind

    assert [decide(a, "full") for a in (0.04, 0.06)] == ["full", "lookup"]
    assert decide(0.01, "lookup") == "lookup"


def test_changing_the_proposer_takes_three_percent() -> None:
    """With one draft, free proposals and equal verify times, sparse makes 1.5 tokens and lookup 1 + a."""
    model = TimeModel.fit([(1, 1.0, 1e-9), (1, 1e6, 1.0), (2, 1e6, 1.0)])
    for a, kind in ((0.53, "sparse"), (0.56, "lookup")):
        known = Acceptances(Estimate(0.5), [Estimate(a) for _ in range(4)])
        state = SequenceState(1e6, known, selection_bytes=0.0, lookup_length=3, k_max=1, previous="sparse")
        assert Controller(model).decide([state])[0].kind == kind


def test_the_ledger_stops_losses_and_forgives_them() -> None:
    model = TimeModel.fit((r, 1e6, 1.0) for r in (1, 9))
    state = SequenceState(1e6, Acceptances(lookup=[Estimate(0.9) for _ in range(4)]), lookup_length=9)
    controller = Controller(model)
    for _ in range(100):
        controller.observe([state], [9], 1.0)  # a good run gives credit for 1 % only
    losses = 0
    while controller.decide([state]) != [FULL] and losses < 1000:
        controller.observe([state], [1], 2.0)  # believed to pay, it takes twice as long as full
        losses += 1
    assert 4 < losses <= 0.02 * 900 + 5
    assert controller.decide([state], force=True)[0].kind == "lookup"
    for _ in range(200):
        controller.observe([state], [1], 1.0)
    assert controller.decide([state])[0].kind == "lookup"
