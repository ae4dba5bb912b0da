"""What batch_invariant holds and what it costs on one GPU.

    PYTHONPATH=.:kernels python3 -m bench.invariance --out DIR [--only products,attention,price,tokens,flips]

The geometry of Qwen2.5-7B, bf16, random weights, temperature 1.
products, attention: the mode's kernels beside the default ones, in a CUDA graph, weights and keys cold.
price: a plain step in the mode over the default plain step, batch 1 and 64 (as bench.decode times them).
tokens: ids and log-probabilities with speculation (replayed continuations with errors), in another order, in chunks,
with preemption and over cached prefixes, against one plain run of all requests at once.
flips: first differences per 1,000 tokens in the default mode, speculation against none, and batch against batch.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tlt_kernels.linear import linear
from tlt_kernels.triton.attention import Geometry, TreeAttention
from tlt_kernels.triton.invariant import make_invariant

from bench.decode import MODEL, build, qwen_7b, step_times
from bench.results import record
from tests.drafters import ReplayDrafter
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.loader import LoadedModel

COMMAND = "python -m bench.invariance"
PROMPT, DEPTH = 32, 3
FLIP_TOKENS = 64
OFF = SpeculationConfig(method="off")
GEOMETRY = Geometry(28, 4, 128, 16, torch.bfloat16)
COLD = 150 << 20  # bytes of keys and values that a timed graph goes through, at least
PRODUCTS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
SHAPES = [  # batch, committed keys, rows of each, a chunk
    (1, 512, 1, False), (64, 200, 1, False), (64, 1024, 1, False), (1, 4096, 1, False), (8, 4096, 1, False),
    (8, 4096, 16, False), (1, 32768, 1, False), (1, 32768, 16, False), (1, 0, 4096, True), (4, 2048, 512, True),
]


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds a call, from replays of one graph of all of them."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # scratch is a stream's own, and must be there before the capture
        calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def products(out: Path | None) -> None:
    """The four products of 14 layers, each of its own weight, one after another."""
    layers = [
        {name: torch.randn(shape, device="cuda").mul_(shape[1] ** -0.5).bfloat16() for name, shape in PRODUCTS.items()}
        for _ in range(14)
    ]
    for rows in (1, 8, 16, 32, 64, 128, 256, 1024):
        x = torch.randn(rows, 3584, device="cuda").bfloat16()

        def layer(weights: dict[str, torch.Tensor], invariant: bool, x: torch.Tensor = x) -> None:
            qkv = linear(x, weights["qkv"], invariant=invariant, checked=False)
            mixed = linear(qkv[:, :3584], weights["o"], invariant=invariant, checked=False)
            gated = linear(mixed, weights["gate_up"], silu_mul=True, invariant=invariant, checked=False)
            linear(gated, weights["down"], invariant=invariant, checked=False)

        default, fixed = (
            graph_us([partial(layer, weights, kind) for weights in layers]) for kind in (False, True)
        )
        print(f"products {rows:4d} rows: {fixed:7.1f} us a layer, default {default:7.1f} ({fixed / default:.2f})")
        record("gpu", "invariant.products_us", fixed, "us", {"rows": rows, "geometry": "Qwen2.5-7B", "of": "a layer"},
               command=COMMAND, runs=15, folder=out)


def attention_inputs(batch: int, context: int, nodes: int, causal: bool) -> tuple[dict[str, torch.Tensor], int]:
    pages = -(-(context + nodes) // 16)
    chain = [[(1 << min(i + 1, 63)) - 1, 0] for i in range(nodes)]
    step = {
        "page_table": torch.randperm(batch * pages, device="cuda").int().view(batch, pages),
        "prefix_lens": torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        "node_indptr": (torch.arange(batch + 1, device="cuda") * nodes).int(),
        "ancestors": torch.tensor(chain, device="cuda").repeat(batch, 1),
        "causal": torch.full((batch,), causal, dtype=torch.uint8, device="cuda"),
        "positions": (context + torch.arange(nodes, device="cuda")).repeat(batch),
    }
    return step, batch * pages


def attention(out: Path | None) -> None:
    for batch, context, nodes, causal in SHAPES:
        step, pages = attention_inputs(batch, context, nodes, causal)
        rows, layer_bytes = batch * nodes, pages * 16 * 2 * 4 * 128 * 2
        layers = max(4, min(40, -(-COLD // layer_bytes)))
        caches = torch.randn(layers, 2, pages, 16, 4, 128, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(rows, 28, 128, device="cuda", dtype=torch.bfloat16)
        result = torch.empty_like(q)
        sizes = {"max_rows": rows, "max_batch": batch, "device": "cuda"}
        default = TreeAttention(GEOMETRY, **sizes)  # type: ignore[arg-type]
        fixed = make_invariant(GEOMETRY, max_keys=context + nodes, **sizes)  # type: ignore[arg-type]
        plans = (default, default.plan(**step)), (fixed, fixed.plan(**step, chunks=causal))
        times = [
            graph_us([partial(a.run, plan, q, k, v, scale=128**-0.5, out=result) for k, v in caches])
            for a, plan in plans
        ]
        plan_us = graph_us([partial(fixed.plan, **step, chunks=causal)] * 8)
        kind = "chunk" if causal else f"V={nodes}"
        print(f"attention {batch}x{context} {kind:6s}: {times[1]:7.1f} us, default {times[0]:7.1f} "
              f"({times[1] / times[0]:.2f}), plan {plan_us:.1f}", flush=True)
        params = {"batch": batch, "context": context, "V": nodes} | ({"causal": True} if causal else {})
        record("gpu", "attention.invariant_us", times[1], "us", params, command=COMMAND, runs=15, folder=out)
        del caches


def price(model: LoadedModel, out: Path | None) -> None:
    for batch in (1, 64):
        medians = []
        for invariant in (False, True):
            engine = build(model, batch, batch_invariant=invariant)
            times = step_times(engine, batch, 1.0)
            print(f"price batch {batch:3d} invariant {invariant!s:5s}: {times}", flush=True)
            medians.append(times.median)
            del engine
        where = MODEL | {"batch": batch, "temperature": 1.0}
        record("gpu", "invariant.ms", medians[1], "ms", where, command=COMMAND, runs=120, folder=out)
        record("gpu", "invariant.price", medians[1] / medians[0], "x", where, command=COMMAND, runs=120, folder=out)
        print(f"price batch {batch}: {medians[1] / medians[0]:.3f}", flush=True)


Bits = list[tuple[list[int], list[float]]]


def decode(
    model: LoadedModel, requests: int, tokens: int, batch: int, *, invariant: bool, known: Bits | None = None,
    order: int = 1, again: bool = False, **config: Any,
) -> Bits:
    """Ids and log-probabilities of each request. known: what a replay drafter proposes, one in ten wrong. order -1: the
    last request first. again: twice, the prompts' pages cached the second time, which counts."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 152064, (PROMPT,), generator=generator).tolist() for _ in range(requests)]
    params = [SamplingParams(temperature=1.0, max_tokens=tokens, seed=i, ignore_eos=True) for i in range(requests)]
    drafter = None
    if known is not None:
        drafter = ReplayDrafter({tuple(p): {0: ids} for p, (ids, _) in zip(prompts, known)}, 0.1, depth=DEPTH)
    spec = OFF if drafter is None else SpeculationConfig(method="custom", profile=Profile(DEPTH, 1, DEPTH + 1))
    engine = RolloutEngine(model, EngineConfig(
        dtype="bfloat16", device="cuda", max_num_seqs=batch, max_model_len=1024, speculation=spec, seed=0,
        batch_invariant=invariant, **{"num_pages": batch * 40, **config},
    ), drafter=drafter)
    begin = time.perf_counter()
    for _ in range(1 + again):
        outputs = engine.generate(prompts[::order], params[::order])
    stats = engine.stats()
    print(f"    {requests} x {tokens} at batch {batch}, invariant {invariant}, replay {known is not None}, {config}: "
          f"{time.perf_counter() - begin:.1f} s, accept length {stats['accept_length']:.2f}, preemptions "
          f"{stats['preemptions']}, prefix hits {stats['prefix_hit_tokens']}", flush=True)
    # In the default mode a sample leaves the replayed continuation at its first difference.
    assert known is None or not invariant or stats["accept_length"] >= 3, "the drafter's proposals are hardly accepted"
    assert not again or stats["prefix_hit_tokens"] > 0, "no prefix was taken from the cache"
    assert "num_pages" not in config or stats["preemptions"] > 0, "nothing was preempted"
    del engine
    gc.collect()  # the next one's pages and graphs need the memory
    torch.cuda.empty_cache()
    return [(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in outputs[::order]]


def first_differences(a: Bits, b: Bits) -> tuple[int, int]:
    """(requests whose ids differ, tokens up to there)."""
    found = seen = 0
    for (x, _), (y, _) in zip(a, b, strict=True):
        unlike = [i for i, (s, t) in enumerate(zip(x, y, strict=True)) if s != t]
        found, seen = found + bool(unlike), seen + (unlike[0] + 1 if unlike else len(x))
    return found, seen


def tokens(model: LoadedModel, requests: int, out: Path | None) -> None:
    decoded = partial(decode, model, requests, 512, invariant=True)
    few = requests * (PROMPT + 512) // 16 * 2 // 3  # two thirds of the pages that all of them come to
    plain = decoded(requests)
    runs: dict[str, Callable[[], Bits]] = {
        "speculation": partial(decoded, 64, known=plain),
        "order, chunks": partial(decoded, 96, order=-1, max_num_batched_tokens=128),
        "preemption": partial(decoded, requests, num_pages=few),
        "prefix hits": partial(decoded, requests, again=True),
        "speculation, order, chunks, preemption": partial(
            decoded, 64, known=plain, order=-1, max_num_batched_tokens=300, num_pages=1400),
    }
    for name, run in runs.items():
        unlike = [
            sum(s != t for a, b in zip(plain, other, strict=True) for s, t in zip(a[part], b[part], strict=True))
            for other in [run()] for part in (0, 1)
        ]
        print(f"tokens, {name}: {unlike[0]} differ, {unlike[1]} log-probabilities", flush=True)
        where = {"geometry": "Qwen2.5-7B", "dtype": "bf16", "requests": requests, "tokens": 512, "temperature": 1.0,
                 "against": name}
        record("gpu", "invariant.tokens_differing", unlike[0], "tokens", where, command=COMMAND, folder=out)
        record("gpu", "invariant.logprobs_differing", unlike[1], "tokens", where, command=COMMAND, folder=out)


def flips(model: LoadedModel, requests: int, out: Path | None) -> None:
    """At batch 8 a pass with drafts has 32 rows, and its products the kernels of plain steps; at batch 64 it has 256,
    which are cuBLAS's."""
    decoded = partial(decode, model, tokens=FLIP_TOKENS, invariant=False)
    few = min(requests, 64)
    one, eight, many = decoded(few, batch=1), decoded(few, batch=8), decoded(requests, batch=64)
    pairs = {
        "batch 1 and 8": (one, eight), "speculation at batch 8": (eight, decoded(few, batch=8, known=eight)),
        "speculation at batch 64": (many, decoded(requests, batch=64, known=many)),
        "batch 8 and 64": (eight, many[:few]),
    }
    for pair, runs in pairs.items():
        found, seen = first_differences(*runs)
        rate = found * 1000 / seen
        print(f"flips {pair}: {found} in {seen} tokens, {rate:.2f} per 1,000", flush=True)
        where = {"geometry": "Qwen2.5-7B", "pair": pair, "tokens": FLIP_TOKENS, "temperature": 1.0}
        record("gpu", "bf16.flips", rate, "per 1,000 tokens", where, command=COMMAND, folder=out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json (default: bench/results)")
    parser.add_argument("--only", default="products,attention,price,tokens,flips")
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    with torch.inference_mode():
        if "products" in parts:
            products(args.out)
        if "attention" in parts:
            attention(args.out)
    needs: dict[str, Callable[[LoadedModel], Any]] = {
        "price": lambda model: price(model, args.out),
        "tokens": lambda model: tokens(model, args.requests, args.out),
        "flips": lambda model: flips(model, args.requests, args.out),
    }
    if not set(parts) & set(needs):
        return
    model = qwen_7b()
    for name, part in needs.items():
        if name in parts:
            part(model)


if __name__ == "__main__":
    main()
