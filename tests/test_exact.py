"""Exact means exact: on SmolLM2, what `exact` says is what transformers' `generate` and mode `full` say, to the token.

Nothing passes by not speculating: each run must have proposed, been rejected at least once, and read little.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Forward, recorded, rehearse, speculating, untimed
from prompts import PROMPTS, distinct_grams, generate, prompted, tokens

from agentkv import Session, SessionManager
from agentkv.backends.base import Segment
from agentkv.backends.sampling import Accepted, Sampler
from agentkv.config import PAGE_TOKENS
from agentkv.generation import Generation

TOKENS = 48
TIE = 5e-4
"""fp32: two candidates closer than this may change places between kernels (agentkv.backends.sampling)."""

PROPOSERS = {"sparse": ("sparse",), "lookup": ("lookup",), "both": ("lookup", "sparse")}
BUDGETS = {"eighth": 8, "quarter": 4, "half": 2}


class Combination(NamedTuple):
    """`budget`: the share of the prompt's pages that a proposal reads."""

    prompt: str
    k: int
    budget: str
    proposers: str
    penalty: float

    def options(self) -> dict[str, Any]:
        pages = PROMPTS[self.prompt].size // 16
        budget = max(pages // BUDGETS[self.budget], 4)
        return {"k": self.k, "k_max": self.k, "budget_pages": budget, "proposers": PROPOSERS[self.proposers]}


COMBINATIONS = [
    Combination(*row)
    for row in (
        ("small module", 4, "quarter", "sparse", 1.0),
        ("small module", 1, "eighth", "both", 1.1),
        ("small module", 8, "half", "lookup", 1.0),
        ("reference", 8, "quarter", "sparse", 1.1),
        ("reference", 4, "eighth", "lookup", 1.0),
        ("reference", 1, "half", "both", 1.0),
        ("licence", 8, "half", "sparse", 1.1),
        ("licence", 4, "eighth", "both", 1.0),
        ("licence", 1, "quarter", "lookup", 1.0),
        ("terms", 4, "half", "lookup", 1.0),
        ("terms", 8, "eighth", "both", 1.1),
        ("terms", 1, "quarter", "sparse", 1.0),
        ("module", 8, "quarter", "lookup", 1.0),
        ("module", 4, "half", "sparse", 1.1),
        ("module", 1, "eighth", "both", 1.0),
        ("review", 4, "eighth", "lookup", 1.1),
        ("review", 8, "half", "both", 1.0),
        ("review", 1, "quarter", "sparse", 1.1),
        ("source", 1, "quarter", "lookup", 1.1),
        ("source", 8, "eighth", "sparse", 1.1),
        ("source", 4, "quarter", "both", 1.1),
        ("documentation", 1, "eighth", "sparse", 1.1),
        ("documentation", 4, "half", "lookup", 1.1),
        ("documentation", 8, "quarter", "both", 1.1),
    )
]


def test_the_combinations_cover_every_pair() -> None:
    """Of k, budget, proposer and penalty; lookup reads no budget, so a pair with one needs a sparse round."""
    assert len(COMBINATIONS) == len(set(COMBINATIONS)) >= 24
    assert {c.prompt for c in COMBINATIONS} == set(PROMPTS)
    values = {"k": (1, 4, 8), "budget": BUDGETS, "proposers": PROPOSERS, "penalty": (1.0, 1.1)}
    for one, two in itertools.combinations(values, 2):
        read = [
            c
            for c in COMBINATIONS
            if "budget" not in (one, two) or c.proposers != "lookup" or "proposers" in (one, two)
        ]
        assert {(getattr(c, one), getattr(c, two)) for c in read} == set(itertools.product(values[one], values[two]))


Generated = Callable[[str, float], tuple[int, ...]]


@pytest.fixture(scope="module")
def generated(reference: Any, smol: SessionManager) -> Generated:
    """(prompt, penalty) → what `generate` says, computed once per prompt for every penalty that is asked of it."""
    known: dict[str, dict[float, tuple[int, ...]]] = {}

    def known_tokens(prompt: str, penalty: float) -> tuple[int, ...]:
        if prompt not in known:
            ids = PROMPTS[prompt].ids(smol._engine.tokenizer)
            penalties = {c.penalty for c in COMBINATIONS if c.prompt == prompt}
            known[prompt] = generate(reference, ids, TOKENS, sorted(penalties))
        return known[prompt][penalty]

    return known_tokens


@pytest.mark.model
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)).replace(" ", "_"))
async def test_greedy_exact_is_generate(smol: SessionManager, generated: Generated, combination: Combination) -> None:
    expected = generated(combination.prompt, combination.penalty)
    assert distinct_grams(expected) >= 0.9
    greedy = tokens(TOKENS, repetition_penalty=combination.penalty)
    async with prompted(smol, PROMPTS[combination.prompt]) as (session, ids):
        with untimed(smol), speculating(session, **combination.options()):
            found = await rehearse(session, ids, decoding=greedy, mode="exact")
    assert found.token_ids == expected
    trace = found.trace
    assert trace.ties == 0
    assert trace.proposed > trace.accepted, "no draft was rejected"
    if combination.proposers == "lookup":
        assert trace.kv_read_share == 0
        assert trace.rounds["lookup"] > 0
    else:
        assert 0 < trace.kv_read_share < 0.6
        assert trace.rounds["sparse"] > 0


