"""Packed forwards of transformers' own modules over a KV pool on the CPU.

The modules stay unchanged but for their linears (`packing.py`): attention is registered under one name with both the
attention and the mask interface (the attention alone would drop the causal mask silently) and finds its batch in the
forward's keyword arguments. No transformers cache object exists.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from agentkv.backends.base import Segment
from agentkv.backends.kv_pool import KVPool
from agentkv.backends.packing import can_pack, pack_linears
from agentkv.backends.torch_attention import DraftBuffer, PackedBatch, gather_pages
from agentkv.errors import BackendUnavailable
from agentkv.types import ModelShape

_NAME = "agentkv"


def _attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, **kwargs: Any):
    batch: PackedBatch = kwargs["agentkv_batch"]
    return batch.attend(q, k, v, module.layer_idx, kwargs["scaling"]), None  # type: ignore[arg-type]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality is the batch's business."""


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)


class TorchBackend(KVPool):
    """The CPU backend (`backends.base.Backend`): a model, its KV pool and its tails."""

    def __init__(
        self, model: nn.Module, shape: ModelShape, *, pages: int, tail_capacity: int, dense_layers: Sequence[int] = ()
    ) -> None:
        if shape.dtype != "float32":
            raise BackendUnavailable(f"the CPU backend computes in float32, not {shape.dtype}")
        if not can_pack():
            raise BackendUnavailable("this torch build lacks oneDNN's packed linear (mkldnn._linear_pointwise)")
        super().__init__(shape, pages, tail_capacity)
        self.pages = pages
        self.selection_rows = shape.kv_heads
        self._dense_layers = frozenset(dense_layers)
        model.set_attn_implementation(_NAME)  # type: ignore[operator]
        pack_linears(model)
        self._model = model.eval()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        tokens = torch.tensor([[t for s in segments for t in s.tokens]])
        positions = torch.cat([torch.arange(s.position, s.position + len(s.tokens)) for s in segments])[None]
        batch = PackedBatch(self, segments, self._dense_layers)
        wanted = [
            row
            for s, start in zip(segments, batch.starts, strict=True)
            for row in range(start + len(s.tokens) - s.logits, start + len(s.tokens))
        ]
        with torch.inference_mode():
            output = self._model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                # A forward without wanted rows (a prefill chunk) still computes one: transformers' heads expect some.
                logits_to_keep=torch.tensor(wanted or [0]),
                agentkv_batch=batch,
            )
        return list(output.logits[0, : len(wanted)].float().split([s.logits for s in segments]))

    def gather(self, pages: np.ndarray, draft: DraftBuffer | None) -> DraftBuffer:
        with torch.inference_mode():
            return gather_pages(self, torch.from_numpy(pages), draft)

    def close(self) -> None:
        """Let go of the model's weights and the pool."""
        del self._model, self.k, self.v
