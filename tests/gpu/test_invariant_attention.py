"""Batch-invariant attention on a GPU: a tree node has the bits of plain decoding, whatever stands beside it. Both sets
of kernels, Triton's and those in CUDA, whose bits differ from each other."""

from __future__ import annotations

import pytest
import torch
from tlt_kernels.reference.attention import tree_attention as reference
from torch import Tensor

from tests.kernels.attention_cases import Case, each_row_alone, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

KERNELS = ("triton", "cuda")
BOUND = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}
REQUESTS = [(3000, 40, False), (0, 1, False), (700, 16, False), (64, 128, False), (150, 300, True), (1300, 1, False)]


def run(case: Case, kernels: str, window: int = 0, part_bytes: int = 1 << 30, chunks: bool = True) -> Tensor:
    from tlt_kernels.triton.invariant import CudaInvariantAttention, Geometry, InvariantAttention

    rows, heads, dim = case.q.shape
    _, page, kv_heads, _ = case.k_cache.shape
    kind = CudaInvariantAttention if kernels == "cuda" else InvariantAttention
    attention = kind(
        Geometry(heads, kv_heads, dim, page, case.q.dtype, window), max_rows=rows,
        max_batch=len(case.step["prefix_lens"]), max_keys=case.step["page_table"].shape[1] * page, device="cuda",
        part_bytes=part_bytes,
    )
    out = torch.full_like(case.q, float("nan"))
    plan = attention.plan(**case.step, chunks=chunks)
    return attention.run(plan, case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)


def unequal(a: Tensor, b: Tensor) -> list[int]:
    """Rows that differ in a bit."""
    a, b = (x.view(len(x), -1).view(torch.uint8) for x in (a, b))
    return (a != b).any(1).nonzero().flatten().tolist()  # type: ignore[no-any-return]


HALF = (torch.bfloat16, torch.float16)
GEOMETRIES = [
    *(("triton", dtype, *g) for dtype in (*HALF, torch.float32) for g in (
        (28, 4, 128, 16), (9, 3, 64, 16), (8, 2, 256, 32), (10, 2, 80, 16), (6, 6, 96, 64), (8, 1, 128, 16))),
    *(("cuda", dtype, *g) for dtype in HALF for g in (
        (28, 4, 128, 16), (9, 3, 64, 16), (8, 1, 128, 64), (4, 4, 64, 32), (64, 2, 128, 16), (40, 1, 64, 16))),
]


