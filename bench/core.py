"""The core's figures on SmolLM2 and the CPU: equality, speed against transformers, parity, leaks.

    python -m bench.core equality    # 64 requests x 128 tokens, every way of running them, against plain decoding
    python -m bench.core speed       # 160 rollouts: ours plain and speculating, transformers static and continuous
    python -m bench.core pair        # the same rollouts, ours only, plain and speculating in turn
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
from functools import partial
from typing import Any

import torch

from bench.results import record
from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.leak import run_events
from tlt_engine import EngineConfig, Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.cli.tasks import load_tasks
from tlt_engine.engine.equality import Equality, compare_runs
from tlt_engine.models import LoadedModel, load_model
from tlt_engine.models.gguf import demo_model
from tlt_engine.rng import derive_seed

MODEL = {"model": "SmolLM2-135M-Instruct Q4_1, dequantised", "dtype": "float32"}
OFF = SpeculationConfig(method="off")
EOS = 2
MAX_MODEL_LEN = 2048


def demo() -> LoadedModel:
    return load_model("demo", dtype="float32", max_model_len=MAX_MODEL_LEN)


def engine_for(
    model: LoadedModel, speculation: SpeculationConfig, *, drafter: Any = None, num_pages: int | None = None
) -> RolloutEngine:
    config = EngineConfig(speculation=speculation, max_model_len=MAX_MODEL_LEN, num_pages=num_pages)
    return RolloutEngine(model, config, drafter=drafter)


def demo_ids(model: LoadedModel, prompts: Sequence[Any]) -> list[list[int]]:
    """Token ids of chat prompts, for transformers."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def hf_demo() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()


# ---------------------------------------------------------------- equality


@dataclass(frozen=True)
class Variant:
    """One way of running the same requests. order: "given", "shuffled" or "first alone"."""

    name: str
    speculation: SpeculationConfig = OFF
    drafter: Any = None
    order: str = "given"
    num_pages: int | None = None


def variants(plain: Sequence[RequestOutput], pages: int) -> list[Variant]:
    """pages: too few for all requests at once."""
    known = {tuple(o.prompt_token_ids): {s.noise.sample: s.token_ids for s in o.outputs if s.noise} for o in plain}
    custom = SpeculationConfig(method="custom", profile=Profile(8, 3, 16))
    narrow = SpeculationConfig(method="custom", profile=Profile(4, 4, 6))
    replay = partial(ReplayDrafter, known, error_rate=0.15, depth=6)
    return [
        Variant("model-free chain", SpeculationConfig(profile=Profile(8, 1, 8))),
        Variant("model-free tree", SpeculationConfig(profile=Profile(8, 3, 16))),
        Variant("replay with errors", custom, replay()),
        Variant("adversarial", narrow, AdversarialDrafter(49152, (EOS,))),
        Variant("shuffled batch order", order="shuffled"),
        Variant("forced preemption", num_pages=pages),
        Variant("preemption under speculation", custom, replay(), num_pages=pages),
        Variant("one request alone", order="first alone"),
    ]


def run_variant(
    model: LoadedModel, variant: Variant, prompts: Sequence[Any], params: Sequence[SamplingParams],
    plain: Sequence[RequestOutput],
) -> tuple[Equality, dict[str, Any]]:
    order = list(range(len(prompts)))
    if variant.order == "shuffled":
        random.Random(0).shuffle(order)
    reference, chosen = [plain[i] for i in order], [params[i] for i in order]
    if variant.order == "first alone":
        order, chosen = order[:1], [replace(params[0], n=1)]
        reference = [replace(plain[0], outputs=plain[0].outputs[:1])]
    engine = engine_for(model, variant.speculation, drafter=variant.drafter, num_pages=variant.num_pages)
    outputs = engine.generate([prompts[i] for i in order], chosen)
    engine.check_integrity()
    return compare_runs(engine, reference, outputs, chosen), engine.stats()


