"""`tlt check MODEL`: the promise, held to on the user's own model.

Four verdicts, each of which can fail: tokens equal with and without speculation; log-probabilities equal to fp32
teacher-forced rescoring; no sample that repeats a sibling by anything but chance; every sample ended in order.
In bf16 and fp16 single tokens may flip where logits round differently, so there the first is reported, not required.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_kernels.params import GREEDY_BELOW

from tlt_engine.cli import show
from tlt_engine.cli.compare import compare, verdict
from tlt_engine.cli.rollout import Rollouts, pair_of_configs, params_for, roll_out, warm_up
from tlt_engine.cli.tasks import PLAIN_PROMPTS, identity, read_prompts
from tlt_engine.config import EngineConfig, SamplingParams, refuse
from tlt_engine.outputs import RequestOutput

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine

# Largest difference (nats) from fp32 rescoring. fp32: the sums of a row group differently in other batches. Half
# precision: the mean counts, and a row taken from a wrong place is off by nats, not by hundredths.
FP32_LOGPROB_LIMIT, HALF_MEAN_LIMIT = 1e-4, 0.1
# A sibling repeats a sample with chance exp(its log-probability). Below this it is no accident.
REPEAT_CHANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    name: str
    kept: bool
    required: bool
    detail: str


def run(
    model: str, *, drafter: str, prompts: Path | None, n: int, temperature: float, max_tokens: int, seed: int,
    dtype: str, device: str, as_json: bool,
) -> bool:
    """True when every required verdict holds."""
    # Equal prompts would share their seed and so their samples; n is there for more samples of one prompt.
    given = read_prompts(prompts) if prompts else PLAIN_PROMPTS
    wanted = list({identity(prompt): prompt for prompt in given}.values())
    params = params_for(wanted, seed, n=n, temperature=temperature, max_tokens=max_tokens)
    method, given_drafter = resolve_drafter(drafter)
    configs = pair_of_configs(dtype, device, method)

    from tlt_engine import RolloutEngine
    from tlt_engine.models.loader import load_model

    loaded = load_model(model, dtype=dtype, device=device)
    plain_engine = RolloutEngine(loaded, configs[0])
    engine = RolloutEngine(loaded, configs[1], drafter=given_drafter)
    warm_up(plain_engine)
    warm_up(engine)
    with show.progress() as bars:
        plain = roll_out(plain_engine, wanted, params, bars, "without speculation")
        speculative = roll_out(engine, wanted, params, bars, "with speculation   ")
        half = dtype != "float32"
        scorer = RolloutEngine(model, EngineConfig(device=device)) if half else plain_engine
        errors = logprob_errors(scorer, speculative.outputs, params)
    equality = compare(plain_engine, plain, speculative, params)
    verdicts = [
        Verdict("tokens", equality.equal, not half, verdict(equality)),
        judge_logprobs(errors, half),
        judge_repeats(speculative.outputs, temperature),
        judge_endings(speculative),
    ]
    kept = all(v.kept for v in verdicts if v.required)
    result = {
        "model": model,
        "dtype": dtype,
        "drafter": drafter,
        "kept": kept,
        "tokens": speculative.tokens,
        "tokens_equal": equality.equal,
        "tokens_differing": equality.tokens_differing,
        "excused_ties": equality.excused_ties,
        "differences": [str(difference) for difference in equality.differences],
        "logprob_error_max": max(errors, default=0.0),
        "logprob_error_mean": statistics.fmean(errors) if errors else 0.0,
        "duplicate_samples": count_repeats(speculative.outputs),
        "accept_length": speculative.accept_length,
        "target_passes_with": speculative.passes,
        "target_passes_without": plain.passes,
        "useful_tokens_per_s_with": speculative.tokens_per_s,
        "useful_tokens_per_s_without": plain.tokens_per_s,
        "verdicts": {v.name: {"kept": v.kept, "required": v.required, "detail": v.detail} for v in verdicts},
    }
    if as_json:
        show.print_json(result)
    else:
        _print(result, verdicts)
    return kept


def resolve_drafter(name: str) -> tuple[str, Any]:
    """(SpeculationConfig.method, what RolloutEngine takes as drafter) of model_free, the folder of a learned drafter,
    or `module:factory`. ValueError for anything else."""
    if name == "model_free":
        return "model_free", None
    if (Path(name) / "config.json").is_file():
        return "learned", name
    return "custom", load_drafter(name)


def load_drafter(name: str) -> Any:
    """The Drafter that `module:factory` makes. ValueError for anything else."""
    module, colon, factory = name.partition(":")
    if not (module and colon and factory):
        raise refuse("--drafter", "model_free or module:factory, or a drafter's folder with config.json", name,
                     "name a function that returns a Drafter, or check the path")
    made = getattr(importlib.import_module(module), factory, None)
    if not callable(made):
        raise refuse("--drafter", f"a function {factory} in {module}", made, "check the name")
    drafter = made()
    lacking = [m for m in ("propose", "observe", "finish", "memory_bytes") if not hasattr(drafter, m)]
    if lacking:
        raise refuse("--drafter", "an object with the methods of Drafter", f"none of {lacking}", "see docs/design.md")
    return drafter


def logprob_errors(
    scorer: RolloutEngine, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[float]:
    """|returned - rescored| (nats) of every output token, from one teacher-forced pass over each sample."""
    errors: list[float] = []
    for output, p in zip(outputs, params, strict=True):
        for sample in output.outputs:
            rescored = scorer.score(output.prompt_token_ids, sample.token_ids, p) if sample.token_ids else []
            errors += [abs(a - b) for a, b in zip(sample.sampled_logprobs, rescored, strict=True)]
    return errors


def judge_logprobs(errors: Sequence[float], half: bool) -> Verdict:
    worst = max(errors, default=0.0)
    mean = statistics.fmean(errors) if errors else 0.0
    kept = mean <= HALF_MEAN_LIMIT if half else worst <= FP32_LOGPROB_LIMIT
    limit = f"mean at most {HALF_MEAN_LIMIT}" if half else f"at most {FP32_LOGPROB_LIMIT:g}"
    detail = f"{len(errors):,} against fp32 rescoring: largest difference {worst:.2e}, mean {mean:.2e} ({limit})"
    return Verdict("log-probabilities", kept and not math.isnan(worst), True, detail)


def repeats(output: RequestOutput) -> list[float]:
    """For each sample equal to an earlier sibling: its log-probability, the log of the chance of that."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for sample in output.outputs:
        ids = tuple(sample.token_ids)
        if ids in seen:
            found.append(sample.cumulative_logprob)
        seen.add(ids)
    return found


