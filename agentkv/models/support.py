"""Which models can be run correctly, read off config.json alone: the hazards by name, then a table of what is proven.

A layer that keeps anything but one K and one V row per position and head would give a silently wrong cache; so
would rotary angles that change as a session grows. `resolve.py` calls this before anything is loaded.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from agentkv.errors import UnsupportedModel
from agentkv.types import ModelShape

PROVEN: dict[str, str] = {
    "llama": "full attention, rotary, GQA",
    "mistral": "as llama, where its window is off",
    "qwen2": "as llama, with q/k/v biases, where its window is off",
    "qwen3": "as llama, with q/k norms, where its window is off",
}
"""model_type → what its attention is. Others may work; nobody has shown that they do."""

# A true (non-zero, non-null) value of any of these fields means the hazard.
_HAZARDS: dict[str, tuple[str, ...]] = {
    "custom code": ("auto_map",),
    "encoder-decoder": ("is_encoder_decoder",),
    "not text alone": ("vision_config", "audio_config", "text_config", "speech_config", "image_token_id"),
    "latent attention": ("kv_lora_rank", "q_lora_rank"),
    "attention logit soft-capping": ("attn_logit_softcapping", "attn_logit_softcap"),
    "attention sinks": ("attention_sinks", "use_attention_sinks", "num_attention_sinks", "num_sink_tokens"),
    "chunked attention": ("attention_chunk_size",),
    "no rotary embedding": ("alibi", "use_alibi", "no_rope_layers", "no_rope_layer_interval"),
    "KV shared across layers": ("num_kv_shared_layers", "use_cla", "cla_share_factor", "cross_layer_attention"),
    "not causal": ("use_bidirectional_attention",),
    "recurrent or hybrid layers": (
        *("ssm_cfg", "ssm_state_size", "state_size", "conv_kernel", "mamba_d_state", "mamba_num_heads"),
        *("attn_layer_period", "attn_layer_indices", "hybrid_override_pattern", "block_types", "full_attn_idxs"),
        *("linear_num_key_heads", "linear_attn_config", "full_attention_interval", "lightning_attention"),
    ),
    "quantised weights": ("quantization_config",),
}
_GROWING_ROPE = ("dynamic", "longrope", "su")
_WINDOW_IF_ABSENT = {"mistral": 4096}  # transformers' default: a config without the field has a window


def check_supported(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model's KV (dtype float32), or `UnsupportedModel` naming the field and its value."""
    for hazard, fields in _HAZARDS.items():
        for field in fields:
            if config.get(field):
                _refuse(config, field, hazard)
    for field, only in (("is_causal", True), ("use_rope", True), ("rotary", True)):
        if config.get(field, only) is not only:
            _refuse(config, field, "not causal" if field == "is_causal" else "no rotary embedding")
    if config.get("position_embedding_type", "rotary") not in ("rotary", "rope"):
        _refuse(config, "position_embedding_type", "no rotary embedding")
    _check_layers(config)
    _check_rope(config)
    if config.get("model_type") not in PROVEN:
        _refuse(config, "model_type", f"proven are {', '.join(sorted(PROVEN))}")
    return _shape(config)


def _check_layers(config: Mapping[str, Any]) -> None:
    layer_types = config.get("layer_types")
    for kind in layer_types or ():
        if kind != "full_attention":
            raise UnsupportedModel(f"layer_types has {kind!r}: only 'full_attention' keeps all positions")
    model_type = config.get("model_type")
    if model_type in ("qwen2", "qwen3"):
        # Only these two read the switch, and their layers then follow layer_types where that is given.
        if config.get("use_sliding_window") and not layer_types:
            _refuse(config, "use_sliding_window", "sliding-window attention")
    elif config.get("sliding_window", _WINDOW_IF_ABSENT.get(str(model_type))):
        _refuse(config, "sliding_window", "sliding-window attention")


def _check_rope(config: Mapping[str, Any]) -> None:
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field) or {}
        if not isinstance(rope, Mapping):
            _refuse(config, field, "not a mapping")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in _GROWING_ROPE:
            _refuse(config, field, f"{kind!r} changes the angles of stored keys as the context grows")


def _shape(config: Mapping[str, Any]) -> ModelShape:
    def whole(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(config, field, "must be a whole number above 0")
        return value

    q_heads = whole("num_attention_heads")
    kv_heads = whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        _refuse(config, "num_key_value_heads", f"must divide num_attention_heads = {q_heads}")
    return ModelShape(
        layers=whole("num_hidden_layers"),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=whole("head_dim", whole("hidden_size") // q_heads),
        vocab=whole("vocab_size"),
        max_positions=whole("max_position_embeddings"),
    )


def _refuse(config: Mapping[str, Any], field: str, reason: str) -> NoReturn:
    raise UnsupportedModel(f"{field} = {config.get(field, '(absent)')!r}: {reason}")
