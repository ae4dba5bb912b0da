"""The noise's tail over 1e9 values and the sampler's cost a row on the CPU. `python -m bench.law [tail|speed]`.

Knows the ops only. The law itself is tested in tests/kernels/test_law.py; this is what is too long for a test.
"""

from __future__ import annotations

import math
import statistics
import sys
import time

import torch
from tlt_kernels import NoiseIds, RowParams, sample
from tlt_kernels.backend import extension, threads

COMMAND = "python -m bench.law"
VOCAB_TAIL, VOCAB_SPEED, ROWS = 151_936, 49_152, 64
THRESHOLDS = (-2.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 17.0, 22.9)


def tail(values: int = 10**9) -> dict[str, float]:
    """Streams `values` noise values; the largest deviation of the counts above THRESHOLDS, in standard deviations."""
    rows = -(-values // VOCAB_TAIL)
    report = extension().noise_tail(0x7157, rows, VOCAB_TAIL, list(THRESHOLDS), threads())
    worst = 0.0
    for x, above in zip(THRESHOLDS, report["above"]):
        p = -math.expm1(-math.exp(-x))
        mean = report["count"] * p
        worst = max(worst, abs(above - mean) / math.sqrt(mean * (1 - p)))
        print(f"g > {x:5.1f}: expected {mean:14.1f}, got {above}")
    print(f"{report['count']} values, {report['not_finite']} not finite, in [{report['min']:.4f}, {report['max']:.4f}]")
    return {"count": report["count"], "not_finite": report["not_finite"], "worst_sigma": worst}


def rows_of(name: str) -> tuple[torch.Tensor, RowParams]:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB_SPEED) * 3
    ones = torch.ones(ROWS)
    cases = {
        "temperature 1": RowParams(ones),
        "temperature 0.6": RowParams(ones * 0.6),
        "greedy": RowParams(ones * 0),
        "min-p 0.05": RowParams(ones, min_p=ones * 0.05),
        "top-k 50": RowParams(ones, top_k=(ones * 50).int()),
        "top-p 0.9": RowParams(ones, top_p=ones * 0.9),
        "top-k 50, top-p 0.9": RowParams(ones, top_k=(ones * 50).int(), top_p=ones * 0.9),
    }
    return logits, cases[name]


def speed(name: str, dtype: torch.dtype, runs: int = 9) -> list[float]:
    """Microseconds a row of CPU time (the machine may be shared), logits normal with deviation 3, one thread."""
    logits, params = rows_of(name)
    logits = logits.to(dtype)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    times = []
    for run in range(runs):
        ids = NoiseIds(zeros + run, torch.arange(ROWS), zeros, zeros)
        start = time.process_time()
        sample(logits, ids, params)
        times.append((time.process_time() - start) / ROWS * 1e6)
    return sorted(times)


def main() -> None:
    from bench.results import record

    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    if what in ("all", "tail"):
        result = tail()
        params = {"values": result["count"], "vocab": VOCAB_TAIL}
        record("law", "noise.not_finite", result["not_finite"], "values", params, command=COMMAND)
        record("law", "noise.tail_deviation", round(result["worst_sigma"], 3), "sigma", params, command=COMMAND)
    if what in ("all", "speed"):
        torch.set_num_threads(1)
        for name, dtype in [
            ("temperature 1", torch.float32), ("temperature 1", torch.bfloat16), ("temperature 0.6", torch.float32),
            ("greedy", torch.float32), ("min-p 0.05", torch.float32), ("top-k 50", torch.float32),
            ("top-p 0.9", torch.float32), ("top-k 50, top-p 0.9", torch.float32),
        ]:
            times = speed(name, dtype)
            median = round(statistics.median(times), 1)
            print(f"{name:22} {dtype!s:16} {median:8.1f} us a row")
            record(
                "law", "sample.us_per_row", median, "us",
                {"case": name, "dtype": str(dtype).removeprefix("torch."), "vocab": VOCAB_SPEED, "rows": ROWS,
                 "threads": 1, "isa": extension().isa()},
                command=COMMAND, spread=[round(times[0], 1), round(times[-1], 1)], runs=len(times),
            )


if __name__ == "__main__":
    main()
