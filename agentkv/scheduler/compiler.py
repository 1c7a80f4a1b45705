"""Page scores to a selection: the page ids that the proposals of a round read (pure).

The CPU form, and the reference of the device kernel. It knows neither where scores come from (`heads/`) nor how pages
are read (`backends/`). Next: `phase.py`, which decides whether a selection is used at all.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from agentkv.config import MIN_BUDGET_PAGES


def budget_pages(context_pages: int, override: int | None = None) -> int:
    """Pages in a selection, for one step: 5 % of `context_pages`, at least 64, rounded up to 64, 96, 128, 192, 256, …

    Buckets keep shapes fixed within a step and few across steps. `override` wins as it is.
    """
    if override is not None:
        return override
    wanted = -(-context_pages // 20)
    bucket = MIN_BUDGET_PAGES
    while bucket < wanted:
        # 2^n goes to 1.5 * 2^n, which goes to 2^(n + 1)
        bucket = bucket // 2 * 3 if bucket & (bucket - 1) == 0 else bucket // 3 * 4
    return bucket


def select(
    scores: NDArray[np.floating] | torch.Tensor,
    budget: int,
    *,
    sinks: int = 1,
    recent: int = 4,
    new_since: int | None = None,
    resident: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """The `budget` pages that each row reads, int64 [rows, budget], distinct and ascending.

    `scores`: [rows, pages], rows = 1 or kv_heads, with pages > budget (else there is nothing to select: read all).
    The selection is the first `budget` pages of one total order: pages from `new_since` on (sealed since the last
    scored pass), the most recent first; the first `sinks` pages; the last `recent` pages, the most recent first; then
    by score, descending, ties by id. NaN is the lowest score. `resident`: bool [pages], pages that may be read at all,
    at least `budget` of them. So a larger budget keeps what a smaller one selects.
    """
    table = np.asarray(scores)
    rows, pages = table.shape
    assert budget < pages, "a sequence of at most `budget` pages reads them all"
    allowed = np.ones(pages, np.bool_) if resident is None else resident
    assert allowed.shape == (pages,)
    assert int(allowed.sum()) >= budget
    first_new = pages if new_since is None else new_since
    order = (
        *range(pages - 1, first_new - 1, -1),
        *range(min(sinks, pages)),
        *range(pages - 1, max(pages - recent, 0) - 1, -1),
    )
    forced = np.asarray(list(dict.fromkeys(page for page in order if allowed[page]))[:budget], np.int64)

    chosen = np.zeros((rows, pages), np.bool_)
    chosen[:, forced] = True
    wanted = budget - forced.size
    if wanted:
        free = np.flatnonzero(allowed & ~chosen[0])
        chosen[:, free] = _top(table[:, free], wanted)
    return np.nonzero(chosen)[1].reshape(rows, budget)


def _top(scores: NDArray[np.floating], count: int) -> NDArray[np.bool_]:
    """Mask of the `count` highest per row, ties to the lowest column. A partition: a stable sort is 10x slower."""
    values = np.where(np.isnan(scores), -np.inf, scores)
    last = np.partition(values, -count, axis=1)[:, -count, None]
    above = values > last
    ties = values == last
    return above | (ties & (np.cumsum(ties, axis=1) <= count - above.sum(axis=1, keepdims=True)))
