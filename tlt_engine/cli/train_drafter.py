"""`tlt train-drafter`: a drafter from zero, or from a folder, learns from the engine's own rollouts. `tlt export`: a
drafter's folder for other engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tlt_engine.cli import show
from tlt_engine.cli.rollout import params_for
from tlt_engine.cli.tasks import identity, load_tasks, read_prompts, suited
from tlt_engine.config import EngineConfig, Profile, SamplingParams, SpeculationConfig, refuse
from tlt_engine.rng import derive_seed

if TYPE_CHECKING:
    import torch

    from tlt_engine.engine.engine import RolloutEngine
    from tlt_engine.models.eagle import EagleModel
    from tlt_engine.models.loader import LoadedModel
    from tlt_engine.rl.adaptive import AdaptiveConfig, AdaptiveDrafter

PIECE_S = 2.0  # of training at one learning rate
COOLEST = 0.02  # of the learning rate, at the end


@dataclass(frozen=True)
class Settings:
    """What `tlt train-drafter` was told. train_share: seconds of training a second of rollouts."""

    minutes: float
    batch: int
    n: int
    temperature: float
    max_tokens: int
    profile: Profile
    draft_vocab: int | None
    learning_rate: float
    train_share: float
    seed: int


@dataclass(frozen=True)
class Piece:
    """A few seconds of training, and the batch that was rolled out before them, if one was. accept_length: tokens a
    target pass in its rollouts, bonus included; None without a batch, and for one that decodes plainly, as the first
    one of a fresh drafter does. tokens: emitted in rollout_s seconds; steps: of the optimiser since the beginning."""

    minutes: float
    accept_length: float | None
    loss: float | None
    agreement: float | None
    steps: int
    rollout_s: float
    tokens: int
    training_s: float


def run(
    model: str, out: Path, *, prompts: Path | None, task: str, tasks: int, start: Path | None, settings: Settings,
    dtype: str, device: str, plot: Path | None, as_json: bool,
) -> None:
    _check_free(out)
    given = read_prompts(prompts) if prompts is not None else load_tasks(task, tasks, settings.seed).questions

    from tlt_engine import RolloutEngine
    from tlt_engine.models import load_model
    from tlt_engine.models.eagle_checkpoint import export_drafter

    loaded = load_model(model, dtype=dtype, device=device)
    asked = suited(given, loaded.tokenizer)
    drafter = _starting_drafter(loaded, start, asked, settings, EngineConfig(dtype=dtype, device=device))
    engine = RolloutEngine(
        loaded, EngineConfig(dtype=dtype, device=device, speculation=SpeculationConfig(
            method="learned", profile=settings.profile, min_chance=0.0)), drafter=drafter,
    )
    pieces: list[Piece] = []
    with _bar() as bar:
        line = bar.add_task("training", total=settings.minutes, note="")
        for done in train(engine, asked, settings, drafting=int(start is None)):
            pieces.append(done)
            loss = "" if done.loss is None else f"loss {done.loss:.2f}, "
            length = "" if done.accept_length is None else f"accept length {done.accept_length:.2f}, "
            told = f"{loss}{length}{done.steps} steps"
            bar.update(line, completed=min(done.minutes, settings.minutes), note=told)
            if bar.disable:
                show.note(f"{done.minutes:.1f} of {settings.minutes:g} min: {told}")
    serving = engine.drafter.model  # type: ignore[union-attr]
    export_drafter(serving, out, to="sglang")
    if plot is not None:
        draw(plot, pieces)
    lengths = [r.accept_length for r in pieces if r.accept_length is not None]
    report = {
        "out": str(out), "pieces": [vars(p) for p in pieces], "minutes": pieces[-1].minutes,
        "steps": pieces[-1].steps, "accept_length_first": lengths[0] if lengths else None,
        "accept_length_last": lengths[-1] if lengths else None,
        "parameters": sum(p.numel() for p in serving.parameters()),
    }
    if as_json:
        show.print_json(report)
        return
    measured = f"{lengths[0]:.2f} with the first drafts, {lengths[-1]:.2f} with the last" if lengths else "one batch"
    show.print_pairs("drafter", {
        "folder": str(out), "optimiser steps": f"{report['steps']:,} in {report['minutes']:.1f} min",
        "accept length (bonus included)": measured, "weights": f"{report['parameters']:,}",
        **({"plot": str(plot)} if plot else {}),
    })


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise refuse("--out", "a folder that does not exist or is empty", str(out), "choose another")


def parse_profile(text: str) -> Profile:
    """"5_4_16" as Profile(depth=5, top_k=4, verify=16)."""
    try:
        depth, top_k, verify = (int(part) for part in text.split("_"))
    except ValueError:
        raise refuse("--profile", "depth_topk_verify, such as 5_4_16", text, "write three integers") from None
    return Profile(depth, top_k, verify)


def default_config(settings: Settings, device: torch.device) -> AdaptiveConfig:
    from tlt_engine.rl.adaptive import AdaptiveConfig
    from tlt_engine.training.loss import LossConfig
    from tlt_engine.training.trainer import TrainerConfig

    trainer = TrainerConfig(
        lr=settings.learning_rate, seed=settings.seed, loss=LossConfig(steps=settings.profile.depth),
        micro_rows=4096 if device.type == "cuda" else 512,  # about a second on two cores
    )
    return AdaptiveConfig(trainer=trainer, slice_ms=200.0)


def train(
    engine: RolloutEngine, prompts: Sequence[Any], settings: Settings, *, drafting: int = 1,
    config: AdaptiveConfig | None = None,
) -> Iterator[Piece]:
    """Roll out a batch, train on what was seen of it, and again until the minutes are over; at least one round. The
    learning rate cools down over the minutes. drafting: the first round that speculates: 1 for a drafter that knows
    nothing yet, whose drafts would only cost time."""
    from tlt_engine.rl.adaptive import AdaptiveDrafter

    adaptive = AdaptiveDrafter(engine, config or default_config(settings, engine.model.device))
    began = time.perf_counter()
    spent = lambda: (time.perf_counter() - began) / (60 * settings.minutes)  # noqa: E731
    number = 0
    while number == 0 or spent() < 1:
        first = number * settings.batch
        batch = [prompts[i % len(prompts)] for i in range(first, first + settings.batch)]
        params = [
            SamplingParams(
                n=settings.n, temperature=settings.temperature, max_tokens=settings.max_tokens, detokenize=False,
                seed=derive_seed(settings.seed, number, f"{i}:{identity(prompt)}"),
            )
            for i, prompt in enumerate(batch)
        ]
        rolling = time.perf_counter()
        outputs = engine.generate(batch, params, speculate=number >= drafting)
        rolled = time.perf_counter() - rolling
        number += 1
        tokens = sum(len(s.token_ids) for o in outputs for s in o.outputs)
        for i, report in enumerate(_train_for(adaptive, settings.train_share * rolled, spent)):
            yield Piece(
                minutes=(time.perf_counter() - began) / 60, accept_length=report["accept_length"],
                loss=report["loss"], agreement=(report["agreement"] or [None])[0], steps=report["steps"],
                rollout_s=0.0 if i else rolled, tokens=0 if i else tokens, training_s=report["seconds"],
            )
    adaptive.close()


def _train_for(adaptive: AdaptiveDrafter, seconds: float, spent: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Reports of pieces of PIECE_S, each at the learning rate of its place in the time that is `spent`."""
    end = time.perf_counter() + seconds
    while True:
        adaptive.trainer.lr_factor = COOLEST + (1 - COOLEST) * 0.5 * (1 + cos(pi * min(spent(), 1.0)))
        report = adaptive.train_drafter(min(PIECE_S, max(end - time.perf_counter(), 0.1)))
        yield report
        if not report["trained"] or time.perf_counter() >= end or spent() >= 1:
            return


