"""Two rollouts of the same prompts and seeds, token by token; ties are judged by the plain engine's own scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlt_engine.cli.rollout import Rollouts
from tlt_engine.config import SamplingParams

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine
    from tlt_engine.engine.equality import Equality


def compare(
    engine: RolloutEngine, plain: Rollouts, other: Rollouts, params: Sequence[SamplingParams]
) -> Equality:
    """params: one a prompt. engine: the one that made `plain`."""
    from tlt_engine.engine.equality import compare_runs

    return compare_runs(engine, plain.outputs, other.outputs, params)


def verdict(equality: Equality) -> str:
    """One line: are the tokens the same, and what was excused?"""
    ties = equality.excused_ties
    excused = f", {ties} excused tie{'' if ties == 1 else 's'}" if ties else ""
    if equality.equal:
        return f"tokens equal: yes ({equality.tokens:,} compared in {equality.samples} samples{excused})"
    return f"tokens equal: NO ({equality.tokens_differing:,} differ after an unexcused difference{excused})"
