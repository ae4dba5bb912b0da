"""What a learned drafter's rows are made of, a launch where torch takes ten: the entries of a walk's tokens, and the
nodes of a draft level. Knows addresses, no checks; what is computed is tlt_engine.speculation.static_draft's.

Shape legend: B requests, S columns of a walk, M nodes of a level a request, N of a whole tree, Ht target hidden,
H drafter hidden, R rows: B * S or B * M.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tlt_kernels.triton.launch import dependent

MAX_LAYERS = 3  # hidden states side by side: EAGLE-3's drafters have that many


@dataclass(frozen=True)
class Places:
    """Where a drafter keeps what it knows (tlt_engine.speculation.lanes.Lanes). window: rows of a lane's ring;
    slots_each: K/V slots of a lane; nobody: the lane of padding; dummy_slot: where its K and V go."""

    window: int
    slots_each: int
    nobody: int
    dummy_slot: int


@triton.jit
def _normed(x, scale, eps, H: tl.constexpr):
    """As rms_norm_kernel rounds."""
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype)
    return (scale.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)


@triton.jit
def walk_kernel(
    accept_lens, paths, tokens, node_indptr, committed, lane, origin, hidden0, hidden1, hidden2, embed, scale, ring,
    aux, inputs, positions, slots, last, stride, window, slots_each, nobody, dummy_slot, eps, S: tl.constexpr,
    LAYERS: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * S, LAYERS + 1): the hidden states of one layer of one entry, or all else of it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b, s = row // S, row % S
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    accepted = tl.load(accept_lens + b).to(tl.int64)
    stop = tl.load(committed + b).to(tl.int64)
    seat = tl.load(lane + b)
    position = stop - accepted + s
    # Of a walk longer than the window only its end has room in the ring, and can be seen from the last entry.
    wanted = (s < accepted) & (position >= stop - window) & (position >= 0) & (seat < nobody)
    if part == LAYERS:
        column = tl.arange(0, BLOCK_H)
        inside = column < H
        token = tl.where(wanted, tl.maximum(tl.load(tokens + row), 0), 0)
        x = tl.load(embed + token * H + column, mask=inside, other=0.0)
        tl.store(inputs + row * (2 * H) + column,
                 _normed(x, tl.load(scale + column, mask=inside, other=0.0), eps, H), mask=inside)
        place = seat * slots_each + (position - tl.load(origin + b)) % slots_each
        tl.store(slots + row, tl.where(wanted, place, dummy_slot))
        tl.store(positions + row, tl.where(wanted, position, 0))
        if s == 0:
            tl.store(last + b, b * S + tl.minimum(tl.maximum(accepted - 1, 0), S - 1))
    else:
        column = tl.arange(0, BLOCK_W)
        inside = column < WIDTH
        source = hidden0
        if part == 1:
            source = hidden1
        elif part == 2:
            source = hidden2
        node = tl.where(wanted, tl.load(node_indptr + b) + tl.load(paths + row), 0).to(tl.int64)
        x = tl.load(source + node * stride + column, mask=inside, other=0.0)
        tl.store(aux + (row * LAYERS + part) * WIDTH + column, x, mask=inside)
        kept = (seat * window + position % window) * LAYERS + part
        tl.store(ring + kept * WIDTH + column, x, mask=inside & wanted)


@triton.jit
def fused_kernel(
    hidden, last, scale, inputs, residual, eps, S: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * S,): the other half of the inputs, and the residual stream of each request's last entry."""
    row = tl.program_id(0).to(tl.int64)
    b = row // S
    column = tl.arange(0, BLOCK)
    inside = column < H
    weight = tl.load(scale + column, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(hidden + row * H + column, mask=inside, other=0.0)
    tl.store(inputs + row * (2 * H) + H + column, _normed(x, weight, eps, H), mask=inside)
    tl.store(residual + b * H + column, x, mask=inside & (tl.load(last + b) == row))


@triton.jit(do_not_specialize=["above", "first", "parents", "depth", "n"])
def level_kernel(
    tokens, up, hidden, embed, token_scale, hidden_scale, committed, lane, origin, keys, samples, segments, temperature,
    inputs, residual, positions, slots, bits, row_keys, row_draws, row_samples, row_segments, row_temperature,
    slots_each, nobody, dummy_slot, length, eps, above, first, parents, depth, n, M: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (B * M,). above: nodes of the levels above; first: the first of the level right above, -1 the root; parents:
    how many that has; n: N."""
    row = tl.program_id(0).to(tl.int64)
    b, m = row // M, row % M
    column = tl.arange(0, BLOCK)
    inside = column < H
    token_weight = tl.load(token_scale + column, mask=inside, other=0.0)
    hidden_weight = tl.load(hidden_scale + column, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    parent = tl.load(up + row)
    h = tl.load(hidden + (b * parents + parent) * H + column, mask=inside, other=0.0)
    e = tl.load(embed + tl.load(tokens + row) * H + column, mask=inside, other=0.0)
    tl.store(residual + row * H + column, h, mask=inside)
    tl.store(inputs + row * (2 * H) + column, _normed(e, token_weight, eps, H), mask=inside)
    tl.store(inputs + row * (2 * H) + H + column, _normed(h, hidden_weight, eps, H), mask=inside)

    stop = tl.load(committed + b).to(tl.int64)
    seat = tl.load(lane + b)
    node = above + m
    place = seat * slots_each + (stop + node - tl.load(origin + b)) % slots_each
    tl.store(slots + row, tl.where(seat < nobody, place, dummy_slot))
    # Beyond the end only nodes stand whose requests draft no deeper: their outputs are thrown away.
    tl.store(positions + row, tl.minimum(tl.maximum(stop - 1, 0) + depth, length - 1))
    own = (node * 0 + 1) << (node % 64)
    low, high = tl.where(node < 64, own, 0), tl.where(node < 64, 0, own)
    inherited = bits + (b * n + tl.maximum(first, 0) + parent) * 2
    low |= tl.load(inherited, mask=first >= 0, other=0)
    high |= tl.load(inherited + 1, mask=first >= 0, other=0)
    tl.store(bits + (b * n + node) * 2, low)
    tl.store(bits + (b * n + node) * 2 + 1, high)
    tl.store(row_keys + row, tl.load(keys + b))
    tl.store(row_samples + row, tl.load(samples + b))
    tl.store(row_segments + row, tl.load(segments + b))
    tl.store(row_temperature + row, tl.load(temperature + b))
    tl.store(row_draws + row, stop + 1 + depth)


@triton.jit(do_not_specialize=["depth"])
def begin_kernel(committed, end, limits, draws, most, depth):
    """Grid (B,)."""
    b = tl.program_id(0)
    stop = tl.load(committed + b).to(tl.int64)
    tl.store(limits + b, tl.minimum(tl.minimum(tl.load(end + b) - 1, most) - stop - 1, depth))
    tl.store(draws + b, stop + 1)


@dataclass(frozen=True)
class WalkRows:
    """inputs [R, 2 H], the half of the hidden states still to come (`fused_rows`); aux [R, layers * Ht]; positions,
    slots int64 [R]; last int64 [B]: each request's last row."""

    inputs: Tensor
    aux: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor


def walk_rows(
    accept_lens: Tensor, paths: Tensor, tokens: Tensor, node_indptr: Tensor, committed: Tensor, lane: Tensor,
    origin: Tensor, hidden: Sequence[Tensor], embed: Tensor, scale: Tensor, ring: Tensor, places: Places, eps: float,
) -> WalkRows:
    """hidden: 1 to MAX_LAYERS of [rows, Ht], equal strides, dense within a row; ring [.., layers * Ht]: the wanted
    entries' are written there too. Other arguments as speculation.static_draft has them, contiguous."""
    (batch, steps), width, features = paths.shape, hidden[0].shape[1], embed.shape[1]
    rows, device, layers = batch * steps, embed.device, len(hidden)
    positions, slots = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    out = WalkRows(
        torch.empty(rows, 2 * features, dtype=embed.dtype, device=device),
        torch.empty(rows, layers * width, dtype=embed.dtype, device=device),
        positions, slots, torch.empty(batch, dtype=torch.int64, device=device),
    )
    blocks = triton.next_power_of_2(width), triton.next_power_of_2(features)
    three = [hidden[min(i, layers - 1)] for i in range(MAX_LAYERS)]
    walk_kernel[(rows, layers + 1)](
        accept_lens, paths, tokens, node_indptr, committed, lane, origin, *three, embed, scale, ring, out.aux,
        out.inputs, out.positions, out.slots, out.last, hidden[0].stride(0), places.window, places.slots_each,
        places.nobody, places.dummy_slot, eps, S=steps, LAYERS=layers, WIDTH=width, H=features, BLOCK_W=blocks[0],
        BLOCK_H=blocks[1], num_warps=warps(max(blocks)), **dependent(device),
    )
    return out


def fused_rows(hidden: Tensor, entries: WalkRows, scale: Tensor, eps: float) -> Tensor:
    """hidden [R, H]: of the entries, mixed from their layers. Completes entries.inputs; hidden of each request's last
    row [B, H]."""
    rows, features = hidden.shape
    batch, block = len(entries.last), triton.next_power_of_2(features)
    residual = torch.empty(batch, features, dtype=hidden.dtype, device=hidden.device)
    fused_kernel[(rows,)](
        hidden, entries.last, scale, entries.inputs, residual, eps, S=rows // batch, H=features, BLOCK=block,
        num_warps=warps(block), **dependent(hidden.device),
    )
    return residual


@dataclass(frozen=True)
class LevelRows:
    """inputs [R, 2 H]; residual [R, H]; positions, slots int64 [R]; keys, draws, samples, segments int64 [R] and
    temperature fp32 [R]: whose noise their children are drawn with, and where."""

    inputs: Tensor
    residual: Tensor
    positions: Tensor
    slots: Tensor
    keys: Tensor
    draws: Tensor
    samples: Tensor
    segments: Tensor
    temperature: Tensor


def level_rows(
    tokens: Tensor, up: Tensor, hidden: Tensor, embed: Tensor, scales: tuple[Tensor, Tensor], committed: Tensor,
    lane: Tensor, origin: Tensor, noise: tuple[Tensor, Tensor, Tensor, Tensor], bits: Tensor, places: Places,
    eps: float, *, depth: int, above: int, parents: int, length: int,
) -> LevelRows:
    """tokens, up int64 [B, M]: nodes at `depth`, and which of the `parents` nodes of the level above is the parent;
    hidden [B * parents, H]: their outputs. scales: of the norms of embeddings and of hidden. noise: keys, samples,
    segments int64 and temperature fp32 [B]. bits int64 [>= B, N, 2]: ancestors, those of the levels above are there;
    above: how many nodes these have. length: positions stay below it."""
    (batch, nodes), features, device = tokens.shape, embed.shape[1], embed.device
    rows, block = batch * nodes, triton.next_power_of_2(features)
    names = ("positions", "slots", "keys", "draws", "samples", "segments")
    out = LevelRows(
        torch.empty(rows, 2 * features, dtype=embed.dtype, device=device),
        torch.empty(rows, features, dtype=embed.dtype, device=device), temperature=torch.empty(rows, device=device),
        **{name: torch.empty(rows, dtype=torch.int64, device=device) for name in names},
    )
    level_kernel[(rows,)](
        tokens, up, hidden, embed, *scales, committed, lane, origin, *noise, out.inputs, out.residual, out.positions,
        out.slots, bits, out.keys, out.draws, out.samples, out.segments, out.temperature, places.slots_each,
        places.nobody, places.dummy_slot, length, eps, above, above - parents if above else -1, parents, depth,
        bits.shape[1], M=nodes, H=features, BLOCK=block, num_warps=warps(block), **dependent(device),
    )
    return out


def begin(committed: Tensor, end: Tensor, *, most: int, depth: int) -> tuple[Tensor, Tensor]:
    """int64 [B] both: depth of each request's tree, at most `depth`, so that no node's child lies at `end` or behind or
    its parent at `most` - 2; and the position that the roots' children are drawn at."""
    limits, draws = torch.empty_like(end), torch.empty_like(end)
    begin_kernel[(len(end),)](committed, end, limits, draws, most, depth, num_warps=1)
    return limits, draws


def warps(block: int) -> int:
    return max(1, min(16, block // 512))
