"""The page pool: three states, each page in one of them."""

from __future__ import annotations

import pytest

from tlt_engine.kvcache.pages import PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.free, pool.idle, pool.used


def test_a_page_goes_free_used_free():
    pool = PagePool(3)
    a, b = pool.allocate(2)
    assert a != b and counts(pool) == (1, 0, 2)
    pool.share(a)
    pool.release(a)
    assert counts(pool) == (1, 0, 2), "one holder is left"
    pool.release_all([a, b])
    assert counts(pool) == (3, 0, 0)


def test_too_many_pages_change_nothing():
    pool = PagePool(3)
    (a,) = pool.allocate(1)
    pool.keep(a)
    pool.release(a)
    assert pool.allocate(4) is None and counts(pool) == (2, 1, 0)
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(3)) == [0, 1, 2] and counts(pool) == (0, 0, 3)


def test_idle_pages_are_evicted_oldest_first_and_only_when_needed():
    pool, evicted = PagePool(4), []
    pool.on_evict = evicted.append
    pages = pool.allocate(3)
    for page in pages:
        pool.keep(page)
    pool.release_all(pages)
    pool.share(pages[0])  # used again: the youngest when it comes back
    pool.release(pages[0])
    assert counts(pool) == (1, 3, 0)
    pool.allocate(1)
    assert evicted == []
    pool.allocate(2)
    assert evicted == [pages[1], pages[2]] and counts(pool) == (0, 1, 3)
    assert pool.evict(5) == 1 and counts(pool) == (1, 0, 3)


def test_drop_frees_idle_pages_and_leaves_used_ones():
    pool = PagePool(2)
    a, b = pool.allocate(2)
    pool.keep(a)
    pool.keep(b)
    pool.release(a)
    pool.drop(a)
    pool.drop(b)
    assert counts(pool) == (1, 0, 1)
    pool.release(b)
    assert counts(pool) == (2, 0, 0)


@pytest.mark.parametrize("misuse", ["release twice", "share a free page", "keep a free page"])
def test_misuse_is_named(misuse):
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release(page)
    call = {"release twice": pool.release, "share a free page": pool.share, "keep a free page": pool.keep}[misuse]
    with pytest.raises(AssertionError, match=f"page {page}:"):
        call(page)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda pool, page: pool._holders.__setitem__(page, 0), r"free 1 \+ cached idle 1 \+ used 0 = 2, total 3"),
        (lambda pool, page: pool._free.append(page), r"free 2 \+ cached idle 1 \+ used 1 = 4, total 3"),
        (lambda pool, page: pool._free.__setitem__(0, page), r"page \d: in the free list, with 1 holders"),
        (lambda pool, page: pool._kept.__init__(3), r"in the idle list, with 0 holders and kept = 0"),
    ],
)
def test_check_catches_damage_and_prints_both_sides(damage, message):
    pool = PagePool(3)
    page, idle = pool.allocate(2)
    pool.keep(idle)
    pool.release(idle)
    pool.check()
    damage(pool, page)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_a_pool_has_a_page():
    with pytest.raises(ValueError, match="num_pages: expected at least 1, got 0"):
        PagePool(0)
