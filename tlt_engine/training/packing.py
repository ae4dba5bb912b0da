"""Sequences of any lengths side by side in one row of tokens, without padding. Knows neither losses nor models.

Shape legend: R packed rows, k aux layers, Ht target hidden.

Attention, positions and targets are all taken from `starts` and `ends`, so no row sees, or is trained on, another
sequence's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.records import Piece


@dataclass(frozen=True)
class PackedRows:
    """tokens int64 [R]; aux [R, k Ht] and last [R, Ht], the target's hidden states with that token as input; positions
    int64 [R], absolute within the row's own sequence; starts, ends int64 [R]: first and last packed row of the row's
    sequence; usable bool [R]: False for entries that may not be trained: context, and sequences that are not finite.
    longest: rows of the longest one."""

    tokens: Tensor
    aux: Tensor
    last: Tensor
    positions: Tensor
    starts: Tensor
    ends: Tensor
    usable: Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.tokens)

    def trained(self, step: int) -> Tensor:
        """bool [R]: may the output of row r at unroll step `step` be trained? It predicts the token behind row
        r + step + 1, so that row must be there for its teacher."""
        rows = torch.arange(len(self), device=self.starts.device)
        return self.usable & (rows + step + 1 <= self.ends)


def pack(
    tokens: Sequence[Tensor], aux: Tensor, last: Tensor, firsts: Sequence[int],
    trained_from: Sequence[int] | None = None,
) -> PackedRows:
    """tokens: int64 [n_i] of each sequence; aux and last: their rows one behind the other; firsts: absolute positions
    of their first rows; trained_from: the first row of each that is an entry to train (n_i: none), 0 by default.
    Everything comes to aux' device."""
    lengths = [len(t) for t in tokens]
    if sum(lengths) != len(aux) or len(aux) != len(last) or len(firsts) != len(tokens):
        raise refuse("pack", "as many hidden rows as tokens", f"{sum(lengths)} tokens, {len(aux)} and {len(last)} rows",
                     "give each token the hidden states of its own position")
    device = aux.device
    counts = torch.tensor(lengths, dtype=torch.int64)
    ends = counts.cumsum(0) - 1
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    starts = (ends - counts + 1)[owner]
    positions = torch.arange(len(owner)) - starts + torch.tensor(firsts, dtype=torch.int64)[owner]
    least = torch.zeros(len(lengths), dtype=torch.int64) if trained_from is None else torch.tensor(trained_from)
    usable = torch.arange(len(owner)) - starts >= least[owner]
    to = lambda t: t.to(device, non_blocking=True)  # noqa: E731
    return PackedRows(
        tokens=to(torch.cat(list(tokens))), aux=aux, last=last, positions=to(positions), starts=to(starts),
        ends=to(ends[owner]), usable=to(usable), longest=max(lengths),
    )


def pack_pieces(
    buffer: HiddenStateBuffer, pieces: Sequence[Piece], device: torch.device
) -> tuple[PackedRows, int]:
    """The pieces of a draw, copied to `device`, and how many of them can be trained on. A sequence with a value that is
    not finite is zeroed, made unusable and dropped from the buffer. Waits for the copies, as the pieces go back to the
    buffer behind the call."""
    rows = [piece.rows for piece in pieces]
    states = torch.empty(sum(rows), buffer.width, dtype=buffer.dtype, device=device)
    for piece, block in zip(pieces, states.split(rows)):
        buffer.load(piece, block)
    finite = states.isfinite().all(-1).cpu()
    good = [bool(block.all()) for block in finite.split(rows)]
    for piece, block, fine in zip(pieces, states.split(rows), good):
        if not fine:
            block.zero_()
            buffer.reject(piece)
    tokens, firsts = [piece.tokens for piece in pieces], [piece.first for piece in pieces]
    trained_from = [piece.trained_from if fine else piece.rows for piece, fine in zip(pieces, good)]
    packed = pack(tokens, states[:, buffer.aux_columns], states[:, buffer.last_columns], firsts, trained_from)
    return packed, sum(good)
