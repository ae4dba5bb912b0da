"""The learned drafter's Triton kernels under Triton's interpreter against the same in torch's ops, alone and in running
engines. Run by test_children.py in a process that has TRITON_INTERPRET=1 before triton is imported; on a GPU,
tests/gpu/test_learned.py runs the same cases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tlt_kernels.params import DraftTop
from tlt_kernels.triton import children, draft_attention, draft_step
from torch import Tensor

from tests.eagle import random_drafter
from tests.engine.emulated import emulation
from tests.engine.test_drafting import STOPS, both, drafting
from tests.engine.test_learned import MODEL, SHAPES, learned
from tests.engine.test_static_draft import PARAMS, check, run
from tests.kernels.level_cases import compare_levels
from tests.tiny import tiny_target
from tlt_engine import Profile
from tlt_engine.speculation.candidates import UNSEEN_NOISE, log_chances
from tlt_engine.speculation.static_draft import StaticDraft
from tlt_engine.speculation.static_ranking import DenseCandidates, Expanded


def tops(batch: int, nodes: int, k: int, generator: torch.Generator, dead: float) -> DraftTop:
    """Sorted by score; some rows have fewer than k ids left."""
    rows = batch * nodes
    noise = torch.randn(rows, k, generator=generator)
    logprobs = torch.log_softmax(3 * torch.randn(rows, k + 3, generator=generator), 1)[:, :k]
    order = (logprobs + noise).argsort(1, descending=True)
    logprobs, scores = logprobs.gather(1, order), (logprobs + noise).gather(1, order)
    tokens = torch.stack([torch.randperm(64, generator=generator)[:k] for _ in range(rows)])
    fewer = torch.randint(0, k, (rows,), generator=generator)
    left = torch.where(torch.rand(rows, generator=generator) < dead, fewer, k)
    gone = torch.arange(k) >= left[:, None]
    return DraftTop(tokens.masked_fill(gone, -1), tokens, scores.masked_fill(gone, -math.inf),
                    logprobs.masked_fill(gone, -math.inf))


CASES = [
    {"k": 8, "width": 8}, {"k": 1, "width": 1}, {"k": 3, "width": 3, "dead": 0.4}, {"k": 5, "width": 2, "least": 0.05},
    {"k": 4, "width": 4, "blind": True}, {"k": 2, "width": 7, "dead": 0.2},
]


def compare(case: dict[str, Any], device: str = "cpu") -> None:
    """Three levels, each from the nodes that the reference has expanded."""
    generator = torch.Generator().manual_seed(case["k"])
    batch, k, width, blind = 3, case["k"], case["width"], case.get("blind", False)
    least = case.get("least", 0.0)
    limits, roots = torch.tensor([3, 2, 0]), torch.tensor([5, 6, 7])
    stops = torch.stack([torch.tensor([3, 17, -2]), torch.arange(0, 48, 16), torch.full((3,), -2)])
    temperature, sharpness = torch.tensor([1.0, 0.0, 0.7]), torch.tensor([1.5, 2.0, 0.6])
    levels = DenseCandidates(limits, stops, least)
    above, indices = torch.zeros(batch, 1), torch.zeros(batch, 1, dtype=torch.int64)
    sizes = [k]
    for _ in range(2):
        sizes.append(min(width, sizes[-1]) * k)
    total = 1 + sum(sizes)
    out = (torch.full((batch * total,), -7), torch.full((batch * total,), -7, dtype=torch.int32),
           torch.full((batch * total,), 7.0))
    out = tuple(t.to(device) for t in out)
    first = 1
    for depth in (1, 2, 3):
        nodes = above.shape[1]
        top = tops(batch, nodes, k, generator, case.get("dead", 0.0))
        rows = [t.repeat_interleave(nodes) for t in (temperature < 1e-5, sharpness)]
        chances = log_chances(top, rows[0], None if blind else rows[1])
        moved = DraftTop(*(getattr(top, n).to(device) for n in ("tokens", "draft_ids", "scores", "logprobs")))
        each = min(width, nodes * k)
        got = children.rank_children(
            moved, above.to(device).contiguous(), indices.to(device).contiguous(), limits.to(device), stops.to(device),
            temperature.to(device), None if blind else sharpness.to(device), roots.to(device), out, depth=depth,
            first=first, candidates=total, width=each, least=math.log(least) if least else -math.inf,
            unseen=UNSEEN_NOISE,
        )
        levels.add(top.tokens.view(batch, -1), chances.view(batch, -1), above, indices)
        places, indices, tokens, above = levels.best(width)
        check_expanded(Expanded(*got), places // k, indices, tokens, above)
        first += nodes * k
    for mine, theirs in zip(out, levels.dense(roots)):
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine.cpu().view(batch, -1), theirs, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(mine.cpu().view(batch, -1), theirs)


def check_expanded(got: Expanded, up: Tensor, indices: Tensor, tokens: Tensor, above: Tensor) -> None:
    torch.testing.assert_close(got.above.cpu(), above, atol=1e-5, rtol=1e-5)
    alive = above > -math.inf  # among dead ones the order is anybody's
    for mine, theirs in ((got.up, up), (got.indices, indices), (got.tokens, tokens)):
        assert torch.equal(mine.cpu()[alive], theirs[alive])
    assert int(got.up.min()) >= 0 and int(got.tokens.min()) >= 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_as_candidates(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.parametrize("wrong", ["stops", "limits", "sharpness", "parents"])
def test_the_comparison_sees_faults(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = children.rank_children
    place = {"parents": 2, "limits": 3, "stops": 4, "sharpness": 6}[wrong]

    def faulty(*args: Any, **more: Any) -> Any:
        changed = list(args)
        changed[place] = args[place] + 1
        return honest(*changed, **more)

    monkeypatch.setattr(children, "rank_children", faulty)
    with pytest.raises(AssertionError):
        for case in CASES[:3]:
            compare(case)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every StaticDraft as on a GPU."""
    honest = StaticDraft.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        honest(self, *args, **more)
        self.fuse()

    monkeypatch.setattr(StaticDraft, "__init__", init)