def count_repeats(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(repeats(output)) for output in outputs)


def judge_repeats(outputs: Sequence[RequestOutput], temperature: float) -> Verdict:
    """Greedy siblings are equal by right; others repeat each other only as often as the distribution has it."""
    logs = [log for output in outputs for log in repeats(output)]
    unlikely = [log for log in logs if log < math.log(REPEAT_CHANCE)] if temperature >= GREEDY_BELOW else []
    detail = f"{len(logs)} samples repeat a sibling, {len(unlikely)} of them with a chance below {REPEAT_CHANCE:g}"
    return Verdict("independent samples", not unlikely, True, detail)


def judge_endings(rollouts: Rollouts) -> Verdict:
    reasons = [sample.finish_reason or "none" for sample in rollouts.samples]
    odd = sorted({r for r in reasons if r not in ("stop", "length")})
    counted = ", ".join(f"{reasons.count(r)} {r}" for r in sorted(set(reasons)))
    return Verdict("endings", not odd, True, f"{len(reasons)} samples ended: {counted}")


def _print(result: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    for v in verdicts:
        mark = "[green]kept[/green]" if v.kept else "[red]BROKEN[/red]" if v.required else "[yellow]differs[/yellow]"
        show.say(f"{mark}  [bold]{v.name}[/bold]: {v.detail}")
    for difference in result["differences"]:
        show.say(f"  {difference}")
    show.say(
        f"{result['tokens']:,} tokens, accept length {result['accept_length']:.2f}, target passes "
        f"{result['target_passes_with']:,} (without speculation {result['target_passes_without']:,}), "
        f"{result['useful_tokens_per_s_with']:.1f} useful tokens/s "
        f"(without {result['useful_tokens_per_s_without']:.1f})"
    )
