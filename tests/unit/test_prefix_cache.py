"""Names of pages, and the order of eviction."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.scheduler.prefix_cache import ROOT, PrefixCache, page_digest

PAGE = st.lists(st.integers(0, 3), min_size=2, max_size=2)
CHAIN = st.lists(PAGE, min_size=1, max_size=4)


def names(chain: list[list[int]]) -> list[bytes]:
    digests: list[bytes] = []
    for page in chain:
        digests.append(page_digest(digests[-1] if digests else ROOT, array("i", page)))
    return digests


@given(CHAIN, CHAIN)
def test_pages_have_equal_names_exactly_if_their_histories_are_equal(
    first: list[list[int]], second: list[list[int]]
) -> None:
    for index, (left, right) in enumerate(zip(names(first), names(second), strict=False)):
        assert (left == right) == (first[: index + 1] == second[: index + 1])


def test_a_page_deeper_in_the_chain_has_another_name() -> None:
    once, twice = names([[1, 2], [1, 2]])
    assert once != twice


def test_evicts_the_page_parked_longest_ago() -> None:
    cache = PrefixCache()
    for page in (0, 1, 2):
        cache.insert(bytes([page]), page)
        cache.park(page)
    cache.unpark(0)
    cache.park(0)
    assert [cache.evict() for _ in range(3)] == [1, 2, 0]
    assert len(cache) == 0
    with pytest.raises(KeyError):
        cache.evict()


def test_a_held_page_is_never_evicted() -> None:
    cache = PrefixCache()
    cache.insert(b"a", 0)
    cache.insert(b"b", 1)
    cache.park(1)
    assert cache.evict() == 1
    assert cache.num_parked == 0
    assert cache.lookup(b"a") == 0
    assert 0 in cache
    assert 1 not in cache
