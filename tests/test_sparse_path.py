"""The sparse path is sparse, reads what verification pointed at, at original positions, and never changes a token."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Forward, kv_option, open_tiny, recorded, rehearse, sparse
from prompts import noise_ids, tokens
from transformers import DynamicCache

from agentkv import Round, Session, SessionManager
from agentkv.backends import torch_attention
from agentkv.backends.base import Segment
from agentkv.config import PAGE_TOKENS

LAYERS, KV_HEADS, GROUP = 2, 2, 2
NOISE = 2e-4
"""fp32 noise of a logit of the tiny model (tests/test_packed_forwards.py shows what a fault does)."""


@contextmanager
def gathered(manager: SessionManager, into: list[Any]) -> Iterator[None]:
    """Append every selection (physical page ids [rows, budget]) to the forwards recorded in `into`."""
    backend = manager._engine.backend

    def gather(pages: np.ndarray, draft: Any) -> Any:
        into.append(pages.copy())
        return type(backend).gather(backend, pages, draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "gather", gather)
        yield


def page_count(segment: Segment) -> int:
    return sum(count for _, count in segment.runs)


def logical(session: Session, physical: np.ndarray) -> np.ndarray:
    """Page ids of the pool as places in the session's table."""
    place = {page: index for index, page in enumerate(session._awake.sequence.table.pages)}
    return np.vectorize(place.__getitem__)(physical)


# How much is read


