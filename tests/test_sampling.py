"""The sampler: noise, distribution, kept sets, margins and lossless acceptance."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentkv.backends.philox import GUMBEL_MAX, gumbel, philox4x32_10
from agentkv.backends.sampling import Sampler
from agentkv.config import DecodingConfig
from agentkv.errors import InvalidInput, ModelError

few = settings(max_examples=150, derandomize=True, deadline=None)


# Noise


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    others = np.arange(8, dtype=np.uint32).reshape(2, 4)
    answers = philox4x32_10(key, np.vstack((others[:1], np.array([counter], np.uint32), others[1:])))
    assert tuple(answers[1].tolist()) == expected


@few
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5000), max_size=40))
def test_noise_of_a_token_does_not_depend_on_the_subset(seed: int, position: int, ids: list[int]) -> None:
    whole = gumbel(seed, position, np.arange(5001))
    part = gumbel(seed, position, np.asarray(ids, np.int64))
    assert np.array_equal(part, whole[np.asarray(ids, np.int64)])
    one = philox4x32_10(seed, np.array([[position, 1250, 0, 0]], np.uint32))[0, 0]
    assert whole[5000] == pytest.approx(-math.log(-math.log((float(one) + 0.5) / 2**32)), rel=1e-12)


def test_noise_is_gumbel_and_bounded() -> None:
    noise = np.concatenate([gumbel(7, position, np.arange(1000)) for position in range(100)])
    assert abs(noise.mean() - 0.57722) < 0.015
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    assert noise.max() < GUMBEL_MAX
    assert -math.log(-math.log((2**32 - 0.5) / 2**32)) < GUMBEL_MAX


# Distribution (an independent account of the options, in numpy, by sorting)


def distribution(logits: np.ndarray, decoding: DecodingConfig, history: list[int]) -> np.ndarray:
    scores = logits.astype(np.float64).copy()
    for token, bias in decoding.logit_bias.items():
        scores[token] += bias
    for token in set(history):
        scores[token] *= decoding.repetition_penalty ** (1 if scores[token] < 0 else -1)
    scores /= decoding.temperature
    alive = list(np.argsort(-scores))
    if decoding.top_k:
        alive = alive[: decoding.top_k]
    probabilities = np.exp(scores - scores.max())
    if decoding.top_p < 1:
        total, mass, count = probabilities[alive].sum(), 0.0, 0
        while mass < decoding.top_p * total:
            mass += probabilities[alive[count]]
            count += 1
        alive = alive[:count]
    alive = [token for token in alive if probabilities[token] >= decoding.min_p * probabilities.max()]
    result = np.zeros_like(scores)
    result[alive] = probabilities[alive]
    return result / result.sum()


TOY = np.array([1.1, -0.4, 0.9, 0.2, -1.7, 0.55], np.float32)
OPTIONS = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"repetition_penalty": 1.4},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {1: 1.0, 0: -0.5}},
]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_draws_follow_the_distribution(temperature: float, options: dict[str, object]) -> None:
    """χ² over 100,000 draws: 1,000 by `sample`, all by its definition with the same noise; both must agree."""
    decoding = DecodingConfig(temperature=temperature, **options)  # type: ignore[arg-type]
    draws, history = 100_000, [0, 4]
    expected = distribution(TOY, decoding, history)
    sampler = Sampler(decoding, 20_26, 6)
    past = sampler.history(history)
    row = torch.from_numpy(TOY)
    counter = np.zeros((2 * draws, 4), np.uint32)
    counter[:, 0] = np.repeat(np.arange(draws), 2)
    counter[:, 1] = np.tile([0, 1], draws)
    bits = philox4x32_10(sampler.seed, counter).reshape(draws, 8)[:, :6]
    with np.errstate(divide="ignore"):
        scores = np.log(expected) - np.log(-np.log((bits + 0.5) * 2.0**-32))
    tokens = scores.argmax(axis=1)
    assert [sampler.sample(row, position, past).token for position in range(1000)] == tokens[:1000].tolist()
    counts = np.bincount(tokens, minlength=6)
    alive = expected > 0
    assert counts[~alive].sum() == 0
    statistic = ((counts[alive] - draws * expected[alive]) ** 2 / (draws * expected[alive])).sum()
    assert statistic < {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5}[int(alive.sum()) - 1]  # p = 0.001


# Equality with transformers


@st.composite
def rows(draw: st.DrawFn, most: int = 200) -> torch.Tensor:
    vocab = draw(st.integers(2, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    row = torch.randn(vocab, generator=generator) * draw(st.sampled_from([0.1, 1.0, 4.0]))
    grid = draw(st.sampled_from([0.0, 0.25, 2.0]))  # a coarse grid makes many ties
    return (row / grid).round() * grid if grid else row


decodings = st.builds(
    DecodingConfig,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 500]),
    top_p=st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    logit_bias=st.sampled_from([{}, {0: 2.0, 1: -3.0}]),
)


def warped(row: torch.Tensor, decoding: DecodingConfig, history: list[int]) -> torch.Tensor:
    """transformers' own processors in its order, the cuts in float64."""
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if decoding.logit_bias:
        before.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in decoding.logit_bias.items()}))
    if decoding.repetition_penalty != 1:
        before.append(RepetitionPenaltyLogitsProcessor(decoding.repetition_penalty))
    after.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k:
        after.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        after.append(TopPLogitsWarper(decoding.top_p))
    if decoding.min_p:
        after.append(MinPLogitsWarper(decoding.min_p))
    ids = torch.tensor([history], dtype=torch.int64)
    return after(ids, before(ids, row[None]).double())[0]  # type: ignore[arg-type]