# Sampled, alone and in company

MIXED = {
    "small module": ("exact", {"k": 4, "k_max": 4, "budget_pages": 6, "proposers": ("sparse",)}),
    "reference": ("exact", {"k": 8, "budget_pages": 8, "proposers": ("lookup", "sparse")}),
    "licence": ("full", {}),
    "terms": ("auto", {"k_max": 4, "budget_pages": 12}),
}


@pytest.mark.model
async def test_sampled_exact_is_full_alone_and_with_three_others(smol: SessionManager) -> None:
    """T .8, top-p .9: the same seed gives the same path in `full` alone, in `exact` alone, and in rounds shared by four
    sessions of different modes, lengths and k."""
    sampled = tokens(32, temperature=0.8, top_p=0.9)
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(prompted(smol, PROMPTS[name])) for name in MIXED]

        async def run(index: int, mode: Any) -> Any:
            session, ids = places[index]
            return await rehearse(session, ids, decoding=sampled, mode=mode, seed=100 + index)

        full = [await run(index, "full") for index in range(4)]
        assert len({result.token_ids[:3] for result in full}) == 4
        with ExitStack() as speculation:
            for (session, _), (_, options) in zip(places, MIXED.values(), strict=True):
                speculation.enter_context(speculating(session, **options))
            with untimed(smol):
                alone = [await run(index, "exact") for index in range(4)]
            with recorded(smol) as forwards:
                together = await asyncio.gather(*(run(i, mode) for i, (mode, _) in enumerate(MIXED.values())))
    for expected, *others in zip(full, alone, together, strict=True):
        for found in others:
            assert found.token_ids == expected.token_ids
            assert found.trace.ties == 0
    assert all(0 < found.trace.accepted < found.trace.proposed for found in (*alone[:3], together[0]))
    assert all(0 < found.trace.kv_read_share < 0.6 for found in (alone[0], together[0]))
    assert sum(len(forward.tails) == 4 for forward in forwards) > 5
    assert sum(0 < len(forward.drafting) < len(forward.segments) for forward in forwards) > 5
    apart = sum(sum(result.trace.rounds.values()) for result in together)
    assert len({id(forward) for forward in forwards if not forward.drafting}) < apart


# Rows in a block, and rows one by one


