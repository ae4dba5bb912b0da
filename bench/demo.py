"""Runs `tlt demo --json` and records what it saved in bench/results/core.json.

    python -m bench.demo                                            # as `make demo`: 8 prompts x 8 samples, 256 tokens
    python -m bench.demo --prompts 20 --n 8 --max-tokens 512        # the rollouts of the speed comparison

Knows no engine: the command is run as a user runs it, and its JSON is all that is read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

from bench.results import record

AREA = "core"
# (metric, key of the JSON, unit)
METRICS = (
    ("demo.target_passes_saved", "target_passes_saved", "share"),
    ("demo.accept_length", "accept_length", "tokens"),
    ("demo.tokens_differing", "tokens_differing", "tokens"),
    ("demo.excused_ties", "excused_ties", "ties"),
    ("demo.useful_tokens_per_s_with", "useful_tokens_per_s_with", "tokens/s"),
    ("demo.useful_tokens_per_s_without", "useful_tokens_per_s_without", "tokens/s"),
    ("demo.target_passes_with", "target_passes_with", "passes"),
    ("demo.target_passes_without", "target_passes_without", "passes"),
    ("demo.target_rows_with", "target_rows_with", "rows"),
    ("demo.target_rows_without", "target_rows_without", "rows"),
)


def run_demo(options: list[str]) -> dict[str, Any]:
    """What `tlt demo --json` prints. Its exit code 1 (tokens differ) still has a result, which is recorded as it is."""
    code = "from tlt_engine.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "demo", "--json", *options], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"tlt demo: expected exit code 0 or 1 with JSON, got {done.returncode}; see above")
    return json.loads(done.stdout)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo")
    for name, default in (("prompts", 8), ("n", 8), ("max-tokens", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = vars(parser.parse_args(argv))
    options = [part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = run_demo(options)
    params = {"model": result["model"], "dtype": "float32", "task": result["task"], "temperature": 1.0, **chosen}
    for metric, key, unit in METRICS:
        record(AREA, metric, result[key], unit, params, command=f"python -m bench.demo {shlex.join(options)}")
    print(json.dumps(result, indent=2))
    return 0 if result["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