@settings(few, max_examples=400)
@given(rows(), decodings)
@example(torch.zeros(100), DecodingConfig(temperature=1.0, top_k=7))  # all equal: every tie of the k-th stays
@example(torch.tensor([0.0, 0.0, 0.0, 0.0]), DecodingConfig(temperature=1.0, top_p=0.5))
@example(torch.tensor([1.0, 0.0]), DecodingConfig(temperature=1.0, top_p=1e-9))
def test_kept_tokens_are_those_of_transformers(row: torch.Tensor, decoding: DecodingConfig) -> None:
    history = [0, row.numel() - 1]
    theirs = warped(row, decoding, history)
    sampler = Sampler(decoding, 1, row.numel(), tie_bound=1e-12)
    past = sampler.history(history)
    if not sampler._cuts:
        assert torch.isfinite(theirs).all()
        return
    found = sampler._candidates(sampler._process(row, past))
    assert not (found.sure & ~found.kept).any()
    assert not (found.kept & ~found.maybe).any()
    if np.array_equal(found.sure, found.maybe):  # no rounding of a sum decides: the sets must be equal
        assert sorted(found.ids[found.kept].tolist()) == torch.isfinite(theirs).nonzero()[:, 0].tolist()
        kept = torch.from_numpy(found.ids[found.kept].copy())
        assert torch.allclose(torch.from_numpy(found.logits[found.kept]) / decoding.temperature, theirs[kept])
    else:  # it picks among equal logits as its sort happens to fall, so only the set's bounds are fixed
        theirs_kept = set(torch.isfinite(theirs).nonzero()[:, 0].tolist())
        assert set(found.ids[found.sure].tolist()) <= theirs_kept <= set(found.ids[found.maybe].tolist())
        assert abs(int(found.kept.sum()) - len(theirs_kept)) <= 1  # p of the mass to the last bit: rounding decides


@few
@given(rows(), decodings, st.integers(0, 1000))
def test_token_is_the_best_of_kept_logits_plus_noise(
    row: torch.Tensor, decoding: DecodingConfig, position: int
) -> None:
    history = [0, row.numel() - 1]
    theirs = warped(row, decoding, history).numpy()
    scores = theirs + gumbel(5, position, np.arange(row.numel()))
    sampler = Sampler(decoding, 5, row.numel())
    choice = sampler.sample(row, position, sampler.history(history))
    if choice.margin >= sampler.tie_bound:
        assert choice.token == scores.argmax()


@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
def test_a_large_vocabulary_needs_no_noise_for_all(spread: float) -> None:
    """The pruned search finds the winner and the margin of the whole vocabulary."""
    vocab = 20_000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * spread
    for temperature in (0.2, 1.0, 2.0):
        sampler = Sampler(DecodingConfig(temperature=temperature), 11, vocab)
        for position in range(5):
            scores = row.double().numpy() / temperature + gumbel(11, position, np.arange(vocab))
            first, second = np.argsort(-scores)[:2]
            choice = sampler.sample(row, position, sampler.history([]))
            assert choice.token == first
            assert choice.margin == pytest.approx((scores[first] - scores[second]) * temperature)


