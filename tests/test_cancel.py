"""A cancelled step leaves a commit: the last one, or with on_cancel="keep" the last verified token. No page leaks.

The instants are chosen by what happens (the n-th forward, a point inside the commit) and, in one test, by the clock.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import anyio
import pytest
import pytest_asyncio
from conftest import open_tiny

import agentkv
from agentkv import DecodingConfig, Done, ManagerClosed, SessionManager, SpeculationConfig, StepResult, Text
from agentkv.errors import SessionError, StoreFull

PROMPT = [3 + i * 7 % 250 for i in range(620)]
DECODING = DecodingConfig(max_new_tokens=24, ignore_eos=True)
Step = Callable[[], Awaitable[StepResult]]
names = (f"c{i}" for i in count())


@pytest_asyncio.fixture(scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SessionManager]:
    speculation = SpeculationConfig(k=2, budget_pages=8)
    async with open_tiny(tmp_path_factory.mktemp("tiny"), prefill_chunk=64, speculation=speculation) as manager:
        yield manager


@pytest_asyncio.fixture(scope="module")
async def expected(tiny: SessionManager) -> StepResult:
    """The second step of `started`, undisturbed."""
    async with started(tiny) as session:
        return await session.step(PROMPT, decoding=DECODING)


@contextlib.asynccontextmanager
async def started(manager: SessionManager, **options: Any) -> AsyncIterator[agentkv.Session]:
    """A session with one committed step."""
    async with manager.session(next(names), **options) as session:
        await session.step([5, 6, 7] * 9, decoding=DecodingConfig(max_new_tokens=6, ignore_eos=True))
        yield session


@contextlib.contextmanager
def at_forward(manager: SessionManager, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Do `act` on the event loop while forward `number` runs."""
    backend, loop, seen = manager._engine.backend, asyncio.get_running_loop(), count()

    def forward(segments: list[Any]) -> Any:
        if next(seen) == number:
            loop.call_soon_threadsafe(act)
        return type(backend).forward(backend, segments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "forward", forward)
        yield


@contextlib.contextmanager
def at_point(manager: SessionManager, point: str, act: Callable[[], object]) -> Iterator[None]:
    """Do `act` on the event loop when a write first passes `point` of the store."""
    store, loop, seen = manager._engine.store, asyncio.get_running_loop(), count()

    def hook(passed: str) -> None:
        if passed == point and next(seen) == 0:
            loop.call_soon_threadsafe(act)

    store.hook = hook
    try:
        yield
    finally:
        store.hook = None


