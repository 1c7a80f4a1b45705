"""(a) `full` decoding and (c) prefill against transformers, SmolLM2, in one interleaved run.

usage: python benchmarks/bench_decode.py [--json] [--lengths 1000 4000 7900] [--runs 5] [--threads 2]
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from common import interleave, machine, median, parser, prose_ids, ratios, read_bandwidth, report, setup, spread
from transformers import DynamicCache, StaticCache

import agentkv
from agentkv import DecodingConfig, EngineConfig, Text
from agentkv.models import load_model, resolve

TOKENS = 24


def transformers_decoder(model: Any, ids: list[int], cache: Any) -> Callable[[], float]:
    """Seconds per token of greedy decoding behind `ids`; the cache is cropped back after each run."""
    tokens = torch.tensor([ids])
    last = _forward(model, tokens, cache, 0)

    def run() -> float:
        token, started = last, time.perf_counter()
        for step in range(TOKENS):
            token = _forward(model, token, cache, len(ids) + step)
        seconds = (time.perf_counter() - started) / TOKENS
        if isinstance(cache, DynamicCache):
            cache.crop(-TOKENS)
        return seconds

    return run


def _forward(model: Any, tokens: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
    positions = torch.arange(position, position + tokens.shape[1])[None]
    name = "cache" if "cache" in model.model.forward.__wrapped__.__code__.co_varnames else "past_key_values"
    output = model(tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **{name: cache})
    return output.logits[:, -1:].argmax(-1)


def rewind_static(cache: Any, length: int) -> None:
    """StaticCache writes by its own count of seen tokens: set it back."""
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length"):
            count = layer.cumulative_length
            layer.cumulative_length = torch.full_like(count, length) if torch.is_tensor(count) else length


async def agentkv_decode(session: agentkv.Session) -> float:
    """Seconds per token of `full`, first to last; left before the commit, so the session stays as it was."""
    times: list[float] = []
    decoding = DecodingConfig(max_new_tokens=TOKENS + 1, ignore_eos=True)
    async with session.stream([1, 2, 3], mode="full", decoding=decoding) as stream:
        async for event in stream:
            if isinstance(event, Text):
                times.append(time.perf_counter())
                if len(times) == TOKENS + 1:
                    break
    return (times[-1] - times[0]) / TOKENS


async def decode(options: Any, manager: agentkv.SessionManager, model: Any) -> None:
    bandwidth = read_bandwidth(options.threads)
    weights = sum(p.numel() * 4 for p in model.parameters())
    loop = asyncio.get_running_loop()
    for length in options.lengths or (1000, 4000, 7900):
        ids = prose_ids(length)
        async with manager.session(f"decode-{length}") as session:
            await session.step(ids, mode="full", decoding=DecodingConfig(max_new_tokens=1))

            def run_ours(session: agentkv.Session = session) -> float:
                return asyncio.run_coroutine_threadsafe(agentkv_decode(session), loop).result()

            static = StaticCache(config=model.config, max_cache_len=length + 2 * TOKENS)
            static_run = transformers_decoder(model, ids, static)

            def run_static(run: Callable[[], float] = static_run, cache: Any = static, length: int = length) -> float:
                rewind_static(cache, length)
                return run()

            systems = {
                "agentkv_full": run_ours,
                "dynamic_cache": transformers_decoder(model, ids, DynamicCache(config=model.config)),
                "static_cache": run_static,
            }
            found = await asyncio.to_thread(interleave, systems, options.runs)
        faster = min(("dynamic_cache", "static_cache"), key=lambda name: median(found[name]))
        row: dict[str, Any] = {"bench": "decode", "length": length}
        row |= {f"{name}_ms": spread([1e3 * s for s in seconds], 1) for name, seconds in found.items()}
        row["faster_peer"] = faster
        row["speedup"] = ratios(found[faster], found["agentkv_full"])
        kv_bytes = length * resolve("smollm2").shape.token_bytes
        row["share_of_bandwidth"] = round((weights + kv_bytes) / median(found["agentkv_full"]) / bandwidth, 3)
        row["bandwidth_gb_s"] = round(bandwidth / 1e9, 1)
        report(row, as_json=options.json)


async def prefill(options: Any, manager: agentkv.SessionManager, model: Any) -> None:
    loop = asyncio.get_running_loop()
    for length in options.lengths or (1000, 4000):
        ids = prose_ids(length)

        async def ours(ids: list[int] = ids) -> float:
            async with manager.session() as session, session.stream(ids, mode="full") as stream:
                started = time.perf_counter()
                async for event in stream:
                    if isinstance(event, Text):
                        break
                return time.perf_counter() - started

        def theirs(ids: list[int] = ids) -> float:
            started = time.perf_counter()
            _forward(model, torch.tensor([ids]), DynamicCache(config=model.config), 0)
            return time.perf_counter() - started

        systems = {
            "agentkv": lambda run=ours: asyncio.run_coroutine_threadsafe(run(), loop).result(),
            "transformers": theirs,
        }
        found = await asyncio.to_thread(interleave, systems, options.runs)
        row: dict[str, Any] = {"bench": "prefill", "length": length}
        row |= {f"{name}_tok_s": spread([length / s for s in seconds], 0) for name, seconds in found.items()}
        row["speedup"] = ratios(found["transformers"], found["agentkv"])
        report(row, as_json=options.json)


async def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", choices=("decode", "prefill"))
    options = arguments.parse_args()
    setup(options.threads)
    report({"bench": "machine", **machine(options.threads)}, as_json=options.json)
    model = load_model(resolve("smollm2"))
    with tempfile.TemporaryDirectory() as store:
        async with agentkv.open("smollm2", store=store, config=EngineConfig(threads=options.threads)) as manager:
            if options.only != "prefill":
                await decode(options, manager, model)
            if options.only != "decode":
                await prefill(options, manager, model)


if __name__ == "__main__":
    asyncio.run(main())
