"""The RL side: importance ratios in TRL, weight updates, sleep and wake.

    python -m bench.rl ratio                                   # CPU: a tiny policy, fp32
    python -m bench.rl update sleep --out DIR                  # one GPU: the geometry of Qwen2.5-7B, bf16

ratio: largest |importance ratio - 1| that TRL logs over three steps. update: copying a whole state dict into the
engine, over a plain copy of as many bytes. sleep: what the driver says is in use after sleep(1) beyond an empty
process, and waking over a plain copy from pinned memory; the same tokens before and after, many cycles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.results import record
from tlt_engine import SamplingParams

COMMAND = "python -m bench.rl"
GEOMETRY = {"geometry": "Qwen2.5-7B", "dtype": "bf16"}


PART_OF = {"trl": "ratio", "update": "update", "sleep": "sleep", "wake": "sleep"}  # by the first word of the metric


def keep(out: Path | None, metric: str, value: float, unit: str, params: dict[str, Any], **more: Any) -> None:
    print(f"{metric} {params}: {value:.6g} {unit}", flush=True)
    command = f"{COMMAND} {PART_OF[metric.split('.')[0]]}"
    record("rl", metric, value, unit, params, command=command, folder=out, **more)


# ---------------------------------------------------------------- TRL


def ratio(out: Path | None) -> None:
    from tests.rl.common import policy
    from tests.rl.test_trl import logged, make_trainer, rollouts_of

    for peft in ("none", "lora"):
        model = policy()
        rollouts = rollouts_of(model)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(Path(folder), model, lora=peft == "lora", vllm_importance_sampling_correction=True)
            rollouts.attach(trainer)
            trainer.train()
        errors = [abs(r - 1) for end in ("min", "max")
                  for r in logged(trainer, f"sampling/importance_sampling_ratio/{end}")]
        where = {"peft": peft, "model": "tiny llama", "dtype": "fp32", "steps": 3}
        keep(out, "trl.ratio_error", max(errors), "", where, runs=len(errors))


# ---------------------------------------------------------------- weights and memory


def timed(work: Callable[[], object], runs: int = 6, warm: int = 1) -> list[float]:
    """Milliseconds of each run after the first `warm`, the device idle before and after."""
    times = []
    for _ in range(warm + runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[warm:]


def timed_copy(size: int, source: torch.Tensor) -> list[float]:
    """Onto the device."""
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return timed(lambda: target.copy_(source, non_blocking=True), runs=4)


def update(out: Path | None) -> None:
    from bench.decode import build, qwen_7b

    loaded = qwen_7b()
    engine = build(loaded, 8)
    new = {name: tensor.clone() for name, tensor in loaded.model.named_weights()}
    size = sum(t.nbytes for t in new.values())
    plain = timed_copy(size, torch.empty(size, dtype=torch.uint8, device="cuda"))
    updates = timed(lambda: engine.update_weights(new))
    ratio_to_copy = statistics.median(updates) / statistics.median(plain)
    keep(out, "update.vs_copy", ratio_to_copy, "", GEOMETRY | {"gb": round(size / 1e9, 2)},
         runs=len(updates), spread=[min(updates) / statistics.median(plain), max(updates) / statistics.median(plain)])
    keep(out, "update.ms", statistics.median(updates), "ms", GEOMETRY, runs=len(updates))


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def sleep(out: Path | None, cycles: int = 50) -> None:
    from bench.decode import build, qwen_7b

    torch.cuda.init()
    empty = used_gb()  # other processes' memory
    loaded = qwen_7b()
    engine = build(loaded, 8)
    weights = sum(t.nbytes for t in dict(loaded.model.named_weights()).values())
    prompts = [list(range(1, 129))] * 8
    params = [SamplingParams(max_tokens=32, seed=i, ignore_eos=True) for i in range(8)]

    def tokens() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in engine.generate(prompts, params)]

    expected = tokens()
    plain = statistics.median(timed_copy(weights, torch.empty(weights, dtype=torch.uint8, pin_memory=True)))
    torch.cuda.empty_cache()
    residual, wakes = [], []
    for _ in range(cycles):
        engine.sleep(1)
        residual.append(used_gb() - empty)
        wakes += timed(engine.wake_up, runs=1, warm=0)
    assert tokens() == expected, "other tokens after waking"
    keep(out, "sleep.residual_gb", residual[-1], "GB", GEOMETRY | {"level": 1, "cycles": cycles},
         spread=[min(residual), max(residual)], runs=cycles)
    keep(out, "sleep.growth_gb", residual[-1] - residual[min(1, cycles - 1)], "GB", GEOMETRY | {"cycles": cycles})
    keep(out, "wake.vs_copy", statistics.median(wakes) / plain, "", GEOMETRY | {"level": 1}, runs=cycles,
         spread=[min(wakes) / plain, max(wakes) / plain])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("ratio", "update", "sleep"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cycles", type=int, default=50)
    args = parser.parse_args(argv)
    if "ratio" in args.parts:
        ratio(args.out)
    if "update" in args.parts:
        update(args.out)
    if "sleep" in args.parts:
        sleep(args.out, args.cycles)


if __name__ == "__main__":
    main()
