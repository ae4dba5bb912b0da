"""A reduced draft vocabulary, chosen from token counts. Knows neither texts nor models.

The head is most of a small drafter's cost (152k rows of a 7B target against 32k), and a few ids make up nearly all of
what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tlt_engine.config import refuse


def count_tokens(token_lists: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """int64 [vocab_size]: how often each id occurs."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids in token_lists:
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise refuse("token_lists", f"ids in [0, {vocab_size})", (int(ids.min()), int(ids.max())),
                         "count with the target's vocabulary")
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def choose_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Ascending target ids int64 [size]: `always` (EOS ids belong there: a drafter that cannot propose the end drafts
    past it every time), then the most frequent; equal counts go to the lower id. For EagleModel.set_vocabulary."""
    kept = sorted(set(always))
    if not max(1, len(kept)) <= size <= len(counts):
        raise refuse("size", f"at least the {len(kept)} ids of `always`, at most the vocabulary's {len(counts)}", size,
                     "choose another size")
    ranked = counts.clone()
    ranked[torch.tensor(kept, dtype=torch.int64)] = int(counts.max()) + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def vocabulary_maps(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t int64 [Vd] of offsets: target id = draft id + d2t[draft id]; t2d bool [V]), as checkpoints hold them."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    return target_ids - torch.arange(len(target_ids)), t2d


def coverage(counts: Tensor, target_ids: Tensor) -> float:
    """Share of all counted tokens that the draft vocabulary holds: a bound on acceptance."""
    total = int(counts.sum())
    return int(counts[target_ids].sum()) / total if total else 0.0
