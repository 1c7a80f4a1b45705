"""Lanes: work in order on one thread; what was begun is finished before a cancellation goes on."""

import asyncio
import threading
import time

import anyio
import pytest

from agentkv.errors import ManagerClosed
from agentkv.lanes import Lane, shielded


@pytest.fixture
async def lane():
    lane = Lane("test")
    yield lane
    await lane.close()


async def test_calls_run_in_order_on_one_thread_off_the_loop(lane):
    seen = []

    def note(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        seen.append((number, threading.get_ident()))
        return number * 2

    assert await asyncio.gather(*(lane.run(note, n) for n in range(12))) == [n * 2 for n in range(12)]
    assert [number for number, _ in seen] == list(range(12))
    threads = {thread for _, thread in seen}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_what_fails_on_the_lane_is_raised_to_its_caller_alone(lane):
    def fail() -> None:
        raise LookupError("planted")

    results = await asyncio.gather(lane.run(fail), lane.run(int, "3"), return_exceptions=True)
    assert isinstance(results[0], LookupError)
    assert results[1] == 3


async def test_a_call_that_has_not_begun_is_withdrawn(lane):
    gate, seen = threading.Event(), []
    first = asyncio.ensure_future(lane.run(gate.wait))
    second = asyncio.ensure_future(lane.run(seen.append, 1))
    await asyncio.sleep(0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
    await lane.run(int)
    assert seen == []


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_call_that_has_begun_is_waited_for(lane, cancels):
    begun, gate, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        gate.wait()
        seen.append("finished")

    task = asyncio.ensure_future(lane.run(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done(), "the caller went on while the thread still works for it"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["finished"]


@pytest.mark.parametrize("by", ["task", "anyio"])
async def test_what_a_cancelled_caller_cannot_get_is_undone(lane, by):
    begun, gate, opened = threading.Event(), threading.Event(), []

    def take() -> str:
        begun.set()
        gate.wait()
        opened.append("thing")
        return "thing"

    async def use() -> None:
        await lane.make(take, opened.remove)

    async with anyio.create_task_group() as group:
        if by == "anyio":
            group.start_soon(use)
        else:
            task = asyncio.ensure_future(use())
        await asyncio.to_thread(begun.wait)
        group.cancel_scope.cancel() if by == "anyio" else task.cancel()
        asyncio.get_running_loop().call_later(0.02, gate.set)
    if by == "task":
        with pytest.raises(asyncio.CancelledError):
            await task
    assert opened == []
    gate.set()
    assert await lane.make(take, opened.remove) == "thing"
    assert opened == ["thing"], "what was got is not undone"


async def test_finish_is_never_withdrawn(lane):
    gate, seen = threading.Event(), []
    first = asyncio.ensure_future(lane.run(gate.wait))
    second = asyncio.ensure_future(lane.finish(seen.append, 1))
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.sleep(0.02)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert seen == [1]
    await first


@pytest.mark.parametrize("fails", [False, True])
async def test_shielded_work_outlives_its_caller(fails):
    seen = []

    async def work() -> None:
        await asyncio.sleep(0.03)
        seen.append(1)
        if fails:
            raise LookupError("planted: a cancellation comes first")

    with anyio.move_on_after(0.005) as scope:
        await shielded(work())
    assert scope.cancelled_caught
    assert seen == [1]


async def test_shielded_work_hands_its_result_and_its_error_through():
    async def give() -> int:
        return 3

    async def fail() -> None:
        raise LookupError("planted")

    assert await shielded(give()) == 3
    with pytest.raises(LookupError):
        await shielded(fail())


async def test_a_closed_lane_refuses_and_its_thread_ends():
    lane, seen = Lane("closing"), []
    running = asyncio.ensure_future(lane.run(time.sleep, 0.03))
    queued = asyncio.ensure_future(lane.run(seen.append, 1))
    await asyncio.sleep(0)
    await asyncio.gather(lane.close(), lane.close())
    assert running.done()
    await queued
    assert seen == [1], "the queue runs dry first"
    with pytest.raises(ManagerClosed):
        await lane.run(int)
    assert not any(thread.name.startswith("agentkv-closing") for thread in threading.enumerate())
