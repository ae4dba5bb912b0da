"""Random steps for tests of the attention kernels: ragged trees and chunks over scattered pages. Knows no backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Requests are (committed keys, rows, causal). Arguments of `tree_attention` by name in `step` and the fields."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    step: dict[str, Tensor]
    scale: float

    def to(self, device: str) -> Case:
        step = {name: tensor.to(device) for name, tensor in self.step.items()}
        return Case(self.q.to(device), self.k_cache.to(device), self.v_cache.to(device), step, self.scale)


def random_tree(nodes: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ancestor words int64 [n, 2], depths int64 [n]) of a random tree, parents before children."""
    seen, depths = [1], [0]
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 12), node, (), generator=draw))
        seen.append(seen[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    words = [[signed(bits & (1 << 64) - 1), signed(bits >> 64)] for bits in seen]
    return torch.tensor(words), torch.tensor(depths)


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def make_case(
    requests: list[tuple[int, int, bool]], *, heads: int, kv_heads: int, head_dim: int, page: int,
    dtype: torch.dtype = torch.float32, seed: int = 0, padding_rows: int = 0,
) -> Case:
    """Unowned slots, and slots behind a request's last row, hold NaN: reading one shows. padding_rows: rows behind
    node_indptr[B], as a graph's padded step has."""
    draw = torch.Generator().manual_seed(seed)
    rows = sum(n for _, n, _ in requests)
    needed = [-(-(prefix + n) // page) for prefix, n, _ in requests]
    order = torch.randperm(sum(needed) + 2, generator=draw).int()
    table = torch.zeros(len(requests), max(needed) + 1, dtype=torch.int32)
    caches = torch.full((2, len(order), page, kv_heads, head_dim), float("nan"))
    ancestors = torch.zeros(rows + padding_rows, 2, dtype=torch.int64)
    positions = torch.zeros(rows + padding_rows, dtype=torch.int64)
    row = taken = 0
    for b, (prefix, n, causal) in enumerate(requests):
        pages = order[taken : taken + needed[b]]
        table[b, : needed[b]] = pages
        slots = torch.arange(prefix + n)
        fresh = torch.randn(2, prefix + n, kv_heads, head_dim, generator=draw)
        caches[:, pages[slots // page].long(), slots % page] = fresh
        if causal:
            positions[row : row + n] = prefix + torch.arange(n)
        elif n:
            ancestors[row : row + n], depths = random_tree(n, draw)
            positions[row : row + n] = prefix + depths
        row, taken = row + n, taken + needed[b]
    step = {
        "page_table": table,
        "prefix_lens": torch.tensor([prefix for prefix, _, _ in requests], dtype=torch.int32),
        "node_indptr": torch.tensor([0] + [n for _, n, _ in requests]).cumsum(0).int(),
        "ancestors": ancestors,
        "causal": torch.tensor([causal for _, _, causal in requests], dtype=torch.uint8),
        "positions": positions,
    }
    q = torch.randn(rows + padding_rows, heads, head_dim, generator=draw).to(dtype)
    return Case(q, caches[0].to(dtype), caches[1].to(dtype), step, head_dim**-0.5)


def paths(case: Case) -> list[tuple[int, list[int]]]:
    """(request, logical slots that the row sees, in path order) of every row that has a request."""
    found: list[tuple[int, list[int]]] = []
    bounds = case.step["node_indptr"].tolist()
    for b, prefix in enumerate(case.step["prefix_lens"].tolist()):
        for node, words in enumerate(case.step["ancestors"][bounds[b] : bounds[b + 1]].tolist()):
            low, high = (word % (1 << 64) for word in words)
            seen = (1 << node + 1) - 1 if case.step["causal"][b] else low | high << 64
            found.append((b, [*range(prefix), *(prefix + i for i in range(seen.bit_length()) if seen >> i & 1)]))
    return found


def each_row_alone(case: Case, rows: list[int], seed: int = 99) -> Case:
    """Plain decoding of the chosen rows: a request for each, whose path is committed but for its last key, in order,
    in other pages; what no path holds is NaN."""
    draw = torch.Generator().manual_seed(seed)
    page, known = case.k_cache.shape[1], paths(case)
    chosen = [known[row] for row in rows]
    needed = [-(-len(slots) // page) for _, slots in chosen]
    order = torch.randperm(sum(needed) + 1, generator=draw).int()
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    caches = torch.full((2, len(order), *case.k_cache.shape[1:]), float("nan"), dtype=case.q.dtype)
    taken = 0
    for i, (b, slots) in enumerate(chosen):
        pages = order[taken : taken + needed[i]]
        table[i, : needed[i]] = pages
        at, to = torch.tensor(slots), torch.arange(len(slots))
        source = case.step["page_table"][b, at // page].long(), at % page
        caches[:, pages[to // page].long(), to % page] = torch.stack([case.k_cache[source], case.v_cache[source]])
        taken += needed[i]
    lengths = torch.tensor([len(slots) for _, slots in chosen])
    step = {
        "page_table": table,
        "prefix_lens": (lengths - 1).int(),
        "node_indptr": torch.arange(len(rows) + 1).int(),
        "ancestors": torch.tensor([[1, 0]] * len(rows)),
        "causal": torch.zeros(len(rows), dtype=torch.uint8),
        "positions": lengths - 1,
    }
    return Case(case.q[rows].contiguous(), caches[0], caches[1], step, case.scale)
