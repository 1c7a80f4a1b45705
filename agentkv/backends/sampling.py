"""From a row of logits to a token, and from target rows to accepted drafts.

Owns the order of processing (that of transformers 5), the shared Gumbel noise, and the margin that tells a tie from a
fault. It knows neither models nor KV; a proposer and the verifier call the same `Sampler.sample`, which is all that
makes a sample path independent of k and mode. Noise: `philox.py`. Next: the executor.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentkv.backends.philox import GUMBEL_MAX, gumbel
from agentkv.config import DecodingConfig
from agentkv.errors import InvalidInput, ModelError

_FIRST_CANDIDATES = 64


class Choice(NamedTuple):
    """A sampled token and its `margin` (see `Sampler.sample`), in units of the row's logits."""

    token: int
    margin: float


class Accepted(NamedTuple):
    """What one verification emits: `accepted` drafts, then one token of the target. `margins` stand beside `tokens`."""

    tokens: list[int]
    accepted: int
    margins: list[float]


class History:
    """How often each token id has occurred, for the repetition penalty; drafts are pushed and popped.

    An untracked history (no penalty in force) stores nothing and costs nothing. Made by `Sampler.history`.
    """

    def __init__(self, vocab: int, ids: Iterable[int], *, tracked: bool) -> None:
        self._tracked = tracked
        self._tokens: list[int] = []
        self._counts = np.zeros(vocab if tracked else 0, np.int32)  # numpy: a scalar write is 20x torch's speed
        self._view = torch.from_numpy(self._counts)
        if tracked:
            self._tokens = list(ids)
            np.add.at(self._counts, np.asarray(self._tokens, np.int64), 1)

    @property
    def seen(self) -> torch.Tensor:
        """Bool [vocab]: the ids that have occurred ([0] when untracked)."""
        return self._view > 0

    def push(self, token: int) -> None:
        """Append a token."""
        if self._tracked:
            self._tokens.append(token)
            self._counts[token] += 1

    def pop(self, count: int = 1) -> None:
        """Take back the last `count` pushed tokens."""
        if self._tracked:
            assert count <= len(self._tokens)
            for _ in range(count):
                self._counts[self._tokens.pop()] -= 1