def equality(count: int = 16, samples: int = 4, length: int = 128) -> None:
    keep = partial(record, "core", command="python -m bench.core equality")
    model = demo()
    prompts = load_tasks("products", count, seed=1).prompts
    params = [
        SamplingParams(n=samples, max_tokens=length, ignore_eos=True, seed=derive_seed(1, 0, i)) for i in range(count)
    ]
    plain = engine_for(model, OFF).generate(prompts, params)
    pages_each = -(-(len(plain[0].prompt_token_ids) + length) // 16)
    total = Equality()
    for variant in variants(plain, pages=count * samples // 3 * pages_each):
        result, stats = run_variant(model, variant, prompts, params, plain)
        print(
            f"{variant.name:30s} {result.tokens:6d} tokens, differing {result.tokens_differing}, excused ties "
            f"{result.excused_ties}, max log-prob error {result.max_logprob_error:.1e}, accept length "
            f"{stats['accept_length']:.2f}, preemptions {stats['preemptions']}", flush=True,
        )
        for tie in result.differences:
            print("   ", tie)
        where = MODEL | {"variant": variant.name, "requests": result.samples, "tokens": length, "temperature": 1.0}
        keep("equality.variant_tokens_differing", result.tokens_differing, "tokens", where)
        keep("equality.variant_excused_ties", result.excused_ties, "ties", where)
        keep("equality.max_logprob_error", result.max_logprob_error, "nats", where)
        keep("equality.accept_length", stats["accept_length"], "tokens/pass", where)
        keep("equality.preemptions", stats["preemptions"], "preemptions", where)
        total.tokens += result.tokens
        total.tokens_differing += result.tokens_differing
        total.max_logprob_error = max(total.max_logprob_error, result.max_logprob_error)
        total.differences += result.differences
    limit = 3 * total.tokens / 8192
    found = f"{total.tokens_differing} differing, {total.excused_ties} excused ties (at most {limit:.0f})"
    print(f"all: {total.tokens} tokens, {found}")
    where = MODEL | {"requests": count * samples, "tokens": length, "compared": total.tokens, "temperature": 1.0}
    keep("equality.tokens_differing", total.tokens_differing, "tokens", where)
    keep("equality.excused_ties", total.excused_ties, "ties", where)
    if total.tokens_differing or total.excused_ties > limit or total.max_logprob_error > 1e-4:
        raise SystemExit("equality: FAILED")


# ---------------------------------------------------------------- speed


def hf_static(hf: Any, ids: Sequence[list[int]], max_tokens: int, batch: int = 32) -> int:
    """Useful tokens of transformers' generate at temperature 1 in static batches, left-padded; up to and with EOS."""
    useful = 0
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        width = max(map(len, rows))
        padded = torch.tensor([[EOS] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        out = hf.generate(
            padded, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_tokens, pad_token_id=EOS, eos_token_id=EOS,
        )
        for row in out[:, width:].tolist():
            useful += row.index(EOS) + 1 if EOS in row else len(row)
    return useful


def hf_continuous(hf: Any, ids: Sequence[list[int]], max_tokens: int) -> int:
    """Useful tokens of transformers' own continuous batching; raises where this machine cannot run it."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=EOS,
        pad_token_id=EOS,
    )
    results = hf.generate_batch(inputs=ids, generation_config=config)
    if len(results) != len(ids):
        raise RuntimeError(f"generate_batch returned {len(results)} of {len(ids)} results")
    return sum(len(r.generated_tokens) for r in results.values())


def tokens_per_s(name: str, call: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = call()
    seconds = time.perf_counter() - start
    print(f"{name:36s} {seconds:7.1f} s {tokens:7d} useful tokens {tokens / seconds:7.1f} tok/s", flush=True)
    return tokens / seconds


def speed(count: int = 20, samples: int = 8, max_tokens: int = 512) -> None:
    """One run of each, one after the other; transformers between ours, so that a drift of the machine shows."""
    model, hf = demo(), hf_demo()
    prompts = load_tasks("products", count, seed=2).prompts
    params = [SamplingParams(n=samples, max_tokens=max_tokens, seed=derive_seed(2, 0, i)) for i in range(count)]
    ids = [row for row in demo_ids(model, prompts) for _ in range(samples)]
    engines = {s.method: engine_for(model, s) for s in (OFF, SpeculationConfig())}
    outputs: dict[str, list[RequestOutput]] = {}

    def ours(method: str) -> int:
        outputs[method] = engines[method].generate(prompts, params)
        return sum(len(s.token_ids) for o in outputs[method] for s in o.outputs)

    torch.manual_seed(0)
    off = tokens_per_s("ours, no speculation", lambda: ours("off"))
    static = tokens_per_s("transformers, static batches of 32", lambda: hf_static(hf, ids, max_tokens))
    on = tokens_per_s("ours, model-free drafter", lambda: ours("model_free"))

    where = MODEL | {"prompts": count, "samples": samples, "max_tokens": max_tokens, "temperature": 1.0}
    keep = partial(record, "core", params=where | {"task": "products"}, command="python -m bench.core speed")
    for name, rate in (("off", off), ("hf_static", static), ("model_free", on)):
        keep(f"speed.{name}_tokens_per_s", rate, "tok/s")
    keep("speed.vs_hf_static", max(off, on) / static, "x")
    keep("speed.off_vs_hf_static", off / static, "x")
    keep("speed.model_free_vs_hf_static", on / static, "x")
    result = compare_runs(engines["off"], outputs["off"], outputs["model_free"], params)
    plain, spec = engines["off"].stats(), engines["model_free"].stats()
    saved = 1 - spec["passes"] / plain["passes"]
    print(
        f"tokens equal: {result.equal} ({result.excused_ties} excused ties); target passes {plain['passes']} -> "
        f"{spec['passes']} ({saved:.1%} saved), rows {plain['rows']} -> {spec['rows']}, accept length "
        f"{spec['accept_length']:.2f}"
    )
    keep("demo.target_passes_saved", saved, "share")
    keep("demo.target_rows_ratio", spec["rows"] / plain["rows"], "x")
    keep("demo.accept_length", spec["accept_length"], "tokens/pass")
    keep("demo.tokens_differing", result.tokens_differing, "tokens")
    try:
        continuous = tokens_per_s("transformers, continuous batching", lambda: hf_continuous(hf, ids, max_tokens))
    except Exception as error:  # a figure beside ours, not a part of it: say why it is missing
        print(f"transformers, continuous batching: not measured ({type(error).__name__}: {str(error)[:300]})")
        return
    keep("speed.hf_continuous_tokens_per_s", continuous, "tok/s")
    keep("speed.vs_hf_continuous", max(off, on) / continuous, "x")


def pair(count: int = 20, samples: int = 8, max_tokens: int = 512, rounds: int = 2) -> None:
    """Speculation against none on the rollouts of `speed`, in turn, each time on a fresh engine."""
    model = demo()
    prompts = load_tasks("products", count, seed=2).prompts
    params = [SamplingParams(n=samples, max_tokens=max_tokens, seed=derive_seed(2, 0, i)) for i in range(count)]

    def once(speculation: SpeculationConfig) -> int:
        outputs = engine_for(model, speculation).generate(prompts, params)
        return sum(len(s.token_ids) for o in outputs for s in o.outputs)

    ratios = []
    for _ in range(rounds):
        off = tokens_per_s("no speculation", partial(once, OFF))
        ratios.append(tokens_per_s("model-free drafter", partial(once, SpeculationConfig())) / off)
    where = MODEL | {"prompts": count, "samples": samples, "max_tokens": max_tokens, "temperature": 1.0}
    record(
        "core", "pair.speculation_speedup", statistics.median(ratios), "x", where | {"task": "products"}, runs=rounds,
        spread=[min(ratios), max(ratios)], command="python -m bench.core pair",
    )


# ---------------------------------------------------------------- parity and leaks


def parity(count: int = 20, length: int = 64) -> None:
    model, hf = demo(), hf_demo()
    half = count // 2
    prompts = load_tasks("products", half, 3).prompts + load_tasks("chain_sum", count - half, 3).prompts
    ids = demo_ids(model, prompts)
    outputs = engine_for(model, OFF).generate(ids, SamplingParams(temperature=0.0, max_tokens=length))
    differing = 0
    for row, output in zip(ids, outputs):
        theirs = hf.generate(
            torch.tensor([row]), do_sample=False, max_new_tokens=length, pad_token_id=EOS, eos_token_id=EOS
        )[0, len(row) :].tolist()
        differing += theirs != output.outputs[0].token_ids
    print(f"greedy: {differing} of {count} prompts differ from transformers")
    record(
        "core", "parity.greedy_prompts_differing", differing, "prompts", MODEL | {"prompts": count, "tokens": length},
        command="python -m bench.core parity",
    )


def leak(events: int = 10_000) -> None:
    leaked = run_events(events, seed=0)
    print(f"{events} events, {leaked} pages leaked")
    record("core", "leak.pages", leaked, "pages", {"events": events}, command="python -m bench.core leak")


COMMANDS = {"leak": leak, "parity": parity, "equality": equality, "speed": speed, "pair": pair}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*COMMANDS, "all"])
    what = parser.parse_args(argv).what
    for name, command in COMMANDS.items():
        if what in (name, "all"):
            command()


if __name__ == "__main__":
    main()
