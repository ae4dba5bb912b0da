"""`tlt generate`: roll out the given prompts and print the samples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from tlt_engine.cli import show
from tlt_engine.cli.rollout import Rollouts, pair_of_configs, params_for, roll_out
from tlt_engine.cli.tasks import as_chat, read_prompts
from tlt_engine.config import refuse


def run(
    model: str, texts: list[str], file: Path | None, *, chat: bool, n: int, temperature: float, max_tokens: int,
    seed: int | None, dtype: str, device: str, speculate: bool, as_json: bool,
) -> None:
    prompts = [*texts, *(read_prompts(file) if file else [])]
    if not prompts:
        raise refuse("--prompt", "at least one prompt", prompts, "pass --prompt TEXT or --prompts FILE")
    if chat:
        prompts = as_chat(prompts)
    params = params_for(prompts, seed, n=n, temperature=temperature, max_tokens=max_tokens)
    config = pair_of_configs(dtype, device, "model_free")[speculate]

    from tlt_engine import RolloutEngine

    engine = RolloutEngine(model, config)
    if not chat and any(isinstance(p, str) for p in prompts) and getattr(engine.tokenizer, "chat_template", None):
        show.note("the model has a chat template; with --chat text prompts are put into it")
    with show.progress() as bars:
        rollouts = roll_out(engine, prompts, params, bars, "rolling out")
    if as_json:
        show.print_json(as_dict(model, rollouts))
    else:
        _print(rollouts)


def as_dict(model: str, rollouts: Rollouts) -> dict[str, Any]:
    return {
        "model": model,
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "samples": [
                    {
                        "index": s.index,
                        "text": s.text,
                        "token_ids": s.token_ids,
                        "sampled_logprobs": s.sampled_logprobs,
                        "cumulative_logprob": s.cumulative_logprob,
                        "finish_reason": s.finish_reason,
                        "stop_reason": s.stop_reason,
                        "spec": asdict(s.spec),
                    }
                    for s in output.outputs
                ],
            }
            for output in rollouts.outputs
        ],
        "tokens": rollouts.tokens,
        "seconds": rollouts.seconds,
        "useful_tokens_per_s": rollouts.tokens_per_s,
        "target_passes": rollouts.passes,
        "accept_length": rollouts.accept_length,
    }


def _print(rollouts: Rollouts) -> None:
    for output in rollouts.outputs:
        show.say(f"[bold]{escape(output.prompt or str(output.prompt_token_ids))}[/bold]")
        for sample in output.outputs:
            tokens = f"{len(sample.token_ids)} token{'s' * (len(sample.token_ids) != 1)}"
            show.say(f"[dim]#{sample.index}, {tokens}, {sample.finish_reason}[/dim]")
            show.say(escape(sample.text or f"(no text) {sample.token_ids}"))
    show.note(
        f"{rollouts.tokens:,} tokens in {rollouts.seconds:.1f} s ({rollouts.tokens_per_s:.1f} tokens/s), "
        f"accept length {rollouts.accept_length:.2f}"
    )
