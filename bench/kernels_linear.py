"""Products of few rows on one GPU: each product of a 7B model alone, then the chain of all layers.

    PYTHONPATH=.:kernels python3 -m bench.kernels_linear --out DIR [--rows 1 16 64]

Weights are random bf16 in the geometry of Qwen2.5-7B, all 28 layers distinct (14.1 GB), so every byte comes from
memory. Times are medians of CUDA-graph replays. A product alone: 28 independent calls in a graph. The chain: every
product reads what the one before wrote; "products" is nothing else, "layers" has the norms with their residual
sums, rope and the gated activation too, as the engine's pass does: all of a step but attention and sampling.
Correctness is tests/gpu/test_linear.py's.
Writes DIR/gpu.json.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from tlt_kernels import linear as linear_module
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv
from torch import Tensor

from bench.gpu_timing import Timing, time_graph
from bench.results import record

COMMAND = "python -m bench.kernels_linear"
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB = 28, 3584, 28, 4, 128, 18944, 152064
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "o": (HIDDEN, HEADS * DIM), "gate_up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP), "head": (VOCAB, HIDDEN),
}
REPLAYS = 11
MODEL = {"model": "7B geometry", "weights": "random"}


class Model:
    """The weights of all layers. A product keeps the size of its input, so that a chain neither fades nor overflows."""

    def __init__(self) -> None:
        def new(shape: tuple[int, int]) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[1] ** -0.5)

        counts = {name: 1 if name == "head" else LAYERS for name in SHAPES}
        self.weights = {name: [new(shape) for _ in range(counts[name])] for name, shape in SHAPES.items()}
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        angles = torch.rand(1024, DIM, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()
        self.kv = torch.zeros(LAYERS, 2, 64, 16, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.bytes = sum(w.numel() * 2 for held in self.weights.values() for w in held)

    def alone(self, name: str, rows: int, backend: str) -> Timing:
        """Of one call."""
        outer, inner = SHAPES[name]
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        out = torch.empty(rows, outer, dtype=torch.bfloat16, device="cuda")
        weights = self.weights[name] * (4 if name == "head" else 1)

        calls = [partial(linear, x, weight, out=out, backend=backend) for weight in weights]  # type: ignore[arg-type]
        return time_graph(calls, REPLAYS)

    def chain(self, kind: str, rows: int, backend: str) -> Timing:
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        positions = torch.arange(rows, device="cuda")
        out = {n: torch.empty(rows, s[0], dtype=torch.bfloat16, device="cuda") for n, s in SHAPES.items()}
        gated = torch.empty(rows, MLP, dtype=torch.bfloat16, device="cuda")
        normed, stream = torch.empty_like(x), torch.empty_like(x)
        queries = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")

        def product(rows_in: Tensor, weight: Tensor, to: Tensor, silu: bool = False) -> Tensor:
            return linear(
                rows_in, weight, out=to, silu_mul=silu, backend=backend, checked=False  # type: ignore[arg-type]
            )

        def norm(h: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
            if added is None:
                return rms_norm(h, self.norm, 1e-6, out=normed, checked=False)
            return rms_norm(added, self.norm, 1e-6, residual=h, out=normed, residual_out=stream, checked=False)

        def products() -> None:
            h = x
            for i in range(LAYERS):
                w = {name: held[i] for name, held in self.weights.items() if name != "head"}
                h = product(product(h, w["qkv"], out["qkv"])[:, :HIDDEN], w["o"], out["o"])
                h = product(product(h, w["gate_up"], out["gate_up"])[:, :MLP], w["down"], out["down"])
            product(h, self.weights["head"][0], out["head"])

        def layers() -> None:
            h, added = x, None
            for i in range(LAYERS):
                w = {name: held[i] for name, held in self.weights.items() if name != "head"}
                y, h = norm(h, added)
                rope_write_kv(
                    product(y, w["qkv"], out["qkv"]), self.cos, self.sin, positions, positions, self.kv[i][0],
                    self.kv[i][1], queries, checked=False,
                )
                y, h = norm(h, product(queries.view(rows, HIDDEN), w["o"], out["o"]))
                added = product(product(y, w["gate_up"], gated, silu=True), w["down"], out["down"])
            product(norm(h, added)[0], self.weights["head"][0], out["head"])

        work = layers if kind == "layers" else products
        times = time_graph([work], REPLAYS)
        if not bool(out["head"].isfinite().all()):
            raise ValueError(f"chain {kind} {rows} {backend}: expected finite outputs; the timing would mean nothing")
        return times


def save(out: Path, metric: str, times: Timing, scale: float, unit: str, params: dict[str, object]) -> None:
    record(
        "gpu", metric, times.us * scale, unit, MODEL | params, command=COMMAND,
        spread=[times.low * scale, times.high * scale], runs=REPLAYS, folder=out,
    )


def alone(model: Model, rows: list[int], out: Path) -> None:
    print("one product, us (TB/s of its weight)")
    for name, (outer, inner) in SHAPES.items():
        for r in rows:
            cells = []
            for backend in ("cuda", "reference"):
                times = model.alone(name, r, backend)
                cells.append(f"{backend} {times.us:7.2f} ({outer * inner * 2 / times.us / 1e6:.2f})")
                save(out, "linear.us", times, 1, "us", {"product": name, "rows": r, "backend": backend})
            print(f"  {name:8} rows {r:3}: " + "  ".join(cells), flush=True)


def chains(model: Model, rows: list[int], out: Path) -> None:
    print(f"chain of {LAYERS} layers + head, ms: {model.bytes / 1e9:.2f} GB, {model.bytes / 4.3e9:.2f} at 4.3 TB/s")
    for r in rows:
        cells = []
        for kind in ("products", "layers"):
            for backend in ("cuda", "reference"):
                times = model.chain(kind, r, backend)
                cells.append(f"{kind} {backend} {times.us / 1e3:.3f}")
                save(out, "linear.chain", times, 1e-3, "ms", {"kind": kind, "rows": r, "backend": backend})
            if kind == "products":
                linear_module.OVERLAP = False
                times = model.chain(kind, r, "cuda")
                linear_module.OVERLAP = True
                cells.append(f"{kind} cuda one by one {times.us / 1e3:.3f}")
        print(f"  rows {r:3}: " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 24, 32, 48, 64, 96, 128, 256])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels_linear: expected a CUDA device, got none; run it on the GPU machine")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        chains(model, args.rows, args.out)
        alone(model, args.rows, args.out)


if __name__ == "__main__":
    main()
