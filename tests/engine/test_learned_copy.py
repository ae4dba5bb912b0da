"""Drafters that know the target exactly, by construction: each must then propose every token that the target draws.
The pairs are explained in tests/copies.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.copies import VOCAB, attention, bigram, reduced
from tests.engine.engines import OFF, tokens
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.eagle import EagleModel
from tlt_engine.outputs import RequestOutput
from tlt_engine.speculation import learned

SOME = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:40]
PROMPTS = [list(range(3 * i, 3 * i + 10)) for i in range(6)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "filters": {"temperature": 0.6, "top_p": 0.9, "min_p": 0.02, "top_k": 30},
    "penalties": {"temperature": 0.6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5,
                  "frequency_penalty": 0.3},
    "masks": {"allowed_token_ids": list(range(1, 64, 2)), "logit_bias": {3: 2.0, 5: -1.0}, "min_tokens": 9,
              "stop_token_ids": [7, 9]},
}


def run(
    target: Any, drafter: EagleModel | None, profile: Profile, sampling: dict[str, Any], **config: Any
) -> list[RequestOutput]:
    spec = OFF
    if drafter is not None:
        spec = SpeculationConfig(method="learned", profile=profile, min_chance=0.0, **config)
    engine = RolloutEngine(target, EngineConfig(page_size=4, max_num_seqs=8, speculation=spec), drafter=drafter)
    return engine.generate(PROMPTS, SamplingParams(**{"max_tokens": 40, "seed": 2, "ignore_eos": True, **sampling}))


def refused(outputs: list[RequestOutput], depth: int, known: set[int] | None = None) -> tuple[int, int]:
    """(drafts that should have been accepted and were not, drafts accepted) of chains of `depth`, from the counts: with
    every known token accepted, passes are as few as the text allows."""
    missed = accepted = 0
    for output in outputs:
        out = output.outputs[0]
        passes = at = 0
        while at < len(out.token_ids):
            reach = min(depth, len(out.token_ids) - at - 1)
            run_on = next(
                (d for d in range(reach) if known is not None and out.token_ids[at + d] not in known), reach
            )
            at += run_on + 1
            passes += 1
        missed += out.spec.passes - passes
        accepted += out.spec.accepted
    return missed, accepted


Pair = Callable[[], tuple[Any, EagleModel]]
CHAIN = {bigram: Profile(depth=4, top_k=1, verify=5), attention: Profile(depth=1, top_k=1, verify=2)}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("pair", [bigram, attention])
def test_a_copy_of_the_target_is_never_refused(pair: Pair, sampling: str) -> None:
    target, drafter = pair()
    plain = run(target, None, CHAIN[pair], SAMPLING[sampling])
    outputs = run(target, drafter, CHAIN[pair], SAMPLING[sampling])
    assert tokens(outputs) == tokens(plain)
    missed, accepted = refused(outputs, CHAIN[pair].depth)
    assert missed == 0 and accepted > 40


@pytest.mark.parametrize("sampling", ["greedy", "temperature 1", "penalties"])
def test_nor_at_the_first_level_of_a_tree(sampling: str) -> None:
    """Further down the right path may lose its place to likelier ones: the estimate of its chance is not 1."""
    target, drafter = bigram()
    for output in run(target, drafter, Profile(depth=4, top_k=3, verify=16), SAMPLING[sampling]):
        spec = output.outputs[0].spec
        assert spec.accepted_per_position[0] == spec.drafted_per_position[0] >= spec.passes - 1


# The filters cut the distribution over the ids that there are. What a reduced vocabulary lacks is not in the drafter's,
# so its cuts fall elsewhere: here 2 drafts in 141 and 1 in 149 are refused for it.
CUT = {"filters": 0.02, "penalties": 0.02}


@pytest.mark.parametrize("sampling", SAMPLING)
def test_nor_with_some_of_its_vocabulary_save_for_the_rest(sampling: str) -> None:
    target, drafter = bigram()
    outputs = run(target, reduced(drafter, target, SOME), CHAIN[bigram], SAMPLING[sampling])
    assert tokens(outputs) == tokens(run(target, None, CHAIN[bigram], SAMPLING[sampling]))
    missed, accepted = refused(outputs, 4, set(SOME.tolist()))
    assert missed <= CUT.get(sampling, 0) * accepted and accepted > 100
    emitted = {t for output in outputs for t in output.outputs[0].token_ids}
    assert not emitted <= set(SOME.tolist()), "E07: ids that the drafter cannot say are still said"


def test_the_targets_are_uncertain_enough_to_tell_noise_from_none() -> None:
    for pair in (bigram, attention):
        target, drafter = pair()
        outputs = run(target, drafter, CHAIN[pair], {}, shared_noise=False)
        missed, _ = refused(outputs, CHAIN[pair].depth)
        assert missed > 30


class Faults:
    """Each loses the coupling or the copy, and no output shows it. What is run: the pair, its sampling, its ids."""

    @staticmethod
    def noise_one_position_late(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        noise = learned.DraftRows.noise
        patch.setattr(learned.DraftRows, "noise", lambda self, depth, width: noise(self, depth + 1, width))
        return bigram, "temperature 1", False

    @staticmethod
    def noise_at_draft_ids(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        top_k = learned.noisy_top_k

        def at_draft_ids(*args: Any, d2t: Tensor, target_vocab: int, **more: Any) -> Any:
            top = top_k(*args, **more)
            return replace(top, tokens=top.draft_ids + d2t[top.draft_ids])

        patch.setattr(learned, "noisy_top_k", at_draft_ids)
        return bigram, "temperature 1", True

    @staticmethod
    def temperature_forgotten(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        params = learned.DraftRows.params
        patch.setattr(
            learned.DraftRows, "params",
            lambda self, depth, branches: replace(
                params(self, depth, branches), temperature=torch.ones(branches.shape[0] * branches.shape[1])
            ),
        )
        return attention, "temperature 0.6", False

    @staticmethod
    def branch_left_out_of_penalties(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        params = learned.DraftRows.params

        def forgetful(self: Any, depth: int, branches: Tensor) -> Any:
            return params(self, depth, torch.full_like(branches, -1))

        patch.setattr(learned.DraftRows, "params", forgetful)
        return bigram, "penalties", False

    @staticmethod
    def hidden_of_the_layer_above(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        take = learned.Lanes.take
        patch.setattr(learned.Lanes, "take", lambda self, rows, layers: take(self, rows, (0, 1, 3)))
        captured = property(lambda self: (0, 1, 2, 3), lambda self, layers: None)
        patch.setattr(learned.EagleDrafter, "hidden_layers", captured, raising=False)
        return attention, "temperature 1", False

    @staticmethod
    def token_of_the_entry_itself(patch: pytest.MonkeyPatch) -> tuple[Pair, str, bool]:
        entries = learned.EagleDrafter._entries
        patch.setattr(
            learned.EagleDrafter, "_entries",
            lambda self, contexts, spans: entries(
                self, [replace(c, token_ids=[0, *c.token_ids]) for c in contexts], spans
            ),
        )
        return bigram, "greedy", False


@pytest.mark.parametrize("fault", [name for name in vars(Faults) if not name.startswith("_")])
def test_faults_that_no_output_shows_are_seen_here(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, sampling, small = getattr(Faults, fault)(monkeypatch)
    target, drafter = pair()
    drafter = reduced(drafter, target, SOME) if small else drafter
    outputs = run(target, drafter, CHAIN[pair], SAMPLING[sampling])
    assert tokens(outputs) == tokens(run(target, None, CHAIN[pair], SAMPLING[sampling]))
    missed, _ = refused(outputs, CHAIN[pair].depth, set(SOME.tolist()) if small else None)
    assert missed > 5
