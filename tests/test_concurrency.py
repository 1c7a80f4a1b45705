"""Sessions that step at once share rounds and say what they say alone; the event loop is never blocked meanwhile."""

import asyncio
import asyncio.base_events
import asyncio.tasks
import bisect
import heapq
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest
import pytest_asyncio
from conftest import Forward, open_tiny, recorded, source_text, speculating

from agentkv import DecodingConfig, Done, Session, SessionManager, SpeculationConfig, StepResult

GREEDY = DecodingConfig(max_new_tokens=48, ignore_eos=True)
SAMPLED = DecodingConfig(max_new_tokens=48, temperature=0.8, top_p=0.9, ignore_eos=True)
LENGTHS = (60, 130, 215, 340)
names = (f"p{i}" for i in count())


@pytest_asyncio.fixture(scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SessionManager]:
    speculation = SpeculationConfig(k=3, budget_pages=8)
    async with open_tiny(tmp_path_factory.mktemp("tiny"), prefill_chunk=64, speculation=speculation) as manager:
        yield manager


def prompt(number: int, length: int) -> list[int]:
    """Token ids that repeat in places, so that lookup has something to find."""
    chance = random.Random(number)
    words = [[chance.randrange(3, 250) for _ in range(9)] for _ in range(8)]
    ids: list[int] = []
    while len(ids) < length:
        ids += chance.choice(words) if chance.random() < 0.6 else [chance.randrange(3, 250)]
    return ids[:length]


def together(forwards: list[Forward]) -> int:
    """Most sequences that one packed forward carried."""
    return max(len(forward.tails) for forward in forwards)


async def run(manager: SessionManager, number: int, length: int, decoding: DecodingConfig, mode: str) -> StepResult:
    async with manager.session(next(names)) as session:
        return await session.step(prompt(number, length), decoding=decoding, mode=mode, seed=number)


