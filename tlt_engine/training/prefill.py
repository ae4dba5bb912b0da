"""Hidden states of given texts: causal passes of the target over token lists. Knows neither buffers nor sampling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.transformer import Transformer
from tlt_engine.types import StepInputs

PAGE = 16
_ids = itertools.count(1)


@dataclass(frozen=True)
class FilledRun:
    """As speculation.hidden.HiddenRun. seq_id is negative, so that it can be no running sequence's."""

    seq_id: int
    first: int
    rows: range


@dataclass(frozen=True)
class Filled:
    """One pass. ended: (seq_id, token ids) of the texts whose last row it holds."""

    hidden: dict[int, Tensor]
    runs: list[FilledRun]
    ended: list[tuple[int, Sequence[int]]]


def prefill(
    model: Transformer, token_lists: Iterable[Sequence[int]], layers: Sequence[int], *, max_rows: int
) -> Iterator[Filled]:
    """Passes of at most max_rows rows over all tokens of the lists; a longer list takes passes of its own. Empty lists
    are passed over. KV lives here and is gone afterwards."""
    if max_rows < 1:
        raise refuse("max_rows", "at least 1", max_rows, "enlarge it")
    for group in _groups(token_lists, max_rows):
        yield from _passes(model, group, layers, max_rows)


def _groups(token_lists: Iterable[Sequence[int]], max_rows: int) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    rows = 0
    for token_ids in token_lists:
        if group and rows + len(token_ids) > max_rows:
            yield group
            group, rows = [], 0
        if len(token_ids):
            group.append(token_ids)
            rows += len(token_ids)
    if group:
        yield group


def _passes(
    model: Transformer, group: list[Sequence[int]], layers: Sequence[int], max_rows: int
) -> Iterator[Filled]:
    """A group of several lists is one pass; a single list may take many."""
    longest = max(map(len, group))
    if longest > model.max_model_len:
        raise refuse("token_lists", f"lists of at most max_model_len = {model.max_model_len} tokens", longest,
                     "cut them, or load the model with a larger max_model_len")
    pages = -(-longest // PAGE)
    kv = model.new_kv(len(group) * pages, PAGE)
    ids = [-next(_ids) for _ in group]
    for start in range(0, longest, max_rows):
        chunks = [token_ids[start : start + max_rows] for token_ids in group]
        hidden = model.forward(_inputs(model, chunks, start, pages), kv, capture=layers).hidden
        bounds = [0, *itertools.accumulate(map(len, chunks))]
        runs = [FilledRun(i, start, range(a, b)) for i, a, b in zip(ids, bounds, bounds[1:])]
        over = start + max_rows >= longest
        yield Filled(hidden, runs, list(zip(ids, group)) if over else [])


def _inputs(model: Transformer, chunks: list[Sequence[int]], start: int, pages: int) -> StepInputs:
    """Causal chunks that begin at position `start`; request b owns pages [b * pages, (b + 1) * pages)."""
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    owners = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
    first = lengths.cumsum(0) - lengths
    positions = start + torch.arange(len(owners)) - first[owners]
    to = lambda t: t.to(model.device)  # noqa: E731
    return StepInputs(
        token_ids=to(torch.tensor([t for chunk in chunks for t in chunk], dtype=torch.int64)),
        positions=to(positions), slots=to(owners * pages * PAGE + positions),
        page_table=to(torch.arange(len(chunks) * pages, dtype=torch.int32).view(len(chunks), pages)),
        prefix_lens=to(torch.full((len(chunks),), start, dtype=torch.int32)),
        node_indptr=to(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()),
        ancestors=to(torch.zeros(len(owners), 2, dtype=torch.int64)),
        causal=to(torch.ones(len(chunks), dtype=torch.uint8)), logit_rows=to(torch.empty(0, dtype=torch.int64)),
    )
