"""Prompts. For SmolLM2 real ones: sources and documentation of the pinned torch, and the licence, so that they are the
same under every Python version. `generate` is what transformers says to them.
"""

import copy
import inspect
import random
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import kv_option
from torch import nn
from transformers import DynamicCache

from agentkv import DecodingConfig, Session, SessionManager

STEP_TOKENS = 12
"""Tokens of a prompt that a test's own step appends; those before them are prefilled once per run."""


@dataclass(frozen=True)
class Prompt:
    """The first `size` tokens of a text; with a `question`, as a user's turn to be answered."""

    name: str
    size: int
    text: Callable[[], str | None]
    question: str | None = None

    def ids(self, tokenizer: Any) -> list[int]:
        text = self.text() or ""
        end = "" if self.question is None else "<|im_end|>\n<|im_start|>assistant\n"
        start = text if self.question is None else f"<|im_start|>user\n{self.question}\n\n{text}"
        last = tokenizer.encode(end)
        ids = tokenizer.encode(start)[: self.size - len(last)] + last
        assert len(ids) == self.size, f"{self.name} has become too short: {len(ids)} tokens"
        return ids


LICENSE = Path(__file__).parent.parent / "LICENSE"

PROMPTS = {
    prompt.name: prompt
    for prompt in (
        Prompt("small module", 300, lambda: inspect.getsource(nn.Flatten), "Explain this module."),
        Prompt("reference", 420, lambda: inspect.getdoc(nn.CrossEntropyLoss)),
        Prompt("licence", 600, LICENSE.read_text),
        Prompt("terms", 700, LICENSE.read_text, "What may I do with this software?"),
        Prompt("module", 800, lambda: _sources(nn.LayerNorm, nn.RMSNorm), "Translate this module to JavaScript."),
        Prompt(
            "review",
            1000,
            lambda: _sources(nn.Module.register_forward_hook, nn.Module.state_dict, nn.Module.load_state_dict),
            "What may go wrong when many threads use this?",
        ),
        Prompt("source", 1700, lambda: _sources(nn.Transformer)),
        Prompt(
            "documentation",
            3000,
            lambda: _documentation(
                nn.MultiheadAttention, nn.functional.scaled_dot_product_attention, torch.stft, nn.GRU
            ),
            "Which of these is causal?",
        ),
    )
}

REPETITIVE = Prompt("repetitive", 900, lambda: _sources(textwrap.dedent) * 3)
"""The same function again and again: what lookup is for."""


def _sources(*objects: Any) -> str:
    return "".join(map(inspect.getsource, objects))


def _documentation(*objects: Any) -> str:
    return "".join(inspect.getdoc(each) or "" for each in objects)


@asynccontextmanager
async def prompted(manager: SessionManager, prompt: Prompt) -> AsyncIterator[tuple[Session, list[int]]]:
    """A session committed at all but the last STEP_TOKENS of a prompt (once per manager), and those last tokens."""
    ids = prompt.ids(manager._engine.tokenizer)
    known = len(ids) - STEP_TOKENS
    async with manager.session(prompt.name.replace(" ", "-")) as session:
        if session.head.endswith("@0"):
            forced = DecodingConfig(max_new_tokens=1, ignore_eos=True, logit_bias={ids[known - 1]: 1e4})
            result = await session.step(ids[: known - 1], decoding=forced, mode="full")
            assert result.token_ids == (ids[known - 1],)
        yield session, ids[known:]


def generate(
    model: Any, ids: list[int], count: int, penalties: Iterable[float] = (1.0,)
) -> dict[float, tuple[int, ...]]:
    """The greedy tokens of transformers' `generate` per repetition penalty; the KV of `ids` is computed once."""
    prompt, found = torch.tensor([ids]), {}
    cache = DynamicCache()
    with torch.inference_mode():
        model(prompt[:, :-1], logits_to_keep=1, **kv_option(model, cache))
        for penalty in penalties:
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=False,
                repetition_penalty=penalty,
                eos_token_id=None,
                pad_token_id=0,
                **kv_option(model, copy.deepcopy(cache)),
            )
            found[penalty] = tuple(output[0, len(ids) :].tolist())
    return found


def tokens(count: int, **options: Any) -> DecodingConfig:
    """Generate exactly `count` tokens."""
    return DecodingConfig(max_new_tokens=count, ignore_eos=True, **options)


def noise_ids(seed: int, count: int) -> list[int]:
    """Ids for the tiny model in which nothing repeats, so that its attention looks everywhere."""
    return random.Random(seed).choices(range(100, 300), k=count)


def distinct_grams(tokens: Sequence[int], length: int = 8) -> float:
    """Share of distinct 8-grams: text that loops proves little."""
    grams = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return len(set(grams)) / len(grams)
