"""Scripted passes for the hidden-state buffer: every value says whose row it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.records import Piece

HIDDEN = 4
LAYERS, LAST = (1, 2), 3


@dataclass(frozen=True)
class ScriptedRun:
    seq_id: int
    first: int
    rows: list[int]


@dataclass(frozen=True)
class ScriptedRows:
    hidden: dict[int, Tensor]
    runs: list[ScriptedRun]


def value(seq_id: int, position: int, policy: int, layer: int) -> Tensor:
    """[HIDDEN] fp32: exact small integers."""
    return torch.tensor([float(seq_id), float(position), float(policy), float(layer)])


def one_pass(runs: list[tuple[int, int, int]], policy: int = 0) -> ScriptedRows:
    """runs: (seq_id, first position, rows). Between two runs lie rows of rejected drafts, which nobody may keep."""
    hidden: dict[int, list[Tensor]] = {layer: [] for layer in (*LAYERS, LAST)}
    listed, at = [], 0
    for seq_id, first, count in runs:
        for layer, rows in hidden.items():
            rows.append(value(-1, -1, -1, layer))
            rows.extend(value(seq_id, first + i, policy, layer) for i in range(count))
        index = list(range(at + 1, at + 1 + count))
        listed.append(ScriptedRun(seq_id, first, index))
        at += 1 + count
    empty = torch.empty(0, HIDDEN)
    return ScriptedRows({k: torch.stack(rows) if rows else empty for k, rows in hidden.items()}, listed)


def small_buffer(*, pages: int = 64, page_rows: int = 4, stage_rows: int = 8, **more: object) -> HiddenStateBuffer:
    page_bytes = page_rows * (len(LAYERS) + 1) * HIDDEN * 4
    return HiddenStateBuffer(
        LAYERS, LAST, HIDDEN, byte_budget=pages * page_bytes, page_rows=page_rows, stage_rows=stage_rows, **more,  # type: ignore[arg-type]
    )


def loaded(buffer: HiddenStateBuffer, piece: Piece) -> tuple[Tensor, Tensor]:
    """(aux [rows, k * HIDDEN], last [rows, HIDDEN])."""
    out = torch.empty(piece.rows, buffer.width)
    buffer.load(piece, out)
    return out[:, buffer.aux_columns], out[:, buffer.last_columns]


def misaligned(buffer: HiddenStateBuffer, piece: Piece, owners: dict[int, list[int]] | None = None) -> list[str]:
    """Complaints about rows that are not the ones of their sequence, position and policy. Token t of sequence s is
    100 s + t in these scripts. owners: of forks, whose pass computed each leading position."""
    aux, last = loaded(buffer, piece)
    complaints = []
    for i in range(piece.rows):
        position, policy = piece.first + i, piece.record.policy
        owner = owner_of(piece.record.seq_id, position, owners)
        for name, row, layers in (("aux", aux[i], LAYERS), ("last", last[i], (LAST,))):
            want = torch.cat([value(owner, position, policy, layer) for layer in layers])
            if not torch.equal(row, want):
                complaints.append(f"{name} of position {position}: {row.tolist()} != {want.tolist()}")
        if int(piece.tokens[i]) != 100 * owner + position:
            complaints.append(f"token of position {position}: {int(piece.tokens[i])}")
    return complaints


def owner_of(seq_id: int, position: int, owners: dict[int, list[int]] | None) -> int:
    known = (owners or {}).get(seq_id, [])
    return known[position] if position < len(known) else seq_id


def script_tokens(seq_id: int, count: int, owners: dict[int, list[int]] | None = None) -> list[int]:
    return [100 * owner_of(seq_id, i, owners) + i for i in range(count)]