@pytest.mark.parametrize(("kernels", "dtype", "heads", "kv_heads", "head_dim", "page"), GEOMETRIES, ids=str)
def test_a_row_has_the_bits_of_plain_decoding(
    kernels: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> None:
    case = make_case(REQUESTS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype)
    on_gpu = case.to("cuda")
    together, folded = run(on_gpu, kernels), run(on_gpu, kernels, part_bytes=0)
    with torch.device("cuda"):
        wanted = reference(
            on_gpu.q.float(), on_gpu.k_cache, on_gpu.v_cache, **on_gpu.step, scale=case.scale
        )
    assert float((together.float() - wanted).abs().max()) < BOUND[dtype]
    assert unequal(folded, together) == []
    assert unequal(run(on_gpu, kernels, chunks=False), together) == []
    rows = [*range(0, 57), *range(57, 185, 9), *range(185, 485, 23), 485]
    assert unequal(run(each_row_alone(case, rows).to("cuda"), kernels), together[rows]) == []
    one = each_row_alone(case, [rows[-1]])  # and in a batch of one
    assert unequal(run(one.to("cuda"), kernels), together[[rows[-1]]]) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("window", [1, 100, 600])
def test_windows(window: int, kernels: str) -> None:
    case = make_case(REQUESTS, heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16)
    on_gpu = case.to("cuda")
    together = run(on_gpu, kernels, window)
    with torch.device("cuda"):
        wanted = reference(
            on_gpu.q.float(), on_gpu.k_cache, on_gpu.v_cache, **on_gpu.step, scale=case.scale, window=window
        )
    assert float((together.float() - wanted).abs().max()) < BOUND[torch.bfloat16]
    assert unequal(run(on_gpu, kernels, window, part_bytes=0), together) == []
    rows = [0, 20, 39, 41, 56, 60, 184, 200, 300, 484, 485]
    assert unequal(run(each_row_alone(case, rows).to("cuda"), kernels, window), together[rows]) == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_chunk_size_changes_no_bit(kernels: str) -> None:
    whole = make_case([(0, 1500, True)], heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16).to("cuda")
    out = run(whole, kernels)
    for begin in (16, 128, 700, 1490, 1499):
        step = dict(whole.step)
        step["prefix_lens"] = torch.tensor([begin], dtype=torch.int32, device="cuda")
        step["node_indptr"] = torch.tensor([0, 1500 - begin], dtype=torch.int32, device="cuda")
        step["positions"], step["ancestors"] = step["positions"][begin:], step["ancestors"][begin:].contiguous()
        chunk = Case(whole.q[begin:].contiguous(), whole.k_cache, whole.v_cache, step, whole.scale)
        assert unequal(run(chunk, kernels), out[begin:]) == []


@pytest.mark.parametrize("kernels", KERNELS)
def test_padding_rows_are_left_alone_and_graphs_replay_other_steps(kernels: str) -> None:
    from tlt_kernels.triton.invariant import CudaInvariantAttention, Geometry, InvariantAttention

    shape = {"heads": 28, "kv_heads": 4, "head_dim": 128, "page": 16, "dtype": torch.bfloat16, "padding_rows": 5}
    cases = [make_case([(a, 1, False), (b, 4, False)], **shape).to("cuda") for a, b in ((900, 40), (130, 800))]  # type: ignore[arg-type]
    still = cases[0]
    wide = max(c.step["page_table"].shape[1] for c in cases)
    for c in cases:
        c.step["page_table"] = torch.nn.functional.pad(c.step["page_table"], (0, wide - c.step["page_table"].shape[1]))
    expected = [run(c, kernels) for c in cases]
    kind = CudaInvariantAttention if kernels == "cuda" else InvariantAttention
    attention = kind(
        Geometry(28, 4, 128, 16, torch.bfloat16), max_rows=10, max_batch=2, max_keys=16 * wide, device="cuda"
    )
    out = torch.empty_like(still.q)
    pages = max(len(c.k_cache) for c in cases)
    caches = torch.zeros(2, pages, *still.k_cache.shape[1:], dtype=torch.bfloat16, device="cuda")
    inputs = {name: t.clone() for name, t in still.step.items()}
    q = still.q.clone()

    def step() -> None:
        plan = attention.plan(**inputs, chunks=False)
        for _ in range(2):
            attention.run(plan, q, caches[0], caches[1], scale=still.scale, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for c, wanted in zip(cases * 2, expected * 2):
        for name, t in c.step.items():
            inputs[name].copy_(t)
        q.copy_(c.q)
        caches[0, : len(c.k_cache)], caches[1, : len(c.v_cache)] = c.k_cache, c.v_cache
        out.fill_(float("nan"))
        graph.replay()
        assert unequal(out[:5], wanted[:5]) == [] and bool(out[5:].isnan().all())
        assert bool(out[:5].isfinite().all())


def test_sibling_the_default_kernels_fail_it() -> None:
    from tlt_kernels.triton.attention import tree_attention

    case = make_case(REQUESTS[:3], heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16)
    rows = list(range(57))
    together, alone = (
        tree_attention(c.q, c.k_cache, c.v_cache, **c.step, scale=c.scale)
        for c in (case.to("cuda"), each_row_alone(case, rows).to("cuda"))
    )
    assert len(unequal(alone, together)) > 10
