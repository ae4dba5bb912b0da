"""Inputs and outputs of the sampling ops. Shape legend: R rows (one per tree node), V vocabulary, B requests.

This module knows nothing of requests, engines or text: a row is a distribution to draw from, with its identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # a temperature below this means argmax, as docs/seeds.md says


@dataclass(frozen=True)
class NoiseIds:
    """Whose noise a row draws: its identity (docs/seeds.md). All int64 [R].

    keys: the 64-bit Philox key as a signed bit pattern. positions: absolute index of the token being drawn.
    samples: sample index. segments: rises with each change of weights under the request. The last three lie in
    [0, 2**32).
    """

    keys: Tensor
    positions: Tensor
    samples: Tensor
    segments: Tensor

    def __getitem__(self, rows: Tensor | slice) -> NoiseIds:
        return NoiseIds(self.keys[rows], self.positions[rows], self.samples[rows], self.segments[rows])


@dataclass(frozen=True)
class RowParams:
    """How each row's logits are processed. Order: allowed mask, bias (bans included), penalties, temperature, min-p,
    top-k, top-p. `None` means that no row uses the step.

    temperature fp32 [R]; below GREEDY_BELOW the row is greedy and min-p, top-k, top-p are no-ops.
    top_k int32 [R], 0 = off. top_p fp32 [R], 1 = off. min_p fp32 [R], 0 = off.

    allowed_row int32 [R]: index into allowed_bits, -1 = all ids. allowed_bits int32 [A, ceil(V / 32)], bit v % 32 of
    word v // 32.
    bias_row int32 [R]: index of a bias list, -1 = none. List i is bias_ids / bias_values
    [bias_indptr[i] : bias_indptr[i + 1]] (indptr int32, ids int64, values fp32); values of an id given twice add up, a
    value of -inf bans the id (min_tokens).

    repetition, presence, frequency fp32 [R] (1, 0, 0 = off). history_row int32 [R]: which history the row's request
    has, -1 = none. History i is history_ids[history_indptr[i] : history_indptr[i + 1]] (ids int64, indptr int32), the
    prompt's ids first, history_prompt[i] (int32) of them; ids that do not exist are ignored. parent_row int32 [R]: the
    row of the tree node's parent, -1 for a root; a row's own history is that list followed by the tokens of its branch
    below the root, node_tokens int64 [R]. branch_tokens int64 [R, D], in place of the two: the tokens of the branch
    itself, the row's own node among them, for rows whose ancestors are not rows of the same call; below 0 = none.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    allowed_row: Tensor | None = None
    allowed_bits: Tensor | None = None
    bias_row: Tensor | None = None
    bias_indptr: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    history_row: Tensor | None = None
    history_indptr: Tensor | None = None
    history_ids: Tensor | None = None
    history_prompt: Tensor | None = None
    parent_row: Tensor | None = None
    node_tokens: Tensor | None = None
    branch_tokens: Tensor | None = None

    @staticmethod
    def plain(rows: int, temperature: float = 1.0, device: torch.device | str = "cpu") -> RowParams:
        return RowParams(torch.full((rows,), temperature, dtype=torch.float32, device=device))


@dataclass(frozen=True)
class SampleResult:
    """tokens int64 [R]: the perturbed argmax, or -1 where the row holds NaN or +inf or no id survives.
    logprobs fp32 [R]: of the processed distribution (greedy rows: at temperature 1, without min-p, top-k, top-p).
    raw_logprobs fp32 [R] or None: log_softmax of the unmodified logits over all V columns, when asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor | None = None


@dataclass(frozen=True)
class DraftTop:
    """The k best drafts of each row, best first, all [R, k]. tokens int64: target ids; draft_ids int64: columns of the
    draft logits; both -1 where no id is left, all through a row that holds NaN or +inf. logprobs fp32: log q, of the
    processed draft distribution (greedy rows: at temperature 1); scores fp32: log q + g, or log q where no noise is
    looked at; both -inf beside -1.
    """

    tokens: Tensor
    draft_ids: Tensor
    scores: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Walk:
    """The equality walk's result for B requests, D the largest depth + 1.

    accept_lens int32 [B]: tokens emitted by this pass, bonus token included (>= 1).
    paths int32 [B, D]: local node indices of the accepted path, the root (0) first; -1 beyond accept_lens.
    tokens int64 [B, D]: the emitted tokens; entry i was drawn at node paths[i]; -1 beyond accept_lens (and at the
    last entry when that row had no valid token).
    """

    accept_lens: Tensor
    paths: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class PackedTrees:
    """Draft trees of B requests, packed. Node 0 of each is its root; a parent stands before its children.

    tokens int64 [R]; parents int32 [R] local index, -1 for the root; depths int32 [R], root 0;
    ancestors int64 [R, 2]: bit j % 64 of word j // 64 set when local node j is the node itself or its ancestor;
    node_indptr int32 [B + 1].
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    node_indptr: Tensor
