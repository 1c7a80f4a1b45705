"""Promises of the model that ships as a test double: same bytes each time, lively output, variants as asked."""

import json
import os
import subprocess
import sys

import pytest
import torch

from agentkv.models import load_model, load_tokenizer, resolve, write_tiny
from agentkv.models.cache import file_digest


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _greedy(model, ids, count):
    """Tokens, and the margin of each over the next best."""
    tokens, margins = [], []
    with torch.inference_mode():
        for _ in range(count):
            best, index = model(input_ids=torch.tensor([[*ids, *tokens]]), use_cache=False).logits[0, -1].topk(2)
            tokens.append(int(index[0]))
            margins.append(float(best[0] - best[1]))
    return tokens, margins


def _prompt_logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.fixture(scope="module")
def tiny():
    files = resolve("tiny")
    return files, load_model(files), load_tokenizer(files)


def test_it_is_an_ordinary_small_model(tiny):
    files, model, tokenizer = tiny
    shape = files.shape
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 16)
    assert shape.max_positions == 4096
    assert shape.vocab == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert sum((files.directory / name).stat().st_size for name in files.weights) < 1 << 20


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    one, two, other = (write_tiny(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_another_process_writes_the_same_bytes(tmp_path):
    """Hash randomisation, global random state and thread counts must not show."""
    code = "import sys, torch; torch.manual_seed(7); from agentkv.models import write_tiny; write_tiny(sys.argv[1])"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, env=environment)
    here = write_tiny(tmp_path / "b")
    assert {p.name: file_digest(p) for p in (tmp_path / "a").iterdir()} == {
        p.name: file_digest(p) for p in here.iterdir()
    }


def test_writing_draws_nothing_from_the_global_generator(tmp_path):
    before = torch.get_rng_state()
    write_tiny(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("prompt", ["hello", "the cat sat on the mat. " * 8])
def test_greedy_output_is_varied_and_decided_by_margins(tiny, prompt):
    _, model, tokenizer = tiny
    tokens, margins = _greedy(model, tokenizer.encode(prompt), 64)
    assert len(set(tokens)) > 30
    assert max(map(tokens.count, set(tokens))) < 10
    assert min(margins) > 5e-4  # what counts as a tie in fp32
    assert sorted(margins)[len(margins) // 2] > 0.5
    assert tokenizer.decode(tokens).isprintable()


def test_what_stands_far_back_matters(tiny):
    """Else every sparse selection would look right."""
    _, model, tokenizer = tiny
    ids = tokenizer.encode("some words that come and go, " * 40)
    base = _prompt_logits(model, ids)
    moved = [(base - _prompt_logits(model, [*ids[:at], 5, *ids[at + 1 :]])).abs().max() for at in (3, 100, 200)]
    assert min(moved) > 1e-3


def test_text_survives_its_tokenizer(tiny):
    _, _, tokenizer = tiny
    text = "thé <b>cat</b>\n\t😀 中文 \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the<|im_end|>")[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "config",
    [
        *({"num_key_value_heads": n} for n in (1, 2, 4)),
        {"num_hidden_layers": 4, "max_position_embeddings": 512},
        *({"model_type": t} for t in ("mistral", "qwen2", "qwen3")),
        {"dtype": "bfloat16"},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_variants_load_and_run(tmp_path, config):
    files = resolve(write_tiny(tmp_path, seed=3, **config))
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {k: stored[k] for k in config} == config
    model = load_model(files)
    logits = _prompt_logits(model, [1, 2, 3])
    assert logits.dtype == torch.float32
    assert logits.shape == (320,)
    assert torch.isfinite(logits).all()
    assert files.shape.kv_heads == config.get("num_key_value_heads", 2)
