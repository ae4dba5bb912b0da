"""The CUDA trees' source on an emulated GPU against the C++ twin: tests/gpu/test_tree_kernels.py in small."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tlt_kernels import cuda
from tlt_kernels.tree import pack_trees, tree_from_candidates, verify_tree
from torch import Tensor

from tests.gpu.test_tree_kernels import candidates, same_trees
from tests.kernels.emulation.tree import EmulatedTrees

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SHAPES = [(5, 2), (60, 3), (300, 1), (1500, 200)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> EmulatedTrees:
    return EmulatedTrees(tmp_path_factory.mktemp("tree"))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[EmulatedTrees], None]]:
    monkeypatch.setattr(cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(cuda, "_scratch", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield lambda emulated: monkeypatch.setattr(cuda, "extension", lambda: emulated)


def given(most: int, vocab: int, seed: int, falling: bool) -> tuple[Tensor, ...]:
    """falling: no candidate better than its parent, as sums of log-probabilities are."""
    tokens, parents, scores, bounds = candidates(4, most, vocab, seed, falling=falling)
    budgets = torch.randint(1, 129, (4,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    return tokens, parents, scores, bounds, budgets


def selected(inputs: tuple[Tensor, ...]) -> tuple[cuda.PackedTrees, int]:
    bounds, budgets = inputs[3], inputs[4]
    widest, rows = int(bounds.diff().max()), int(budgets.sum())
    out = cuda.tree_from_candidates(*inputs, rows=rows, widest=widest)
    n = int(out.node_indptr[-1])
    return cuda.PackedTrees(out.tokens[:n], out.parents[:n], out.depths[:n], out.ancestors[:n], out.node_indptr), n


def ties() -> tuple[Tensor, ...]:
    """Equal scores at the cut, a better one behind them."""
    parents, scores = torch.tensor([-1, 0, 0, 0, 0, 0]), torch.tensor([0.0, -1.0, -2.0, -2.0, -2.0, -1.5])
    return torch.arange(6), parents.int(), scores, torch.tensor([0, 6]).int(), torch.tensor([4]).int()


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("most,vocab", SHAPES)
def test_trees_of_the_twin(
    built: EmulatedTrees, use: Callable[[EmulatedTrees], None], most: int, vocab: int, falling: bool
) -> None:
    use(built)
    for seed in range(2):
        built.seed = seed
        inputs = given(most, vocab, seed, falling)
        want = tree_from_candidates(*inputs, backend="cpp")
        got, n = selected(inputs)
        assert same_trees(got, want)
        assert same_trees(cuda.pack_trees(got.tokens, got.parents, got.node_indptr), want)
        sampled = torch.randint(0, vocab + 1, (n,), generator=torch.Generator().manual_seed(seed))
        walk = verify_tree(sampled, want, backend="cpp")
        seen = cuda.verify_tree(sampled, got, steps=walk.paths.shape[1])
        assert torch.equal(seen.paths, walk.paths) and torch.equal(seen.tokens, walk.tokens)


def test_edges(built: EmulatedTrees, use: Callable[[EmulatedTrees], None]) -> None:
    """A chain of 128, a request without candidates, dead candidates, and batches of other sizes on one workspace."""
    use(built)
    assert selected(ties())[0].tokens.tolist() == [0, 1, 2, 5]
    chain = torch.arange(-1, 127, dtype=torch.int32)
    indptr = torch.tensor([0, 128], dtype=torch.int32)
    assert same_trees(
        cuda.pack_trees(torch.arange(128), chain, indptr),
        pack_trees(torch.arange(128), chain, indptr, backend="cpp"),
    )
    for batch in (3, 1, 2, 3):
        tokens, parents = torch.arange(6).repeat(batch), torch.tensor([-1, 0, 0, 1, 1, 2], dtype=torch.int32)
        scores = torch.tensor([0.0, -1.0, -2.0, -torch.inf, -1.5, -torch.inf]).repeat(batch)
        bounds = torch.tensor([0, *range(6, 6 * batch, 6), 6 * (batch - 1)], dtype=torch.int32)[: batch + 1]
        bounds[batch] = 6 * max(batch - 1, 1)  # the last of several has none
        budgets = torch.full((batch,), 4, dtype=torch.int32)
        out, _ = selected((tokens, parents.repeat(batch), scores, bounds, budgets))
        trees = max(batch - 1, 1)
        assert out.node_indptr.tolist() == [4 * min(b, trees) for b in range(batch + 1)]
        assert out.tokens.tolist() == [0, 1, 2, 4] * trees and out.parents.tolist() == [-1, 0, 0, 1] * trees


@pytest.mark.parametrize("change", [
    {"here + min(alike, ties)": "here + alike"}, {"atomicMin(&table[at], mine);": ""},
    {"found = higher;": "found = bit;"}, {"mine = {above.jump,": "mine = {-1,"},
])
def test_broken_kernels_are_seen(
    use: Callable[[EmulatedTrees], None], tmp_path: Path, change: dict[str, str]
) -> None:
    broken = EmulatedTrees(tmp_path, change)
    use(broken)
    broken.seed = 3  # threads out of order
    cases = [ties(), *(given(200, 4, seed, True) for seed in range(3))]
    assert not all(same_trees(selected(case)[0], tree_from_candidates(*case, backend="cpp")) for case in cases)
