"""The learned drafter on static tensors against its eager self, in a running engine: the same trees, K and V and rings,
bit for bit in fp32 on the CPU, whatever the walk, the window, padding and neighbours.

What the engine does not do here, graphs and the steps of a GPU's runner, is tests/engine/test_drafting.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tlt_kernels import tree_from_candidates
from torch import Tensor

from tests.eagle import random_drafter
from tests.engine.test_learned import MODEL, PROFILE, PROMPTS, SHAPES, engine_with, learned
from tests.tiny import tiny_target
from tlt_engine import DraftTree, Profile, SamplingParams
from tlt_engine.speculation import static_ranking
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.learned_pass import EaglePass
from tlt_engine.speculation.static_draft import Seats, StaticDraft, Verified
from tlt_engine.speculation.static_levels import Rows

BATCH, STOPS = 16, 4


class Mirror:
    """Beside each proposal of an engine's drafter: the same from a StaticDraft, on lanes of its own."""

    def __init__(self, drafter: EagleDrafter, patch: pytest.MonkeyPatch) -> None:
        self.drafter: Any = drafter
        self.trees: list[tuple[DraftTree, DraftTree]] = []
        self.states: list[tuple[Tensor, Tensor]] = []
        self.accepted: list[int] = []
        self.expected: list[tuple[float, float]] = []
        self._eager = drafter.propose
        patch.setattr(drafter, "propose", self.propose)

    def propose(self, contexts: Sequence[Any]) -> list[DraftTree]:
        d, lanes = self.drafter, self.drafter._lanes
        chosen = [c for c in contexts if self._fits(c)]
        if not chosen:
            return self._eager(contexts)
        own = copy.copy(d)
        own._lanes = copy.deepcopy(lanes)
        own._pass = EaglePass(d.model, own._lanes, d._pass.length)
        static = StaticDraft(
            d.model, own._lanes, own._pass, d.config, batch=BATCH, width=d._width, vocab_limit=d._vocab_limit
        )
        known = [lanes._lanes[c.seq_id] for c in chosen]
        new = [lane.end - lane.kv_end for lane in known]
        with torch.inference_mode():
            trees = self._drafted(static, own, chosen, known, new)
        eager = dict(zip((c.seq_id for c in contexts), self._eager(contexts)))
        self.trees += [(eager[c.seq_id], tree) for c, tree in zip(chosen, trees)]
        self.accepted += new
        for lane in known:
            self.states.append((lanes.ring[lane.index].clone(), own._lanes.ring[lane.index].clone()))
            seen = torch.arange(max(lane.origin, lane.end - lanes.window), lane.end)  # behind it lie drafts
            slots = lanes.slots(lane, seen.numpy())
            self.states.append(tuple(x.kv.data.flatten(2, 3)[:, :, slots].clone() for x in (lanes, own._lanes)))
        for c, share in zip(chosen, static.expected.tolist()):
            if len(eager[c.seq_id]) > 1:
                self.expected.append((d._drafted[c.seq_id][1], share))
        return list(eager.values())

    def _fits(self, context: Any) -> bool:
        """All entries before the last walk are there: what a graph relies on."""
        lane = self.drafter._lanes._lanes.get(context.seq_id)
        steps = self.drafter.config.profile.depth + 1
        if lane is None or lane.end != len(context.token_ids) - 1 or context.max_depth < 1:
            return False
        return 0 < lane.end - lane.kv_end <= min(steps, lane.end - lane.origin)

    def _drafted(
        self, static: StaticDraft, own: Any, contexts: Sequence[Any], known: list[Any], new: list[int]
    ) -> list[DraftTree]:
        lanes, steps = own._lanes, own.config.profile.depth + 1
        batch = min(BATCH, len(contexts) + 2)  # rows of padding
        walked = self._walk(lanes, contexts, known, new, batch, steps)
        seats = self._seats(lanes, contexts, known, batch)
        roots = torch.tensor([c.token_ids[-1] for c in contexts] + [0] * (batch - len(contexts)))
        for _ in range(2):  # as a capture does
            static.extend(seats, walked)
            static.draft(seats, walked.committed, roots)
        n = len(contexts)
        assert static.cand_indptr[: batch + 1].diff().tolist() == [static.candidates] * n + [0] * (batch - n)
        end = int(static.cand_indptr[n])
        packed = tree_from_candidates(
            static.tokens[:end], static.parents[:end], static.scores[:end], static.cand_indptr[: n + 1],
            static.budgets[:n],
        )
        bounds = packed.node_indptr.tolist()
        return [DraftTree(tuple(packed.tokens[a:b].tolist()), tuple(packed.parents[a:b].tolist()))
                for a, b in pairwise(bounds)]

    @staticmethod
    def _walk(lanes: Any, contexts: Any, known: Any, new: list[int], batch: int, steps: int) -> Verified:
        """A walk that gave these requests their new tokens, through trees of `steps` + 2 nodes; the hidden states of
        what was not accepted are NaN, and so is the ring where the walk's own belong."""
        nodes, padding = steps + 2, batch - len(contexts)
        paths = torch.full((batch, steps), -1, dtype=torch.int32)
        tokens = torch.full((batch, steps), -1, dtype=torch.int64)
        wide = torch.full((len(contexts) * nodes, lanes.ring.shape[2]), float("nan"))
        for b, (context, lane, count) in enumerate(zip(contexts, known, new)):
            stop = len(context.token_ids) - 1
            for d in range(count):
                node = d if d < 2 else d + 1  # not every node is on the path
                paths[b, d], tokens[b, d] = node, context.token_ids[stop - count + d + 1]
                row = lanes.ring[lane.index, (stop - count + d) % lanes.window]
                wide[b * nodes + node] = row
            for d in range(count):
                lanes.ring[lane.index, (stop - count + d) % lanes.window] = float("nan")
        indptr = [min(b, len(contexts)) * nodes for b in range(batch + 1)]
        return Verified(
            torch.tensor(new + [0] * padding, dtype=torch.int32), paths, tokens,
            torch.tensor(indptr, dtype=torch.int32),
            torch.tensor([len(c.token_ids) - 1 for c in contexts] + [0] * padding, dtype=torch.int32),
            wide.chunk(max(lanes.ring.shape[2] // 32, 1), -1),
        )

    def _seats(self, lanes: Any, contexts: Any, known: Any, batch: int) -> Seats:
        pad = batch - len(contexts)

        def put(values: list[Any], fill: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values + [fill] * pad, dtype=dtype)

        stops = [[*self.drafter.eos_ids, *(c.params.stop_token_ids or ())] for c in contexts]
        sharp = self.drafter._sharpness.value
        greedy = [c.params.temperature < 1e-5 for c in contexts]
        return Seats(
            put([lane.index for lane in known], lanes.nobody), put([lane.origin for lane in known], 0),
            put([c.max_depth + 1 + len(c.token_ids) for c in contexts], 0), put([c.key for c in contexts], 0),
            put([c.sample for c in contexts], 0), put([c.segment for c in contexts], 0),
            put([c.params.temperature for c in contexts], 1.0, torch.float32),
            put([sharp[g] for g in greedy], 1.0, torch.float32),
            torch.tensor([s + [-2] * (STOPS - len(s)) for s in stops] + [[-2] * STOPS] * pad),
            torch.tensor([len(contexts)], dtype=torch.int32),
        )


def run(patch: pytest.MonkeyPatch, speculation: Any, shape: dict[str, Any], params: Any, **config: Any) -> Mirror:
    model = random_drafter(tiny_target(**MODEL), **shape)
    engine = engine_with(model, speculation, **config)
    drafter = engine._core.drafter
    assert isinstance(drafter, EagleDrafter)
    mirror = Mirror(drafter, patch)
    engine.generate(PROMPTS, params)
    return mirror


def check(mirror: Mirror, least: int = 30, atol: float = 0.0) -> None:
    assert len(mirror.trees) > least
    for eager, static in mirror.trees:
        assert eager == static
    for eager_state, static_state in mirror.states:
        torch.testing.assert_close(static_state, eager_state, rtol=0, atol=atol, equal_nan=True)
    for wanted, got in mirror.expected:
        assert got == pytest.approx(wanted, abs=1e-5)


PARAMS = SamplingParams(max_tokens=20, n=2, seed=3, stop_token_ids=[7, 9, 11])
PROFILES = {"tree": PROFILE, "chain": Profile(5, 1, 6), "wide": Profile(2, 6, 24), "short": Profile(6, 2, 4)}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "narrow"])
def test_shapes(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(monkeypatch, learned(), SHAPES[shape], PARAMS))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_profiles(profile: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(PARAMS, temperature=temperature)
    mirror = run(monkeypatch, learned(profile=PROFILES[profile]), {"window": 6}, params)
    check(mirror)
    assert max(mirror.accepted) > 1, "walks of several tokens"


@pytest.mark.parametrize("change", [{"min_chance": 0.1}, {"ranking": "q"}, {"shared_noise": False}])
def test_rankings(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(monkeypatch, learned(**change), {"window": 6, "draft_vocab_size": 24}, PARAMS))


def test_up_to_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(PARAMS, max_tokens=60, stop_token_ids=None)
    mirror = run(monkeypatch, learned(), {"window": 6}, params, max_model_len=34)
    check(mirror)
    assert any(len(eager) == 1 or max(eager.depths) < PROFILE.depth for eager, _ in mirror.trees)


def later(rows: Rows) -> Rows:
    """The same children, one position on."""
    return replace(rows, ids=replace(rows.ids, positions=rows.ids.positions + 1))


class Faults:
    @staticmethod
    def dead_candidates_count(patch: pytest.MonkeyPatch) -> None:
        honest = StaticDraft._keep

        def keep(self: Any, *args: Any) -> None:
            honest(self, *args)
            self.budgets.fill_(self.config.profile.verify)

        patch.setattr(StaticDraft, "_keep", keep)

    @staticmethod
    def rows_by_step_not_by_path(patch: pytest.MonkeyPatch) -> None:
        honest = StaticDraft._entries

        def entries(self: Any, seats: Any, walked: Any) -> Any:
            straight = torch.arange(walked.paths.shape[1], dtype=torch.int32).expand_as(walked.paths)
            straight = torch.where(walked.paths < 0, -1, straight)
            return honest(self, seats, replace(walked, paths=straight))

        patch.setattr(StaticDraft, "_entries", entries)

    @staticmethod
    def one_position_late(patch: pytest.MonkeyPatch) -> None:
        honest = StaticDraft._top
        patch.setattr(StaticDraft, "_top", lambda self, rows, logits: honest(self, later(rows), logits))

    @staticmethod
    def stops_have_children(patch: pytest.MonkeyPatch) -> None:
        honest = static_ranking.DenseCandidates.__init__
        patch.setattr(static_ranking.DenseCandidates, "__init__", lambda self, limit, stops, least: honest(
            self, limit, torch.full_like(stops, -2), least
        ))

    @staticmethod
    def padding_writes(patch: pytest.MonkeyPatch) -> None:
        """What stands behind a walk's end goes to the lane as well."""
        honest = StaticDraft._entries

        def entries(self: Any, seats: Any, walked: Any) -> Any:
            longer = torch.where(walked.accept_lens > 0, walked.paths.shape[1], 0).int()
            return honest(self, seats, replace(walked, accept_lens=longer, committed=(
                walked.committed + longer - walked.accept_lens
            )))

        patch.setattr(StaticDraft, "_entries", entries)


@pytest.mark.parametrize("fault", [n for n in vars(Faults) if not n.startswith("_")])
def test_the_check_sees_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    getattr(Faults, fault)(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(run(monkeypatch, learned(min_chance=0.05), {"window": 6}, PARAMS))
