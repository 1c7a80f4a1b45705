"""Options that can never work are refused when they are made, by name; the rest when a manager opens."""

import math

import msgspec
import pytest
from conftest import open_tiny

import agentkv
from agentkv import DecodingConfig, EngineConfig, Every, InvalidInput, Item, SpeculationConfig, Tolerant

NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": NAN}, {"temperature": INFINITY}, {"temperature": -1.0}, {"temperature": "hot"},
        {"temperature": None}, {"temperature": True}, {"top_p": NAN}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1},
        {"top_k": 1.5}, {"min_p": NAN}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"repetition_penalty": -INFINITY},
        {"max_new_tokens": 0}, {"max_new_tokens": 2.0}, {"max_new_tokens": 1 << 60}, {"ignore_eos": "yes"},
        {"logit_bias": None}, {"logit_bias": [1]}, {"logit_bias": {-1: 0.0}}, {"logit_bias": {1: NAN}},
        {"logit_bias": {"a": 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_decoding_options_that_cannot_be(options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        DecodingConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0}, {"k": 9}, {"k": "2"}, {"k": True}, {"k_max": 41}, {"k_max": None}, {"budget_pages": 2},
        {"proposers": ("guess",)}, {"proposers": ("sparse", "sparse")}, {"proposers": 3}, {"proposers": [["sparse"]]},
        {"dense_layers": (-1,)}, {"dense_layers": 3}, {"dense_layers": (0.5,)}, {"recompute_tokens": 8},
    ],
    ids=str,
)  # fmt: skip
def test_speculation_options_that_cannot_be(options):
    with pytest.raises(InvalidInput):
        SpeculationConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"store_bytes": 0}, {"store_bytes": 1 << 70}, {"kv_bytes": 1}, {"kv_bytes": 1.5e9}, {"durability": "maybe"},
        {"threads": 0}, {"threads": 1 << 40}, {"prefill_chunk": 17}, {"keep_checkpoints": 0}, {"speculation": None},
        {"speculation": {"k": 2}},
    ],
    ids=str,
)  # fmt: skip
def test_engine_options_that_cannot_be(options):
    with pytest.raises(InvalidInput):
        EngineConfig(**options)


@pytest.mark.parametrize("struct", [DecodingConfig, SpeculationConfig, EngineConfig, Item, Tolerant, Every])
def test_unknown_fields_are_refused(struct):
    needed = {"role": "user", "content": ""} if struct is Item else {"n": 1} if struct in (Tolerant, Every) else {}
    struct(**needed)
    with pytest.raises(TypeError, match="unheard_of"):
        struct(**needed, unheard_of=1)
    with pytest.raises(msgspec.ValidationError, match="unheard_of"):
        msgspec.convert({**needed, "unheard_of": 1}, struct)


@pytest.mark.parametrize(
    "arguments", [{"model": 3}, {"model": None}, {"store": 3}, {"config": {"threads": 1}}, {"on_mismatch": "guess"}]
)
def test_arguments_of_open(arguments):
    with pytest.raises(InvalidInput, match=next(iter(arguments))):
        agentkv.open(**{"model": "tiny"} | arguments)


async def test_dense_layers_that_the_model_lacks(tmp_path):
    with pytest.raises(InvalidInput, match="2 layers"):
        async with open_tiny(tmp_path, speculation=SpeculationConfig(dense_layers=(0, 2))):
            pass
