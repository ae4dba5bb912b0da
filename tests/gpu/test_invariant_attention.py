"""Batch-invariant attention on a GPU: a tree node has the bits of plain decoding, whatever stands beside it."""

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

BOUND = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}
REQUESTS = [(3000, 40, False), (0, 1, False), (700, 16, False), (64, 128, False), (150, 300, True), (1300, 1, False)]


def run(case: Case, window: int = 0, part_bytes: int = 1 << 30) -> Tensor:
    from tlt_kernels.triton.invariant import Geometry, InvariantAttention

    rows, heads, dim = case.q.shape
    _, page, kv_heads, _ = case.k_cache.shape
    attention = InvariantAttention(
        Geometry(heads, kv_heads, dim, page, case.q.dtype, window), max_rows=rows,
        max_batch=len(case.step["prefix_lens"]), max_keys=case.step["page_table"].shape[1] * page, device="cuda",
        part_bytes=part_bytes,
    )
    out = torch.full_like(case.q, float("nan"))
    return attention.run(attention.plan(**case.step), case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)


def unequal(a: Tensor, b: Tensor) -> list[int]:
    """Rows that differ in a bit."""
    a, b = (x.view(len(x), -1).view(torch.uint8) for x in (a, b))
    return (a != b).any(1).nonzero().flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page"), [
    (28, 4, 128, 16), (9, 3, 64, 16), (8, 2, 256, 32), (10, 2, 80, 16), (6, 6, 96, 64), (8, 1, 128, 16),
])
def test_a_row_has_the_bits_of_plain_decoding(
    heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype
) -> None:
    case = make_case(REQUESTS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype)
    on_gpu = case.to("cuda")
    together, folded = run(on_gpu), run(on_gpu, part_bytes=0)
    with torch.device("cuda"):
        wanted = reference(
            on_gpu.q.float(), on_gpu.k_cache, on_gpu.v_cache, **on_gpu.step, scale=case.scale
        )
    assert float((together.float() - wanted).abs().max()) < BOUND[dtype]
    assert unequal(folded, together) == []
    rows = [*range(0, 57), *range(57, 185, 9), *range(185, 485, 23), 485]
    assert unequal(run(each_row_alone(case, rows).to("cuda")), together[rows]) == []
    one = each_row_alone(case, [rows[-1]])  # and in a batch of one
    assert unequal(run(one.to("cuda")), together[[rows[-1]]]) == []


@pytest.mark.parametrize("window", [1, 100, 600])
def test_windows(window: int) -> None:
    case = make_case(REQUESTS, heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16)
    together = run(case.to("cuda"), window)
    rows = [0, 20, 39, 41, 56, 60, 184, 200, 300, 484, 485]
    assert unequal(run(each_row_alone(case, rows).to("cuda"), window), together[rows]) == []


def test_a_chunk_size_changes_no_bit() -> None:
    whole = make_case([(0, 1500, True)], heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16).to("cuda")
    out = run(whole)
    for begin in (16, 128, 700, 1499):
        step = dict(whole.step)
        step["prefix_lens"] = torch.tensor([begin], dtype=torch.int32, device="cuda")
        step["node_indptr"] = torch.tensor([0, 1500 - begin], dtype=torch.int32, device="cuda")
        step["positions"], step["ancestors"] = step["positions"][begin:], step["ancestors"][begin:].contiguous()
        chunk = Case(whole.q[begin:].contiguous(), whole.k_cache, whole.v_cache, step, whole.scale)
        assert unequal(run(chunk), out[begin:]) == []


def test_sibling_the_default_kernels_fail_it() -> None:
    from tlt_kernels.triton.attention import tree_attention

    case = make_case(REQUESTS[:3], heads=28, kv_heads=4, head_dim=128, page=16, dtype=torch.bfloat16)
    rows = list(range(57))
    together, alone = (
        tree_attention(c.q, c.k_cache, c.v_cache, **c.step, scale=c.scale)
        for c in (case.to("cuda"), each_row_alone(case, rows).to("cuda"))
    )
    assert len(unequal(alone, together)) > 10