@pytest.mark.parametrize("dense", [(), (0,), (1,)], ids=str)
async def test_a_proposal_reads_exactly_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: tuple[int, ...]
) -> None:
    """By the backend's own count, by the keys that its kernels were given, and by the trace. Dense layers read all."""
    positions: list[int] = []

    def counting(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(q: torch.Tensor, view: tuple[torch.Tensor, torch.Tensor], scale: float) -> Any:
            positions.append(view[0].shape[0] * view[0].shape[1])
            return kernel(q, view, scale)

        return counted

    for name in ("_attend_view", "_attend_view_scored"):
        monkeypatch.setattr(torch_attention, name, counting(getattr(torch_attention, name)))
    options = sparse(dense_layers=dense)
    async with open_tiny(tmp_path, speculation=options) as manager, manager.session() as session:
        with recorded(manager) as forwards:
            result = await session.step(noise_ids(1, 400), decoding=tokens(40), mode="exact")
    drafts = [segment for forward in forwards for segment in forward.drafting]
    assert len(drafts) == result.trace.proposed > 40
    for segment in drafts:
        expected = 8 * (LAYERS - len(dense)) + page_count(segment) * len(dense)
        assert segment.pages_read == expected * KV_HEADS
    counted = sum(segment.pages_read for forward in forwards for segment in forward.segments)
    assert counted == sum(positions) // PAGE_TOKENS
    read = sum(segment.pages_read for segment in drafts)
    whole = sum(page_count(segment) for segment in drafts) * LAYERS * KV_HEADS
    assert result.trace.kv_read_share == pytest.approx(read / whole)
    assert (result.trace.kv_read_share < 0.4) == (not dense)


async def test_pages_per_proposal_stay_constant_over_2000_tokens(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=sparse(budget_pages=12)) as manager, manager.session() as session:
        with recorded(manager) as forwards:
            result = await session.step(noise_ids(2, 300), decoding=tokens(2000), mode="exact")
    drafts = [segment for forward in forwards for segment in forward.drafting]
    assert result.usage.output == 2000
    assert result.trace.accepted > 200
    assert {segment.pages_read for segment in drafts} == {12 * LAYERS * KV_HEADS}
    assert {segment.draft.k.shape[2] for segment in drafts} == {12 * PAGE_TOKENS}
    assert max(segment.tail_rows for segment in drafts) < PAGE_TOKENS + 4  # what is not paged does not grow either
    assert page_count(drafts[0]) == 300 // PAGE_TOKENS
    assert page_count(drafts[-1]) >= 2290 // PAGE_TOKENS


async def test_no_more_pages_than_the_budget_is_full_and_counted_so(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=sparse(budget_pages=8)) as manager, manager.session() as session:
        result = await session.step(noise_ids(3, 8 * PAGE_TOKENS - 12), decoding=tokens(20), mode="exact")
    assert result.trace.rounds == {"full": 19}  # the prefill's last row gave the first token
    assert (result.trace.proposed, result.trace.kv_read_share) == (0, 0.0)


# What is read


async def kinds(session: Session, ids: list[int]) -> list[str]:
    async with session.stream(ids, decoding=tokens(12), mode="exact") as stream:
        return [event.kind async for event in stream if isinstance(event, Round)]


async def test_a_first_selection_exists_after_a_prefill(tmp_path: Path) -> None:
    """The first decode round drafts already: in a new session, after more input, and after a reload from disk."""
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        for seed, count in ((4, 400), (5, 3), (6, 60), (7, 1)):
            found = await kinds(session, noise_ids(seed, count))
            decoding = [kind for kind in found if kind != "prefill"]
            assert found[0] == "prefill"
            assert decoding
            assert set(decoding) == {"sparse"} or decoding == [*["sparse"] * (len(decoding) - 1), "full"]
            await session.sleep()


def page_attention(tiny_reference: Any, ids: list[int]) -> np.ndarray:
    """[queries, kv_heads, pages] of plain full attention: summed over layers and positions, mean over the group."""
    with torch.inference_mode():
        layers = tiny_reference(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    total = torch.stack(layers).sum(0)[0]  # [q_heads, queries, keys]
    pages = len(ids) // PAGE_TOKENS
    grouped = total.view(KV_HEADS, GROUP, len(ids), len(ids)).mean(1)[..., : pages * PAGE_TOKENS]
    return grouped.view(KV_HEADS, len(ids), pages, PAGE_TOKENS).sum(-1).transpose(0, 1).numpy()


def accepted_rows(segment: Segment, final: list[int]) -> int:
    """How many of a segment's rows are tokens of the session in the end: the carry and the drafts accepted."""
    own = final[segment.position : segment.position + len(segment.tokens)]
    return next((i for i, (a, b) in enumerate(zip(segment.tokens, own, strict=False)) if a != b), len(own))


def check_selection(chosen: np.ndarray, scores: np.ndarray, pages: int, budget: int) -> None:
    """Exactly `budget` pages per KV head: new ones, the sink, the last four, and then those with the most mass."""
    assert chosen.shape == (KV_HEADS, budget)
    scored = scores.shape[1]
    forced = {0, *range(pages - 4, pages), *range(scored, pages)}
    for own, mass in zip(chosen, scores, strict=True):
        assert len(set(own)) == budget
        assert forced <= set(own)
        free = set(range(pages)) - forced
        picked = free & set(own)
        assert min(mass[list(picked)]) > max(mass[list(free - picked)]) - 1e-5


async def test_selections_come_from_the_verification_of_accepted_queries(tmp_path: Path, tiny_reference: Any) -> None:
    """Every selection of a step against an independent run of plain attention over the final tokens."""
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        with recorded(manager) as happened, gathered(manager, happened):
            result = await session.step(noise_ids(8, 400), decoding=tokens(60), mode="exact")
        final = list(session.token_ids)
        happened = [logical(session, x) if isinstance(x, np.ndarray) else x for x in happened]
    attention = page_attention(tiny_reference, final)
    scores, selection, checked, differ = None, None, 0, 0
    for each in happened:
        if not isinstance(each, Forward):
            selection = each
            continue
        *_, segment = each.segments  # a prefill chunk may precede the last rows
        if segment.draft is not None and selection is not None:
            assert scores is not None
            check_selection(selection, scores, page_count(segment), 8)
            checked, differ, selection = checked + 1, differ + (selection[0] != selection[1]).any(), None
        if segment.mass is not None:
            first = segment.position + len(segment.tokens) - segment.scored
            good = segment.position + accepted_rows(segment, final) - first
            expected = attention[first : first + good, :, : page_count(segment)]
            assert np.allclose(segment.mass[:good].numpy(), expected, atol=1e-4)
            scores = expected[-4:].mean(0)
    assert checked == result.trace.rounds["sparse"] > 10
    assert differ > checked / 2, "one set for all KV heads would have done"
    assert 0 < result.trace.accepted < result.trace.proposed


def masked_logits(tiny_reference: Any, ids: list[int], selection: np.ndarray, pages: int) -> torch.Tensor:
    """Logits after ids[-1], which reads per KV head only its pages of `selection` and what follows page `pages`."""
    size, cache = len(ids), kv_option(tiny_reference, DynamicCache())
    mask = torch.full((1, KV_HEADS * GROUP, 1, size), torch.finfo(torch.float32).min)
    mask[..., pages * PAGE_TOKENS :] = 0
    for head in range(KV_HEADS * GROUP):
        for page in selection[head // GROUP]:
            mask[0, head, 0, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = 0
    with torch.inference_mode():
        tiny_reference(input_ids=torch.tensor([ids[:-1]]), **cache)
        last = {"input_ids": torch.tensor([ids[-1:]]), "position_ids": torch.tensor([[size - 1]])}
        return tiny_reference(**last, attention_mask=mask, **cache).logits[0]


async def test_c83_a_proposal_is_full_attention_with_the_rest_masked(tmp_path: Path, tiny_reference: Any) -> None:
    """Positions stay original: a draft's logits are those of plain transformers whose mask hides unselected pages."""
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        with recorded(manager) as happened, gathered(manager, happened):
            await session.step(noise_ids(9, 400), decoding=tokens(24), mode="exact")
        final = list(session.token_ids)
        starts = [i for i, each in enumerate(happened) if isinstance(each, np.ndarray)]
        for start in starts:
            [segment], [logits] = happened[start + 1].segments, happened[start + 1].logits
            ids, selection = final[: segment.position + 1], logical(session, happened[start])
            expected = masked_logits(tiny_reference, ids, selection, page_count(segment))
            assert (logits - expected).abs().max() < NOISE
        moved = masked_logits(tiny_reference, ids, (selection + 1) % page_count(segment), page_count(segment))
        assert (logits - moved).abs().max() > 20 * NOISE  # other pages would have been seen


# Where it lies does not matter


@contextmanager
def scattered(manager: SessionManager) -> Iterator[None]:
    """Hand out pages of the pool in random order."""
    pool, chance = manager._engine.pool, random.Random(0)

    def take(count: int, after: int | None = None) -> list[int]:
        every = type(pool).take(pool, pool.free)
        chosen = chance.sample(every, count)
        pool.release(set(every) - set(chosen))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "take", take)
        yield


async def test_c83_permuting_physical_pages_changes_nothing(tmp_path: Path) -> None:
    ids, seen = noise_ids(10, 400), []
    async with open_tiny(tmp_path, speculation=sparse(), kv_bytes=1 << 20) as manager:
        for place in ("in order", "scattered"):
            async with manager.session() as session:
                with recorded(manager) as happened, gathered(manager, happened):
                    if place == "scattered":
                        with scattered(manager):
                            result = await session.step(ids, decoding=tokens(40), mode="exact")
                    else:
                        result = await session.step(ids, decoding=tokens(40), mode="exact")
                pages = session._awake.sequence.table.pages
                selections = [logical(session, x) for x in happened if isinstance(x, np.ndarray)]
                logits = [row for x in happened if isinstance(x, Forward) for row in x.logits]
                seen.append((result.token_ids, selections, logits))
                assert (pages == sorted(pages)) == (place == "in order")
    (tokens_a, selections_a, logits_a), (tokens_b, selections_b, logits_b) = seen
    assert tokens_a == tokens_b
    assert all(np.array_equal(a, b) for a, b in zip(selections_a, selections_b, strict=True))
    assert max((a - b).abs().max() for a, b in zip(logits_a, logits_b, strict=True) if len(a)) < NOISE


# A bad selection costs speed, never a token


class HostileHead:
    """Scores made from the true ones by `rule`; keeps nothing across steps."""

    def __init__(self, rule: Callable[[np.ndarray], np.ndarray]) -> None:
        self._rule = rule
        self._scores: np.ndarray | None = None

    def observe(self, mass: np.ndarray) -> None:
        self._scores = self._rule(mass.mean(0))

    def scores(self) -> np.ndarray | None:
        return self._scores

    def truncate(self, pages: int) -> None:
        pass

    def export(self) -> bytes:
        return b""

    def restore(self, sidecar: bytes) -> None:
        pass


RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "random": lambda true: np.random.default_rng(true.shape[1]).random(true.shape),
    "constant": np.zeros_like,
    "nan": lambda true: np.full_like(true, np.nan),
    "inverted": np.negative,
    "of fewer pages": lambda true: true[:, :-3],
}


@pytest.mark.parametrize("rule", RULES)
async def test_a_hostile_head_never_changes_a_token(tmp_path: Path, rule: str) -> None:
    ids = noise_ids(11, 400)
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        full = await rehearse(session, ids, decoding=tokens(60), mode="full")
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        session._engine = dataclasses.replace(session._engine, new_head=lambda: HostileHead(RULES[rule]))
        found = await session.step(ids, decoding=tokens(60), mode="exact")
    assert found.token_ids == full.token_ids
    assert found.trace.ties == 0
    assert found.trace.proposed > found.trace.accepted
    assert found.trace.kv_read_share < 0.4
