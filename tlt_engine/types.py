"""The tensors that one target pass takes and gives. Shape legend: R packed rows, B requests, L layers, V vocabulary.

Knows neither requests nor text. The same call serves prefill (a causal chunk), plain decoding (a tree with a root
only) and verification (a draft tree); one step may mix them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

MAX_NODES = 128  # nodes of one draft tree, the root included: two 64-bit ancestor words a row


@dataclass(frozen=True)
class StepInputs:
    """One packed step. Row i of request b is its node i - node_indptr[b]; its K and V go to logical slot
    prefix_lens[b] + (i - node_indptr[b]) of the request's pages, whose flat address is slots[i].

    token_ids int64 [R]. positions int64 [R]: absolute position for rope (prefix + depth, not + node index).
    slots int64 [R]: page * page_size + offset. page_table int32 [B, P]: page of each logical page, rows padded with 0.
    prefix_lens int32 [B]: keys already committed. node_indptr int32 [B + 1].
    ancestors int64 [R, 2]: as PackedTrees. causal uint8 [B]: 1 for a chunk in which every row sees all earlier rows
    (any length; ancestors ignored), 0 for a tree of at most MAX_NODES.
    logit_rows int64 [Rl]: rows whose logits are wanted, ascending.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    prefix_lens: Tensor
    node_indptr: Tensor
    ancestors: Tensor
    causal: Tensor
    logit_rows: Tensor


@dataclass(frozen=True)
class StepOutputs:
    """logits [Rl, V] in the head's dtype (EngineConfig.lm_head_dtype). hidden: {index: [R, hidden]} for the indices
    asked for, numbered as transformers' hidden_states: 0 is the embedding, i the output of layer i - 1, and the
    number of layers the input of the final norm."""

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
