"""Public ops as a caller sees them, checks and launches included: pytest-benchmark with a timer that waits for the GPU.

    PYTHONPATH=.:kernels python3 -m pytest bench/ops_benchmark.py --benchmark-only

What the kernels alone take stands in bench/kernels_*.py. Inputs are warm: these are small steps, and the host's share
is the point. `python -m bench.kernels --only ops` records the medians.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.gpu_timing import synchronized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.benchmark(timer=synchronized, group="ops"),
]
ROUNDS, WARMUP = 200, 20
BF16 = torch.bfloat16


def measure(benchmark: Any, call: Callable[[], object], **params: Any) -> None:
    benchmark.extra_info.update(params)
    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=WARMUP)


def test_nothing(benchmark: Any) -> None:
    """The timer's own cost: one synchronization."""
    measure(benchmark, lambda: None)


@pytest.mark.parametrize("rows", [1, 64])
def test_sample(benchmark: Any, rows: int) -> None:
    from tlt_kernels import NoiseIds, RowParams, sample

    logits = torch.randn(rows, 152064, device="cuda", dtype=BF16)
    ids = NoiseIds(*(torch.arange(rows, device="cuda") + i for i in range(4)))
    params = RowParams(torch.ones(rows, device="cuda"))
    measure(benchmark, lambda: sample(logits, ids, params), rows=rows, vocab=152064)


@pytest.mark.parametrize("rows", [1, 64])
def test_linear(benchmark: Any, rows: int) -> None:
    from tlt_kernels.linear import linear

    x, weight = (torch.randn(n, 3584, device="cuda", dtype=BF16) for n in (rows, 4608))
    measure(benchmark, lambda: linear(x, weight), rows=rows, product="qkv")


@pytest.mark.parametrize("rows", [1, 64])
def test_rms_norm(benchmark: Any, rows: int) -> None:
    from tlt_kernels.norm import rms_norm

    x, weight = torch.randn(rows, 3584, device="cuda", dtype=BF16), torch.ones(3584, device="cuda", dtype=BF16)
    measure(benchmark, lambda: rms_norm(x, weight, 1e-6, residual=x), rows=rows)


@pytest.mark.parametrize("batch,nodes", [(1, 1), (8, 16)])
def test_tree_attention(benchmark: Any, batch: int, nodes: int) -> None:
    from tlt_kernels.triton.attention import Geometry, TreeAttention

    from tests.kernels.attention_cases import make_case

    case = make_case([(1024, nodes, False)] * batch, heads=28, kv_heads=4, head_dim=128, page=16, dtype=BF16).to("cuda")
    attention = TreeAttention(
        Geometry(28, 4, 128, 16, BF16), max_rows=batch * nodes, max_batch=batch, device="cuda"
    )
    out = torch.empty_like(case.q)

    def planned_and_run() -> None:
        step = attention.plan(**case.step)
        attention.run(step, case.q, case.k_cache, case.v_cache, scale=case.scale, out=out)

    measure(benchmark, planned_and_run, batch=batch, V=nodes, context=1024)


@pytest.mark.parametrize("part", ["whole", "in use"])
def test_page_table(benchmark: Any, part: str) -> None:
    """64 requests of an engine for 128k tokens, 2k of them in use: int32 [64, 8200]."""
    from tlt_kernels.cuda import copy_block, copy_bytes

    pitch, size = 8200 * 4, 64 * 8200 * 4
    host, device = torch.zeros(size, dtype=torch.uint8, pin_memory=True), torch.device("cuda", 0)
    to = torch.zeros(size, dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], object]] = {
        "whole": lambda: copy_bytes(to, host, 0, size, device),
        "in use": lambda: copy_block(to, host, 0, pitch, 129 * 4, 64, device),
    }
    measure(benchmark, calls[part], part=part, requests=64, context=131072)
