"""Fork and rollback of sessions awake and asleep, commit, and compaction of a store 90 % deleted, SmolLM2.

usage: python benchmarks/bench_lifecycle.py [--json] [--lengths 1000 4000 7900] [--runs 5] [--threads 2]
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from common import machine, parser, prose_ids, report, setup, spread

import agentkv
from agentkv import DecodingConfig, EngineConfig

ONE = DecodingConfig(max_new_tokens=1)


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds that `call` takes."""
    started = time.perf_counter()
    await call()
    return (time.perf_counter() - started) * 1e3


async def branches(manager: agentkv.SessionManager, length: int, runs: int) -> dict[str, Any]:
    """Forks, their first waking, and rollbacks of one session of `length` tokens."""
    row: dict[str, Any] = {"bench": "branches", "length": length}
    async with manager.session(f"source-{length}") as session:
        await session.step(prose_ids(length), decoding=ONE)
        first = await session.checkpoint()
        for state in ("awake", "asleep"):
            forks, rollbacks, sizes = [], [], []
            for run in range(runs):
                await session.step([1, 2, 3], decoding=ONE)
                if state == "asleep":
                    await session.sleep()
                before = manager.statistics()["store"]["used_bytes"]
                name = f"fork-{length}-{state}-{run}"
                forks.append(await timed(lambda name=name: session.fork(name)))
                sizes.append(manager.statistics()["store"]["used_bytes"] - before)
                rollbacks.append(await timed(lambda: session.rollback(first)))
            row[f"fork_{state}_ms"] = spread(forks, 2)
            row[f"rollback_{state}_ms"] = spread(rollbacks, 2)
            row["fork_kb"] = round(max(sizes) / 1e3, 1)
        commits = []
        for _ in range(runs):
            result = await session.step([1, 2, 3], decoding=ONE)
            commits.append(next(e.seconds for e in result.trace.events if e.kind == "commit") * 1e3)
        row["commit_ms"] = spread(commits, 2)
        async with manager.session(f"fork-{length}-awake-0") as fork:
            row["fork_digest_ms"] = round(await timed(fork.digest), 1)
    return row


async def compaction(config: EngineConfig) -> dict[str, Any]:
    """Ten sessions of 1,000 tokens, nine of them deleted."""
    with tempfile.TemporaryDirectory() as store:
        async with agentkv.open("smollm2", store=store, config=config) as manager:
            for number in range(10):
                async with manager.session(f"s{number}") as session:
                    await session.step(prose_ids(1000), decoding=ONE)
            for number in range(1, 10):
                await manager.delete(f"s{number}")
            started = time.perf_counter()
            before, after = await manager.compact()
            seconds = time.perf_counter() - started
    return {"bench": "compact", "before_mb": before >> 20, "after_mb": after >> 20, "seconds": round(seconds, 3)}


async def main() -> None:
    options = parser(__doc__ or "").parse_args()
    setup(options.threads)
    report({"bench": "machine", **machine(options.threads)}, as_json=options.json)
    config = EngineConfig(threads=options.threads)
    with tempfile.TemporaryDirectory() as store:
        async with agentkv.open("smollm2", store=store, config=config) as manager:
            for length in options.lengths or (1000, 4000, 7900):
                report(await branches(manager, length, options.runs), as_json=options.json)
    report(await compaction(config), as_json=options.json)


if __name__ == "__main__":
    asyncio.run(main())