def target_rows(forwards: list[Forward], first: int, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Logits by position of the target's rows, as far as their inputs are `tokens` (which start at `first`)."""
    rows: dict[int, torch.Tensor] = {}
    for forward in forwards:
        for segment, logits in zip(forward.segments, forward.logits, strict=True):
            if segment.draft is not None:
                continue
            given = tokens[segment.position - first :][: len(segment.tokens)]
            good = next((i for i, (a, b) in enumerate(zip(segment.tokens, given, strict=False)) if a != b), len(given))
            skipped = len(segment.tokens) - len(logits)
            rows |= {segment.position + row: logits[row - skipped] for row in range(skipped, good)}
    return rows


@pytest.mark.model
async def test_c94_rows_of_a_verification_are_those_of_one_by_one_decoding(smol: SessionManager) -> None:
    """fp32: no difference of two logits moves by as much as the tie bound, and no token is decided by so little."""
    prompt = PROMPTS["module"]
    async with prompted(smol, prompt) as (session, ids):
        with recorded(smol) as one_by_one:
            full = await rehearse(session, ids, decoding=tokens(TOKENS), mode="full")
        with recorded(smol) as in_blocks, speculating(session, k=8, budget_pages=16, proposers=("sparse",)):
            exact = await rehearse(session, ids, decoding=tokens(TOKENS), mode="exact")
        given = [session.token_ids[-1], *ids, *full.token_ids]
    first = prompt.size - len(ids) - 1
    wanted, found = (target_rows(forwards, first, given) for forwards in (one_by_one, in_blocks))
    assert wanted.keys() == found.keys()
    assert len(wanted) == TOKENS
    moved = [wanted[position] - found[position] for position in wanted]
    noise = max(float(row.max() - row.min()) for row in moved)
    margin = min(float(-row.topk(2).values.diff()) for row in wanted.values())
    assert 0 < noise < TIE < margin, f"noise {noise:.1e}, smallest margin {margin:.1e}"
    assert exact.token_ids == full.token_ids
    assert exact.trace.ties == full.trace.ties == 0


# A planted fault is found, and is no tie


def _drop_a_page(patch: pytest.MonkeyPatch, session: Session) -> None:
    """Verification overlooks one page in the middle of the context."""
    backend = session._engine.backend

    def forward(segments: list[Segment]) -> list[torch.Tensor]:
        for segment in segments:
            if segment.draft is None and segment.logits:
                [(start, count), *rest] = segment.runs
                middle = count - 3
                segment.runs = ((start, middle), (start + middle + 1, count - middle - 1), *rest)
        return type(backend).forward(backend, segments)

    patch.setattr(backend, "forward", forward)


def _accept_a_draft_too_many(patch: pytest.MonkeyPatch, session: Session) -> None:
    """The first draft is taken as it is."""
    accept = Sampler.accept

    def careless(
        self: Sampler, drafts: Any, rows: torch.Tensor, position: int, history: Any, tolerant: Any
    ) -> Accepted:
        found = accept(self, drafts, rows, position, history, tolerant)
        if not drafts or found.accepted:
            return found
        return Accepted([drafts[0]], 1, found.margins)

    patch.setattr(Sampler, "accept", careless)


def _verify_a_page_on(patch: pytest.MonkeyPatch, session: Session) -> None:
    """Verification rows are rotated as if they stood a page later."""
    backend = session._engine.backend

    def forward(segments: list[Segment]) -> list[torch.Tensor]:
        for segment in segments:
            segment.position += PAGE_TOKENS * (segment.draft is None and segment.logits > 1)
        return type(backend).forward(backend, segments)

    patch.setattr(backend, "forward", forward)


@contextmanager
def margins_of_tokens() -> Iterator[list[float]]:
    """The margin of every token emitted meanwhile."""
    margins: list[float] = []
    accept = Generation.accept

    def noting(self: Generation, drafts: list[int], rows: torch.Tensor) -> Accepted:
        found = accept(self, drafts, rows)
        margins.extend(found.margins)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "accept", noting)
        yield margins


FAULTS = {"page": _drop_a_page, "acceptance": _accept_a_draft_too_many, "position": _verify_a_page_on}


@pytest.mark.model
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_shows_as_a_divergence_that_is_no_tie(
    smol: SessionManager, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The test of the tests above: where tokens first part, `full` had decided by far more than numeric noise.
    (Sampled: greedy output of this model is so sure of itself that it survives each of these faults for a while.)"""
    options: Any = {"decoding": tokens(TOKENS, temperature=1.5), "seed": 1}
    async with prompted(smol, PROMPTS["reference"]) as (session, ids):
        with margins_of_tokens() as margins:
            full = await rehearse(session, ids, mode="full", **options)
        FAULTS[fault](monkeypatch, session)
        with speculating(session, k=4, budget_pages=6, proposers=("sparse",)):
            found = await rehearse(session, ids, mode="exact", **options)
    assert len(margins) == TOKENS
    parted = [i for i, (a, b) in enumerate(zip(full.token_ids, found.token_ids, strict=True)) if a != b]
    assert parted, "the fault was not seen"
    assert margins[parted[0]] > 10 * TIE
