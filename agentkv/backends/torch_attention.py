"""Attention on the CPU: sealed pages ⊕ tail, merged by log-sum-exp. The reference form of every backend.

The queries of a sequence are stacked as rows of their GQA group, token-major: row i * group + g. Sealed pages are read
non-causally, run by run; the tail (or a prefill chunk's own rows) causally. Scored rows take explicit probabilities, so
page mass is a by-product; the others take torch's flash kernel, which returns the log-sum-exp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agentkv.backends.base import Segment
from agentkv.backends.kv_pool import KV, KVPool
from agentkv.config import PAGE_TOKENS

_SPLIT_TOKENS = 2048
"""From here on a run is read as two halves, so that few KV heads still keep two threads busy (8K: 22 ms, not 27)."""

_CAUSAL_ROWS = 128
"""Queries of one block of causal attention (512 of 4,000 tokens' prefill: 2.9 ms a layer, not 3.9)."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over a part of the keys: (out [kv_heads, rows, dim], log-sum-exp [kv_heads, rows])."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class DraftBuffer:
    """A selection gathered once per round: K and V [layers, kv_heads, 16 * budget, dim]."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class PackedBatch:
    """What the attention of one packed forward needs: the pool, the segments and their rows."""

    pool: KVPool
    segments: Sequence[Segment]
    dense_layers: frozenset[int]
    starts: list[int] = field(init=False)
    masks: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.starts, self.masks, at = [], [], 0
        for segment in self.segments:
            self.starts.append(at)
            at += len(segment.tokens)
            self.masks.append(_causal_mask(len(segment.tokens), segment.tail_rows, self.pool))
            if segment.scored:
                pages = sum(count for _, count in segment.runs)
                segment.mass = torch.zeros(segment.scored, self.pool.shape.kv_heads, pages)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """q [1, q_heads, tokens, dim], k and v [1, kv_heads, tokens, dim] → [1, tokens, q_heads, dim]."""
        shape = self.pool.shape
        tokens = q.shape[2]
        out = torch.empty(1, tokens, shape.q_heads, shape.head_dim, dtype=q.dtype)
        for segment, start, mask in zip(self.segments, self.starts, self.masks, strict=True):
            rows = len(segment.tokens)
            span = slice(start, start + rows)
            heads = q[0, :, span].view(shape.kv_heads, shape.group, rows, shape.head_dim)
            stacked = heads.transpose(1, 2).reshape(shape.kv_heads, rows * shape.group, shape.head_dim)
            tail = self._write(segment, k[0, :, span], v[0, :, span], layer)
            result = self._attend_segment(segment, stacked, tail, mask, layer, scale)
            unstacked = result.view(shape.kv_heads, rows, shape.group, shape.head_dim).transpose(0, 1)
            out[0, span] = unstacked.reshape(rows, shape.q_heads, shape.head_dim)
        return out

    def _write(self, segment: Segment, k: torch.Tensor, v: torch.Tensor, layer: int) -> KV:
        """Put fresh rows where they belong; returns K and V [kv_heads, tail_rows + rows, dim] of the causal part."""
        before, after = segment.tail_rows, segment.tail_rows + len(segment.tokens)
        k_tail, v_tail = (buffer[layer] for buffer in self.pool.tail(segment.tail))
        if segment.into is None:
            k_tail[:, before:after] = k
            v_tail[:, before:after] = v
            return k_tail[:, :after], v_tail[:, :after]
        local = torch.cat((k_tail[:, :before], k), dim=1), torch.cat((v_tail[:, :before], v), dim=1)
        for pool, rows in zip((self.pool.k, self.pool.v), local, strict=True):
            paged = rows.view(rows.shape[0], len(segment.into), PAGE_TOKENS, rows.shape[-1])
            pool[layer].index_copy_(1, torch.tensor(segment.into), paged)
        return local

    def _attend_segment(
        self, segment: Segment, q: torch.Tensor, tail: KV, mask: torch.Tensor | None, layer: int, scale: float
    ) -> torch.Tensor:
        views = self._sealed_views(segment, layer)
        parts = [_attend_causal(q, tail, mask, self.pool.shape.group, scale)]
        if not segment.scored:
            for view in views:
                parts.extend(_attend_view(q, view, scale))
            return _merge(parts)[0]
        weights = []
        for view in views:
            part, mass = _attend_view_scored(q, view, scale)
            parts.append(part)
            weights.append(mass)
        out, total = _merge(parts)
        if weights:
            self._add_mass(segment, weights, total)
        return out

    def _sealed_views(self, segment: Segment, layer: int) -> list[KV]:
        """The views this layer reads, and their pages counted."""
        if segment.draft is not None and layer not in self.dense_layers:
            views = [(segment.draft.k[layer], segment.draft.v[layer])]
        else:
            views = [self.pool.run(layer, first, count) for first, count in segment.runs]
        segment.pages_read += sum(k.shape[0] * k.shape[1] for k, _ in views) // PAGE_TOKENS
        return views

    def _add_mass(self, segment: Segment, weights: list[Part], total: torch.Tensor) -> None:
        """Add this layer's page mass of the scored rows, normalised by the final log-sum-exp."""
        assert segment.mass is not None
        group = self.pool.shape.group
        keep = slice(-segment.scored * group, None)
        mass = torch.cat([w[:, keep] * torch.exp(m - total)[:, keep, None] for w, m in weights], dim=-1)
        by_query = mass.view(mass.shape[0], segment.scored, group, -1).mean(2)  # [kv_heads, scored, pages]
        segment.mass += by_query.transpose(0, 1)


def gather_pages(pool: KVPool, pages: torch.Tensor, draft: DraftBuffer | None) -> DraftBuffer:
    """Copy page ids [1 or kv_heads, budget] of every layer into a contiguous draft buffer."""
    shape, budget = pool.shape, pages.shape[1]
    size = (shape.layers, shape.kv_heads, budget * PAGE_TOKENS, shape.head_dim)
    if draft is None or draft.k.shape != size:
        draft = DraftBuffer(torch.empty(size, dtype=pool.dtype), torch.empty(size, dtype=pool.dtype))
    total = pool.k.shape[2]
    flat = (pages + total * torch.arange(shape.kv_heads)[:, None]).reshape(-1)  # per-head view: head * pages + page
    for source, target in ((pool.k, draft.k), (pool.v, draft.v)):
        for layer in range(shape.layers):
            rows = source[layer].view(shape.kv_heads * total, -1)
            torch.index_select(rows, 0, flat, out=target[layer].view(flat.numel(), -1))
    return draft


def _causal_mask(rows: int, before: int, pool: KVPool) -> torch.Tensor | None:
    """[rows * group, before + rows]: row i sees positions ≤ before + i; None where one row sees everything."""
    if rows == 1:
        return None
    visible = torch.ones(rows, before + rows, dtype=torch.bool).tril(before)
    mask = torch.zeros(rows, before + rows, dtype=pool.dtype).masked_fill_(~visible, -math.inf)
    return mask.repeat_interleave(pool.shape.group, dim=0)


def _attend_causal(q: torch.Tensor, kv: KV, mask: torch.Tensor | None, group: int, scale: float) -> Part:
    """The last rows of `kv` are the queries' own; blocks of queries skip the keys that are behind all of them."""
    k, v = kv
    rows, step = q.shape[1], _CAUSAL_ROWS * group
    parts = []
    for start in range(0, rows, step):
        end = min(start + step, rows)
        seen = k.shape[1] - (rows - end) // group
        visible = None if mask is None else mask[start:end, :seen]
        parts.append(
            _flash(q[None, :, start:end], k[None, :, :seen], v[None, :, :seen], attn_mask=visible, scale=scale)
        )
    if len(parts) == 1:
        return parts[0][0][0], parts[0][1][0]
    return torch.cat([out[0] for out, _ in parts], dim=1), torch.cat([lse[0] for _, lse in parts], dim=1)


def _attend_view(q: torch.Tensor, view: KV, scale: float) -> list[Part]:
    k, v = view
    tokens, dim = k.shape[1], k.shape[2]
    if tokens < _SPLIT_TOKENS or tokens % 2:
        out, lse = _flash(q[None], k[None], v[None], 0.0, False, scale=scale)
        return [(out[0], lse[0])]
    halves, strides = (2, k.shape[0], tokens // 2, dim), (tokens // 2 * dim, k.stride(0), dim, 1)
    both = [x.as_strided(halves, strides, x.storage_offset()) for x in (k, v)]
    out, lse = _flash(q.expand(2, -1, -1, -1), both[0], both[1], 0.0, False, scale=scale)
    return [(out[0], lse[0]), (out[1], lse[1])]


def _attend_view_scored(q: torch.Tensor, view: KV, scale: float) -> tuple[Part, Part]:
    """(attention part, (unnormalised page mass [kv_heads, rows, pages], its log scale [kv_heads, rows]))."""
    k, v = view
    # bmm, not matmul: matmul over a strided run copies V silently.
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    mass = weights.view(*weights.shape[:2], -1, PAGE_TOKENS).sum(-1)
    norm = mass.sum(-1, keepdim=True)
    out = torch.bmm(weights, v).div_(norm)
    return (out, (top + norm.log())[..., 0]), (mass, top[..., 0])


def _merge(parts: list[Part]) -> Part:
    """Combine attention over disjoint keys exactly (log-sum-exp)."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        (out, lse), (other, other_lse) = parts
        return torch.lerp(other, out, torch.sigmoid(lse - other_lse)[..., None]), torch.logaddexp(lse, other_lse)
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    return (outs * lses.softmax(0)[..., None]).sum(0), lses.logsumexp(0)