def _starting_drafter(
    loaded: LoadedModel, start: Path | None, prompts: Sequence[Any], settings: Settings, config: EngineConfig
) -> EagleModel:
    """From a folder; or fresh, with the draft vocabulary of one batch's rollouts if one is asked for."""
    import torch

    from tlt_engine.models.eagle import EagleConfig, EagleModel

    if start is not None:
        from tlt_engine.models.eagle_checkpoint import load_drafter

        return load_drafter(start, loaded.model)
    shape = EagleConfig.for_target(loaded.config, draft_vocab_size=settings.draft_vocab)
    model = EagleModel(shape, dtype=loaded.model.dtype, device=loaded.model.device)
    model.initialise(torch.Generator().manual_seed(settings.seed))
    model.bind(loaded.model).start_from_target()
    if settings.draft_vocab is not None:
        model.set_vocabulary(_vocabulary(loaded, prompts[: settings.batch], settings, config))
        model.copy_head()
    return model


def _vocabulary(loaded: LoadedModel, prompts: Sequence[Any], settings: Settings, config: EngineConfig) -> Any:
    from tlt_engine import RolloutEngine
    from tlt_engine.training.vocabulary import choose_vocabulary, count_tokens

    assert settings.draft_vocab is not None
    params = params_for(prompts, settings.seed, n=settings.n, temperature=settings.temperature,
                        max_tokens=settings.max_tokens, detokenize=False)
    outputs = RolloutEngine(loaded, config).generate(prompts, params)
    counts = count_tokens((s.token_ids for o in outputs for s in o.outputs), loaded.config.vocab_size)
    return choose_vocabulary(counts, settings.draft_vocab, always=loaded.eos_ids)