# Greedy, margins, refusals


def test_top_p_takes_the_lowest_ids_of_equal_logits() -> None:
    sampler = Sampler(DecodingConfig(temperature=1.0, top_p=0.5), 3, 8)
    found = sampler._candidates(torch.zeros(8))
    assert found.ids[found.kept].tolist() == [0, 1, 2, 3]


def test_greedy_is_argmax_with_the_gap_as_margin() -> None:
    row = torch.tensor([0.0, 2.5, 1.0, 2.5])
    plain = Sampler(DecodingConfig(), 0, 4)
    assert plain.sample(row, 0, plain.history([])) == (1, 0.0)  # the first of equals, and a tie
    punished = Sampler(DecodingConfig(repetition_penalty=1.25), 0, 4)
    token, margin = punished.sample(row, 0, punished.history([1]))
    assert (token, margin) == (3, pytest.approx(0.5 / 1.25))
    cut = Sampler(DecodingConfig(top_k=1, top_p=0.1), 0, 4)  # cuts do nothing at T = 0
    assert cut.sample(row, 0, cut.history([])) == (1, 0.0)


@settings(few, max_examples=500)
@given(rows(most=60), decodings, st.integers(0, 50), st.integers(0, 2**31), st.booleans())
def test_noise_below_the_bound_changes_only_ties(
    row: torch.Tensor, decoding: DecodingConfig, position: int, noise_seed: int, large: bool
) -> None:
    """The promise of `margin`: no move of the logits' differences by less than the bound changes another token."""
    bound = 0.2 if large else 0.02
    sampler = Sampler(decoding, 9, row.numel(), tie_bound=bound)
    past = sampler.history([0, row.numel() - 1])
    choice = sampler.sample(row, position, past)
    assert choice.margin >= 0
    assume(choice.margin >= bound)
    generator = torch.Generator().manual_seed(noise_seed)
    for _ in range(8):
        noise = torch.rand(row.numel(), generator=generator)
        noise = noise.round() if large else noise  # corners move the most
        assert sampler.sample(row + (noise - 0.5) * bound * 0.999, position, past).token == choice.token


