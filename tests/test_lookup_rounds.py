"""Rounds that draft by lookup: free of forwards, accepted on repetitive text, and as exact as any other."""

from pathlib import Path
from typing import Any

import pytest
from conftest import open_tiny, recorded, rehearse, speculating, untimed
from prompts import REPETITIVE, generate, noise_ids, prompted, tokens

from agentkv import DecodingConfig, Round, SessionManager, SpeculationConfig

LOOKUP = SpeculationConfig(k_max=8, proposers=("lookup",))


def repetitive_ids() -> list[int]:
    """A phrase again and again, with something else between, so that drafts both hit and miss."""
    phrase = noise_ids(20, 24)
    return [token for part in range(8) for token in (*phrase, *noise_ids(30 + part, part % 3))]


# Biases that make the tiny model, which never repeats itself, write phrases that it has written before.
REPEATING = dict.fromkeys(noise_ids(20, 24)[:5], 14.0)


def repeating(count: int, **options: Any) -> DecodingConfig:
    return tokens(count, logit_bias=REPEATING, **options)


@pytest.mark.model
@pytest.mark.parametrize("penalty", [1.0, 1.1])
async def test_lookup_on_repetitive_text_is_generate(smol: SessionManager, reference: Any, penalty: float) -> None:
    """On a real model and text: most drafts are right, tokens are those of `generate`, and no forward drafts."""
    ids = REPETITIVE.ids(smol._engine.tokenizer)
    expected = generate(reference, ids, 64, [penalty])[penalty]
    async with prompted(smol, REPETITIVE) as (session, rest):
        greedy = tokens(64, repetition_penalty=penalty)
        with recorded(smol) as forwards, untimed(smol), speculating(session, k_max=8, proposers=("lookup",)):
            found = await rehearse(session, rest, decoding=greedy, mode="exact")
    assert found.token_ids == expected
    assert found.trace.accepted > 0
    assert found.trace.ties == 0
    assert len(forwards) == sum(found.trace.rounds.values()) + 1  # the prefill's last rows
    if penalty == 1:
        assert len(forwards) < 64 / 2


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
async def test_lookup_equals_full(tmp_path: Path, options: dict[str, Any]) -> None:
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        ids = repetitive_ids()
        full = await rehearse(session, ids, decoding=repeating(200, **options), mode="full", seed=1)
        with untimed(manager):
            found = await rehearse(session, ids, decoding=repeating(200, **options), mode="exact", seed=1)
    assert found.token_ids == full.token_ids
    assert 0 < found.trace.accepted < found.trace.proposed
    assert found.trace.rounds["lookup"] > 0
    assert found.trace.ties == 0


async def test_a_lookup_round_is_one_forward_over_carry_and_drafts(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        with recorded(manager) as forwards, untimed(manager):
            async with session.stream(repetitive_ids(), decoding=repeating(120), mode="exact") as stream:
                rounds = [event async for event in stream if isinstance(event, Round)]
        assert stream.result is not None
        trace = stream.result.trace
    assert len(rounds) == len(forwards)
    for event, forward in zip(rounds, forwards, strict=True):
        *chunk, segment = forward.segments
        assert len(chunk) == (event.kind == "prefill"), "the prompt is a chunk and its last rows"
        assert segment.draft is None
        if event.kind != "prefill":
            assert len(segment.tokens) == 1 + event.proposed
            assert (event.kind == "lookup") == (event.proposed > 0)
            assert event.tokens == 1 + event.accepted
    assert trace.proposed == sum(event.proposed for event in rounds) > 0
    assert trace.kv_read_share == 0.0


async def test_without_a_match_the_round_is_full(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        result = await session.step(noise_ids(21, 40), decoding=tokens(16), mode="exact")
    assert result.trace.rounds == {"full": 15}
    assert result.trace.proposed == 0


async def test_a_lookup_draft_outlives_sleep_and_forgets_a_rollback(tmp_path: Path) -> None:
    """The index is made of the session's committed tokens: a step left early leaves nothing in it."""
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        await session.step(repetitive_ids(), decoding=repeating(30), mode="exact")
        before = session._awake.lookup.propose(8)
        await rehearse(session, noise_ids(22, 40), decoding=repeating(60), mode="exact")
        assert len(session._awake.lookup) == len(session.token_ids)
        assert session._awake.lookup.propose(8) == before
        await session.sleep()
        await session.digest()
        assert session._awake.lookup.propose(8) == before


async def test_a_step_may_end_at_every_place_of_a_draft(tmp_path: Path) -> None:
    """Every length of a step, so that its last token falls on each place of an accepted draft."""
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        ids = repetitive_ids()
        full = (await rehearse(session, ids, decoding=repeating(60), mode="full")).token_ids
        for count in range(30, 50):
            with untimed(manager):
                found = await rehearse(session, ids, decoding=repeating(count), mode="exact")
            assert found.token_ids == full[:count]
            assert found.trace.accepted > 0


async def test_c103_a_second_step_reads_what_the_first_one_generated(tmp_path: Path, tiny_reference: Any) -> None:
    """Against `generate` over all ids, generated ones included; and only the new ids are prefilled."""
    more = repetitive_ids()[:50]
    async with open_tiny(tmp_path, speculation=LOOKUP) as manager, manager.session() as session:
        first = await session.step(repetitive_ids(), decoding=repeating(40), mode="exact")
        ids = [*session.token_ids, *more]
        second = await session.step(more, decoding=tokens(40), mode="exact")
    assert second.token_ids == generate(tiny_reference, ids, 40)[1.0]
    without = [token for token in ids if token not in first.token_ids]
    assert second.token_ids != generate(tiny_reference, without, 40)[1.0]
    assert (second.usage.prefilled, second.usage.input) == (50, 50)
