"""Every kernel once on small inputs under compute-sanitizer, part by part, on a machine with a GPU:

    PYTHONPATH=.:kernels python3 -m tests.gpu.sanitize --out DIR [--seconds 110]

memcheck and racecheck of all parts run side by side, each in a process of its own; DIR/gpu.json gets how many errors
and hazards they found, DIR/TOOL_PART.log what. A part that did not run to its end counts as -1. To look at one part:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:kernels compute-sanitizer python3 -m tests.gpu.sanitize --part trees
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck")
COMMAND = "python -m tests.gpu.sanitize"
# How the tools end: "ERROR SUMMARY: 3 errors", "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)".
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")
RAN = "sanitize: part ran"


def samplers() -> None:
    from tlt_kernels import cuda
    from tlt_kernels.params import RowParams

    from tests.gpu import test_sampler as cases

    rows = 6
    for vocab in (5003, 5008):
        logits, ids = cases.random_logits(rows, vocab, torch.bfloat16).cuda(), cases.to(cases.identities(rows), "cuda")
        flat = cases.random_logits(rows, vocab, torch.bfloat16, 0.3).cuda()
        plain = RowParams(cases.temperatures(rows))
        nucleus = RowParams(torch.ones(rows), top_p=torch.full((rows,), 0.97))
        loose = RowParams(torch.ones(rows), min_p=torch.full((rows,), 1e-4))
        narrow, wide = cases.filtered(rows, cases.NARROW), cases.filtered(rows, cases.WIDE)
        for params in (plain, narrow, wide, nucleus, loose, cases.modified(rows, vocab)):
            for x in (logits, flat):
                cuda.sample(x, ids, cases.to(params, "cuda"), want_raw=True)


def drafts() -> None:
    from tlt_kernels import cuda
    from tlt_kernels.noise import gumbel_noise
    from tlt_kernels.params import RowParams

    from tests.gpu import test_sampler as cases
    from tests.gpu.test_draft import mapping

    rows, columns, vocab = 6, 2003, 5003
    logits, ids = cases.random_logits(rows, columns, torch.bfloat16).cuda(), cases.to(cases.identities(rows), "cuda")
    options = mapping(columns, vocab)
    options["d2t"] = options["d2t"].cuda()  # type: ignore[attr-defined]
    plain, narrow = RowParams(cases.temperatures(rows)), cases.filtered(rows, cases.NARROW)
    for params in (plain, narrow, cases.modified(rows, vocab)):
        cuda.noisy_top_k(logits, ids, cases.to(params, "cuda"), 8, **options)  # type: ignore[arg-type]
    cuda.noisy_top_k(torch.zeros_like(logits), ids, cases.to(plain, "cuda"), 3, noise=False)
    gumbel_noise(ids, vocab, backend="cuda")


def trees() -> None:
    from tlt_kernels import cuda

    from tests.gpu.test_tree_kernels import INT, candidates

    moved = [t.cuda() for t in candidates(5, 200, 20, 0)]
    budgets = torch.tensor([1, 128, 40, 64, 7], dtype=INT).cuda()
    packed = cuda.tree_from_candidates(*moved, budgets, rows=240, widest=200)
    cuda.pack_trees(packed.tokens, packed.parents, packed.node_indptr)
    cuda.verify_tree(torch.randint(0, 21, (240,)).cuda(), packed, steps=128)


def moves() -> None:
    from tlt_kernels import cuda

    from tests.gpu.test_tree_kernels import INT, walk_of

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


def products() -> None:
    from tlt_kernels.linear import linear

    for dtype in (torch.bfloat16, torch.float16):
        for outer, inner in ((128, 128), (200, 264), (576, 576)):
            weight, bias = torch.randn(outer, inner).cuda().to(dtype), torch.randn(outer).cuda().to(dtype)
            for rows in (1, 9, 33, 100):
                x, base = torch.randn(rows, inner).cuda().to(dtype), torch.randn(rows, outer).cuda().to(dtype)
                linear(x, weight, bias, base=base, backend="cuda")
                linear(x, weight, silu_mul=True, backend="cuda")


def attention() -> None:
    from tests.gpu.test_attention import run
    from tests.kernels.attention_cases import make_case

    requests = [(150, 7, False), (0, 20, True), (65, 1, False), (0, 0, False), (3, 33, False)]
    for dtype in (torch.bfloat16, torch.float16):
        for heads, kv_heads, dim in ((8, 2, 128), (7, 1, 128), (4, 4, 64), (6, 2, 64)):
            case = make_case(requests, heads=heads, kv_heads=kv_heads, head_dim=dim, page=16, dtype=dtype).to("cuda")
            run(case)
            run(case, window=40)
    case = make_case(requests, heads=6, kv_heads=2, head_dim=80, page=16, dtype=torch.float32).to("cuda")
    run(case)


def invariant_attention() -> None:
    from tests.gpu.test_invariant_attention import run
    from tests.kernels.attention_cases import make_case

    requests = [(300, 7, False), (0, 20, True), (65, 1, False), (130, 33, False)]
    kinds = (("cuda", torch.bfloat16, 128), ("cuda", torch.float16, 64), ("triton", torch.float32, 128))
    for kernels, dtype, dim in kinds:
        run(make_case(requests, heads=8, kv_heads=2, head_dim=dim, page=16, dtype=dtype).to("cuda"), kernels)


def elementwise() -> None:
    from tlt_kernels.activation import silu_mul
    from tlt_kernels.norm import rms_norm
    from tlt_kernels.rope import rope_write_kv

    from tests.kernels.elementwise_cases import rope_case

    for dtype in (torch.bfloat16, torch.float32):
        x, residual = torch.randn(2, 7, 576, device="cuda").to(dtype)
        rms_norm(x, torch.ones(576, device="cuda", dtype=dtype), 1e-6, residual=residual)
        silu_mul(torch.randn(7, 300, device="cuda").to(dtype))
    for norm in (False, True):
        case = rope_case(7, 4, 2, 64, 64, norm=norm, dtype=torch.bfloat16, device="cuda")
        rope_write_kv(*case.args(), q_norm=case.q_norm, k_norm=case.k_norm)


def drafter() -> None:
    """The levels of a learned drafter, and steps that it drafts in graphs."""
    from tests.eagle import random_drafter
    from tests.gpu.test_learned import MODEL, PROFILES, engine_with, wide_drafter
    from tests.kernels.level_cases import compare_levels
    from tests.tiny import tiny_target
    from tlt_engine import SamplingParams

    for profile in ("tree", "chain"):
        compare_levels(wide_drafter("bfloat16", 150), PROFILES[profile], 8e-2)
    made = engine_with(random_drafter(tiny_target(**MODEL), window=9), PROFILES["tree"], device="cuda", max_num_seqs=2)
    made.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=1.0, max_tokens=12, seed=7, ignore_eos=True))


def engine() -> None:
    """Prefill, plain decoding and verification of trees; without graphs, fp32 and bf16."""
    from tests.drafters import AdversarialDrafter
    from tests.engine.engines import tiny_engine
    from tlt_engine import SamplingParams

    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], list(range(20, 45))]
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, max_tokens=12, n=2, seed=7)
    for dtype in ("float32", "bfloat16"):
        made = tiny_engine(drafter=AdversarialDrafter(64, eos_ids=(3,)), device="cuda", dtype=dtype, enforce_eager=True)
        made.generate(prompts, params)
        made.generate(prompts, params, speculate=False)
        made.check_integrity()


PARTS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (samplers, drafts, trees, moves, products, attention, invariant_attention, elementwise, drafter, engine)
}


def errors_of(log: str) -> int:
    """What the tool counted; -1 when the part did not run to its end."""
    found = SUMMARY.findall(log)
    return sum(map(int, found)) if found and RAN in log else -1


def run_all(out: Path, seconds: float, parts: Sequence[str] = tuple(PARTS)) -> int:
    from bench.results import record

    # Each tensor an allocation of its own, so that memcheck sees its borders.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    running = {}
    for tool in TOOLS:
        for part in parts:
            log = out / f"{tool}_{part}.log"
            command = [
                "compute-sanitizer", "--tool", tool, "--print-limit", "20", sys.executable, "-m", "tests.gpu.sanitize",
                "--part", part,
            ]
            with log.open("w") as file:
                running[tool, part] = log, subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
                )
    until, worst = time.monotonic() + seconds, 0
    for (tool, part), (log, process) in running.items():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool's own process alone would leave Python running
        errors = errors_of(log.read_text(errors="replace"))
        worst = max(worst, abs(errors))
        print(f"{tool:10s} {part:20s} {errors}", flush=True)
        name = {"tool": tool, "part": part}
        record("gpu", "sanitizer.errors", errors, "errors", name, command=COMMAND, runs=1, folder=out)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), help="run this part in this process, under whatever watches it")
    parser.add_argument("--out", type=Path, help="run all parts under both tools; folder for logs and records")
    parser.add_argument("--seconds", type=float, default=110, help="after which what still runs is ended")
    parser.add_argument("--only", default=",".join(PARTS), help="which parts, with --out")
    args = parser.parse_args()
    if args.part:
        PARTS[args.part]()
        torch.cuda.synchronize()
        print(RAN)
        return 0
    if args.out is None:
        parser.error("expected --out DIR or --part NAME, got neither")
    return 1 if run_all(args.out, args.seconds, args.only.split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())