@pytest.mark.parametrize(
    ("decoding", "logits"),
    [
        (DecodingConfig(temperature=1.0, top_k=2), [3.0, 2.0, 2.0 - 1e-4, -5.0]),
        (DecodingConfig(temperature=1.0, top_p=0.5), [math.log(0.50002), math.log(0.3), math.log(0.19998)]),
        (DecodingConfig(temperature=1.0, min_p=0.5), [0.0, math.log(0.5) - 1e-4, -9.0]),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_token_just_cut_is_a_tie_where_it_would_have_won(decoding: DecodingConfig, logits: list[float]) -> None:
    row = torch.tensor(logits)
    sampler, eager = Sampler(decoding, 3, len(logits)), 0
    for position in range(200):
        choice = sampler.sample(row, position, sampler.history([]))
        scores = row.double().numpy() + gumbel(3, position, np.arange(len(logits)))
        near = 2 if decoding.top_k else 1
        would_win = scores[near] == scores[: near + 1].max()
        eager += would_win
        if would_win:
            assert choice.margin < sampler.tie_bound
            assert choice.token != near
    assert eager > 10


@pytest.mark.parametrize(
    ("shares", "top_k", "top_p"),
    [((0.5, 0.25, 0.25 - 2e-5), 2, 0.6), ((0.5, 0.25, 0.25), 2, 0.6), ((0.4, 0.3, 0.15, 0.15), 3, 0.43)],
)
def test_a_tie_at_top_k_makes_top_p_uncertain(shares: tuple[float, ...], top_k: int, top_p: float) -> None:
    """Whether the last token is in decides what share of the mass precedes the second: below or above top_p."""
    row = torch.tensor(shares).log()
    sampler, seen = Sampler(DecodingConfig(temperature=1.0, top_k=top_k, top_p=top_p), 3, len(shares)), 0
    for position in range(200):
        scores = row.double().numpy() + gumbel(3, position, np.arange(len(shares)))
        if scores.argmax() == 1:
            seen += 1
            assert sampler.sample(row, position, sampler.history([])).margin < sampler.tie_bound
    assert seen > 10


@pytest.mark.parametrize("decoding", [DecodingConfig(), *(DecodingConfig(temperature=1.0, **o) for o in OPTIONS[:4])])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_broken_logits_are_never_a_token(decoding: DecodingConfig, poison: float) -> None:
    row = torch.zeros(300)
    row[137] = poison
    sampler = Sampler(decoding, 0, 300)
    with pytest.raises(ModelError, match="not finite"):
        sampler.sample(row, 0, sampler.history([]))


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        Sampler(DecodingConfig(logit_bias={6: 1.0}), 0, 6)


# Speculation


def target(prefix: list[int], vocab: int) -> torch.Tensor:
    """A toy model: logits depend on the last two tokens and the length."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix[-2:])) % 2**31 + len(prefix))
    return torch.randn(vocab, generator=generator) * 1.5


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *({"temperature": 0.9, **o} for o in OPTIONS)])
def test_speculation_leaves_the_tokens_as_they_are(options: dict[str, object]) -> None:
    """Drafts come from another distribution (C90, C91); for every k the emitted tokens are those of one by one."""
    decoding = DecodingConfig(**options)  # type: ignore[arg-type]
    vocab, prompt, length = 6, [1, 2, 0], 60
    sampler = Sampler(decoding, 77, vocab)
    alone, past = list(prompt), sampler.history(prompt)
    for _ in range(length):
        alone.append(sampler.sample(target(alone, vocab), len(alone), past).token)
        past.push(alone[-1])
    accepted = 0
    for k in range(1, 9):
        ids, past = list(prompt), sampler.history(prompt)
        while len(ids) < len(alone):
            drafts: list[int] = []
            for _ in range(k):
                seen = [*ids, *drafts]
                shifted = target(seen, vocab) + 0.8 * target(seen[::-1], vocab)
                drafts.append(sampler.sample(shifted, len(seen), past).token)
                past.push(drafts[-1])
            past.pop(k)
            table = torch.stack([target([*ids, *drafts[:i]], vocab) for i in range(k + 1)])
            result = sampler.accept(drafts, table, len(ids), past)
            assert result.tokens[:-1] == drafts[: result.accepted]
            assert len(result.margins) == len(result.tokens) == result.accepted + 1
            accepted += result.accepted
            ids += result.tokens
        assert ids[: len(alone)] == alone
    assert accepted > 50  # else nothing was speculated


def test_penalty_sees_drafts_before_a_position_and_forgets_rejected_ones() -> None:
    sampler = Sampler(DecodingConfig(repetition_penalty=2.0), 0, 4)
    past = sampler.history([0])
    row = torch.tensor([1.0, 1.9, 1.5, 1.0])
    result = sampler.accept([1, 3, 3], row.repeat(4, 1), 1, past)
    assert (result.tokens, result.accepted) == ([1, 2], 1)  # 1 is halved once drafted; then 2, not the draft 3
    assert past.seen.tolist() == [True, True, True, False]
    past.pop(2)
    assert past.seen.tolist() == [True, False, False, False]


def test_tolerant_accepts_the_best_n_and_nothing_cut() -> None:
    row = torch.tensor([3.0, 2.0, 1.0, 0.0])
    greedy = Sampler(DecodingConfig(), 0, 4)
    past = greedy.history([])
    assert [greedy.within(token, 2, row, past) for token in range(4)] == [True, True, False, False]
    cut = Sampler(DecodingConfig(temperature=1.0, top_k=1), 0, 4)
    assert [cut.within(token, 3, row, past) for token in range(4)] == [True, False, False, False]
    table = row.repeat(3, 1)
    assert greedy.accept([1, 2], table, 0, past).tokens == [0]
    assert greedy.accept([1, 2], table, 0, past, tolerant=2).tokens == [1, 0]
    assert greedy.accept([1, 2], table, 0, past, tolerant=3).tokens == [1, 2, 0]


def test_every_draft_accepted_brings_a_bonus_token() -> None:
    greedy = Sampler(DecodingConfig(), 0, 3)
    table = torch.eye(3)
    result = greedy.accept([0, 1], table, 5, greedy.history([]))
    assert (result.tokens, result.accepted) == ([0, 1, 2], 2)
    assert all(margin == 1.0 for margin in result.margins)
    assert [b - a for a, b in pairwise(result.tokens)] == [1, 1]
