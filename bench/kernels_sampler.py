"""Sampler, draft top-k, tree and KV kernels on one GPU.

    PYTHONPATH=.:kernels python3 -m bench.kernels_sampler --out DIR

Times are replays of CUDA graphs that hold one call on each of several input sets, together far beyond L2; medians over
replays. GB/s count the logits (or KV) once, against the read bandwidth measured in the same run by a sum over the same
sets. Writes DIR/gpu.json. Correctness is tests/gpu's.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from tlt_kernels import cuda
from tlt_kernels.params import NoiseIds, RowParams, Walk
from torch import Tensor

from bench.gpu_timing import Timing, time_graph
from bench.results import record

VOCAB = 151936
COLD_BYTES = 160 << 20  # L2 holds 60 MB
COMMAND = "python -m bench.kernels_sampler"
INT = torch.int32


def identities(rows: int) -> NoiseIds:
    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (rows,), device="cuda")

    return NoiseIds(draw(2**62), draw(4000), draw(8), draw(2))


def logit_sets(rows: int, vocab: int, scale: float) -> list[Tensor]:
    """Enough sets that none is in L2 when its turn comes."""
    count = max(3, -(-COLD_BYTES // (rows * vocab * 2)))
    return [(torch.randn(rows, vocab, device="cuda") * scale).bfloat16() for _ in range(count)]


def params_for(rows: int, filters: str) -> RowParams:
    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    plain = RowParams(full(1.0))
    given = {
        "none": {},
        "all": {"top_k": full(50, INT), "top_p": full(0.95), "min_p": full(0.02)},
        "top_k": {"top_k": full(50, INT)},
        "min_p": {"min_p": full(0.05)},
        "top_p": {"top_p": full(0.95)},
        "greedy": {"temperature": full(0.0)},
    }[filters]
    return RowParams(**{"temperature": plain.temperature, **given})


class Bench:
    def __init__(self, out: Path) -> None:
        self.out = out

    def note(
        self, metric: str, timing: Timing, params: dict[str, object], bytes_read: int = 0, read_tbs: float = 0.0
    ) -> None:
        rate = bytes_read / timing.us / 1e6 if bytes_read else 0.0
        share = f" {rate:5.2f} TB/s {rate / read_tbs:4.0%}" if rate and read_tbs else ""
        head = f"{metric:16s} {params!s:62s} {timing.us:8.1f} us [{timing.low:.1f}, {timing.high:.1f}]"
        print(head + share, flush=True)
        record(
            "gpu", metric, timing.us, "us", params, command=COMMAND, spread=[timing.low, timing.high], runs=15,
            folder=self.out,
        )

    def sampler(self) -> None:
        ids = {rows: identities(rows) for rows in (1, 8, 64, 256)}
        for scale in (1.0, 3.0):
            # randn * 1: a nucleus of tens of thousands of ids, worse than any model; * 3: entropy about 7 nats.
            for rows in (1, 8, 64, 256):
                sets = logit_sets(rows, VOCAB, scale)
                size = sets[0].numel() * 2
                read = time_graph([partial(torch.sum, x.view(torch.float32)) for x in sets])
                tbs = size / read.us / 1e6
                for filters in ("none", "all", "top_k", "min_p", "top_p", "greedy"):
                    if rows in (1, 8) and filters not in ("none", "all"):
                        continue
                    params = params_for(rows, filters)
                    timing = time_graph([partial(cuda.sample, x, ids[rows], params) for x in sets])
                    name = {"rows": rows, "filters": filters, "logits": f"randn * {scale:g}"}
                    self.note("sampler.us", timing, name, size, tbs)
                del sets

    def memory(self) -> None:
        """Beside logits, parameters and results: what a call of 256 rows holds."""
        logits, ids = torch.randn(256, VOCAB, device="cuda").bfloat16(), identities(256)
        for filters in ("none", "all", "top_p"):
            params = params_for(256, filters)
            cuda._scratch.clear()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            cuda.sample(logits, ids, params)
            held = torch.cuda.max_memory_allocated() - before
            print(f"sampler.bytes {filters}: {held}", flush=True)
            record(
                "gpu", "sampler.bytes", held, "bytes", {"rows": 256, "filters": filters}, command=COMMAND, runs=1,
                folder=self.out,
            )

    def draft(self) -> None:
        for rows, vocab, k in ((1, 32000, 8), (8, 32000, 8), (64, 32000, 8), (8, VOCAB, 8)):
            sets, ids = logit_sets(rows, vocab, 3.0), identities(rows)
            mapped = {"d2t": torch.arange(vocab, device="cuda") * 3, "target_vocab": VOCAB} if vocab == 32000 else {}
            for filters in ("none", "all"):
                params = params_for(rows, filters)
                timing = time_graph([partial(cuda.noisy_top_k, x, ids, params, k, **mapped) for x in sets])
                self.note("draft_top_k.us", timing, {"rows": rows, "vocab": vocab, "k": k, "filters": filters})

    def trees(self) -> None:
        for batch, budget in ((1, 32), (8, 16), (64, 4)):
            count = 1 + 8 + 64 * 4
            parents = torch.tensor([-1] + [0] * 8 + [1 + i // 8 for i in range(256)], dtype=INT)
            tokens = torch.arange(count).repeat(batch).cuda()
            scores = torch.randn(batch * count).sort(descending=True).values.cuda()
            bounds = (torch.arange(batch + 1) * count).to(INT).cuda()
            budgets = torch.full((batch,), budget, dtype=INT).cuda()
            rows, every = batch * budget, parents.repeat(batch).cuda()

            build = partial(
                cuda.tree_from_candidates, tokens, every, scores, bounds, budgets, rows=rows, widest=count
            )
            name = {"batch": batch, "verify": budget, "candidates": count}
            trees = build()
            self.note("tree_select.us", time_graph([partial(build, out=trees)] * 100), name)
            sampled = torch.randint(0, count, (rows,), device="cuda")
            walk = time_graph([partial(cuda.verify_tree, sampled, trees, steps=9)] * 100)
            self.note("walk.us", walk, {"batch": batch, "verify": budget})

    def commit(self) -> None:
        for batch, length in ((1, 6), (8, 6), (64, 4)):
            kv = torch.randn(28, 2, 64 * 8 + 1, 16, 4, 128, device="cuda").bfloat16()
            table = torch.randperm(512, device="cuda")[: batch * 8].reshape(batch, 8).to(INT)
            paths = (torch.arange(length, device="cuda") * 2).to(INT).repeat(batch, 1)
            lens = torch.full((batch,), length, dtype=INT, device="cuda")
            prefix = torch.full((batch,), 50, dtype=INT, device="cuda")
            walk = Walk(lens, paths, paths.long())
            timing = time_graph([partial(cuda.commit_kv, kv, table, prefix, walk)] * 10)
            self.note("commit_kv.us", timing, {"batch": batch, "accepted": length, "layers": 28})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    bench = Bench(parser.parse_args().out)
    bench.sampler()
    bench.memory()
    bench.draft()
    bench.trees()
    bench.commit()


if __name__ == "__main__":
    main()
