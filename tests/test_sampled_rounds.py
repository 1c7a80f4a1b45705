"""Sampling end to end on the tiny model: `full` is the sampler's definition over plain logits, `exact` is `full`."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import open_tiny, recorded, rehearse, sparse
from prompts import noise_ids, tokens

from agentkv import SpeculationConfig, StepResult
from agentkv.backends.sampling import Sampler
from agentkv.proposers import SparseProposer
from agentkv.scheduler.phase import FULL, Decision, SequenceState

OPTIONS: dict[str, dict[str, Any]] = {
    "cuts": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"temperature": 1.3, "repetition_penalty": 1.2},
    "all": {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {150: 5.0, 200: -100.0},
    },
}


@pytest.mark.parametrize("options", OPTIONS)
async def test_c91_full_is_the_definition_over_plain_logits(tmp_path: Path, tiny_reference: Any, options: str) -> None:
    """Each token is what the sampler makes of plain transformers' logits at its position, with all that precedes it."""
    decoding = tokens(60, **OPTIONS[options])
    async with open_tiny(tmp_path) as manager, manager.session() as session:
        ids = noise_ids(40, 200)
        found = await session.step(ids, decoding=decoding, mode="full", seed=7)
        every = list(session.token_ids)
    with torch.inference_mode():
        rows = tiny_reference(input_ids=torch.tensor([every]), use_cache=False).logits[0]
    sampler = Sampler(decoding, 7, rows.shape[1])
    for position, token in enumerate(found.token_ids, start=len(ids)):
        assert sampler.sample(rows[position - 1], position, sampler.history(every[:position])).token == token
    assert len(set(found.token_ids)) > 20


@pytest.mark.parametrize("proposers", [("sparse",), ("lookup", "sparse")], ids="-".join)
@pytest.mark.parametrize("options", OPTIONS)
async def test_c91_exact_is_full_with_every_processor_on(
    tmp_path: Path, options: str, proposers: tuple[str, ...]
) -> None:
    """For several seeds, with drafts refused and accepted: a draft meets the same processors and the same history."""
    decoding = tokens(40, **OPTIONS[options])
    speculation = SpeculationConfig(k=5, budget_pages=12, proposers=proposers)  # type: ignore[arg-type]
    accepted, refused = 0, 0
    async with open_tiny(tmp_path, speculation=speculation) as manager, manager.session() as session:
        ids = noise_ids(41, 400)
        for seed in range(5):
            full = await rehearse(session, ids, decoding=decoding, mode="full", seed=seed)
            exact = await rehearse(session, ids, decoding=decoding, mode="exact", seed=seed)
            assert exact.token_ids == full.token_ids
            assert exact.trace.ties == full.trace.ties == 0
            accepted += exact.trace.accepted
            refused += exact.trace.proposed - exact.trace.accepted
    assert min(accepted, refused) > 20


async def acceptance(store: Path) -> float:
    """Share of drafts that steps at T 2 accept when proposals read all pages but a few of no weight."""
    proposed = accepted = 0
    async with open_tiny(store, speculation=sparse(budget_pages=99)) as manager, manager.session() as session:
        for seed in range(4):
            decoding = tokens(40, temperature=2.0)
            result = await rehearse(session, noise_ids(42, 1600), decoding=decoding, mode="exact", seed=seed)
            proposed, accepted = proposed + result.trace.proposed, accepted + result.trace.accepted
    return accepted / proposed


async def test_c90_drafts_are_sampled_with_the_noise_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where proposals see nearly all, nearly all are accepted, at any temperature; drafted greedily, far fewer are."""
    shared = await acceptance(tmp_path / "shared")

    def take(self: SparseProposer, logits: torch.Tensor, segment: Any) -> None:
        self.drafts.append(int(logits[0].argmax()))

    monkeypatch.setattr(SparseProposer, "take", take)
    greedy = await acceptance(tmp_path / "greedy")
    assert shared > 0.8
    assert greedy < shared - 0.3


async def test_auto_is_full_whatever_the_controller_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sessions in shared rounds, each round of each a random one of all that its state allows."""
    chance = random.Random(4)

    def decide(states: list[SequenceState], **_: Any) -> list[Decision]:
        return [chance.choice(chance.choice([(FULL,), *state.options()])) for state in states]

    again = dict.fromkeys(noise_ids(60, 5), 14.0)  # the tiny model repeats itself, so that lookup finds something
    sampled = tokens(80, temperature=0.8, top_p=0.9, logit_bias=again)
    speculation = SpeculationConfig(k_max=6, budget_pages=10)
    async with open_tiny(tmp_path, speculation=speculation) as manager, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(manager.session()) for _ in range(4)]

        async def run(index: int, mode: Any) -> StepResult:
            ids = noise_ids(50 + index, 20)
            ids = (ids[: 5 + 4 * index] + noise_ids(60, 30)) * 8  # what repeats differs, and so does the length
            return await rehearse(sessions[index], ids, decoding=sampled, mode=mode, seed=index)

        full = [await run(index, "full") for index in range(4)]
        monkeypatch.setattr(manager._engine.executor._controller, "decide", decide)
        with recorded(manager) as forwards:
            auto = await asyncio.gather(*(run(index, "auto") for index in range(4)))
    assert [result.token_ids for result in auto] == [result.token_ids for result in full]
    kinds = Counter[str]()
    for result in auto:
        kinds.update(result.trace.rounds)
    assert min(kinds[kind] for kind in ("full", "lookup", "sparse")) > 5
    assert sum(0 < len(forward.drafting) < len(forward.segments) for forward in forwards) > 10
