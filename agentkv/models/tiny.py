"""The test double that ships with the package: a small seeded model, written as an ordinary model directory.

Its text is noise, its behaviour is not: attention looks far back, greedy output varies and is decided by clear
margins, and the same seed gives the same bytes. Loaded by `loading.py` like any other.
"""

import json
import math
from pathlib import Path
from typing import Any

RECIPE = 1
"""Raised whenever what `write_tiny` writes changes, so that a cached copy is never another model."""

# Pairs that the tokenizer merges, so that text has more than one encoding, as with any real vocabulary.
_MERGES = (
    "t h|h e|i n|e r|a n|r e|o n|a t|e n|n d|t i|e s|o r|t e|o f|e d|i s|i t|a l|a r|s t|t o|n t|n g|s e|h a|o u|i o|"
    "l e|v e|c o|m e|d e|h i|r i|r o|i c|n e|e a|r a|c e|l i|c h|l l|b e|m a|s i|o m|u r|Ġ t|Ġ a|Ġ s|Ġ o|Ġ w|Ġ c|Ġ b|"
    "Ġ p|th e|Ġ the|in g|an d"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(directory: str | Path, *, seed: int = 0, template: str | None = _TEMPLATE, **config: Any) -> Path:
    """Write the model into `directory` (made if absent) and return it.

    `config` overrides or adds fields of config.json: `num_key_value_heads=4`, `num_hidden_layers=4`,
    `model_type="mistral"`, `dtype="bfloat16"`, a `sliding_window` to be refused. `template=None` writes none.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    fields = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        **({"sliding_window": None} if config.get("model_type") == "mistral" else {}),
        **config,
    }
    fields["architectures"] = [fields["model_type"].capitalize() + "ForCausalLM"]
    _write_weights(directory, fields, seed, tokenizer)
    (directory / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True))
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [(first, second) for first, second in map(str.split, _MERGES.split("|"))]
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in _SPECIAL])
    return tokenizer


def _write_weights(directory: Path, fields: dict[str, Any], seed: int, tokenizer: Any) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # names and shapes only: no global random state is drawn from
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    dtype = getattr(torch, fields["dtype"])
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, meta in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and fields["tie_word_embeddings"]:
            continue
        if "norm" in name:
            value = torch.ones(meta.shape)
        else:
            value = torch.randn(meta.shape, generator=generator) * _scale(name, meta.shape)
        if name == "lm_head.weight":
            value[_unprintable(tokenizer)] *= 0.05
        tensors[name] = value.to(dtype).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _scale(name: str, shape: Any) -> float:
    """Standard deviations found by trial: output neither repeats nor forgets what stands far back."""
    if "embed" in name:
        return 1.0
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 6.0 if "lm_head" in name else 1.5
    return gain / math.sqrt(shape[-1])


def _unprintable(tokenizer: Any) -> list[int]:
    """Ids that greedy output should not contain: half characters, controls, special tokens."""
    texts = [(i, tokenizer.decode([i], skip_special_tokens=True)) for i in range(tokenizer.get_vocab_size())]
    return [i for i, text in texts if not text or not text.isprintable() or not text.isascii()]
