"""The RL side: importance ratios in TRL, weight updates, sleep and wake, errors of the log-probabilities.

    python -m bench.rl ratio                                   # CPU: a tiny policy, fp32
    python -m bench.rl update sleep --out DIR                  # one GPU: the geometry of Qwen2.5-7B, bf16
    python -m bench.rl logprob --asked FILE --model MODEL --out DIR [--device cuda --dtype bfloat16 --tokens 100000]

ratio: largest |importance ratio - 1| that TRL logs over three steps. update: copying a whole state dict into the
engine, over a plain copy of as many bytes. sleep: what the driver says is in use after sleep(1) beyond an empty
process, and waking over a plain copy from pinned memory; the same tokens before and after, many cycles.
logprob: |logged log-probability - an fp32 recompute of the same tokens|, p95 and maximum with speculation over without;
and the p95 after each of many small weight updates, as the slope of a line through them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.grpo import MODEL, source_of
from bench.results import record
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.cli.tasks import chat
from tlt_engine.models import load_model
from tlt_engine.models.loader import LoadedModel
from tlt_engine.models.sources import weight_source

COMMAND = "python -m bench.rl"
GEOMETRY = {"geometry": "Qwen2.5-7B", "dtype": "bf16"}
OFF = SpeculationConfig(method="off")
SPARE = 1 << 30  # bytes beside the weights: segments are larger than what lies in them


# By the first word of the metric.
PART_OF = {"trl": "ratio", "update": "update", "sleep": "sleep", "wake": "sleep", "logprob": "logprob"}


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
    """The plain copy moves the same bytes: memory never written is read faster."""
    from bench.decode import build, qwen_7b

    loaded = qwen_7b()
    engine = build(loaded, 8)
    weights = loaded.model.weights
    size = sum(t.nbytes for _, t in weights.named())
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    new = dict(carved(source, weights.named()))
    plain = statistics.median(timed_copy(size, source))
    updates = timed(lambda: engine.update_weights(new))
    for name, part in {
        "tensor by tensor": lambda: weights.copy(new.items()),
        "small ones together": lambda: weights.copy(new.items(), lasting=True),
        "all together": lambda: torch._foreach_copy_([t for _, t in weights.named()], list(new.values())),
        "check": lambda: weights.check(weight_source(new).shapes),
        "fingerprint": lambda: setattr(weights, "loads", weights.loads + 1) or weights.fingerprint(),
    }.items():
        print(f"{name}: {statistics.median(timed(part)):.3f} ms; a plain copy {plain:.3f}", flush=True)
    where = GEOMETRY | {"gb": round(size / 1e9, 2)}
    keep(out, "update.vs_copy", statistics.median(updates) / plain, "", where, runs=len(updates),
         spread=[min(updates) / plain, max(updates) / plain])
    keep(out, "update.ms", statistics.median(updates), "ms", GEOMETRY, runs=len(updates))


def carved(buffer: torch.Tensor, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors, one behind the other in the buffer."""
    start = 0
    for name, tensor in tensors:
        part = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, part.copy_(tensor)
        start += tensor.nbytes


def sleep(out: Path | None, cycles: int) -> None:
    """Asleep, a second process takes all that is free but room for the weights and SPARE, and gives it back before the
    KV wakes."""
    from bench.neighbour import Neighbour

    with Neighbour() as other:
        empty = other.used()  # before this process has a context
        residual, wakes, plain, filled = _cycles(other, cycles, empty)
    keep(out, "sleep.residual_gb", statistics.median(residual), "GB", GEOMETRY | {"level": 1, "cycles": cycles},
         spread=[min(residual), max(residual)], runs=cycles)
    keep(out, "sleep.growth_gb", residual[-1] - residual[min(1, cycles - 1)], "GB", GEOMETRY | {"cycles": cycles})
    keep(out, "sleep.neighbour_gb", min(filled), "GB", GEOMETRY | {"cycles": cycles}, runs=cycles)
    keep(out, "wake.vs_copy", statistics.median(wakes) / plain, "", GEOMETRY | {"level": 1}, runs=cycles,
         spread=[min(wakes) / plain, max(wakes) / plain])


