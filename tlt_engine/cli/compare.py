"""Two rollouts of the same prompts and seeds, token by token; ties are judged by the plain engine's own scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlt_engine.cli.rollout import Rollouts
from tlt_engine.config import SamplingParams, refuse
from tlt_engine.rng import noise_key

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine
    from tlt_engine.engine.equality import Equality


def compare(
    engine: RolloutEngine, plain: Rollouts, other: Rollouts, params: Sequence[SamplingParams]
) -> Equality:
    """params: one a prompt, each with a seed. engine: the one that made `plain`."""
    from tlt_engine.engine.equality import Draw, compare_runs

    draws = []
    for output, p in zip(plain.outputs, params, strict=True):
        if p.seed is None:
            raise refuse("seed", "a seed, so that both runs draw the same noise", None, "pass --seed")
        ids = output.prompt_token_ids
        key = noise_key(p.seed, ids)
        draws.append([Draw(key, p.sample_index + s.index, 0, ids, len(ids)) for s in output.outputs])
    return compare_runs(
        engine.model, plain.outputs, other.outputs, params, draws, vocab_limit=engine.vocab_limit
    )


def verdict(equality: Equality) -> str:
    """One line: are the tokens the same, and what was excused?"""
    ties = equality.excused_ties
    excused = f", {ties} excused tie{'' if ties == 1 else 's'}" if ties else ""
    if equality.equal:
        return f"tokens equal: yes ({equality.tokens:,} compared in {equality.samples} samples{excused})"
    return f"tokens equal: NO ({equality.tokens_differing:,} differ after an unexcused difference{excused})"
