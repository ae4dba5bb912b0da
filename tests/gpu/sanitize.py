"""Runs every CUDA kernel once on small inputs, for compute-sanitizer:

    PYTHONPATH=.:kernels compute-sanitizer --tool racecheck python3 -m tests.gpu.sanitize
"""

from __future__ import annotations

import torch
from tlt_kernels import cuda
from tlt_kernels.params import RowParams

from tests.gpu.test_sampler import INT, NARROW, WIDE, filtered, identities, modified, random_logits, temperatures, to
from tests.gpu.test_tree_kernels import candidates, walk_of


def run_samplers() -> None:
    rows, vocab = 6, 5003
    logits, ids = random_logits(rows, vocab, torch.bfloat16).cuda(), to(identities(rows), "cuda")
    flat = random_logits(rows, vocab, torch.bfloat16, 0.3).cuda()
    for params in (RowParams(temperatures(rows)), filtered(rows, NARROW), filtered(rows, WIDE), modified(rows, vocab)):
        for x in (logits, flat):
            cuda.sample(x, ids, to(params, "cuda"), want_raw=True)
    temperature = temperatures(rows).cuda()
    cuda.noisy_top_k(logits, ids, temperature, 8)
    cuda.noisy_top_k(torch.zeros_like(logits), ids, temperature, 3, torch.arange(vocab, device="cuda"))


def run_trees() -> None:
    moved = [t.cuda() for t in candidates(5, 200, 20, 0)]
    budgets = torch.tensor([1, 128, 40, 64, 7], dtype=INT).cuda()
    trees = cuda.tree_from_candidates(*moved, budgets, rows=240, widest=200)
    cuda.pack_trees(trees.tokens, trees.parents, trees.node_indptr)
    cuda.verify_tree(torch.randint(0, 21, (240,)).cuda(), trees, steps=128)


def run_moves() -> None:
    paths = walk_of([[0, 2, 3], [0], [0, *range(5, 45, 2)]])
    walk = type(paths)(paths.accept_lens.cuda(), paths.paths.cuda(), paths.tokens.cuda())
    prefix, roots = torch.tensor([10, 3, 0], dtype=INT).cuda(), torch.zeros(3, dtype=torch.int64).cuda()
    table = torch.arange(12, dtype=INT).reshape(3, 4).cuda()
    for heads, dim in ((2, 64), (1, 3)):
        kv = torch.randn(2, 2, 12, 16, heads, dim).half().cuda()
        cuda.commit_kv(kv, table, prefix, walk)
        cuda.copy_pages(kv, torch.tensor([0, 1]).cuda(), torch.tensor([1, 2]).cuda())
    bounds = torch.tensor([0, 4, 5, 50], dtype=INT).cuda()
    cuda.gather_accepted(torch.randn(50, 64).cuda(), bounds, walk, torch.zeros(3, paths.paths.shape[1], 64).cuda())
    cuda.advance(walk, prefix, roots)
    positions, draws, slots = (torch.zeros(52, dtype=torch.int64).cuda() for _ in range(3))
    cuda.step_inputs(
        bounds, torch.zeros(50, dtype=INT).cuda(), prefix, table, page=16, pad_slot=0, positions=positions, draws=draws,
        slots=slots,
    )


if __name__ == "__main__":
    run_samplers()
    run_trees()
    run_moves()
    torch.cuda.synchronize()
    print("sanitize: every kernel ran")
