"""FusedLevels against TorchLevels, level by level over the same nodes. Under Triton's interpreter by
children_interpreted.py, on a GPU by tests/gpu/test_learned.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.engine.test_learned import learned
from tlt_engine import Profile
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.lanes import Lanes
from tlt_engine.speculation.learned_pass import EaglePass
from tlt_engine.speculation.static_draft import Seats, StaticDraft, Verified
from tlt_engine.speculation.static_levels import FusedLevels, TorchLevels
from tlt_engine.speculation.static_ranking import Expanded

LENGTH = 250
STOPS = (229, 9, 150, 1)  # entries of each request: beyond a circle, in the first turn, of one walk alone; padding
ORIGINS = (37, 0, 0, 0)
ACCEPTED = (5, 2, 4, 0)


def compare_levels(model: EagleModel, profile: Profile, atol: float) -> None:
    """Three requests and one of padding. The lanes hold random keys, values and hidden states."""
    device, live = model.device, 3
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    def ints(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    torch_way, fused = (make(model, profile) for _ in range(2))
    fused.fuse()
    lanes = torch_way.lanes
    lanes.kv.data.copy_(random(*lanes.kv.data.shape))
    lanes.ring_flat.copy_(random(*lanes.ring_flat.shape))
    fused.lanes.kv.data.copy_(lanes.kv.data)
    fused.lanes.ring_flat.copy_(lanes.ring_flat)
    seats = Seats(
        ints([2, 0, 1, lanes.nobody]), ints(ORIGINS), ints([LENGTH] * 4), ints([11, 12, 13, 0]), ints([3, 4, 5, 0]),
        ints([0, 1, 0, 0]), torch.ones(4, device=device), torch.ones(4, device=device), ints([[-2] * 4] * 4),
        ints([live], torch.int32),
    )
    steps = profile.depth + 1
    accepted = [min(n, steps) for n in ACCEPTED]
    paths = [[2 * d if d < n else -1 for d in range(steps)] for n in accepted]
    tokens = torch.randint(0, model.config.vocab_size, (4, steps), generator=generator).to(device)
    indptr = ints([20 * min(b, live) for b in range(5)], torch.int32)
    hidden = [random(20 * live, model.config.target_hidden_size) for _ in model.config.aux_layers]
    committed = ints(STOPS, torch.int32)
    walked = Verified(ints(accepted, torch.int32), ints(paths, torch.int32), tokens, indptr, committed, hidden)
    with torch.inference_mode():
        for one in (torch_way, fused):
            one.extend(seats, walked)
        assert torch.equal(fused.lanes.ring, lanes.ring)
        same(fused, torch_way, atol)
        close(fused.hidden[:live], torch_way.hidden[:live], atol)
        close(fused.logits[:live], torch_way.logits[:live], atol)
        states = torch_way.hidden
        mine, theirs = fused._levels(seats, committed), torch_way._levels(seats, committed)
        assert isinstance(mine, FusedLevels) and isinstance(theirs, TorchLevels)
        assert torch.equal(mine.limits, theirs.limits)
        above = 1
        for width in [n // profile.top_k for n in fused._level_sizes()[1:]]:
            up = torch.randint(0, above, (4, width), generator=generator).to(device)
            ids = torch.randint(0, model.config.vocab_size, (4, width), generator=generator).to(device)
            nodes = Expanded(up, up, ids, up.float())
            (got, got_rows), (wanted, wanted_rows) = mine.next(nodes, states), theirs.next(nodes, states)
            for name in ("keys", "positions", "samples", "segments"):
                assert torch.equal(getattr(got_rows.ids, name), getattr(wanted_rows.ids, name)), name
            assert torch.equal(got_rows.temperature, wanted_rows.temperature)
            same(fused, torch_way, atol)
            close(got.hidden[: live * width], wanted.hidden[: live * width], atol)
            close(got.logits[: live * width], wanted.logits[: live * width], atol)
            assert bool(got.logits.isfinite().all()), "padding"
            states, above = wanted.hidden, width


def make(model: EagleModel, profile: Profile) -> StaticDraft:
    c = model.config
    width = min(profile.top_k, 8)
    lanes = Lanes(
        4, window=c.window, max_len=LENGTH, tree_slots=(profile.depth - 1) * width,
        width=len(c.aux_layers) * c.target_hidden_size, kv_heads=c.num_kv_heads, head_dim=c.head_dim, page_size=16,
        dtype=model.dtype, device=model.device,
    )
    static = StaticDraft(
        model, lanes, EaglePass(model, lanes, LENGTH + profile.depth), learned(profile=profile, min_chance=0.0),
        batch=4, width=width, vocab_limit=None,
    )
    static.fused, static._passes = False, None
    return static


def same(fused: StaticDraft, torch_way: StaticDraft, atol: float) -> None:
    """K and V of all lanes; the dummy's are anybody's."""
    pages = fused.lanes.dummy_slot // fused.lanes.kv.page_size
    close(fused.lanes.kv.data[:, :, :pages], torch_way.lanes.kv.data[:, :, :pages], atol)


def close(mine: Tensor, theirs: Tensor, atol: float) -> None:
    torch.testing.assert_close(mine.float(), theirs.float(), atol=atol, rtol=atol)