class _Candidates(NamedTuple):
    """The head of a row by descending logit, then ascending id; all that could survive the cuts is in it.

    The three masks are bool [n]: `kept` by the cuts as computed, `maybe` kept by them and `sure` to be kept when every
    difference of two logits moves by less than the tie bound: sure ⊆ kept ⊆ maybe.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]
    kept: NDArray[np.bool_]
    maybe: NDArray[np.bool_]
    sure: NDArray[np.bool_]


class Sampler:
    """Chooses tokens for one step: `decoding`'s options, a 64-bit `seed`, a vocabulary of `vocab` ids.

    `tie_bound`: the numeric noise of a difference of two logits between two kernels that compute the same row.
    Raises InvalidInput if `decoding` biases a token outside the vocabulary.
    """

    def __init__(self, decoding: DecodingConfig, seed: int, vocab: int, tie_bound: float = 5e-4) -> None:
        outside = [token for token in decoding.logit_bias if token >= vocab]
        if outside:
            raise InvalidInput(f"logit_bias names tokens outside the vocabulary of {vocab}: {outside}")
        assert tie_bound > 0
        self.decoding = decoding
        self.seed = seed
        self.vocab = vocab
        self.tie_bound = tie_bound
        penalty = decoding.repetition_penalty
        self._stretch = max(penalty, 1 / penalty)  # the penalty multiplies a logit's noise by at most this
        self._bound = tie_bound * self._stretch
        self._bias_ids = torch.tensor(list(decoding.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(decoding.logit_bias.values()), dtype=torch.float32)
        self._top_k = min(decoding.top_k, vocab)
        self._cuts = self._top_k > 0 or decoding.top_p < 1 or decoding.min_p > 0

    def history(self, ids: Iterable[int]) -> History:
        """The history of a sequence that holds `ids` (prompt and generated tokens, the carry included)."""
        return History(self.vocab, ids, tracked=self.decoding.repetition_penalty != 1)

    def sample(self, row: torch.Tensor, position: int, history: History) -> Choice:
        """The token at `position` (the index that it will have), given `row`: logits, float32 [vocab], on the CPU.

        `history` holds every token before `position`, drafts included. Raises ModelError on NaN or infinite logits.

        The margin is how far the logits are from another outcome. With T the temperature and score = logit / T + noise,
        it is the smallest of: T * (score of the winner - score of any other token that is kept, or is removed by a
        top-k, top-p or min-p cut but would be kept if differences of logits moved by less than `tie_bound`), not below
        0; and 0 if the winner itself would not surely be kept under such a move. A repetition penalty stretches noise
        by at most max(p, 1/p); the margin is divided by that. So `margin >= tie_bound` means: no change of the row
        that moves every difference of two logits by less than `tie_bound` changes the token; less is a tie.
        """
        x = self._process(row, history)
        if self.decoding.temperature == 0:
            token, margin = _greedy(x)
        elif self._cuts:
            token, margin = self._sample_cut(x, position)
        else:
            token, margin = self._sample_whole(x, position)
        return Choice(token, margin / self._stretch)

    def within(self, token: int, n: int, row: torch.Tensor, history: History) -> bool:
        """Whether `token` is among the processed row's `n` best candidates, before noise (`verify=Tolerant(n)`)."""
        x = self._process(row, history)
        if int((x > x[token]).sum()) >= n:
            return False
        if self.decoding.temperature == 0 or not self._cuts:
            return True
        found = self._candidates(x)
        return token in found.ids[found.kept]

    def accept(
        self, drafts: Sequence[int], rows: torch.Tensor, position: int, history: History, tolerant: int | None = None
    ) -> Accepted:
        """Verify `drafts` (k ids) against target logits `rows`, float32 [k + 1, vocab].

        `rows[i]` predicts `position + i`, having read the drafts before it; `history` holds the tokens before
        `position`, and afterwards the emitted ones too. Emits the longest prefix of drafts that equals what the target
        samples (or lies within its `tolerant` best), plus one token of the target.
        """
        assert rows.shape == (len(drafts) + 1, self.vocab)
        tokens: list[int] = []
        margins: list[float] = []
        for row, draft in zip(rows, (*drafts, None), strict=True):
            choice = self.sample(row, position + len(tokens), history)
            match = draft == choice.token
            if not match and draft is not None and tolerant is not None:
                match = self.within(draft, tolerant, row, history)
            token = draft if match and draft is not None else choice.token
            tokens.append(token)
            margins.append(choice.margin)
            history.push(token)
            if not match:
                break
        return Accepted(tokens, len(tokens) - 1, margins)

    def _process(self, row: torch.Tensor, history: History) -> torch.Tensor:
        """Bias and penalty, out of place: what greedy decoding takes the argmax of."""
        assert row.shape == (self.vocab,)
        assert row.dtype == torch.float32
        assert row.device.type == "cpu"
        if self._bias_ids.numel():
            row = row.index_add(0, self._bias_ids, self._bias)
        penalty = self.decoding.repetition_penalty
        if penalty != 1:
            row = torch.where(history.seen, torch.where(row < 0, row * penalty, row / penalty), row)
        # A grammar's mask belongs here: after the penalty, before the temperature.
        return row

    def _sample_whole(self, x: torch.Tensor, position: int) -> tuple[int, float]:
        """Sample without cuts: only tokens that could pass the runner-up with the largest noise get noise."""
        temperature = self.decoding.temperature
        head = torch.topk(x, min(_FIRST_CANDIDATES, self.vocab))
        _require_finite(float(head.values[0]))
        scores = head.values.double().numpy() / temperature + gumbel(self.seed, position, head.indices.numpy())
        if self.vocab > _FIRST_CANDIDATES:
            bar = float(np.partition(scores, -2)[-2]) - GUMBEL_MAX
            # float32 rounding of the bar is far below the slack in GUMBEL_MAX except for huge logits: step down once.
            ids = (x >= np.nextafter(np.float32(bar * temperature), np.float32(-np.inf)).item()).nonzero()[:, 0]
            scores = x[ids].double().numpy() / temperature + gumbel(self.seed, position, ids.numpy())
        else:
            ids = head.indices
        winner = int(scores.argmax())
        others = np.delete(scores, winner)
        gap = float(scores[winner] - others.max()) * temperature if others.size else math.inf
        return int(ids[winner]), gap

    def _sample_cut(self, x: torch.Tensor, position: int) -> tuple[int, float]:
        temperature = self.decoding.temperature
        found = self._candidates(x)
        ids, kept, sure = found.ids[found.maybe], found.kept[found.maybe], found.sure[found.maybe]
        scores = found.logits[found.maybe] / temperature + gumbel(self.seed, position, ids)
        winner = int(np.where(kept, scores, -np.inf).argmax())
        if not sure[winner]:
            return int(ids[winner]), 0.0
        others = np.delete(scores, winner)
        gap = float(scores[winner] - others.max()) * temperature if others.size else math.inf
        return int(ids[winner]), max(gap, 0.0)

    def _candidates(self, x: torch.Tensor) -> _Candidates:
        """Every token that may survive the cuts: the head of the row, grown until its last token surely does not."""
        decoding = self.decoding
        size = max(_FIRST_CANDIDATES, self._top_k + 1)
        total = math.inf  # of exp((logit - max) / T) over the whole row: top-p without top-k needs it
        while True:
            head = torch.topk(x, min(size, self.vocab)).values
            _require_finite(float(head[0]))
            if decoding.top_p < 1 and not self._top_k and math.isinf(total):
                total = float(((x.double() - head[0]) / decoding.temperature).exp().sum())
            # With every tie of the last one, as topk picks among ties freely.
            found = (x >= head[-1]).nonzero()[:, 0]
            values, order = x[found].sort(descending=True, stable=True)
            ids, logits = found[order].numpy(), values.double().numpy()
            kept, maybe, sure = self._masks(logits, total)
            if ids.size == self.vocab or not maybe[-1]:
                return _Candidates(ids, logits, kept, maybe, sure)
            size *= 4

    def _masks(self, logits: NDArray[np.float64], total: float) -> tuple[NDArray[np.bool_], ...]:
        """`kept`, `maybe`, `sure` of sorted candidates, cut after cut; see `_Candidates`."""
        bound = self._bound
        place = np.arange(logits.size)
        # How many tokens precede each one: at least, and at most, when differences move by less than the bound.
        fewest = np.minimum(np.searchsorted(-logits, -(logits + bound), side="right"), place)
        most = np.searchsorted(-logits, -(logits - bound), side="left") - 1
        kept = maybe = sure = np.ones(logits.size, np.bool_)
        masks = (kept, maybe, sure)
        if self._top_k:
            above = np.searchsorted(-logits, -logits, side="left")  # strictly: ties of the k-th are kept
            masks = kept, maybe, sure = above < self._top_k, fewest < self._top_k, most < self._top_k
        if self.decoding.top_p < 1:
            cut = self._top_p_masks(logits, fewest, most, kept, maybe, total)
            masks = tuple(mask & more for mask, more in zip(masks, cut, strict=True))
        if self.decoding.min_p > 0:
            floor = logits[0] + self.decoding.temperature * math.log(self.decoding.min_p)
            passes = [logits >= floor, logits >= floor - bound, logits >= floor + bound]
            # The top token competes with the others only: alone it always passes.
            passes[2][0] = logits.size == 1 or logits[0] >= logits[1] + floor - logits[0] + bound
            masks = tuple(mask & more for mask, more in zip(masks, passes, strict=True))
        return masks

    def _top_p_masks(
        self,
        logits: NDArray[np.float64],
        fewest: NDArray[np.int64],
        most: NDArray[np.int64],
        kept: NDArray[np.bool_],
        maybe: NDArray[np.bool_],
        total: float,
    ) -> tuple[NDArray[np.bool_], ...]:
        """Top-p keeps a token while the mass before it is below p (so the one that crosses p is kept).

        Among equal logits the lower id comes first (transformers leaves that to its sort). A move of all differences
        by less than the bound changes the log-odds of "before" against "the rest" by less than bound / T; it may also
        change the order, and which tokens top-k leaves (at least its k best).
        """
        p, temperature = self.decoding.top_p, self.decoding.temperature
        mass = np.exp((logits - logits[0]) / temperature)
        before = np.concatenate(([0.0], np.cumsum(mass)))  # before[i]: mass of the first i
        whole = least = largest = total
        if self._top_k:
            whole, least, largest = before[int(kept.sum())], before[self._top_k], before[int(maybe.sum())]
        odds = math.exp(min(self._bound / temperature, 700.0))
        low, high = before[fewest] / largest, (before[most + 1] - mass) / least
        return before[:-1] / whole < p, low * (1 - p) < p * (1 - low) * odds, high * (1 - p) * odds < p * (1 - high)


def _greedy(x: torch.Tensor) -> tuple[int, float]:
    head = torch.topk(x, min(2, x.numel()))
    values = head.values.tolist()
    _require_finite(values[0])
    if len(values) == 1:
        return 0, math.inf
    if values[0] == values[1]:  # topk picks among equals freely; argmax takes the first
        return int(x.argmax()), 0.0
    return int(head.indices[0]), values[0] - values[1]


def _require_finite(largest: float) -> None:
    """`largest` of topk is NaN if any logit is: NaN sorts above everything."""
    if not math.isfinite(largest):
        raise ModelError(f"the model's logits are not finite (largest: {largest})")
