"""Counter-based noise: Philox4x32-10 and the Gumbel noise of a (seed, position, token id).

Owns the numbers only: it knows neither logits nor rounds. Because a value depends on its counter alone, drafts,
verification, batches and restarts see the same noise without any state to save. Next: `sampling.py`.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

GUMBEL_MAX = 22.88
"""No `gumbel` value is larger: u is at most 1 - 2**-33, whose noise is 22.874."""


def philox4x32_10(key: int, counter: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32 with 10 rounds (Salmon et al., SC 2011; Random123).

    `key`: 64 bits, the low word is the first key word. `counter`: uint32 [n, 4]. Returns uint32 [n, 4].
    """
    assert 0 <= key < 1 << 64
    assert counter.shape[1:] == (4,)
    # uint64 lanes: a 32 x 32 bit product is exact and both of its halves are one shift or mask away.
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0 = (second >> _SHIFT) ^ c1 ^ np.uint64(low)
        c1 = second & _LOW
        c2 = (first >> _SHIFT) ^ c3 ^ np.uint64(high)
        c3 = first & _LOW
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of token `ids` [n] at `position`, float64 [n].

    G = -log(-log(u)), u = (x + 0.5) * 2**-32, x = lane `id % 4` of the Philox block with counter
    (position, id // 4, 0, 0) and key `seed` (64 bits). The noise of an id is the same in whatever subset it is asked.
    """
    assert 0 <= position < 1 << 32
    if ids.size == 0:
        return np.empty(0, np.float64)
    blocks = ids >> 2
    start = int(blocks.min())
    span = int(blocks.max()) - start + 1
    if span <= ids.size:  # dense ids share blocks: compute the range once instead of one block per id
        wanted, row = np.arange(start, start + span), blocks - start
    else:
        wanted, row = blocks, np.arange(ids.size)
    counter = np.zeros((wanted.size, 4), np.uint32)
    counter[:, 0] = position
    counter[:, 1] = wanted
    bits = philox4x32_10(seed, counter)[row, ids & 3]
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))
