"""CUDA trees, walks, KV moves, step inputs and draft proposals against their definitions, bit for bit. Needs a GPU."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.kv import commit_kv, copy_pages
from tlt_kernels.params import PackedTrees, Walk
from tlt_kernels.tree import pack_trees, tree_from_candidates, verify_tree
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INT = torch.int32


def candidates(
    batch: int, most: int, vocab: int, seed: int, falling: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """falling: no candidate better than its parent, as with sums of log-probabilities; such trees are selected by
    another way than the rest."""
    rng = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    bounds = [0]
    for _ in range(batch):
        count = rng.randint(1, most)
        reach = rng.choice([1, 5, 50])
        parents += [-1] + [rng.randint(max(0, i - reach), i - 1) for i in range(1, count)]
        tokens += [rng.randint(0, vocab) for _ in range(count)]
        scores += [round(rng.uniform(-5, 0), rng.choice([0, 6])) for _ in range(count)]  # whole numbers tie
        for i in range(bounds[-1] + 1, bounds[-1] + count if falling else 0):
            scores[i] = min(scores[i], scores[bounds[-1] + parents[i]])
        bounds.append(bounds[-1] + count)
    return torch.tensor(tokens), torch.tensor(parents, dtype=INT), torch.tensor(scores), torch.tensor(bounds, dtype=INT)


def same_trees(a: PackedTrees, b: PackedTrees) -> bool:
    names = ("tokens", "parents", "depths", "ancestors", "node_indptr")
    return all(torch.equal(getattr(a, n).cpu(), getattr(b, n).cpu()) for n in names)


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("most,vocab", [(5, 2), (60, 3), (400, 50), (300, 1), (3000, 200), (8000, 200)])
def test_trees_and_walks(most: int, vocab: int, falling: bool) -> None:
    for seed in range(6):
        tokens, parents, scores, bounds = candidates(9, most, vocab, seed, falling)
        budgets = torch.randint(1, 129, (9,), dtype=INT, generator=torch.Generator().manual_seed(seed))
        want = tree_from_candidates(tokens, parents, scores, bounds, budgets, backend="cpp")
        moved = [t.cuda() for t in (tokens, parents, scores, bounds, budgets)]
        got = tree_from_candidates(*moved, backend="cuda")
        assert same_trees(got, want)
        assert same_trees(pack_trees(got.tokens, got.parents, got.node_indptr, backend="cuda"), want)
        sampled = torch.randint(0, vocab + 1, (len(want.tokens),), generator=torch.Generator().manual_seed(seed))
        walk, seen = verify_tree(sampled, want, backend="cpp"), verify_tree(sampled.cuda(), got, backend="cuda")
        steps = walk.paths.shape[1]
        assert torch.equal(seen.accept_lens.cpu(), walk.accept_lens)
        assert torch.equal(seen.paths[:, :steps].cpu(), walk.paths) and (seen.paths[:, steps:] == -1).all()
        assert torch.equal(seen.tokens[:, :steps].cpu(), walk.tokens)
    # The comparison is not blind: another budget gives other trees.
    other = tree_from_candidates(*moved[:4], torch.ones_like(moved[4]), backend="cuda")
    assert not same_trees(other, want)


def test_a_chain_of_128_is_accepted_whole() -> None:
    tokens = torch.arange(128).cuda()
    bounds = torch.tensor([0, 128], dtype=INT).cuda()
    trees = pack_trees(tokens, torch.arange(-1, 127, dtype=INT).cuda(), bounds, backend="cuda")
    walk = verify_tree(tokens + 1, trees, backend="cuda")
    assert walk.accept_lens.tolist() == [128] and walk.tokens[0].tolist() == list(range(1, 129))


def all_paths(depth: int) -> list[list[int]]:
    """Every rising path from the root among the nodes 1 .. depth."""
    return [[0, *rest] for n in range(depth + 1) for rest in combinations(range(1, depth + 1), n)]


def walk_of(paths: list[list[int]]) -> Walk:
    width = max(map(len, paths))
    table = torch.tensor([p + [-1] * (width - len(p)) for p in paths], dtype=INT)
    return Walk(torch.tensor([len(p) for p in paths], dtype=INT), table, table.long())


@pytest.mark.parametrize("dtype,heads,dim", [(torch.bfloat16, 4, 128), (torch.float32, 2, 8), (torch.float16, 1, 3)])
@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_commit_kv_on_every_path(dtype: torch.dtype, heads: int, dim: int, page: int) -> None:
    rng = torch.Generator().manual_seed(page)
    paths = [*all_paths(6), [0, *range(10, 70, 2)]]
    batch, width = len(paths), 100 // page + 2
    kv = torch.randn(2, 2, batch * width + 1, page, heads, dim, generator=rng).to(dtype)
    table = torch.randperm(batch * width + 1, generator=rng)[: batch * width].reshape(batch, width).to(INT)
    prefix = torch.randint(0, 25, (batch,), generator=rng, dtype=INT)
    walk = walk_of(paths)
    want, got, wrong = kv.clone(), kv.cuda(), kv.cuda()
    commit_kv(want, table, prefix, walk, backend="reference")
    moved = Walk(walk.accept_lens.cuda(), walk.paths.cuda(), walk.tokens.cuda())
    commit_kv(got, table.cuda(), prefix.cuda(), moved, backend="cuda")
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    short = Walk((walk.accept_lens - 1).cuda(), moved.paths, moved.tokens)  # the last node of each path forgotten
    commit_kv(wrong, table.cuda(), prefix.cuda(), short, backend="cuda")
    assert not torch.equal(wrong.cpu().view(torch.uint8), want.view(torch.uint8))


def test_copy_pages_in_order() -> None:
    kv = torch.randn(3, 2, 6, 16, 2, 64)
    src, dst = torch.tensor([0, 1, 2, 1]), torch.tensor([1, 2, 3, 0])
    got = kv.cuda()
    copy_pages(kv, src, dst, backend="reference")
    copy_pages(got, src.cuda(), dst.cuda(), backend="cuda")
    assert torch.equal(got.cpu(), kv)


def test_next_step_inputs() -> None:
    walk = walk_of([[0, 2, 3], [0], [0, 1]])
    walk = Walk(walk.accept_lens.cuda(), walk.paths.cuda(), torch.tensor([[5, 6, 7], [-1, -1, -1], [8, 9, -1]]).cuda())
    prefix, roots = torch.tensor([10, 31, 0], dtype=INT).cuda(), torch.zeros(3, dtype=torch.int64).cuda()
    cuda.advance(walk, prefix, roots)
    assert prefix.tolist() == [13, 32, 2] and roots.tolist() == [7, 0, 9]
    table = torch.tensor([[3, 4, 0], [5, 6, 9], [1, 0, 0]], dtype=INT).cuda()
    positions, draws, slots = (torch.full((7,), -9, dtype=torch.int64).cuda() for _ in range(3))
    cuda.step_inputs(
        torch.tensor([0, 4, 5, 6], dtype=INT).cuda(), torch.tensor([0, 1, 1, 2, 0, 0], dtype=INT).cuda(), prefix, table,
        page=16, pad_slot=99, positions=positions, draws=draws, slots=slots,
    )
    assert positions.tolist() == [13, 14, 14, 15, 32, 2, 0]
    assert draws.tolist() == [14, 15, 15, 16, 33, 3, 1]
    assert slots.tolist() == [61, 62, 63, 64, 9 * 16, 18, 99]


def test_gather_accepted() -> None:
    rows = torch.randn(9, 3584).bfloat16().cuda()
    walk = walk_of([[0, 2, 3], [0], [0, 1]])
    moved = Walk(walk.accept_lens.cuda(), walk.paths.cuda(), walk.tokens.cuda())
    out = torch.zeros(3, 3, 3584, dtype=torch.bfloat16).cuda()
    cuda.gather_accepted(rows, torch.tensor([0, 4, 5, 9], dtype=INT).cuda(), moved, out)
    for b, (first, path) in enumerate([(0, [0, 2, 3]), (4, [0]), (5, [0, 1])]):
        for d in range(3):
            want = rows[first + path[d]] if d < len(path) else torch.zeros_like(rows[0])
            assert torch.equal(out[b, d], want)
