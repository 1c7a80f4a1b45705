"""(b) `exact` and `auto` against `full`, SmolLM2, prose and repetitive text, interleaved.

usage: python benchmarks/bench_speculation.py [--json] [--lengths 4000 7900] [--runs 5] [--threads 2]
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from common import interleave, machine, parser, prose_ids, ratios, repetitive_ids, report, setup, spread

import agentkv
from agentkv import DecodingConfig, EngineConfig, Mode, Round, SpeculationConfig, Text

TOKENS = 96
SEED = 7
TEXTS = {
    "prose": (prose_ids, {"temperature": 0.8, "top_p": 0.95}),  # greedy, so small a model repeats itself
    "repetitive": (repetitive_ids, {}),
}


class Measured:
    """Seconds per token of one mode on one session, and what its rounds were, summed over runs."""

    def __init__(self, session: agentkv.Session, mode: Mode, more: list[int], sampling: dict[str, Any]) -> None:
        self.session = session
        self.more = more  # the text goes on: a break in it would be what the model sees last
        self.mode: Mode = mode
        self.decoding = DecodingConfig(max_new_tokens=TOKENS, ignore_eos=True, **sampling)
        self.proposed = self.accepted = 0
        self.kinds: dict[str, int] = {}

    async def run(self) -> float:
        """One run; it is left before the commit, so the session stays as it was."""
        times: list[float] = []
        tokens: list[int] = []
        async with self.session.stream(self.more, mode=self.mode, decoding=self.decoding, seed=SEED) as stream:
            async for event in stream:
                if isinstance(event, Text):
                    times.append(time.perf_counter())
                    tokens.append(len(event.token_ids))
                elif isinstance(event, Round):
                    self.kinds[event.kind] = self.kinds.get(event.kind, 0) + 1
                    self.proposed += event.proposed
                    self.accepted += event.accepted
                    if sum(tokens) == TOKENS:
                        break
        return (times[-1] - times[0]) / (TOKENS - tokens[0])


def blocking(run: Callable[[], Coroutine[Any, Any, float]], loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    return lambda: asyncio.run_coroutine_threadsafe(run(), loop).result()


async def main() -> None:
    options = parser(__doc__ or "").parse_args()
    setup(options.threads)
    report({"bench": "machine", **machine(options.threads)}, as_json=options.json)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        managers = {}
        for name, speculation in {
            "default": SpeculationConfig(),
            "k2": SpeculationConfig(k=2, proposers=("sparse",)),
            "k4": SpeculationConfig(k=4, proposers=("sparse",)),
        }.items():
            store = stack.enter_context(tempfile.TemporaryDirectory())
            config = EngineConfig(threads=options.threads, speculation=speculation)
            managers[name] = await stack.enter_async_context(agentkv.open("smollm2", store=store, config=config))
        for length in options.lengths or (4000, 7900):
            for text, (make, sampling) in TEXTS.items():
                ids = make(length - TOKENS)
                ids, more = ids[:-4], ids[-4:]
                async with AsyncExitStack() as sessions:
                    opened = {}
                    for name, manager in managers.items():
                        opened[name] = await sessions.enter_async_context(manager.session(f"{text}-{length}"))
                        await opened[name].step(ids, decoding=DecodingConfig(max_new_tokens=1))
                    measured = {
                        "full": Measured(opened["default"], "full", more, sampling),
                        "auto": Measured(opened["default"], "auto", more, sampling),
                        "exact_k2": Measured(opened["k2"], "exact", more, sampling),
                        "exact_k4": Measured(opened["k4"], "exact", more, sampling),
                    }
                    systems = {name: blocking(system.run, loop) for name, system in measured.items()}
                    found = await asyncio.to_thread(interleave, systems, options.runs)
                row: dict[str, Any] = {"bench": "speculation", "text": text, "length": length}
                for name, seconds in found.items():
                    row[f"{name}_tok_s"] = spread([1 / s for s in seconds], 1)
                    if name != "full":
                        row[f"{name}_over_full"] = ratios(found["full"], seconds)
                        system = measured[name]
                        row[f"{name}_rounds"] = {k: v for k, v in system.kinds.items() if k != "prefill"}
                        row[f"{name}_h"] = round(system.accepted / max(system.proposed, 1), 3)
                report(row, as_json=options.json)


if __name__ == "__main__":
    asyncio.run(main())
