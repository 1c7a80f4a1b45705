"""The phase controller in simulated machines whose truth it does not know: promise 8, "auto never slower than full"."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from agentkv.scheduler.phase import Acceptances, Controller, SequenceState, TimeModel

Cost = Callable[[int, float], float]

ROWS = (1, 2, 3, 5, 9, 17, 33)


class World:
    """A machine and a text: true forward times (with noise) and true acceptance, which the controller only observes."""

    def __init__(
        self, cost: Cost, kv_bytes: float, selection: float | None, *, measured: Cost | None = None, hidden: float = 0.0
    ) -> None:
        self.rng = random.Random(99)
        self.cost = cost
        self.kv_bytes, self.selection = kv_bytes, selection
        self.hidden = hidden  # seconds that a speculative round takes outside its forwards
        fit = measured or cost
        sizes = (kv_bytes * 0.1, kv_bytes * 0.5, kv_bytes * 1.2)
        self.controller = Controller(
            TimeModel.fit((r, b, fit(r, b) * self.rng.gauss(1, 0.02)) for r in ROWS for b in sizes for _ in range(3))
        )
        self.known, self.previous = Acceptances(), "full"
        self.seconds = self.full_seconds = 0.0
        self.kinds: Counter[str] = Counter()

    def forward(self, rows: int, size: float) -> float:
        assert self.controller.time is not None
        seconds = self.cost(rows, size) * max(self.rng.gauss(1, 0.05), 0.5)
        self.controller.time.refine(rows, size, seconds)
        return seconds

    def run(self, tokens: int, sparse_a: float, lookup: Callable[[], tuple[int, float]]) -> float:
        """Emit `tokens`; `lookup` draws a match length and its true acceptance. Returns time / that of all-full."""
        start, start_full, kinds = self.seconds, self.full_seconds, self.kinds.copy()
        done = 0
        while done < tokens:
            length, lookup_a = lookup()
            state = SequenceState(
                self.kv_bytes,
                self.known,
                self.selection,
                length,
                k_max=8,
                previous=self.previous,  # type: ignore[arg-type]
            )
            kind, k = self.controller.decide([state])[0]
            seconds = sum(self.forward(1, self.selection or 0) for _ in range(k)) if kind == "sparse" else 0.0
            seconds += self.forward(k + 1, self.kv_bytes) + (self.hidden if k else 0.0)
            a = sparse_a if kind == "sparse" else lookup_a
            accepted = next((j for j in range(k) if self.rng.random() >= a), k)
            emitted = accepted + 1
            good = emitted if kind != "lookup" else accepted
            if kind != "lookup":
                good = next((j for j in range(emitted) if self.rng.random() >= lookup_a), emitted)
            shadow = list(range(8))
            self.known.observe_lookup(shadow, length, [*shadow[:good], *([-1] * (emitted - good))])
            self.known.observe_sparse(k if kind == "sparse" else 0, accepted if kind == "sparse" else 0)
            self.controller.observe([state], [emitted], seconds)
            self.previous, self.seconds = kind, self.seconds + seconds
            self.full_seconds += emitted * self.cost(1, self.kv_bytes)
            self.kinds[kind] += emitted
            done += emitted
        self.last = {kind: count / done for kind, count in (self.kinds - kinds).items()}
        return (self.seconds - start) / (self.full_seconds - start_full)


def no_match() -> tuple[int, float]:
    return 0, 0.0


def cpu(rows: int, size: float) -> float:
    return 0.075 + 0.011 * (rows - 1) + 1e-10 * size  # 135M parameters, fp32, two cores: weights dominate


def gpu(rows: int, size: float) -> float:
    return 0.0046 + 2e-5 * rows + 2.5e-13 * size * (1 + 0.01 * rows)


def test_a_machine_where_weights_dominate_runs_full() -> None:
    world = World(cpu, 1e8, 5e6)
    assert world.run(3000, 0.9, no_match) < 1.02
    assert world.last["full"] > 0.9


def test_a_long_context_on_a_fast_link_speculates_near_the_optimum() -> None:
    world = World(gpu, 60e9, 3e9)
    ratio = world.run(3000, 0.95, no_match)
    best = min(
        (k * gpu(1, 3e9) + gpu(k + 1, 60e9)) / sum(0.95**j for j in range(k + 1)) / gpu(1, 60e9) for k in range(1, 9)
    )
    assert ratio < best * 1.06
    assert world.last["sparse"] > 0.95


def test_repetitive_text_is_drafted_by_lookup_and_prose_is_not() -> None:
    rng = random.Random(5)
    world = World(cpu, 1e8, None)
    assert world.run(1500, 0.0, lambda: (30, 0.95) if rng.random() < 0.9 else (0, 0.0)) < 0.75
    assert world.last["lookup"] > 0.8
    assert world.run(1500, 0.0, lambda: (rng.choice((0, 3, 4)), 0.04)) < 1.02
    assert world.last["full"] > 0.9
    assert world.run(1500, 0.0, lambda: (30, 0.95)) < 0.6  # and it comes back


def test_collapse_costs_little_and_recovery_is_found() -> None:
    world = World(gpu, 60e9, 3e9)
    assert world.run(2000, 0.95, no_match) < 0.7
    assert world.run(4000, 0.05, no_match) < 1.03  # the collapse itself, with every later trial
    assert world.run(6000, 0.05, no_match) < 1.02
    assert world.seconds < world.full_seconds
    assert world.run(6000, 0.97, no_match) < 0.9  # recovery
    assert world.last["sparse"] > 0.5


@pytest.mark.parametrize("seed", range(4))
def test_auto_never_loses_two_percent_to_full(seed: int) -> None:
    """Promise 8, from the first token on: nothing pays here, whatever the priors and the first fit believe."""
    rng = random.Random(seed)
    world = World(gpu, 30e9, 2e9, measured=lambda r, b: gpu(r, b) * (1 if r == 1 else rng.uniform(0.8, 1.0)))
    world.rng.seed(seed)
    assert world.run(3000, 0.1, lambda: (rng.choice((0, 3, 6, 12)), 0.02)) < 1.02


def test_a_cost_that_no_forward_shows_is_bounded_too() -> None:
    world = World(gpu, 30e9, 2e9, hidden=8 * gpu(1, 30e9))
    assert world.run(3000, 0.95, no_match) < 1.02


def test_a_loaded_machine_does_not_mislead() -> None:
    """Load comes and goes by a factor of two; speculation never pays (acceptance 0.2), and is not believed to."""
    load = [1.0]
    world = World(lambda r, b: load[0] * gpu(r, b), 30e9, 2e9)
    world.known.sparse.observe(100, 20)
    for _ in range(12):
        load[0] = 3.0 - load[0]
        world.run(400, 0.2, lambda: (4, 0.02))
    assert world.seconds < 1.02 * world.full_seconds
