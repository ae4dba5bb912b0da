"""write_kv, commit_kv and copy_pages against a ledger of slots, on every short path."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from tlt_kernels import commit_kv, copy_pages, write_kv
from tlt_kernels.params import Walk
from torch import Tensor

LAYERS, HEADS, DIM = 2, 2, 8
NODES = 9
PATHS = [(0, *rest) for size in range(6) for rest in combinations(range(1, NODES), size)]  # 219, depth <= 6


def fresh_kv(pages: int, page: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every slot of every plane holds a number of its own."""
    slots = torch.arange(LAYERS * 2 * pages * page, dtype=torch.float32).view(LAYERS, 2, pages, page, 1, 1)
    return (slots.expand(-1, -1, -1, -1, HEADS, DIM) + torch.arange(DIM) / 16).to(dtype).contiguous()


def as_walk(paths: list[tuple[int, ...]]) -> Walk:
    width = max(map(len, paths)) + 1
    padded = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], dtype=torch.int32)
    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return Walk(lengths, padded, torch.zeros(len(paths), width, dtype=torch.int64))


def scattered_table(prefixes: list[int], page: int, seed: int) -> tuple[Tensor, int]:
    """(page table, pages in all): each request's pages for prefix + NODES slots, in random order."""
    needed = [-(-(prefix + NODES) // page) for prefix in prefixes]
    order = torch.tensor(random.Random(seed).sample(range(sum(needed) + 1), sum(needed)), dtype=torch.int32)
    table = torch.zeros(len(prefixes), max(needed), dtype=torch.int32)
    for row, taken in zip(table, order.split(needed)):
        row[: len(taken)] = taken
    return table, sum(needed) + 1


def ledger(kv: Tensor, table: Tensor, prefixes: list[int], paths: list[tuple[int, ...]]) -> Tensor:
    """What must lie where: the accepted path's slots hold what its nodes held before, all other slots are untouched."""
    page = kv.shape[3]
    after = kv.clone().flatten(2, 3)
    for row, prefix, path in zip(table.tolist(), prefixes, paths):
        slot = [row[t // page] * page + t % page for t in range(len(row) * page)]
        for d, node in enumerate(path):
            after[:, :, slot[prefix + d]] = kv.flatten(2, 3)[:, :, slot[prefix + node]]
    return after.view_as(kv)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_every_short_path_lands_where_the_ledger_says(page: int, batch: int, backend: str) -> None:
    for i in range(len(PATHS)):
        paths = [PATHS[(i + 37 * b) % len(PATHS)] for b in range(batch)]
        prefixes = [(i + 5 * b) % 19 for b in range(batch)]
        table, pages = scattered_table(prefixes, page, i)
        kv = fresh_kv(pages, page)
        want = ledger(kv, table, prefixes, paths)
        commit_kv(kv, table, torch.tensor(prefixes, dtype=torch.int32), as_walk(paths), backend=backend)
        assert torch.equal(kv, want), (paths, prefixes)


def test_sabotage_copying_in_the_wrong_order_is_caught() -> None:
    def deepest_first(kv: Tensor, table: Tensor, prefix: int, path: tuple[int, ...]) -> None:
        page = kv.shape[3]
        slot = [p * page + o for p in table[0].tolist() for o in range(page)]
        flat = kv.view(LAYERS, 2, -1, HEADS, DIM)
        for d in range(len(path) - 1, -1, -1):
            flat[:, :, slot[prefix + d]] = flat[:, :, slot[prefix + path[d]]].clone()

    table, pages = scattered_table([5], 4, 0)
    for path, survives in (((0, 1, 4), True), ((0, 2, 3), False)):
        kv = fresh_kv(pages, 4)
        want = ledger(kv, table, [5], [path])
        deepest_first(kv, table, 5, path)
        assert torch.equal(kv, want) == survives


def test_sabotage_moving_to_node_slots_of_a_sibling_is_caught() -> None:
    """Case G01: the accepted node's KV stays where it was, and the rejected sibling's is taken for it."""
    table, pages = scattered_table([5], 4, 0)
    kv = fresh_kv(pages, 4)
    assert not torch.equal(kv, ledger(kv, table, [5], [(0, 2, 3)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_write_kv_writes_its_slots_only(backend: str, dtype: torch.dtype) -> None:
    kv = fresh_kv(5, 4, dtype)
    slots = torch.tensor([7, 0, 19, 12])
    qkv = torch.randn(4, 3 * HEADS * DIM).to(dtype)  # a product's columns: rows are strided
    k, v = (qkv[:, i * HEADS * DIM : (i + 1) * HEADS * DIM].unflatten(1, (HEADS, DIM)) for i in (1, 2))
    want = kv.clone()
    for i, slot in enumerate(slots.tolist()):
        want[1, 0, slot // 4, slot % 4] = k[i]
        want[1, 1, slot // 4, slot % 4] = v[i]
    write_kv(k, v, kv[1, 0], kv[1, 1], slots, backend=backend)
    assert torch.equal(kv, want)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_copy_pages_in_order(backend: str) -> None:
    kv = fresh_kv(6, 4)
    before = kv.clone()
    copy_pages(kv, torch.tensor([1, 2, 3]), torch.tensor([4, 4, 3]), backend=backend)
    assert torch.equal(kv[:, :, 4], before[:, :, 2])
    others = [0, 1, 2, 3, 5]
    assert torch.equal(kv[:, :, others], before[:, :, others])


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_nothing_to_do(backend: str) -> None:
    kv = fresh_kv(2, 4)
    before = kv.clone()
    none = torch.zeros(0, dtype=torch.int64)
    write_kv(torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM), kv[0, 0], kv[0, 1], none, backend=backend)
    copy_pages(kv, none, none, backend=backend)
    empty = torch.zeros(0, dtype=torch.int32)
    commit_kv(kv, empty.view(0, 1), empty, Walk(empty, empty.view(0, 3), none.view(0, 3)), backend=backend)
    assert torch.equal(kv, before)


def test_errors_name_what_is_wrong_and_write_nothing() -> None:
    kv = fresh_kv(3, 4)
    before = kv.clone()
    rows = torch.zeros(1, HEADS, DIM)
    table, prefix = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"slots: expected slots in \[0, 12\), got 12"):
        write_kv(rows, rows, kv[0, 0], kv[0, 1], torch.tensor([12]))
    with pytest.raises(ValueError, match="k: expected float32"):
        write_kv(rows.double(), rows, kv[0, 0], kv[0, 1], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"walk\.paths: expected rising nodes, got 1 at depth 2"):
        commit_kv(kv, table, prefix, as_walk([(0, 2, 1)]))
    with pytest.raises(ValueError, match="page_table: expected more than 2 pages, got 2"):
        commit_kv(kv, table, prefix, as_walk([(0, 6)]))
    with pytest.raises(ValueError, match="page_table: expected pages in"):
        commit_kv(kv, table + 2, prefix, as_walk([(0, 2)]))
    with pytest.raises(ValueError, match="dst: expected values in"):
        copy_pages(kv, torch.tensor([0]), torch.tensor([3]))
    assert torch.equal(kv, before)