def export(model: str, drafter: Path, out: Path, *, to: str, as_json: bool) -> None:
    """Rewrite a drafter's folder for another engine."""
    _check_free(out)
    from tlt_engine.models import load_model
    from tlt_engine.models.eagle_checkpoint import export_drafter, load_drafter

    target = load_model(model)
    export_drafter(load_drafter(drafter, target.model), out, to=to)
    files = sorted(p.name for p in out.iterdir())
    if as_json:
        show.print_json({"out": str(out), "to": to, "files": files})
    else:
        show.print_pairs(f"drafter for {to}", {"folder": str(out), "files": ", ".join(files)})


def draw(path: Path, pieces: Sequence[Piece]) -> None:
    """Loss and accept length (or agreement) over minutes, one picture. ImportError says how to get matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"matplotlib: {error}; pip install matplotlib") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from tlt_engine.cli.plot import FAINT, INK, PLAIN, SPECULATIVE

    with matplotlib.rc_context({"font.size": 10, "axes.edgecolor": INK, "axes.spines.top": False}):
        figure = Figure(figsize=(7.5, 4.2), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        left = figure.subplots()
        points = [(r.minutes, r.accept_length) for r in pieces if r.accept_length is not None]
        name = "accept length of a batch's rollouts (bonus included)"
        if len(points) < 2:  # batches that decoded plainly
            points = [(r.minutes, r.agreement) for r in pieces if r.agreement is not None]
            name = "share of rows whose best draft is the target's best"
        left.plot(*zip(*points), color=SPECULATIVE, linewidth=2, marker="o", markersize=3)
        left.set_xlabel("minutes, rollouts included")
        left.set_ylabel(name, color=SPECULATIVE)
        left.set_ylim(bottom=1.0 if points and points[0][1] > 1 else 0.0)
        left.grid(axis="y", color=FAINT, linewidth=0.8)
        left.set_axisbelow(True)
        right = left.twinx()
        losses = [(r.minutes, r.loss) for r in pieces if r.loss is not None]
        right.plot(*zip(*losses), color=PLAIN, linewidth=1.5, linestyle="--")
        right.set_ylabel("loss (nats, summed over the unroll)", color=INK)
        left.set_title("A drafter learning from its target's rollouts")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
    )
