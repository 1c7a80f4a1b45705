"""What loosens `exact` (`sparse`, Tolerant, Every) says so, and still leaves nothing but verified KV behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import open_tiny, recorded, sparse
from prompts import noise_ids, tokens

from agentkv import Every, Session, SessionManager, StepResult, Tolerant
from agentkv.generation import Generation
from agentkv.memory.sequence import Sequence

KV_NOISE = 1e-4
"""fp32 noise of a K or V element of the tiny model; unverified rows are off by far more."""

LOOSENED: dict[str, dict[str, Any]] = {
    "sparse": {"mode": "sparse"},
    "every": {"mode": "exact", "verify": Every(3)},
    "tolerant": {"mode": "exact", "verify": Tolerant(3)},
}


def kv_rows(session: Session) -> np.ndarray:
    """Every K and V element of the session, float32 [parts, ...] page by page and then the tail."""
    backend, sequence = session._engine.backend, session._awake.sequence
    parts = [backend.read_page(page) for page in sequence.table.pages]
    if sequence.tail.rows:
        parts.append(backend.read_tail(sequence.buffer, sequence.tail.rows))
    return np.concatenate([part.reshape(-1).view(np.float32) for part in parts])


async def given(manager: SessionManager, ids: tuple[int, ...]) -> np.ndarray:
    """The KV that one full prefill makes of `ids` (the last one being the carry)."""
    async with manager.session() as session:
        forced = tokens(1, logit_bias={ids[-1]: 1e4})
        await session.step(list(ids[:-1]), decoding=forced, mode="full")
        assert session.token_ids == ids
        return kv_rows(session)


@contextmanager
def rounds_watched(read: Callable[[Sequence], Any]) -> Iterator[list[Any]]:
    """What `read` says of the sequence after each round; read on the compute lane, where nothing is half done."""
    seen: list[Any] = []
    end = Generation.end_recompute

    def watched(self: Generation) -> None:
        end(self)
        seen.append(read(self.sequence))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "end_recompute", watched)
        yield seen


def event_tokens(result: StepResult, kind: str) -> list[int]:
    return [event.tokens for event in result.trace.events if event.kind == kind]


@pytest.mark.parametrize("how", LOOSENED)
async def test_committed_kv_is_that_of_full_attention(tmp_path: Path, how: str) -> None:
    """Two steps; after each, every KV element equals that of a session given the same token ids."""
    async with open_tiny(tmp_path, speculation=sparse(k=None)) as manager, manager.session("a") as session:
        for seed, count in ((1, 400), (2, 30)):
            result = await session.step(noise_ids(seed, count), decoding=tokens(70), **LOOSENED[how])
            assert result.usage.output == 70
            found, expected = kv_rows(session), await given(manager, session.token_ids)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < KV_NOISE
        durable = await session.digest()
        await session.sleep()
        assert await session.digest() == durable


async def test_unverified_kv_was_off_before_it_was_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above sees it if it is kept."""
    kept: list[np.ndarray] = []
    begin = Generation.begin_recompute

    def keeping(self: Generation) -> None:
        kept.append(kv_rows(session))
        begin(self)

    monkeypatch.setattr(Generation, "begin_recompute", keeping)
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        await session.step(noise_ids(1, 400), decoding=tokens(70), mode="sparse")
        [before], after = kept, kv_rows(session)
    assert before.shape == after.shape
    assert np.abs(before - after).max() > 1000 * KV_NOISE


@pytest.mark.parametrize("how", LOOSENED)
async def test_it_changes_the_output_and_says_so(tmp_path: Path, how: str) -> None:
    ids = noise_ids(3, 400)
    async with open_tiny(tmp_path, speculation=sparse()) as manager:
        async with manager.session() as session:
            full = await session.step(ids, decoding=tokens(60), mode="full")
        async with manager.session() as session:
            found = await session.step(ids, decoding=tokens(60), **LOOSENED[how])
        async with manager.session() as session:
            exact = await session.step(ids, decoding=tokens(60), mode="exact")
    assert found.token_ids != full.token_ids == exact.token_ids
    spoken = [found.trace.mode, *(event.reason for event in found.trace.events if event.kind == "verify")]
    assert any(how in word.lower() for word in spoken)
    assert not any(event.kind == "verify" for event in (*full.trace.events, *exact.trace.events))


@pytest.mark.parametrize("limit", [16, 64, 512])
async def test_unverified_kv_is_recomputed_at_least_every_so_many_tokens(tmp_path: Path, limit: int) -> None:
    """Never more than `recompute_tokens` positions are unverified; each recomputation is in the trace with a price."""
    options = sparse(k=None, k_max=7, recompute_tokens=limit)
    async with open_tiny(tmp_path, speculation=options) as manager, manager.session() as session:
        with rounds_watched(lambda sequence: sequence.provisional) as held:
            result = await session.step(noise_ids(4, 400), decoding=tokens(700), mode="sparse")
    assert 0 < max(held) <= limit
    assert held[-1] == 0
    recomputed = event_tokens(result, "recompute")
    assert max(recomputed) <= limit
    assert len(recomputed) >= 699 // (limit + 1)  # a recomputation emits a token, too
    assert all(event.seconds > 0 for event in result.trace.events if event.kind == "recompute")
    assert result.usage.prefilled == 400 + sum(recomputed)


async def test_unverified_pages_are_private(tmp_path: Path) -> None:
    """They have no record, and the backup is never offered one."""
    with rounds_watched(lambda sequence: (len(sequence.table), sequence.table.sealed, sequence.offered)) as seen:
        async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
            await session.step(noise_ids(5, 400), decoding=tokens(200), mode="sparse")
    assert max(pages - sealed for pages, sealed, _ in seen) >= 5
    assert all(offered <= sealed for _, sealed, offered in seen)
    assert all(sealed == 400 // 16 for pages, sealed, _ in seen if pages > sealed)


async def test_sparse_runs_no_verification_forward(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        with recorded(manager) as forwards:
            result = await session.step(noise_ids(6, 400), decoding=tokens(61), mode="sparse")
    decoding = [bool(forward.drafting) for forward in forwards]
    assert sum(decoding) == result.trace.proposed == 60
    after = decoding[decoding.index(True) :]
    assert after == sorted(after, reverse=True)  # the recomputation comes at the end
    assert result.trace.accepted == 60


async def test_every_verifies_each_nth_round(tmp_path: Path) -> None:
    async with open_tiny(tmp_path, speculation=sparse()) as manager, manager.session() as session:
        with recorded(manager) as forwards:
            result = await session.step(noise_ids(7, 400), decoding=tokens(60), mode="exact", verify=Every(3))
    verified = [s for forward in forwards for s in forward.segments if s.draft is None and s.logits > 1]
    assert result.trace.rounds["sparse"] // 3 == len(verified) >= 3
    assert result.trace.accepted < result.trace.proposed


async def test_tolerant_takes_drafts_among_the_best_and_one_is_exact(tmp_path: Path) -> None:
    """Tolerant(1) accepts what exact accepts; a wider one accepts more."""
    ids, found = noise_ids(8, 400), {}
    async with open_tiny(tmp_path, speculation=sparse()) as manager:
        for verify in (None, Tolerant(1), Tolerant(3), Tolerant(50)):
            async with manager.session() as session:
                found[verify] = await session.step(ids, decoding=tokens(60), mode="exact", verify=verify)
    shares = [result.trace.accepted / result.trace.proposed for result in found.values()]
    assert found[Tolerant(1)].token_ids == found[None].token_ids
    assert shares[0] == shares[1] < shares[2] < shares[3]