async def by_task_cancel(step: Step, arm: Callable[[Callable[[], object]], None]) -> None:
    task = asyncio.ensure_future(step())
    arm(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_anyio_scope(step: Step, arm: Callable[[Callable[[], object]], None]) -> None:
    with anyio.CancelScope() as scope:
        arm(scope.cancel)
        await step()
    assert scope.cancelled_caught


async def by_asyncio_timeout(step: Step, arm: Callable[[Callable[[], object]], None]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(None) as timeout:
            arm(lambda: timeout.reschedule(0))
            await step()

    with pytest.raises(TimeoutError):
        await timed()


CANCELLERS = [by_task_cancel, by_anyio_scope, by_asyncio_timeout]


async def cancelled(canceller: Any, step: Step, trigger: Any, manager: SessionManager, instant: Any) -> None:
    """Run `step`, cancelled by `canceller` at the instant of `trigger`."""
    with contextlib.ExitStack() as stack:
        await canceller(step, lambda act: stack.enter_context(trigger(manager, instant, act)))


def check_pool(manager: SessionManager) -> None:
    """Free + held = all, and what is held is held by the open sessions."""
    pool = manager._engine.pool
    pool.check()
    assert pool.held == sum(session.held_pages for session in manager._sessions.values())
    assert manager.statistics()["executor"] == {"running": 0, "waiting": 0}


async def reloaded_digest(session: agentkv.Session) -> str:
    await session.sleep()
    assert session.held_pages == 0
    return await session.digest()


INSTANTS = [(at_forward, n) for n in (0, 2, 4, 5, 9)] + [(at_point, "put:begin"), (at_point, "put:committed")]


@pytest.mark.parametrize("canceller", CANCELLERS)
@pytest.mark.parametrize(("trigger", "instant"), INSTANTS)
async def test_rolled_back_it_equals_the_last_commit(tiny, expected, canceller, trigger, instant):
    async with started(tiny) as session:
        head, digest, ids = session.head, await session.digest(), session.token_ids
        await cancelled(canceller, lambda: session.step(PROMPT, decoding=DECODING), trigger, tiny, instant)
        assert (session.head, session.token_ids, session.busy) == (head, ids, False)
        assert await session.digest() == digest
        check_pool(tiny)
        again = await session.step(PROMPT, decoding=DECODING, expect=head)
        assert again.token_ids == expected.token_ids
    assert tiny._engine.store.statistics()["pending"] == 0


@pytest.mark.parametrize("canceller", CANCELLERS)
@pytest.mark.parametrize("mode", ["exact", "sparse"])
@pytest.mark.parametrize("instant", [8, 12, 15])
async def test_kept_it_holds_every_verified_token(tiny, expected, canceller, mode, instant):
    async with started(tiny, on_cancel="keep") as session:
        before, head = session.token_ids, session.head
        delivered: list[int] = []

        async def step() -> StepResult:
            async with session.stream(PROMPT, decoding=DECODING, mode=mode) as stream:
                async for event in stream:
                    delivered.extend(event.token_ids if isinstance(event, Text) else ())
            raise AssertionError("not cancelled")

        await cancelled(canceller, step, at_forward, tiny, instant)
        kept = session.token_ids[len(before) + len(PROMPT) :]
        assert session.token_ids[: len(before) + len(PROMPT)] == (*before, *PROMPT)
        assert session.head != head
        assert 0 < len(kept) < DECODING.max_new_tokens
        assert list(kept[: len(delivered)]) == delivered
        if mode == "exact":
            assert kept == expected.token_ids[: len(kept)]
        manifest = tiny._engine.store.manifest(session.namespace, session.id)
        assert (manifest.finish_reason, manifest.kv_len) == ("cancelled", manifest.tokens - 1)
        digest = await session.digest()
        assert await reloaded_digest(session) == digest
        check_pool(tiny)
        assert (await session.step([1, 2], decoding=DECODING)).usage.output == DECODING.max_new_tokens


@pytest.mark.parametrize("instant", [0, 3])
async def test_keep_before_the_first_token_is_rollback(tiny, instant):
    async with started(tiny, on_cancel="keep") as session:
        head, digest = session.head, await session.digest()
        await cancelled(by_task_cancel, lambda: session.step(PROMPT, decoding=DECODING), at_forward, tiny, instant)
        assert session.head == head
        assert await session.digest() == digest
        check_pool(tiny)


@pytest.mark.parametrize("canceller", CANCELLERS)
@pytest.mark.parametrize("point", ["commit:begin", "commit:written", "commit:synced"])
async def test_inside_the_commit_the_cancellation_comes_after_it(tiny, expected, canceller, point):
    async with started(tiny) as session:
        before = session.token_ids
        await cancelled(canceller, lambda: session.step(PROMPT, decoding=DECODING), at_point, tiny, point)
        assert session.head.endswith("@2"), "the manifest transaction is shielded once it is handed over"
        assert session.token_ids == (*before, *PROMPT, *expected.token_ids)
        digest = await session.digest()
        assert await reloaded_digest(session) == digest
        check_pool(tiny)


async def test_cancelled_twice_it_still_ends_well(tiny):
    """The second cancellation arrives while the first one's clean-up runs."""
    async with started(tiny) as session:
        digest = await session.digest()
        task = asyncio.ensure_future(session.step(PROMPT, decoding=DECODING))
        with at_forward(tiny, 3, lambda: (task.cancel(), asyncio.get_running_loop().call_soon(task.cancel))):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not session.busy
        assert await session.digest() == digest
        check_pool(tiny)


async def test_at_random_instants(tiny, expected):
    """By the clock, waking included: the session sleeps before each step."""
    clock, chance = asyncio.get_running_loop().time, random.Random(7)
    async with started(tiny) as session, started(tiny) as neighbour:
        digest = await session.digest()
        begun = clock()
        await neighbour.step(PROMPT, decoding=DECODING)
        duration = clock() - begun
        for turn in range(12):
            await session.sleep()
            with anyio.move_on_after(chance.uniform(0, duration * (0.1 if turn % 3 else 0.9))) as scope:
                await session.step(PROMPT, decoding=DECODING)
            if not scope.cancelled_caught:
                break
            assert await session.digest() == digest
            check_pool(tiny)
        if not session.head.endswith("@2"):
            result = await session.step(PROMPT, decoding=DECODING)
            assert result.token_ids == expected.token_ids


CALLS = ["store.contents", "backend.open_tail", "store.read_pages", "backend.write_page", "store.read_tail"]


@pytest.mark.parametrize("call", CALLS)
async def test_cancelled_while_it_wakes(tiny, call):
    async with started(tiny) as session:
        await session.step(PROMPT, decoding=DECODING)
        digest = await session.digest()
        await session.sleep()
        held, tails = tiny._engine.pool.held, len(tiny._engine.backend._tails)
        part, name = call.split(".")
        owner, loop = getattr(tiny._engine, part), asyncio.get_running_loop()
        task = asyncio.ensure_future(session.step([1, 2, 3], decoding=DECODING))

        def function(*args: Any) -> Any:
            loop.call_soon_threadsafe(task.cancel)
            return getattr(type(owner), name)(owner, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, function)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (tiny._engine.pool.held, len(tiny._engine.backend._tails)) == (held, tails)
        assert await session.digest() == digest
        check_pool(tiny)


async def test_a_kept_step_that_finds_the_store_full_is_rolled_back(tiny, caplog):
    async with started(tiny, on_cancel="keep") as session:
        digest = await session.digest()

        def full(*args: Any) -> Any:
            raise StoreFull("planted")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny._engine.store, "commit", full)
            await cancelled(by_anyio_scope, lambda: session.step(PROMPT, decoding=DECODING), at_forward, tiny, 10)
        assert "could not be kept" in caplog.text
        assert await session.digest() == digest
        check_pool(tiny)


async def test_digests_and_steps_may_wake_a_session_at_once(tiny):
    async with started(tiny) as session:
        digest = await session.digest()
        await session.sleep()
        results = await asyncio.gather(session.digest(), session.digest(), session.step([1, 2], decoding=DECODING))
        assert digest == results[0] == results[1]
        check_pool(tiny)


# Closing


async def in_flight(session: agentkv.Session, **options: Any) -> tuple["asyncio.Task[StepResult]", asyncio.Event]:
    """A step in its own task, and an event set once its first text has come."""
    begun = asyncio.Event()

    async def step() -> StepResult:
        async with session.stream(PROMPT, decoding=DecodingConfig(max_new_tokens=2000, ignore_eos=True)) as stream:
            async for event in stream:
                if isinstance(event, Text):
                    begun.set()
        assert stream.result is not None
        return stream.result

    return asyncio.ensure_future(step()), begun


@pytest.mark.parametrize("phase", ["begin", "prefill", "decode"])
async def test_closing_the_manager_ends_steps_in_flight(tmp_path, phase):
    others = asyncio.all_tasks()
    async with open_tiny(tmp_path, prefill_chunk=32) as manager:
        async with started(manager) as rolled, started(manager, on_cancel="keep") as kept:
            heads = rolled.head, kept.head
            await rolled.sleep()
            steps = [await in_flight(rolled), await in_flight(kept)]
            if phase == "decode":
                await asyncio.gather(*(begun.wait() for _, begun in steps))
            else:
                await asyncio.sleep(0 if phase == "begin" else 0.02)
            await asyncio.gather(manager.close(), manager.close())
            for task, _ in steps:
                with pytest.raises(ManagerClosed):
                    await asyncio.wait_for(task, 10)
            with pytest.raises(ManagerClosed):
                await rolled.step("x")
        for call in (lambda: manager.sessions(), lambda: manager.delete("x")):
            with pytest.raises(ManagerClosed):
                await call()
        for use in (manager.statistics, manager.session):
            with pytest.raises(ManagerClosed):
                use()
        await manager.close()
    assert asyncio.all_tasks() <= others
    async with open_tiny(tmp_path) as manager:
        async with manager.session(rolled.id, create=False) as session:
            assert session.head == heads[0]
            await session.digest()
        async with manager.session(kept.id, create=False) as session:
            assert (session.head != heads[1]) == (phase == "decode")
            await session.digest()
            assert (await session.step([4], decoding=DECODING)).usage.output == DECODING.max_new_tokens


async def test_a_session_closed_by_another_task_ends_its_step(tiny):
    async with started(tiny) as session:
        task, begun = await in_flight(session)
        await begun.wait()
        await session.close()
        with pytest.raises(SessionError, match="closed"):
            await asyncio.wait_for(task, 10)
        with pytest.raises(SessionError, match="closed"):
            await session.step("x")
    check_pool(tiny)


async def test_a_commit_that_has_begun_wins_over_closing(tmp_path):
    async with open_tiny(tmp_path) as manager, started(manager) as session:
        closing: list[asyncio.Task[None]] = []
        with at_point(manager, "commit:begin", lambda: closing.append(asyncio.ensure_future(manager.close()))):
            async with session.stream(PROMPT, decoding=DECODING) as stream:
                events = [event async for event in stream]
        await closing[0]
        assert isinstance(events[-1], Done)
        assert session.head == events[-1].result.checkpoint


@pytest.mark.parametrize("part", ["_open_store", "_new_backend", "_calibrate"])
async def test_a_cancelled_open_leaves_nothing_open(tmp_path, part):
    from agentkv import building

    loop, slow = asyncio.get_running_loop(), getattr(building, part)

    async def use() -> None:
        async with open_tiny(tmp_path):
            raise AssertionError("not cancelled")

    task = asyncio.ensure_future(use())

    def function(*args: Any) -> Any:
        loop.call_soon_threadsafe(task.cancel)
        return slow(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, part, function)
        with pytest.raises(asyncio.CancelledError):
            await task
    async with open_tiny(tmp_path) as manager, manager.session() as session:
        assert (await session.step([1, 2], decoding=DECODING)).usage.output == DECODING.max_new_tokens
