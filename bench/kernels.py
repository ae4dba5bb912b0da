"""Every kernel benchmark on one GPU.

    PYTHONPATH=.:kernels python3 -m bench.kernels --out DIR [--only bandwidth,ops,linear,sampler,attention,prefill]

bandwidth is what reading memory reaches on this GPU: the others' GB/s stand against it. ops times public ops with the
host's share (bench/ops_benchmark.py); the rest are bench.kernels_linear, bench.kernels_sampler, bench.kernels_attention
and bench.prefill, each in a process of its own. Records go to DIR/gpu.json with commit, GPU and versions. A part that
fails does not stop the others; the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.results import record

COMMAND = "python -m bench.kernels"
SCRIPTS = {
    "linear": ("bench.kernels_linear",), "sampler": ("bench.kernels_sampler",),
    "attention": ("bench.kernels_attention",), "prefill": ("bench.prefill",),
}
PARTS = ("bandwidth", "ops", *SCRIPTS)


def bandwidth(out: Path) -> None:
    from bench.gpu_timing import REPLAYS, read_bandwidth

    tbs, low, high = read_bandwidth()
    print(f"read bandwidth {tbs:.2f} TB/s [{low:.2f}, {high:.2f}]", flush=True)
    record("gpu", "bandwidth.read", tbs, "TB/s", {"bytes": "4 GiB"}, command=COMMAND, spread=[low, high], runs=REPLAYS,
           folder=out)


def ops(out: Path) -> None:
    report = out / "ops.json"
    subprocess.run(
        [sys.executable, "-m", "pytest", "bench/ops_benchmark.py", "--benchmark-only", "--benchmark-quiet", "-q",
         f"--benchmark-json={report}", "-p", "no:warnings"],
        check=True, stdout=subprocess.DEVNULL,
    )
    record_ops(json.loads(report.read_text()), out)


def record_ops(report: dict, out: Path) -> int:
    """pytest-benchmark's JSON as records; how many."""
    for entry in report["benchmarks"]:
        name, stats = entry["name"].removeprefix("test_").split("[")[0], entry["stats"]
        low, median, high = (stats[key] * 1e6 for key in ("q1", "median", "q3"))
        print(f"op {name:16s} {entry['extra_info']!s:40s} {median:7.1f} us [{low:.1f}, {high:.1f}]", flush=True)
        record("gpu", "op.us", median, "us", {"op": name} | entry["extra_info"], command=f"{COMMAND} --only ops",
               spread=[low, high], runs=stats["rounds"], folder=out)
    return len(report["benchmarks"])


def script(part: str, out: Path) -> None:
    subprocess.run([sys.executable, "-m", *SCRIPTS[part], "--out", str(out)], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in wanted:
        begin = time.monotonic()
        try:
            if part in SCRIPTS:
                script(part, args.out)
            else:
                {"bandwidth": bandwidth, "ops": ops}[part](args.out)
        except Exception as error:
            failed.append(part)
            print(f"{part}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        print(f"({part}: {time.monotonic() - begin:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