def test_trees_of_a_running_engine(monkeypatch: pytest.MonkeyPatch, fused: None) -> None:
    params = replace(PARAMS, n=1, max_tokens=12)
    check(run(monkeypatch, learned(min_chance=0.05), {"window": 6}, params), least=10, atol=1e-5)


PROFILES = {"tree": Profile(4, 3, 12), "chain": Profile(5, 1, 6), "wide": Profile(3, 16, 40)}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("window", [150, 3, None])
def test_levels(profile: str, window: int | None) -> None:
    """Several splits of the keys at 150; 3: nodes that others of the tree do not see."""
    compare_levels(random_drafter(tiny_target(**MODEL), window=window), PROFILES[profile], 2e-5)


@pytest.mark.parametrize("shape", ["reduced", "other heads", "narrow", "one entry"])
def test_levels_of_other_drafters(shape: str) -> None:
    compare_levels(random_drafter(tiny_target(**MODEL), **SHAPES[shape]), PROFILES["tree"], 2e-5)


@pytest.mark.parametrize("wrong", ["window", "depth", "bits", "origin"])
def test_the_comparison_of_levels_sees_faults(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = draft_attention.attend_drafts

    def faulty(*args: Any, **more: Any) -> Any:
        if wrong == "origin":
            args = (*args[:5], args[5] + 1, *args[6:])
        elif wrong == "bits" and "bits" in more:
            more["bits"] = torch.full_like(more["bits"], -1)
        elif wrong in more:
            more[wrong] = more[wrong] + 1
        return honest(*args, **more)

    monkeypatch.setattr(draft_attention, "attend_drafts", faulty)
    with pytest.raises(AssertionError):
        compare_levels(random_drafter(tiny_target(**MODEL), window=3), PROFILES["tree"], 2e-5)


@pytest.mark.parametrize("sabotaged", [False, True])
def test_steps_that_the_device_drafts(sabotaged: bool, monkeypatch: pytest.MonkeyPatch, fused: None) -> None:
    """The same traces as with the host's drafts; with the noise of the wrong rows, others."""
    honest = draft_step.pack

    def pack(*args: Any, **more: Any) -> None:
        honest(*args, **more)
        if sabotaged:
            args[5].keys.copy_(args[5].keys.roll(1))

    monkeypatch.setattr(draft_step, "pack", pack)
    model, params = random_drafter(tiny_target(**MODEL), window=9), replace(STOPS, n=1, max_tokens=24)
    with emulation():
        mine, plain, engine = both(model, params, [[1, 2, 3], [4, 5, 6, 7], [8]])
    assert drafting(engine)["steps"] > 5
    assert (mine == plain) != sabotaged
