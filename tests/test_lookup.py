"""The suffix index against a search of all positions, its undo, and its cost."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.scheduler.lookup import MATCH_CLASSES, MAX_MATCH, SuffixIndex, match_class

few = settings(max_examples=300, derandomize=True, deadline=None)
texts = st.lists(st.integers(0, 2), max_size=120) | st.lists(st.integers(0, 1), max_size=60).map(lambda part: part * 3)


def matches(ids: list[int]) -> list[tuple[int, int]]:
    """(end, length) of every earlier occurrence of a suffix, length counted up to MAX_MATCH."""
    found = []
    for end in range(1, len(ids)):
        length = 0
        while length < min(end, MAX_MATCH) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        found.append((end, length))
    return found


def check(index: SuffixIndex, ids: list[int], k: int) -> None:
    draft, length = index.propose(k)
    classes = [found for found in (match_class(length) for _, length in matches(ids)) if found is not None]
    if not classes:
        assert (draft, length) == ([], 0)
        return
    best = max(classes)
    end, expected = max(pair for pair in matches(ids) if match_class(pair[1]) == best)
    assert length == expected
    assert len(draft) == k
    grown = list(ids)
    for offset, token in enumerate(draft):  # what followed, reading its own tokens past the end
        assert token == grown[end + offset]
        grown.append(token)


def test_match_classes() -> None:
    assert [match_class(length) for length in (0, 2, 3, 4, 5, 8, 9, 16, 17, 64)] == [None, None, 0, 0, 1, 1, 2, 2, 3, 3]


@few
@given(texts, st.integers(1, 12))
def test_finds_the_most_recent_match_of_the_longest_class(ids: list[int], k: int) -> None:
    check(SuffixIndex(ids), ids, k)


@few
@given(texts, st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), max_size=20)), max_size=6))
def test_truncate_leaves_no_trace(ids: list[int], edits: list[tuple[int, list[int]]]) -> None:
    index = SuffixIndex(ids)
    for back, more in edits:
        kept = max(len(ids) - back, 0)
        index.truncate(kept)
        index.extend(more)
        ids = ids[:kept] + more
        assert len(index) == len(ids)
        check(index, ids, 5)
    fresh = SuffixIndex(ids)
    assert (index._ends, index._earlier, index._hashes) == (fresh._ends, fresh._earlier, fresh._hashes)


def test_a_period_shorter_than_k_goes_on() -> None:
    assert SuffixIndex([9, 1, 2, 1, 2, 1, 2]).propose(5) == ([1, 2, 1, 2, 1], 4)
    assert SuffixIndex([5] * 10).propose(4) == ([5] * 4, 9)


def test_two_tokens_are_no_match() -> None:
    assert SuffixIndex([1, 2, 3, 1, 2]).propose(4) == ([], 0)
    assert SuffixIndex([1, 2, 3, 4, 1, 2, 3]).propose(2) == ([4, 1], 3)


def test_a_longer_match_beats_a_more_recent_one() -> None:
    context = list(range(100, 110))
    ids = [*context, 1, 7, *context[-3:], 2, 7, *context]
    draft, length = SuffixIndex(ids).propose(1)
    assert (draft, length) == ([1], 10)
    assert match_class(length) == MATCH_CLASSES.index(9)


def test_a_hash_collision_is_no_match() -> None:
    index = SuffixIndex([1, 2, 3, 4, 5, 6, 7, 8, 9])
    key = index._key(0, 9)
    assert key is not None
    index._ends[0][key] = 5  # as if the gram (3, 4, 5) had the hash of (7, 8, 9)
    assert index.propose(3) == ([], 0)


def test_appending_is_linear() -> None:
    def seconds(count: int) -> float:
        ids = [(position * position) % 1009 for position in range(count)]
        start = time.perf_counter()
        SuffixIndex(ids).propose(8)
        return time.perf_counter() - start

    small = min(seconds(25_000) for _ in range(3))
    assert min(seconds(100_000) for _ in range(2)) < 4 * small * 3


def test_a_lookup_does_not_read_the_session() -> None:
    def seconds(count: int) -> float:
        index = SuffixIndex([*range(count), 0, 1, 2])
        start = time.perf_counter()
        for _ in range(200):
            assert index.propose(8)[0] == [3, 4, 5, 6, 7, 8, 9, 10]
        return time.perf_counter() - start

    assert min(seconds(40_000) for _ in range(3)) < 5 * min(seconds(1_000) for _ in range(3))
