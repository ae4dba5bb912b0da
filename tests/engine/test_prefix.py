"""The prefix cache: equal ids under equal weights, whole pages, first copy kept, leaves evicted first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_engine.kvcache.pages import PagePool
from tlt_engine.kvcache.prefix import PrefixCache


def cache(num_pages: int = 16, page_size: int = 2) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, page_size)


def store(pool: PagePool, prefix: PrefixCache, ids: list[int], version: int = 0, release: bool = True) -> list[int]:
    pages = pool.allocate(-(-len(ids) // prefix.page_size))
    prefix.insert(ids, pages, len(ids), version)
    if release:
        pool.release_all(reversed(pages))
    prefix.check()
    return pages


def test_match_shares_whole_pages_up_to_the_limit():
    pool, prefix = cache()
    pages = store(pool, prefix, [1, 2, 3, 4, 5])
    assert len(prefix) == 2 and (pool.free, pool.idle) == (14, 2), "the partial page is free again"
    assert prefix.match([1, 2, 3, 4, 5], 0, 5) == pages[:2]
    assert pool.holders(pages[0]) == 1 and pool.idle == 0
    assert prefix.match([1, 2, 3, 4, 5], 0, 3) == pages[:1]
    assert pool.holders(pages[0]) == 2
    assert prefix.match([1, 2, 3], 0, 9) == pages[:1], "a limit beyond the ids"
    assert prefix.match([1, 2, 9, 4], 0, 4) == pages[:1]
    assert prefix.match([9, 2, 3, 4], 0, 4) == []


def test_a_page_counts_only_behind_its_own_prefix():
    pool, prefix = cache()
    store(pool, prefix, [1, 2, 7, 7])
    store(pool, prefix, [3, 4, 5, 5])
    assert len(prefix.peek([3, 4, 7, 7], 0, 4)) == 1 and len(prefix.peek([1, 2, 7, 7], 0, 4)) == 2


def test_ids_are_not_confused_by_their_encoding():
    pool, prefix = cache(page_size=1)
    store(pool, prefix, [2**40, 0])
    for other in ([0, 2**40], [2**8], [2**40 + 1], [0]):
        assert prefix.peek(other, 0, 2) == []


def test_other_versions_never_match():
    pool, prefix = cache()
    store(pool, prefix, [1, 2, 3, 4], version=1)
    assert prefix.match([1, 2, 3, 4], 2, 4) == [] and prefix.match([1, 2, 3, 4], 0, 4) == []
    new = store(pool, prefix, [1, 2, 3, 4], version=2)
    assert prefix.match([1, 2, 3, 4], 2, 4) == new


def test_equal_content_keeps_the_first_page():
    pool, prefix = cache()
    first = store(pool, prefix, [1, 2, 3, 4], release=False)
    second = store(pool, prefix, [1, 2, 3, 4], release=False)
    assert prefix.peek([1, 2, 3, 4], 0, 4) == first
    pool.release_all(reversed(second))
    assert pool.idle == 0, "the second copy is worth nothing"
    pool.release_all(reversed(first))
    assert pool.idle == 2


def test_insert_goes_on_where_it_stopped_and_never_beyond_kv_len():
    pool, prefix = cache()
    ids, keys = [1, 2, 3, 4, 5, 6], []
    pages = pool.allocate(3)
    prefix.insert(ids, pages, 3, 0, 0, keys)
    assert prefix.peek(ids, 0, 6) == pages[:1] and len(keys) == 1
    prefix.insert(ids, pages, 5, 0, 3, keys)
    assert prefix.peek(ids, 0, 6, keys) == pages[:2] == prefix.peek(ids, 0, 6)
    prefix.insert(ids, pages, 6, 0, 5, keys)
    assert prefix.peek(ids, 0, 6) == pages


def test_leaves_are_evicted_before_their_parents_and_old_ones_first():
    pool, prefix = cache()
    old = store(pool, prefix, [1, 1, 2, 2, 3, 3])
    young = store(pool, prefix, [1, 1, 2, 2, 4, 4])  # computed, so its first two pages are second copies
    pool.release_all(reversed(prefix.match([1, 1, 2, 2], 0, 4)))  # the common part was used last
    for left in ([1, 1, 2, 2, 4, 4], [1, 1, 2, 2], [1, 1], []):
        assert pool.evict(1) == 1
        prefix.check()
        assert len(prefix.peek([1, 1, 2, 2, 3, 3], 0, 6)) == min(2, len(left) // 2)
        assert len(prefix.peek(left, 0, 6)) == len(left) // 2
    assert pool.evict(1) == 0 and pool.free == 16 and old[2] not in prefix and young[2] not in prefix


def test_reset_frees_idle_pages_and_leaves_used_ones_to_their_holders():
    pool, prefix = cache()
    store(pool, prefix, [1, 2, 3, 4])
    held = prefix.match([1, 2], 0, 2)
    prefix.reset()
    prefix.check()
    assert len(prefix) == 0 and (pool.free, pool.idle, pool.used) == (15, 0, 1)
    pool.release_all(held)
    assert pool.free == 16


def test_one_cache_a_pool():
    pool, _ = cache()
    with pytest.raises(ValueError, match="pool: expected"):
        PrefixCache(pool, 2)
    with pytest.raises(ValueError, match="page_size: expected at least 1, got 0"):
        PrefixCache(PagePool(1), 0)


IDS = st.lists(st.integers(0, 1), max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=12), IDS, st.integers(0, 1), st.sampled_from([1, 2, 3]))
def test_match_finds_the_longest_stored_prefix(stored, ids, version, page_size):
    """Against brute force over everything stored, with room for all."""
    pool, prefix = cache(256, page_size)
    for other, v in stored:
        store(pool, prefix, other, v)
    best = 0
    for other, v in stored:
        same = next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), min(len(ids), len(other)))
        best = max(best, same // page_size * (v == version))
    assert len(prefix.match(ids, version, len(ids))) == best


@pytest.mark.parametrize("sabotage", ["no version", "no parent"])
def test_a_key_without_version_or_parent_is_caught(sabotage, monkeypatch):
    def key(self, i, token_ids, version, keys):
        begin = i * self.page_size if sabotage == "no parent" else 0
        ids = tuple(token_ids[begin : (i + 1) * self.page_size])
        return (ids, version if sabotage == "no parent" else 0)

    monkeypatch.setattr(PrefixCache, "_key", key)
    check = {
        "no version": test_other_versions_never_match, "no parent": test_a_page_counts_only_behind_its_own_prefix,
    }[sabotage]
    with pytest.raises(AssertionError):
        check()