def _cycles(other: Any, cycles: int, empty: int) -> tuple[list[float], list[float], float, list[float]]:
    """GB left asleep (this process' context among them), ms of each waking, ms of a plain copy from pinned memory, GB
    that the other process took."""
    from bench.decode import build, qwen_7b

    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s {what}", flush=True)

    loaded = qwen_7b()
    engine = build(loaded, 8)
    weights = sum(t.nbytes for _, t in loaded.model.named_weights())
    prompts = [list(range(1, 129))] * 8
    params = [SamplingParams(max_tokens=32, seed=i, ignore_eos=True) for i in range(8)]

    def tokens() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in engine.generate(prompts, params)]

    expected = tokens()
    say("awake")
    pinned = torch.empty(weights, dtype=torch.uint8, pin_memory=True)
    plain = statistics.median(timed_copy(weights, pinned))
    new = dict(carved(pinned, loaded.model.named_weights()))
    torch.cuda.empty_cache()
    say(f"a plain copy from pinned memory takes {plain:.0f} ms")
    residual, wakes, filled = [], [], []
    for cycle in range(cycles):
        clock = time.perf_counter()
        engine.sleep(1)
        asleep = (time.perf_counter() - clock) * 1e3
        residual.append((other.used() - empty) / 1e9)
        filled.append(other.fill(weights + SPARE) / 1e9)
        wakes += timed(lambda: engine.wake_up(["weights"]), runs=1, warm=0)
        clock = time.perf_counter()
        engine.update_weights(new)  # as a trainer sends them, before there is room for the KV
        other.release()
        engine.wake_up()
        if cycle % 10 == 0:
            assert tokens() == expected, f"other tokens after waking {cycle + 1} times"
        say(f"sleep {asleep:.0f} ms, {residual[-1]:.3f} GB left, neighbour took {filled[-1]:.1f} GB, "
            f"weights awake {wakes[-1]:.0f} ms, the rest {(time.perf_counter() - clock) * 1e3:.0f} ms")
    return residual, wakes, plain, filled


# ---------------------------------------------------------------- log-probabilities


