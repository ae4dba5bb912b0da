"""The demo's picture: response lengths, the tail of the batch, acceptance by position. Knows figures, no engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlt_engine.cli.rollout import Rollouts

PLAIN, SPECULATIVE, INK, FAINT = "#8a8f98", "#1f6feb", "#24292f", "#d0d7de"


def draw(path: Path, title: str, plain: Rollouts, speculative: Rollouts, max_tokens: int) -> None:
    """Write a PNG of three panels to `path`, folders made. ImportError says how to get matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"matplotlib: {error}; pip install matplotlib") from error
    # The object interface and its own Agg canvas: a caller's pyplot state and backend stay as they are.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {"font.size": 10, "axes.edgecolor": INK, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(13.5, 4.3), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
        left, middle, right = figure.subplots(1, 3)
        _lengths(left, plain.lengths, max_tokens)
        _tail(middle, plain, speculative)
        _acceptance(right, speculative)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _lengths(axes: Any, lengths: Sequence[int], max_tokens: int) -> None:
    bins = min(24, max_tokens)
    limits = (0, max_tokens)
    counts, _, _ = axes.hist(lengths, bins=bins, range=limits, color=SPECULATIVE, alpha=0.85, edgecolor="white")
    axes.set_title("Response lengths")
    axes.set_xlabel(f"tokens (at most {max_tokens})")
    axes.set_ylabel("responses")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, max_tokens)
    axes.set_ylim(0, max(counts) * 1.18)  # room for the labels of the lines
    quantiles = statistics.quantiles(lengths, n=10, method="inclusive") if len(lengths) > 1 else [lengths[0]] * 9
    median, ninth = quantiles[4], quantiles[8]
    close = abs(ninth - median) < 0.3 * max_tokens
    for value, name, height in ((median, "median", 0.99), (ninth, "p90", 0.92 if close else 0.99)):
        axes.axvline(value, color=INK, linewidth=1, linestyle="--")
        on_the_right = value > 0.7 * max_tokens
        axes.annotate(
            f"{name} {value:.0f}", (value, height), xycoords=("data", "axes fraction"), color=INK, va="top",
            xytext=(-4 if on_the_right else 4, 0), textcoords="offset points", ha="right" if on_the_right else "left",
        )  # fmt: skip


def _tail(axes: Any, plain: Rollouts, speculative: Rollouts) -> None:
    for rollouts, name, color in (
        (plain, "without speculation", PLAIN),
        (speculative, "with speculation", SPECULATIVE),
    ):
        steps = len(rollouts.running)
        label, curve = f"{name}: {steps} steps", [*rollouts.running, 0]
        axes.fill_between(range(steps + 1), curve, step="post", alpha=0.15, color=color, linewidth=0)
        axes.step(range(steps + 1), curve, where="post", color=color, linewidth=1.8, label=label)
    axes.set_title("The long tail: samples running in each step")
    axes.set_xlabel("step (one target forward of the whole batch)")
    axes.set_ylabel("samples running")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _acceptance(axes: Any, speculative: Rollouts) -> None:
    spec = speculative.spec
    drafted, accepted = spec.drafted_per_position, spec.accepted_per_position
    positions = [i for i, count in enumerate(drafted) if count]
    axes.set_title(f"Acceptance by position (accept length {spec.accept_length:.2f})")
    axes.set_xlabel("draft position, and how many passes drafted that far")
    axes.set_ylabel("share of those passes that committed it")
    axes.set_ylim(0, 1)
    if not positions:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color=INK)
        axes.set_xticks([])
        return
    shares = [accepted[i] / drafted[i] for i in positions]
    bars = axes.bar(positions, shares, color=SPECULATIVE, alpha=0.85, width=0.7)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=2, color=INK, fontsize=9)
    axes.set_xticks(positions, [f"{i + 1}\n{drafted[i]:,}" for i in positions], fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
