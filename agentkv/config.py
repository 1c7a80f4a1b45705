"""Frozen options. Unknown fields are refused; ranges are checked when a struct is made.

Nothing here reads the environment. `types.py` holds what comes back; `errors.py` what is raised.
"""

import math
from typing import Literal

import msgspec

from agentkv.errors import InvalidInput

PAGE_TOKENS = 16
"""Positions in a page (design: page-level selection; 4 KB fragments reach link speed)."""

MIN_BUDGET_PAGES = 64
"""Floor of the default budget: below 1,024 tokens acceptance falls fast (Qwen2.5-1.5B, SmolLM2)."""

Mode = Literal["auto", "exact", "full", "sparse"]
MODES: tuple[Mode, ...] = ("auto", "exact", "full", "sparse")


_MOST = 1 << 48
"""No count and no number of bytes is larger; beyond it the system's own calls overflow."""


def _check_types(options: msgspec.Struct) -> None:
    """msgspec checks types when it decodes, not when a struct is made."""
    for field in msgspec.structs.fields(type(options)):
        try:
            msgspec.convert(getattr(options, field.name), field.type, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{type(options).__name__}.{field.name}: {error}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)


def _finite(name: str, value: float, low: float, high: float) -> None:
    _require(
        math.isfinite(value) and low <= value <= high,
        f"{name} must be a finite number in [{low}, {high}], not {value!r}",
    )


def _whole(name: str, value: int, low: int, high: int = _MOST) -> None:
    _require(low <= value <= high, f"{name} must be a whole number in [{low}, {high}], not {value!r}")


class Tolerant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Accept a draft that is among the target's `n` likeliest tokens (KAP uses 3). Changes the output."""

    n: int

    def __post_init__(self) -> None:
        _check_types(self)
        _whole("Tolerant.n", self.n, 1)


class Every(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Verify every `n`-th round only; the rounds between keep their drafts. Changes the output."""

    n: int

    def __post_init__(self) -> None:
        _check_types(self)
        _whole("Every.n", self.n, 1)


class DecodingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen from logits; the order of operations is that of transformers 5.

    `temperature=0` is argmax. `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1` switch those off.
    `logit_bias` maps token ids to additive biases, in logits; `ignore_eos` generates through end tokens.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _finite("temperature", self.temperature, 0.0, 1e4)
        _whole("top_k", self.top_k, 0)
        _finite("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0, "top_p must be above 0")
        _finite("min_p", self.min_p, 0.0, 1.0)
        _finite("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        for token, bias in self.logit_bias.items():
            _whole("a logit_bias token", token, 0)
            _finite(f"logit_bias[{token}]", bias, -1e4, 1e4)


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rounds draft. `k` fixes the draft length of sparse rounds (None: the controller chooses, ≤ `k_max`).

    `budget_pages` overrides the selection's size (default: max(64 pages, 5 % of the context), bucketed).
    `proposers` are those a round may use, in order of preference: "lookup", "sparse".
    `dense_layers` read all pages in proposals too (diffuse layers). `recompute_tokens` bounds how many
    unverified tokens mode="sparse" holds before one full-attention forward recomputes them.
    """

    k: int | None = None
    k_max: int = 8
    budget_pages: int | None = None
    proposers: tuple[Literal["lookup", "sparse"], ...] = ("lookup", "sparse")
    dense_layers: tuple[int, ...] = ()
    recompute_tokens: int = 512

    def __post_init__(self) -> None:
        _check_types(self)
        _whole("k_max", self.k_max, 1, 40)
        if self.k is not None:
            _whole("k", self.k, 1)
            _require(self.k <= self.k_max, f"k must be ≤ k_max={self.k_max}")
        if self.budget_pages is not None:
            _whole("budget_pages", self.budget_pages, 3)
        _require(
            len(self.proposers) == len(set(self.proposers)) and set(self.proposers) <= {"lookup", "sparse"},
            f"proposers must be distinct names out of 'lookup' and 'sparse', not {self.proposers!r}",
        )
        for layer in self.dense_layers:
            _whole("a dense layer", layer, 0)
        _whole("recompute_tokens", self.recompute_tokens, PAGE_TOKENS)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manager may use. Bytes are bytes; None means: derived from the machine.

    `store_bytes` limits the counted bytes of the store; `kv_bytes` the KV pool in memory (default: a quarter of
    the machine's memory, reserved as address space and only touched as pages fill).
    `durability="kv"`: a step returns when its KV is on disk; `"tokens"`: when its token ids are.
    `threads` is the number of torch threads (default: the cores this process may use).
    `prefill_chunk` is the most tokens a prefill computes while other sessions wait for their next round (twice that
    when none does); a multiple of 16.
    """

    store_bytes: int = 16 << 30
    kv_bytes: int | None = None
    durability: Literal["kv", "tokens"] = "kv"
    threads: int | None = None
    prefill_chunk: int = 256
    keep_checkpoints: int = 16
    speculation: SpeculationConfig = SpeculationConfig()

    def __post_init__(self) -> None:
        _check_types(self)
        _whole("store_bytes", self.store_bytes, 1 << 20)
        if self.kv_bytes is not None:
            _whole("kv_bytes", self.kv_bytes, 1 << 16)
        _require(self.durability in ("kv", "tokens"), f"durability must be 'kv' or 'tokens', not {self.durability!r}")
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024)
        _whole("prefill_chunk", self.prefill_chunk, PAGE_TOKENS)
        _require(self.prefill_chunk % PAGE_TOKENS == 0, f"prefill_chunk must be a multiple of {PAGE_TOKENS}")
        _whole("keep_checkpoints", self.keep_checkpoints, 1)
        _require(isinstance(self.speculation, SpeculationConfig), "speculation must be a SpeculationConfig")