def logprob(out: Path | None, args: argparse.Namespace) -> None:
    from tests.drafters import ReplayDrafter

    begin = time.perf_counter()
    source = source_of(args.model)
    weights = load_model(source, device=args.device)
    reference = RolloutEngine(weights, EngineConfig(device=args.device, speculation=OFF))
    loaded = load_model(source, dtype=args.dtype, device=args.device)
    asked = [chat(question) for question, _ in json.loads(args.asked.read_text())["train"][:64]]
    count = max(min(256, args.tokens // len(asked)), 1)
    n = max(-(-args.tokens // (len(asked) * count)), 1)
    params = [SamplingParams(n=n, max_tokens=count, seed=i, ignore_eos=True, detokenize=False)
              for i in range(len(asked))]
    config = EngineConfig(dtype=args.dtype, device=args.device, max_num_seqs=64, speculation=OFF)
    plain = RolloutEngine(loaded, config).generate(asked, params)
    known = {tuple(o.prompt_token_ids): {s.index: s.token_ids for s in o.outputs} for o in plain}
    drafting = replace(config, speculation=SpeculationConfig(method="custom", profile=Profile(3, 2, 4)))
    drafter = ReplayDrafter(known, error_rate=0.2, depth=3, shape="tree", width=2)
    engine = RolloutEngine(loaded, drafting, drafter=drafter)
    drafted = engine.generate(asked, params)
    print(f"{time.perf_counter() - begin:.0f} s: decoded, accept length {engine.stats()['accept_length']:.2f}")
    found = dict(zip(("off", "on"), errors((plain, drafted), reference)))
    where = {"model": MODEL, "dtype": args.dtype, "tokens": len(found["on"]), "samples": len(params) * n}
    for name, values in found.items():
        keep(out, "logprob.p95", quantile(values), "nats", where | {"speculation": name})
        keep(out, "logprob.max", float(values.max()), "nats", where | {"speculation": name})
    keep(out, "logprob.error_ratio", quantile(found["on"]) / quantile(found["off"]), "", where | {"stat": "p95"})
    keep(out, "logprob.error_ratio", float(found["on"].max() / found["off"].max()), "", where | {"stat": "max"})
    print(f"{time.perf_counter() - begin:.0f} s: compared", flush=True)
    if args.updates == 0:
        return
    slope, sigma = trend(loaded, weights, reference, config, asked[:8], args.updates)
    where = {"model": MODEL, "dtype": args.dtype, "updates": args.updates, "stat": "p95"}
    keep(out, "logprob.trend", slope, "nats an update", where, runs=args.updates,
         spread=[slope - 2 * sigma, slope + 2 * sigma])
    print(f"{time.perf_counter() - begin:.0f} s: updated", flush=True)


def errors(runs: Sequence[Sequence[Any]], reference: RolloutEngine) -> list[torch.Tensor]:
    """One a token and run, of the tokens before their outputs part (bf16 products of other row counts round otherwise):
    behind that they have other texts, and the largest of 1e5 errors differs by half from text to text."""
    parts: list[list[torch.Tensor]] = [[] for _ in runs]
    for outputs in zip(*runs):
        for samples in zip(*(output.outputs for output in outputs)):
            ids = [sample.token_ids for sample in samples]
            count = next((i for i, at in enumerate(zip(*ids)) if len(set(at)) > 1), min(map(len, ids)))
            if count:
                exact = torch.tensor(reference.score(outputs[0].prompt_token_ids, ids[0][:count]))
                for part, sample in zip(parts, samples):
                    part.append((torch.tensor(sample.sampled_logprobs[:count]) - exact).abs())
    return [torch.cat(part) for part in parts]


def quantile(values: torch.Tensor, q: float = 0.95) -> float:
    return float(values.sort().values[int(q * (len(values) - 1))])


def trend(
    loaded: LoadedModel, weights: LoadedModel, reference: RolloutEngine, config: EngineConfig, asked: Sequence[Any],
    updates: int,
) -> tuple[float, float]:
    """Slope of the p95 over updates that move every weight by a thousandth of its spread, and its standard error."""
    engine = RolloutEngine(loaded, config)
    generator = torch.Generator(engine.model.device).manual_seed(0)
    state = {n: t.clone() for n, t in weights.model.named_weights()}
    found = []
    for step in range(updates):
        for name, value in state.items():
            noise = torch.randn(value.shape, generator=generator, device=value.device)
            state[name] = value + 1e-3 * value.std() * noise if value.dim() > 1 else value
        for one in (engine, reference):
            one.update_weights(state)
        params = [SamplingParams(max_tokens=64, seed=1000 * step + i, ignore_eos=True, detokenize=False)
                  for i in range(len(asked))]
        found.append(quantile(errors([engine.generate(asked, params)], reference)[0]))
    fit = statistics.linear_regression(range(updates), found)
    rest = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in enumerate(found))
    return fit.slope, math.sqrt(rest / max(updates - 2, 1) / ((updates**3 - updates) / 12))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("ratio", "update", "sleep", "logprob"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--model", default="demo", help="folder, GGUF file of SmolLM2, or 'demo'")
    parser.add_argument("--asked", type=Path, help="what `bench.grpo questions` wrote")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=160_000)
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args(argv)
    if "ratio" in args.parts:
        ratio(args.out)
    if "update" in args.parts:
        update(args.out)
    if "sleep" in args.parts:
        sleep(args.out, args.cycles)
    if "logprob" in args.parts:
        logprob(args.out, args)


if __name__ == "__main__":
    main()