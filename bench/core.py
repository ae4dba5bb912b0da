"""The core's figures on SmolLM2 and the CPU: equality, speed against transformers, parity, leaks.

    python -m bench.core equality    # 64 requests x 128 tokens, every way of running them, against plain decoding
    python -m bench.core speed       # 160 rollouts: ours without and with speculation, transformers static and continuous
    python -m bench.core parity      # greedy text of 20 prompts against transformers
    python -m bench.core leak        # 10,000 scheduler events

Records go to bench/results/core.json. `speed` is one paired run: the machine's speed drifts, ratios hold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.results import record
from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.leak import run_events
from tlt_engine import EngineConfig, Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig, derive_seed
from tlt_engine.cli.tasks import load_tasks
from tlt_engine.engine.equality import Equality, compare_runs
from tlt_engine.models import LoadedModel, load_model

MODEL = {"model": "SmolLM2-135M-Instruct Q4_1, dequantised", "dtype": "float32"}
OFF = SpeculationConfig(method="off")


@dataclass(frozen=True)
class Variant:
    name: str
    speculation: SpeculationConfig = OFF
    drafter: Any = None
    order: str = "given"  # or "shuffled", "first alone"
    num_pages: int | None = None


def demo() -> LoadedModel:
    return load_model("demo", dtype="float32", max_model_len=2048)


def build(model: LoadedModel, variant: Variant, max_num_seqs: int = 256) -> RolloutEngine:
    config = EngineConfig(
        speculation=variant.speculation, max_num_seqs=max_num_seqs, max_model_len=2048, num_pages=variant.num_pages
    )
    return RolloutEngine(model, config, drafter=variant.drafter)


# ---------------------------------------------------------------- equality


def equality_variants(plain: Sequence[RequestOutput], pages: int) -> list[Variant]:
    known = {tuple(o.prompt_token_ids): {s.noise.sample: s.token_ids for s in o.outputs if s.noise} for o in plain}
    custom = SpeculationConfig(method="custom", profile=Profile(8, 3, 16))
    return [
        Variant("model-free chain", SpeculationConfig(profile=Profile(8, 1, 8))),
        Variant("model-free tree", SpeculationConfig(profile=Profile(8, 3, 16))),
        Variant("replay with errors", custom, ReplayDrafter(known, error_rate=0.15, depth=6)),
        Variant("adversarial", SpeculationConfig(method="custom", profile=Profile(4, 4, 6)), AdversarialDrafter(49152, (2,))),
        Variant("shuffled batch order", OFF, None, "shuffled"),
        Variant("forced preemption", OFF, None, "given", pages),
        Variant("preemption under speculation", custom, ReplayDrafter(known, error_rate=0.15, depth=6), "given", pages),
        Variant("one request alone", OFF, None, "first alone"),
    ]


def run_variant(model: LoadedModel, variant: Variant, prompts: list, params: list) -> tuple[list[int], list[RequestOutput], RolloutEngine]:
    order = list(range(len(prompts)))
    if variant.order == "shuffled":
        random.Random(0).shuffle(order)
    elif variant.order == "first alone":
        order = order[:1]
        params = [replace(params[0], n=1)]
    engine = build(model, variant)
    outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
    engine.check_integrity()
    return order, outputs, engine


def equality(prompts_count: int = 16, samples: int = 4, length: int = 128) -> None:
    model = demo()
    prompts = load_tasks("products", prompts_count, seed=1).prompts
    params = [
        SamplingParams(n=samples, max_tokens=length, ignore_eos=True, seed=derive_seed(1, 0, i)) for i in range(prompts_count)
    ]
    plain_engine = build(model, Variant("off"))
    plain = plain_engine.generate(prompts, params)
    # Pages for about a third of the samples at full length: the rest is thrown out and recomputed.
    pages = prompts_count * samples // 3 * (-(-(plain[0].prompt_token_ids.__len__() + length) // 16))
    total = Equality()
    for variant in equality_variants(plain, pages):
        order, outputs, engine = run_variant(model, variant, prompts, params)
        reference = [plain[i] if len(order) > 1 else replace(plain[0], outputs=plain[0].outputs[:1]) for i in order]
        result = compare_runs(engine, reference, outputs, [params[i] for i in order])
        stats = engine.stats()
        print(
            f"{variant.name:30s} {result.tokens:6d} tokens, differing {result.tokens_differing}, excused ties "
            f"{result.excused_ties}, max log-prob error {result.max_logprob_error:.1e}, accept length "
            f"{stats['accept_length']:.2f}, preemptions {stats['preemptions']}", flush=True,
        )
        for tie in result.differences:
            print("   ", tie)
        where = MODEL | {"variant": variant.name, "requests": len(outputs) * samples, "tokens": length, "temperature": 1.0}
        for metric, value, unit in (
            ("equality.variant_tokens_differing", result.tokens_differing, "tokens"),
            ("equality.variant_excused_ties", result.excused_ties, "ties"),
            ("equality.max_logprob_error", result.max_logprob_error, "nats"),
            ("equality.accept_length", stats["accept_length"], "tokens/pass"),
            ("equality.preemptions", stats["preemptions"], "preemptions"),
        ):
            record("core", metric, value, unit, where, command="python -m bench.core equality")
        total.tokens += result.tokens
        total.tokens_differing += result.tokens_differing
        total.differences += result.differences
    where = MODEL | {"requests": prompts_count * samples, "tokens_each": length, "compared": total.tokens, "temperature": 1.0}
    record("core", "equality.tokens_differing", total.tokens_differing, "tokens", where, command="python -m bench.core equality")
    record("core", "equality.excused_ties", total.excused_ties, "ties", where, command="python -m bench.core equality")
    limit = 3 * total.tokens / 8192
    print(f"all: {total.tokens} tokens, {total.tokens_differing} differing, {total.excused_ties} excused (at most {limit:.0f})")
    if total.tokens_differing or total.excused_ties > limit:
        raise SystemExit("equality: FAILED")


# ---------------------------------------------------------------- speed


def hf_inputs(model: LoadedModel, prompts: list) -> list[list[int]]:
    tokenizer = model.tokenizer
    return [
        tokenizer.encode(tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False), add_special_tokens=False)
        for p in prompts
    ]


def hf_model() -> Any:
    from transformers import AutoModelForCausalLM

    from tlt_engine.models.gguf import demo_model

    return AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()


def hf_static(hf: Any, ids: list[list[int]], max_tokens: int, batch: int = 32) -> int:
    """Useful tokens of transformers' generate at temperature 1 in static batches, left-padded; up to and with EOS."""
    useful = 0
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        width = max(map(len, rows))
        padded = torch.tensor([[2] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        out = hf.generate(
            padded, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens,
            pad_token_id=2, eos_token_id=2,
        )
        for row in out[:, width:].tolist():
            useful += row.index(2) + 1 if 2 in row else len(row)
    return useful


def hf_continuous(hf: Any, ids: list[list[int]], max_tokens: int) -> int:
    """transformers' own continuous batching (generate_batch); raises where this machine cannot run it."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=2,
    )
    results = hf.generate_batch(inputs=ids, generation_config=config)
    if len(results) != len(ids):
        raise RuntimeError(f"generate_batch returned {len(results)} of {len(ids)} results")
    return sum(len(r.generated_tokens) for r in results.values())


def timed(name: str, call: Callable[[], int]) -> tuple[float, int, float]:
    start = time.perf_counter()
    tokens = call()
    seconds = time.perf_counter() - start
    print(f"{name:36s} {seconds:7.1f} s {tokens:7d} useful tokens {tokens / seconds:7.1f} tok/s", flush=True)
    return tokens / seconds, tokens, seconds


def ours(model: LoadedModel, speculation: SpeculationConfig, prompts: list, params: list, keep: dict) -> int:
    engine = build(model, Variant("speed", speculation))
    outputs = engine.generate(prompts, params)
    keep[speculation.method] = (outputs, engine.stats(), engine)
    return sum(len(s.token_ids) for o in outputs for s in o.outputs)


def speed(prompts_count: int = 20, samples: int = 8, max_tokens: int = 512, rounds: int = 1) -> None:
    model, hf = demo(), hf_model()
    tasks = load_tasks("products", prompts_count, seed=2)
    params = [SamplingParams(n=samples, max_tokens=max_tokens, seed=derive_seed(2, 0, i)) for i in range(prompts_count)]
    ids = [row for row in hf_inputs(model, tasks.prompts) for _ in range(samples)]
    where = MODEL | {"prompts": prompts_count, "samples": samples, "max_tokens": max_tokens, "temperature": 1.0, "task": "products"}
    command = "python -m bench.core speed"
    kept: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"off": [], "model_free": [], "hf_static": []}
    torch.manual_seed(0)
    for _ in range(rounds):
        rates["off"].append(timed("ours, no speculation", lambda: ours(model, OFF, tasks.prompts, params, kept))[0])
        rates["hf_static"].append(timed("transformers, static batches of 32", lambda: hf_static(hf, ids, max_tokens))[0])
        spec = SpeculationConfig()
        rates["model_free"].append(timed("ours, model-free drafter", lambda: ours(model, spec, tasks.prompts, params, kept))[0])
    for name, values in rates.items():
        record("core", f"speed.{name}_tokens_per_s", statistics.median(values), "tok/s", where, command=command, runs=rounds,
               spread=[min(values), max(values)])
    base = statistics.median(rates["hf_static"])
    record("core", "speed.vs_hf_static", max(statistics.median(rates[k]) for k in ("off", "model_free")) / base, "x", where, command=command)
    record("core", "speed.off_vs_hf_static", statistics.median(rates["off"]) / base, "x", where, command=command)
    record("core", "speed.model_free_vs_hf_static", statistics.median(rates["model_free"]) / base, "x", where, command=command)
    (off, off_stats, engine), (on, on_stats, _) = kept["off"], kept["model_free"]
    result = compare_runs(engine, off, on, params)
    saved = 1 - on_stats["passes"] / off_stats["passes"]
    print(f"tokens equal: {result.equal} ({result.excused_ties} excused ties); target passes {off_stats['passes']} -> "
          f"{on_stats['passes']} ({saved:.1%} saved), rows {off_stats['rows']} -> {on_stats['rows']}, accept length "
          f"{on_stats['accept_length']:.2f}")
    record("core", "demo.target_passes_saved", saved, "share", where, command=command)
    record("core", "demo.target_rows_ratio", on_stats["rows"] / off_stats["rows"], "x", where, command=command)
    record("core", "demo.accept_length", on_stats["accept_length"], "tokens/pass", where, command=command)
    record("core", "demo.tokens_differing", result.tokens_differing, "tokens", where, command=command)
    try:
        rate = timed("transformers, continuous batching", lambda: hf_continuous(hf, ids, max_tokens))[0]
        record("core", "speed.hf_continuous_tokens_per_s", rate, "tok/s", where, command=command)
        record("core", "speed.vs_hf_continuous", max(statistics.median(rates[k]) for k in ("off", "model_free")) / rate, "x", where, command=command)
    except Exception as error:  # a figure beside ours, not a part of it: say why it is missing
        print(f"transformers, continuous batching: not measured ({type(error).__name__}: {str(error)[:300]})")


# ---------------------------------------------------------------- parity and leaks


def parity(prompts_count: int = 20, length: int = 64) -> None:
    model, hf = demo(), hf_model()
    prompts = load_tasks("products", prompts_count // 2, 3).prompts + load_tasks("chain_sum", prompts_count - prompts_count // 2, 3).prompts
    ids = hf_inputs(model, prompts)
    engine = build(model, Variant("off"))
    outputs = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=length))
    differing = 0
    for row, output in zip(ids, outputs):
        theirs = hf.generate(torch.tensor([row]), do_sample=False, max_new_tokens=length, pad_token_id=2, eos_token_id=2)[0, len(row):].tolist()
        if theirs != output.outputs[0].token_ids:
            differing += 1
            print("differs:", model.tokenizer.decode(theirs)[:80], "|", output.outputs[0].text[:80])
    print(f"greedy: {differing} of {prompts_count} prompts differ from transformers")
    where = MODEL | {"prompts": prompts_count, "tokens": length}
    record("core", "parity.greedy_prompts_differing", differing, "prompts", where, command="python -m bench.core parity")


def leak(events: int = 10_000) -> None:
    leaked = run_events(events, seed=0)
    print(f"{events} events, {leaked} pages leaked")
    record("core", "leak.pages", leaked, "pages", {"events": events}, command="python -m bench.core leak")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equality", "speed", "parity", "leak", "all"])
    what = parser.parse_args(argv).what
    for name, call in (("leak", leak), ("parity", parity), ("equality", equality), ("speed", speed)):
        if what in (name, "all"):
            call()


if __name__ == "__main__":
    main()
