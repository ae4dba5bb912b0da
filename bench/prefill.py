"""Prompts of a 7B model on one GPU: whole prefill steps and their attention, through FlashInfer and through our kernel.

    PYTHONPATH=.:kernels python3 -m bench.prefill --out DIR

The geometry of Qwen2.5-7B in bf16 with random weights. prefill.ms: one RolloutEngine.step() over `batch` prompts of
which `length` tokens each are computed, to the end of the GPU's work. prefill.attention_us: one layer's attention
alone, launched back to back. Medians of 7; FlashInfer is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tlt_kernels.flashinfer_prefill import ChunkAttention, ChunkShape, installed
from tlt_kernels.triton.attention import Geometry, TreeAttention

from bench.decode import OFF, qwen_7b
from bench.results import record
from tlt_engine import EngineConfig, RolloutEngine, SamplingParams

COMMAND = "python -m bench.prefill"
MODEL = {"geometry": "Qwen2.5-7B", "dtype": "bf16"}
SHAPES = ((1, 4096), (8, 1024))
HEADS, KV_HEADS, DIM, PAGE, LAYERS, RUNS = 28, 4, 128, 16, 28, 7


def step_ms(model: Any, backend: str, batch: int, length: int) -> list[float]:
    engine = RolloutEngine(model, EngineConfig(
        dtype="bfloat16", device="cuda", max_num_seqs=batch, max_num_batched_tokens=batch * length, seed=0,
        max_model_len=8192, num_pages=batch * (length // PAGE + 4), enable_prefix_caching=False, speculation=OFF,
        prefill_backend=backend,
    ))
    assert engine.stats()["prefill_backend"] == backend
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(RUNS + 2):
        prompts = torch.randint(0, 152064, (batch, length + 1), generator=generator).tolist()
        ids = [engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True)) for prompt in prompts]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        assert engine.stats()["prefill_tokens"] == len(times) * batch * length
        engine.abort(ids)
    return sorted(times[2:])


def attention_us(backend: str, batch: int, length: int) -> list[float]:
    pages = length // PAGE
    host = {
        "prefix_lens": torch.zeros(batch, dtype=torch.int32),
        "node_indptr": torch.arange(batch + 1, dtype=torch.int32) * length,
        "page_table": torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages),
    }
    q = torch.randn(batch * length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch * pages, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, scale = torch.empty_like(q), DIM**-0.5
    run: Callable[[], object]
    if backend == "flashinfer":
        theirs = ChunkAttention(
            ChunkShape(HEADS, KV_HEADS, DIM, PAGE, q.dtype), windows=(0,), scale=scale, device="cuda"
        )
        theirs.plan(**host)
        run = lambda: theirs.run(0, q, k, v, out=out)  # noqa: E731
    else:
        ours = TreeAttention(
            Geometry(HEADS, KV_HEADS, DIM, PAGE, q.dtype), max_rows=len(q), max_batch=batch, device="cuda"
        )
        step = ours.plan(
            **{name: tensor.cuda() for name, tensor in host.items()},
            ancestors=torch.zeros(len(q), 2, dtype=torch.int64, device="cuda"),
            causal=torch.ones(batch, dtype=torch.uint8, device="cuda"),
            positions=torch.arange(length, device="cuda").repeat(batch),
        )
        run = lambda: ours.run(step, q, k, v, scale=scale, out=out)  # noqa: E731
    return timed(run)


def timed(run: Callable[[], object], repeat: int = 8) -> list[float]:
    """Microseconds a call, of RUNS groups of `repeat` calls between CUDA events. A call's q, k and v (30 to 60 MB) and
    its result pass through L2 in between, so that each call finds it cold enough."""
    times = []
    for _ in range(RUNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeat * 1e3)
    return sorted(times[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json (default: bench/results)")
    args = parser.parse_args(argv)
    model = qwen_7b(max_model_len=8192)
    backends = ["triton", *(["flashinfer"] if installed() else [])]
    for batch, length in SHAPES:
        for backend in backends:
            where = MODEL | {"backend": backend, "batch": batch, "length": length}
            steps, layer = step_ms(model, backend, batch, length), attention_us(backend, batch, length)
            flop = 2 * DIM * HEADS * batch * length * (length + 1)
            print(f"prefill {batch}x{length} {backend:10s}: {statistics.median(steps):.2f} ms a step [{steps[0]:.2f}, "
                  f"{steps[-1]:.2f}]; attention {statistics.median(layer):.0f} us a layer, "
                  f"{flop / statistics.median(layer) / 1e6:.0f} TFLOP/s", flush=True)
            for metric, unit, times in (("prefill.ms", "ms", steps), ("prefill.attention_us", "us", layer)):
                record("gpu", metric, statistics.median(times), unit, where, command=COMMAND, runs=RUNS,
                       spread=[times[0], times[-1]], folder=args.out)


if __name__ == "__main__":
    main()
