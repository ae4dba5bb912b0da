"""The commands of `tlt` and their options. Knows no engine: each command's module is imported when the command runs,
so that `tlt --help` loads no torch.

Exit codes: 0 done, 1 a promise was broken (`tlt check`, `tlt demo`), 2 bad input or a missing package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """Bad input ends in one line that names the field and the remedy; TLT_DEBUG=1 shows the traceback."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("TLT_DEBUG"):
                raise
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    name="tlt",
    help="Exact speculative rollouts for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Seed = Annotated[int, typer.Option(help="Run seed; each prompt's own seed is derived from it.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or 'demo' for SmolLM2-135M-Instruct.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", help="A .txt file (one prompt a line) or .jsonl (prompt, messages or prompt_token_ids)."),
]


@app.command()
def env(json: Json = False) -> None:
    """Show versions, devices, the compiled extension and what is optional."""
    from tlt_engine.cli import env as command

    command.run(as_json=json)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompts: PromptFile = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put text prompts into the model's chat template.")] = False,
    n: Annotated[int, typer.Option(help="Samples a prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens a sample.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Run seed; none: fresh noise each time.")] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    speculate: Annotated[bool, typer.Option("--speculate/--no-speculate", help="Same tokens either way.")] = True,
    json: Json = False,
) -> None:
    """Roll out prompts and print the samples."""
    from tlt_engine.cli import generate as command

    command.run(
        model, prompt or [], prompts, chat=chat, n=n, temperature=temperature, max_tokens=max_tokens, seed=seed,
        dtype=dtype, device=device, speculate=speculate, as_json=json,
    )  # fmt: skip


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(min=1, help="Distinct reasoning-gym questions.")] = 8,
    n: Annotated[int, typer.Option(min=1, help="Samples a question.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a sample.")] = 256,
    seed: Seed = 0,
    task: Annotated[str, typer.Option(help="reasoning-gym task: products or chain_sum.")] = "products",
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/tlt-demo.png"),
    json: Json = False,
) -> None:
    """Roll out real tasks with SmolLM2, with and without speculation, and compare."""
    from tlt_engine.cli import demo as command

    kept = command.run(
        prompts=prompts, n=n, max_tokens=max_tokens, seed=seed, task=task, plot=plot, as_json=json
    )
    raise typer.Exit(0 if kept else 1)


@app.command()
def check(
    model: Model,
    drafter: Annotated[
        str, typer.Option(help="model_free, a trained drafter's folder, or module:factory that returns a Drafter.")
    ] = "model_free",
    prompts: PromptFile = None,
    n: Annotated[int, typer.Option(help="Samples a prompt.")] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens a sample.")] = 64,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Hold the engine to its promise on your own model; exit code 1 when it is broken."""
    from tlt_engine.cli import check as command

    kept = command.run(
        model, drafter=drafter, prompts=prompts, n=n, temperature=temperature, max_tokens=max_tokens, seed=seed,
        dtype=dtype, device=device, as_json=json,
    )  # fmt: skip
    raise typer.Exit(0 if kept else 1)


@app.command("train-drafter")
def train_drafter(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the trained drafter, in the form that SGLang loads.")],
    minutes: Annotated[float, typer.Option(help="Wall time, rollouts included.")] = 10.0,
    prompts: PromptFile = None,
    task: Annotated[str, typer.Option(help="reasoning-gym task, when there is no --prompts.")] = "products",
    tasks: Annotated[int, typer.Option(help="Distinct questions of the task.")] = 256,
    drafter: Annotated[Path | None, typer.Option(help="A drafter's folder to go on from; none: from zero.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts a round.")] = 16,
    n: Annotated[int, typer.Option(min=1, help="Samples a prompt.")] = 4,
    temperature: Annotated[float, typer.Option(help="Of the rollouts that it learns from.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a sample.")] = 256,
    profile: Annotated[str, typer.Option(help="Draft trees while it learns: depth_topk_verify.")] = "5_4_16",
    draft_vocab: Annotated[int | None, typer.Option(help="Reduced draft vocabulary; none: the target's head.")] = None,
    learning_rate: Annotated[float, typer.Option(help="AdamW's.")] = 1e-3,
    train_share: Annotated[float, typer.Option(help="Seconds of training a second of rollouts.")] = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    plot: Annotated[Path | None, typer.Option(help="A picture of loss and accept length.")] = None,
    json: Json = False,
) -> None:
    """Train a drafter on the rollouts of the model itself."""
    from tlt_engine.cli import train_drafter as command

    command.run(
        model, out, prompts=prompts, task=task, tasks=tasks, start=drafter, dtype=dtype, device=device, plot=plot,
        settings=command.Settings(
            minutes=minutes, batch=batch, n=n, temperature=temperature, max_tokens=max_tokens,
            profile=command.parse_profile(profile), draft_vocab=draft_vocab, learning_rate=learning_rate,
            train_share=train_share, seed=seed,
        ), as_json=json,
    )  # fmt: skip


@app.command()
def export(
    model: Model,
    drafter: Annotated[Path, typer.Argument(help="The drafter's folder, of any of the three forms.")],
    out: Annotated[Path, typer.Option(help="Folder for the copy.")],
    to: Annotated[str, typer.Option(help="sglang, vllm or speculators.")] = "sglang",
    json: Json = False,
) -> None:
    """Write a drafter in the form that another engine loads."""
    from tlt_engine.cli import train_drafter as command

    command.export(model, drafter, out, to=to, as_json=json)


def main() -> None:
    app()
