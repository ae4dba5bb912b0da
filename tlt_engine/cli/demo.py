"""`tlt demo`: real reasoning-gym prompts rolled out by SmolLM2 at temperature 1, with and without speculation, from the
same seeds. The tokens must be the same; the passes are fewer."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_engine.cli import show
from tlt_engine.cli.compare import compare, verdict
from tlt_engine.cli.rollout import Rollouts, pair_of_configs, params_for, roll_out, warm_up
from tlt_engine.cli.tasks import Tasks, load_tasks

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine
    from tlt_engine.engine.equality import Equality

MODEL = "SmolLM2-135M-Instruct"


def run(*, prompts: int, n: int, max_tokens: int, seed: int, task: str, plot: Path, as_json: bool) -> bool:
    """True when every token was equal, excused ties aside."""
    tasks = load_tasks(task, prompts, seed)
    show.note(f"{MODEL}, fp32 on the CPU: {prompts} distinct {task} questions x {n} samples, temperature 1")
    plain_engine, engine = _engines()
    params = params_for(tasks.prompts, seed, n=n, temperature=1.0, max_tokens=max_tokens)
    with show.progress() as bars:
        plain = roll_out(plain_engine, tasks.prompts, params, bars, "without speculation")
        speculative = roll_out(engine, tasks.prompts, params, bars, "with speculation   ")
    equality = compare(plain_engine, plain, speculative, params)
    title = f"{MODEL} on reasoning-gym {task}: {prompts} prompts x {n} samples, temperature 1"
    from tlt_engine.cli.plot import draw

    draw(plot, title, plain, speculative, max_tokens)
    result = summary(tasks, plain, speculative, equality) | {"plot": str(plot)}
    if as_json:
        show.print_json(result)
    else:
        _print(title, result, equality)
    return equality.equal


def _engines() -> tuple[RolloutEngine, RolloutEngine]:
    """(without, with) speculation: one copy of the weights, but two engines, so that the drafter of the second has seen
    nothing of what the first rolled out."""
    from tlt_engine import RolloutEngine
    from tlt_engine.models.loader import load_model

    loaded = load_model("demo")
    plain, speculative = (RolloutEngine(loaded, config) for config in pair_of_configs("float32", "cpu", "model_free"))
    warm_up(plain)
    warm_up(speculative)
    return plain, speculative


def summary(tasks: Tasks, plain: Rollouts, speculative: Rollouts, equality: Equality) -> dict[str, Any]:
    """What --json prints. Ratios are with / without."""
    rewards = [tasks.reward(i, s.text) for i, output in enumerate(speculative.outputs) for s in output.outputs]
    return {
        "model": MODEL,
        "task": tasks.name,
        "prompts": len(plain.outputs),
        "samples": len(plain.samples),
        "tokens": plain.tokens,
        "tokens_equal": equality.equal,
        "tokens_differing": equality.tokens_differing,
        "excused_ties": equality.excused_ties,
        "target_passes_with": speculative.passes,
        "target_passes_without": plain.passes,
        "target_passes_saved": 1 - speculative.passes / plain.passes,
        "target_rows_with": speculative.rows,
        "target_rows_without": plain.rows,
        "steps_with": len(speculative.running),
        "steps_without": len(plain.running),
        "accept_length": speculative.accept_length,
        "accepted_per_position": speculative.spec.accepted_per_position,
        "drafted_per_position": speculative.spec.drafted_per_position,
        "seconds_with": speculative.seconds,
        "seconds_without": plain.seconds,
        "cpu_seconds_with": speculative.cpu_seconds,
        "cpu_seconds_without": plain.cpu_seconds,
        "useful_tokens_per_s_with": speculative.tokens_per_s,
        "useful_tokens_per_s_without": plain.tokens_per_s,
        "reward_mean": statistics.fmean(rewards),
    }


def _print(title: str, result: dict[str, Any], equality: Equality) -> None:
    def row(name: str, key: str, form: str) -> list[str]:
        without, with_ = result[f"{key}_without"], result[f"{key}_with"]
        return [name, format(without, form), format(with_, form), f"{with_ / without:.2f}x"]

    rows = [
        row("wall time, s", "seconds", ".1f"),
        row("CPU time, s", "cpu_seconds", ".1f"),
        row("useful tokens/s", "useful_tokens_per_s", ".1f"),
        row("target passes", "target_passes", ","),
        row("target rows computed", "target_rows", ","),
        row("steps", "steps", ","),
        ["accept length", "1.00", f"{result['accept_length']:.2f}", ""],
    ]
    show.say(f"[bold]{title}[/bold]")
    show.print_table(("", "without", "with speculation", "with / without"), rows)
    show.say(verdict(equality))
    for difference in equality.differences:
        show.say(f"  {difference}")
    show.say(
        f"{result['tokens']:,} tokens in {result['samples']} responses; mean reward {result['reward_mean']:.2f}. "
        f"{result['target_passes_saved']:.1%} of the target passes saved (a pass: one request in one target forward)."
    )
    show.say(speed_note(result))
    show.say(f"picture: {result['plot']}")


def speed_note(result: dict[str, Any]) -> str:
    """Whether speculation was faster here, and why or why not. One run each: other work on the machine shows."""
    time, cpu, rows, passes = (
        result[f"{key}_with"] / result[f"{key}_without"]
        for key in ("seconds", "cpu_seconds", "target_rows", "target_passes")
    )
    cost = f"{passes:.2f}x the passes for {rows:.2f}x the rows, {cpu:.2f}x the CPU time"
    if time <= 1:
        return f"Speculation took {1 - time:.0%} less time here: {cost}."
    return (
        f"Speculation was slower on this CPU, {time:.2f}x the time: {cost}. A CPU busy with products pays for every "
        "row of a draft tree; a GPU decoding a small batch mostly waits for weights. The tokens do not depend on it."
    )