@pytest.mark.parametrize("mode", ["full", "exact", "auto"])
@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_four_at_once_say_what_each_says_alone(tiny, decoding, mode):
    alone = [await run(tiny, n, length, decoding, "full") for n, length in enumerate(LENGTHS)]
    with recorded(tiny) as forwards:
        results = await asyncio.gather(*(run(tiny, n, length, decoding, mode) for n, length in enumerate(LENGTHS)))
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert sum(r.trace.ties for r in results) == 0
    assert together(forwards) == 4
    # Alone each needs a forward per token and per prefill chunk; packed, they share them.
    if mode == "full":
        tokens, chunks = decoding.max_new_tokens, sum(length // 64 for length in LENGTHS)
        assert len(forwards) <= tokens + chunks + len(LENGTHS)
    if mode == "exact":
        assert sum(r.trace.proposed for r in results) > sum(r.trace.accepted for r in results) > 0
    tiny._engine.pool.check()


async def test_sessions_of_unequal_length_join_and_leave(tiny):
    """Twelve sessions, started one after another, of different lengths, modes and numbers of tokens."""
    chance, modes = random.Random(3), ["full", "exact", "auto", "exact"]
    jobs = [
        (number, chance.randrange(20, 500), DecodingConfig(max_new_tokens=chance.randrange(2, 40), ignore_eos=True))
        for number in range(12)
    ]
    alone = [await run(tiny, *job, "full") for job in jobs]

    async def late(job: tuple[int, int, DecodingConfig]) -> StepResult:
        await asyncio.sleep(0.01 * job[0])
        return await run(tiny, *job, modes[job[0] % 4])

    with recorded(tiny) as forwards:
        results = await asyncio.gather(*map(late, jobs))
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert together(forwards) > 2
    assert len({len(forward.tails) for forward in forwards}) > 2, "the batch grew and shrank"
    assert tiny._engine.pool.held == 0


async def test_a_session_goes_on_while_others_come_and_go(tiny):
    """Several steps in a row, each beside other sessions, equal the same steps alone."""

    async def steps(session: Session) -> list[tuple[int, ...]]:
        return [(await session.step(prompt(n, 70), decoding=GREEDY)).token_ids for n in range(4)]

    async with tiny.session(next(names)) as alone, tiny.session(next(names)) as session:
        expected = await steps(alone)
        crowd = [asyncio.ensure_future(run(tiny, n, 200, SAMPLED, "exact")) for n in range(3)]
        assert await steps(session) == expected
        await asyncio.gather(*crowd)


@pytest.mark.model
async def test_smollm2_four_at_once_say_what_each_says_alone(smol):
    modules = (random, asyncio.tasks, heapq, bisect)
    texts = [source_text(module, 2000, 900 + 500 * n) for n, module in enumerate(modules)]
    decoding = DecodingConfig(max_new_tokens=16, temperature=0.8, top_p=0.9, ignore_eos=True)

    async def step(number: int, mode: str) -> StepResult:
        async with smol.session(next(names), namespace="concurrency") as session:
            with speculating(session, k=2, budget_pages=8):
                return await session.step(texts[number], decoding=decoding, mode=mode, seed=number)

    alone = [await step(number, "full") for number in range(4)]
    with recorded(smol) as forwards:
        results = await asyncio.gather(*(step(number, "exact") for number in range(4)))
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert together(forwards) == 4
    assert sum(r.trace.proposed for r in results) > 0


# The event loop

LIMIT_SECONDS = 0.020


@asynccontextmanager
async def probed(lags: dict[str, float], phase: Callable[[], str]) -> AsyncIterator[None]:
    """Sleep 1 ms over and over, noting per phase by how much the longest one was late."""
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            lags[phase()] = max(lags.get(phase(), 0.0), loop.time() - due)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()


async def life(manager: SessionManager, prompt: str | list[int], tokens: int, enter: Callable[[str], None]) -> None:
    """A session's life, in phases: prefill, decode (drafts included), commit, sleep, reopen, digest."""
    decoding = DecodingConfig(max_new_tokens=tokens, ignore_eos=True)
    name = next(names)
    async with manager.session(name, namespace="loop") as session:
        enter("prefill")
        async with session.stream(prompt, decoding=decoding, mode="exact") as stream:
            async for event in stream:
                if not isinstance(event, Done):
                    left = decoding.max_new_tokens - len(stream._generation.emitted)
                    enter("prefill" if left == decoding.max_new_tokens else "decode" if left else "commit")
    async with manager.session(name, namespace="loop") as session:
        enter("reopen")
        await session.step([5, 6, 7], decoding=DecodingConfig(max_new_tokens=1))
        enter("digest")
        await session.digest()
    enter("delete")
    await manager.delete(name, namespace="loop")


async def unblocked(work: Callable[[Callable[[str], None]], Awaitable[None]]) -> None:
    """No phase of `work` blocks the loop. What blocks does so every time; what the machine does to a test beside other
    processes it does now and then: of three attempts each phase must have one within the limit."""
    least: dict[str, float] = {}
    for _ in range(3):
        lags: dict[str, float] = {}
        phases = ["start"]
        async with probed(lags, partial(phases.__getitem__, -1)):
            await work(phases.append)
        least = {phase: min(lag, least.get(phase, lag)) for phase, lag in lags.items()}
        if max(least.values()) < LIMIT_SECONDS:
            break
    assert least.keys() >= {"prefill", "decode", "reopen"}
    slow = {phase: f"{lag * 1000:.1f} ms" for phase, lag in least.items() if lag >= LIMIT_SECONDS}
    assert not slow


async def test_the_loop_is_not_blocked(tiny):
    await unblocked(lambda enter: life(tiny, prompt(1, 3600), 60, enter))


async def test_the_loop_is_not_blocked_by_many_sessions(tiny):
    async def work(enter: Callable[[str], None]) -> None:
        await asyncio.gather(*(life(tiny, prompt(n, 900), 30, enter) for n in range(6)))

    await unblocked(work)


async def test_the_probe_sees_a_blocked_loop(tiny):
    """The test of the test: a loop that is held for 30 ms in one phase is found out."""

    async def work(enter: Callable[[str], None]) -> None:
        await life(tiny, prompt(1, 300), 10, enter)
        enter("planted")
        time.sleep(LIMIT_SECONDS * 1.5)  # noqa: ASYNC251 - the fault that the probe must see
        await asyncio.sleep(0.01)

    with pytest.raises(AssertionError, match="planted"):
        await unblocked(work)


@pytest.mark.model
async def test_the_loop_is_not_blocked_by_smollm2(smol):
    text = source_text(asyncio.base_events, 5000, 5000)
    await unblocked(lambda enter: life(smol, text, 12, enter))
