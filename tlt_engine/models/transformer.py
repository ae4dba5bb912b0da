"""The target model's forward pass over packed rows. Shape legend: R packed rows, B requests, L layers, V vocabulary,
H hidden, Hq / Hkv query and key-value heads, D head dimension.

Knows neither requests nor sampling: token ids, positions and cache slots in, logits and hidden states out. The same
pass serves prefill, plain decoding and verification. No host sync and no data-dependent Python: safe in a CUDA graph.
In fp32 on the CPU a row's bits depend on its own context only, not on the other rows of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from tlt_kernels.activation import silu_mul
from tlt_kernels.attention import tree_attention
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models.config import ModelConfig
from tlt_engine.models.rope import rope_tables
from tlt_engine.models.weights import LayerWeights, LoadReport, Weights
from tlt_engine.types import StepInputs, StepOutputs


class Transformer:
    """A model with uninitialised weights: fill them with load_weights (or build it with loader.load_model).

    All weights live in `weights`, allocated once; loading and later updates copy in place, so addresses never move.
    `lm_head_dtype` other than `dtype` keeps a copy of the head in that dtype, refreshed by every load.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        lm_head_dtype: torch.dtype | None = None, max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.empty((0,), device=device).device  # "cuda" resolved to the GPU it means, as tensors say it
        self.max_model_len = max_model_len or config.context_limit
        config.check_length(self.max_model_len)
        if config.rope.rotary_dim > config.head_dim:  # the ops are called unchecked and would write past a head
            raise refuse("rope.rotary_dim", f"at most head_dim = {config.head_dim}", config.rope.rotary_dim,
                         "correct the config")
        self.weights = Weights(config, dtype=dtype, device=self.device, lm_head_dtype=lm_head_dtype)
        self.cos, self.sin = rope_tables(config.rope, self.max_model_len, self.device)
        self._scale = config.head_dim**-0.5
        self.users: WeakSet[object] = WeakSet()  # engines built on it

    @property
    def lm_head_dtype(self) -> torch.dtype:
        return self.weights.head.dtype

    def new_kv(self, num_pages: int, page_size: int) -> KVStorage:
        """Zeroed KV for this model, of its dtype and on its device. page_size: tokens a page."""
        c = self.config
        return KVStorage(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, view into our fused tensors). Read only: write through load_weights, which also refreshes
        the head's copy."""
        return self.weights.named()

    def load_weights(self, weights: Any, *, strict: bool = True) -> LoadReport:
        """Copies Hugging Face tensors in place; see Weights.load."""
        return self.weights.load(weights, strict=strict)

    # no_grad, not inference_mode: the drafter's trainer saves captured hidden states for its backward pass, which torch
    # refuses for inference tensors. The difference is 0.1 ms of a 30-layer pass.
    @torch.no_grad()
    def forward(self, step: StepInputs, kv: KVStorage, *, capture: Sequence[int] = ()) -> StepOutputs:
        """Writes the rows' K and V to kv at step.slots and returns logits [Rl, V] of step.logit_rows, plus the hidden
        states [R, H] named in `capture` (StepOutputs.hidden). Positions must be below max_model_len. On the GPU
        cuda_pass.CudaPass is the fast way to the same."""
        self.check_capture(capture)
        captured: dict[int, Tensor] = {}
        x = F.embedding(step.token_ids, self.weights.embed)
        for i, layer in enumerate(self.weights.layers):
            if i in capture:
                captured[i] = x
            x = self._attention(layer, x, step, *kv.layer(i), self.config.windows[i])
            x = self._mlp(layer, x)
        if self.config.num_layers in capture:
            captured[self.config.num_layers] = x
        return StepOutputs(self._logits(x, step.logit_rows), captured)

    __call__ = forward

    def check_capture(self, capture: Sequence[int]) -> None:
        for index in capture:
            if not 0 <= index <= self.config.num_layers:
                raise refuse(
                    "capture", f"hidden states in [0, {self.config.num_layers}]", index,
                    "0 is the embedding, i the output of layer i - 1, the number of layers the input of the final norm",
                )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, checked=False)[0]

    def _attention(
        self, layer: LayerWeights, x: Tensor, step: StepInputs, k_cache: Tensor, v_cache: Tensor, window: int
    ) -> Tensor:
        qkv = linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias, checked=False)
        q = rope_write_kv(
            qkv, self.cos, self.sin, step.positions, step.slots, k_cache, v_cache, q_norm=layer.q_norm,
            k_norm=layer.k_norm, eps=self.config.rms_norm_eps, checked=False,
        )
        out = tree_attention(
            q, k_cache, v_cache, step.page_table, step.prefix_lens, step.node_indptr, step.ancestors, step.causal,
            step.positions, scale=self._scale, window=window,
        )
        return linear(out.view(len(x), -1), layer.o, layer.o_bias, base=x, checked=False)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate_up = linear(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias, checked=False)
        return linear(silu_mul(gate_up, checked=False), layer.down, layer.down_bias, base=x, checked=False)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        if len(rows) != len(x):  # logit_rows is ascending: as many as rows means all of them
            x = x[rows]
        if not len(x):  # a pass of prefill chunks alone
            return torch.empty(0, self.config.vocab_size, dtype=self.lm_head_dtype, device=self.device)
        return linear(self._norm(x, self.weights.norm).to(self.lm_head_dtype), self.weights.head)
