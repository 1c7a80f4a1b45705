"""(d) memory against weights + KV, and (e) commit and reopen of a 4,000-token session, SmolLM2.

usage: python benchmarks/bench_store.py [--json] [--lengths 4000] [--runs 5] [--threads 2]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, parser, prose_ids, report, setup, spread

import agentkv
from agentkv import DecodingConfig, EngineConfig
from agentkv.models import resolve

ONE = DecodingConfig(max_new_tokens=1)


async def memory(ids: list[int], threads: int) -> dict[str, Any]:
    """Peak resident bytes of this (fresh) process with one session of `ids` (made elsewhere: a tokenizer counts)."""
    length = len(ids)
    files = resolve("smollm2")
    with tempfile.TemporaryDirectory() as store:
        async with agentkv.open("smollm2", store=store, config=EngineConfig(threads=threads)) as manager:
            opened = _status("VmRSS")
            async with manager.session("memory") as session:
                await session.step(ids, decoding=DecodingConfig(max_new_tokens=64))
                stepped = _status("VmRSS")
            weights = sum((files.directory / name).stat().st_size for name in files.weights)
            kv_bytes = (length + 64) * files.shape.token_bytes
    peak = _status("VmHWM")  # getrusage would count this process's parent, too
    return {
        "bench": "memory",
        "length": length,
        "peak_mb": peak >> 20,
        "after_open_mb": opened >> 20,
        "after_step_mb": stepped >> 20,
        "weights_mb": weights >> 20,
        "kv_mb": kv_bytes >> 20,
        "peak_over_weights_and_kv": round(peak / (weights + kv_bytes), 2),
        "after_step_over_weights_and_kv": round(stepped / (weights + kv_bytes), 2),
    }


def _status(name: str) -> int:
    """Bytes of this process, from the kernel: VmRSS resident now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


async def commit_and_reopen(options: Any, length: int) -> dict[str, Any]:
    commits, opens, loads, first_tokens, rates = [], [], [], [], []
    with tempfile.TemporaryDirectory() as store:
        for run in range(options.runs):
            async with agentkv.open("smollm2", store=store, config=EngineConfig(threads=options.threads)) as manager:
                async with manager.session("long") as session:
                    if run == 0:
                        await session.step(prose_ids(length), decoding=ONE)
            started = time.perf_counter()
            async with agentkv.open("smollm2", store=store, config=EngineConfig(threads=options.threads)) as manager:
                opens.append(time.perf_counter() - started)
                async with manager.session("long") as session:
                    result = await session.step([1, 2, 3], decoding=ONE)
            events = {event.kind: event for event in result.trace.events}
            commits.append(events["commit"].seconds * 1e3)
            loads.append(events["load"].seconds * 1e3)
            rates.append(events["load"].bytes / events["load"].seconds / 1e9)
            first_tokens.append(result.trace.ttft_seconds * 1e3)
            assert result.usage.prefilled == 3
    return {
        "bench": "reopen",
        "length": length,
        "commit_ms": spread(commits, 1),
        "open_manager_s": spread(opens, 2),
        "load_ms": spread(loads, 1),
        "load_gb_s": spread(rates, 2),
        "first_token_ms": spread(first_tokens, 1),
    }


async def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    setup(options.threads)
    lengths = options.lengths or [4000]
    if options.memory_only:
        print(json.dumps(await memory(json.load(sys.stdin), options.threads)))
        return
    report({"bench": "machine", **machine(options.threads)}, as_json=options.json)
    for length in lengths:
        command = [
            sys.executable,
            __file__,
            "--memory-only",
            "--threads",
            str(options.threads),
        ]
        ids = json.dumps(prose_ids(length))
        child = await asyncio.to_thread(subprocess.run, command, input=ids, capture_output=True, text=True, check=True)
        report(json.loads(child.stdout.splitlines()[-1]), as_json=options.json)
        report(await commit_and_reopen(options, length), as_json=options.json)


if __name__ == "__main__":
    asyncio.run(main())
