"""How many bytes the store may use. Pure: budgets and prices; `environment.py` enforces them.

Three limits, nested: pages stop at `store_bytes` of counted bytes; manifests may pass it by half the reserve; the
LMDB map is larger by the reserve and headroom, because with a reader open even a delete has to write new pages.
"""

from typing import Final

TRANSACTION_BYTES: Final = 64 << 20
"""No page transaction is larger: it bounds LMDB's dirty pages in memory and the time a commit waits."""

_MIN_RESERVE: Final = 256 << 20
_LMDB_PAGE: Final = 4096
_NODE_BYTES: Final = 16
_INLINE_BYTES: Final = 2000
_BOOK_BYTES: Final = 192  # entries in `references` and `pending`, at the fill factor of a B-tree


def reserve_bytes(store_bytes: int) -> int:
    """What only manifests and deletes may use."""
    return max(_MIN_RESERVE, store_bytes // 20)


def map_bytes(store_bytes: int, file_bytes: int) -> int:
    """Size of the LMDB map (address space, not disk) for a data file of `file_bytes`.

    Headroom of a quarter covers half-empty B-tree pages and free runs too short for a record. A file that
    outgrew a smaller `store_bytes` keeps its reserve, so that deletes still work.
    """
    wanted = max(store_bytes + store_bytes // 4 + (64 << 20), file_bytes) + reserve_bytes(store_bytes)
    return -(-wanted // _LMDB_PAGE) * _LMDB_PAGE


def cost(key_bytes: int, value_bytes: int) -> int:
    """Counted bytes of an entry: what LMDB occupies for it, large values rounded up to whole LMDB pages."""
    stored = value_bytes
    if key_bytes + value_bytes > _INLINE_BYTES:
        stored = -(-(value_bytes + _NODE_BYTES) // _LMDB_PAGE) * _LMDB_PAGE
    return key_bytes + _NODE_BYTES + stored + _BOOK_BYTES
