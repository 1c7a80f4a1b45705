"""The `lookup` proposer: what followed the last tokens where they occurred before, in the session's own text (pure).

Owns an index of one session's token ids; it never reads KV, so a draft costs no forward. `phase.py` decides whether
and how far to use a draft; the classes of match length here are those it keeps acceptance for.
"""

from array import array
from collections.abc import Iterable

MATCH_CLASSES = (3, 5, 9, 17)
"""Least match lengths of the classes 3–4, 5–8, 9–16, 17+; a gram of each length is indexed."""

MAX_MATCH = 64
"""Match lengths are counted up to this; longer ones are not likelier to go on."""

_MODULUS = (1 << 61) - 1
_BASE = 0x1F3D5B79A2C4E601 % _MODULUS
_POWERS = tuple(pow(_BASE, length, _MODULUS) for length in MATCH_CLASSES)


def match_class(length: int) -> int | None:
    """Index into MATCH_CLASSES of a match `length`; None if it is below the minimum."""
    found = sum(length >= least for least in MATCH_CLASSES)
    return found - 1 if found else None


class SuffixIndex:
    """Finds earlier occurrences of the last tokens. Appending and taking back a token are O(1).

    A match is longest up to its class: of the highest class that any earlier occurrence reaches, the most recent one.
    Per class a dictionary holds where each gram ended last (by rolling hash, verified on use), and an array per
    position what it held before, so that `truncate` undoes. A suffix automaton would be exact about length, but it
    needs about 500 bytes a token and cannot forget.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._hashes: list[int] = [0]  # of every prefix
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in MATCH_CLASSES)
        self._earlier: tuple[array[int], ...] = tuple(array("q") for _ in MATCH_CLASSES)  # -1: none
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token: int) -> None:
        """Add one token."""
        # Grams that end at the last token are entered only now: a lookup must not find the suffix itself.
        end = len(self._ids)
        for level, (ends, earlier) in enumerate(zip(self._ends, self._earlier, strict=True)):
            key = self._key(level, end)
            if key is None:
                earlier.append(-1)
            else:
                earlier.append(ends.get(key, -1))
                ends[key] = end
        self._ids.append(token)
        self._hashes.append((self._hashes[-1] * _BASE + token + 1) % _MODULUS)

    def extend(self, ids: Iterable[int]) -> None:
        """Add tokens in order."""
        for token in ids:
            self.append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; O(tokens taken back)."""
        assert 0 <= length <= len(self._ids)
        while len(self._ids) > length:
            self._ids.pop()
            self._hashes.pop()
            end = len(self._ids)
            for level, (ends, earlier) in enumerate(zip(self._ends, self._earlier, strict=True)):
                before, key = earlier.pop(), self._key(level, end)
                if key is None:
                    continue
                if before < 0:
                    del ends[key]
                else:
                    ends[key] = before

    def propose(self, k: int) -> tuple[list[int], int]:
        """Up to `k` draft ids and the match length (≤ MAX_MATCH); ([], 0) without a match of three tokens.

        Where the match runs into the end of the session, the draft goes on reading itself: a period continues.
        """
        ids = self._ids
        end = len(ids)
        for level in reversed(range(len(MATCH_CLASSES))):
            key = self._key(level, end)
            source = None if key is None else self._ends[level].get(key)
            if source is None:
                continue
            length = 0
            while length < min(source, MAX_MATCH) and ids[source - 1 - length] == ids[end - 1 - length]:
                length += 1
            if length >= MATCH_CLASSES[level]:  # else two grams share a hash
                draft = ids[source : source + k]
                period = end - source
                while len(draft) < k:
                    draft.append(draft[len(draft) - period])
                return draft, length
        return [], 0

    def _key(self, level: int, end: int) -> int | None:
        """Hash of the gram of this level that ends before index `end`; None if there are too few tokens."""
        start = end - MATCH_CLASSES[level]
        if start < 0:
            return None
        return (self._hashes[end] - self._hashes[start] * _POWERS[level]) % _MODULUS
