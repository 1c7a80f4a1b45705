"""What every benchmark shares: the machine's facts, real text, interleaved runs, medians with their interval."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from agentkv.models import load_tokenizer, resolve


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="JSON lines on stdout only")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--lengths", type=int, nargs="+")
    return options


def machine(threads: int) -> dict[str, Any]:
    """Where a number was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def report(row: dict[str, Any], *, as_json: bool) -> None:
    """One result, written as it ends."""
    print(json.dumps(row) if as_json else "  ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def interleave(systems: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Run A B C A B C …, `runs` times each, after one warm-up each; what each call returns, by system."""
    for system in systems.values():
        system()
    results: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(runs):
        for name, system in systems.items():
            results[name].append(system())
    return results


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median with the smallest and largest value."""
    return {
        "median": round(median(values), digits),
        "low": round(min(values), digits),
        "high": round(max(values), digits),
    }


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Ratio of neighbours in the same interleaved sweep: what drifts slowly cancels."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)], 3)


def read_bandwidth(threads: int) -> float:
    """Bytes per second that summing a large tensor reads."""
    torch.set_num_threads(threads)
    data = torch.ones(64 << 20)
    best = 0.0
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - started))
    return best


@cache
def _tokenizer() -> Any:
    return load_tokenizer(resolve("smollm2"))


def prose_ids(count: int) -> list[int]:
    """`count` ids of real prose and code: docstrings and sources of the standard library."""
    import argparse as a
    import asyncio.tasks as b
    import inspect as c
    import typing as d

    text = "\n".join(Path(str(module.__file__)).read_text() for module in (a, b, c, d))
    ids = _tokenizer().encode(text, add_special_tokens=False)
    assert len(ids) >= count
    return ids[:count]


def repetitive_ids(count: int) -> list[int]:
    """`count` ids of a table whose rows repeat a pattern, as logs and edited code do."""
    rows = "".join(
        f"    Setting(name='option_{i % 40:02d}', default=None, help='see the manual'),\n" for i in range(2000)
    )
    return _tokenizer().encode("settings = [\n" + rows, add_special_tokens=False)[:count]


def setup(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if sys.platform == "linux":
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
