"""The forward pass on the GPU: Transformer.forward with fused kernels and attention planned once a step.

Shape legend: R packed rows, B requests, V vocabulary. Knows neither requests nor sampling. No host sync and no
data-dependent Python: a pass can be captured in a CUDA graph, the plan of its attention included.

The residual stream x and what a block adds to it travel apart, so that each norm does the sum: rms_norm(added,
residual=x) gives the normed rows and the new x in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tlt_kernels.linear import linear
from tlt_kernels.norm import rms_norm
from tlt_kernels.rope import rope_write_kv
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import LayerWeights
from tlt_engine.types import StepInputs, StepOutputs

if TYPE_CHECKING:
    from tlt_kernels.triton.attention import Step, TreeAttention


class CudaPass:
    """A model over one KV storage, for passes of at most max_rows rows and max_batch requests, one at a time, on one
    stream: attention's workspace is shared by all of them. Layers of one window share a plan."""

    def __init__(self, model: Transformer, kv: KVStorage, *, max_rows: int, max_batch: int) -> None:
        try:
            from tlt_kernels.triton.attention import Geometry, TreeAttention
        except ImportError as error:
            raise refuse("triton", "Triton, in which attention on the GPU is written", str(error),
                         "pip install 'tlt-engine[cuda]'") from error
        self.model, self.kv = model, kv
        c = model.config
        self._attention: dict[int, TreeAttention] = {
            window: TreeAttention(
                Geometry(c.num_heads, c.num_kv_heads, c.head_dim, kv.page_size, model.dtype, window),
                max_rows=max_rows, max_batch=max_batch, device=model.device,
            )
            for window in sorted(set(c.windows))
        }
        self._scale = c.head_dim**-0.5
        self._ieee = torch.float32 in (model.dtype, model.lm_head_dtype)

    @property
    def bytes(self) -> int:
        return sum(attention.workspace_bytes for attention in self._attention.values())

    @torch.no_grad()
    def forward(
        self, step: StepInputs, *, capture: Sequence[int] = (), logits_out: Tensor | None = None
    ) -> StepOutputs:
        """As Transformer.forward. logits_out [Rl, V], contiguous: where the logits go."""
        self.model.check_capture(capture)
        with ieee_products(self._ieee):
            return self._forward(step, capture, logits_out)

    def _forward(self, step: StepInputs, capture: Sequence[int], logits_out: Tensor | None) -> StepOutputs:
        weights = self.model.weights
        captured: dict[int, Tensor] = {}
        plans = {
            window: attention.plan(
                step.page_table, step.prefix_lens, step.node_indptr, step.ancestors, step.causal, step.positions
            )
            for window, attention in self._attention.items()
        }
        x = F.embedding(step.token_ids, weights.embed)
        added: Tensor | None = None
        for i, layer in enumerate(weights.layers):
            normed, x = self._norm(x, added, layer.input_norm)
            if i in capture:
                captured[i] = x
            mixed = self._attend(i, layer, normed, step, plans)
            mixed = linear(mixed.view(len(x), -1), layer.o, layer.o_bias, checked=False)
            normed, x = self._norm(x, mixed, layer.post_norm)
            gated = linear(normed, layer.gate_up, layer.gate_up_bias, silu_mul=True, checked=False)
            added = linear(gated, layer.down, layer.down_bias, checked=False)
        assert added is not None, "a model without layers"
        if len(step.logit_rows) != len(x) or self.model.config.num_layers in capture:
            x, added = x + added, None
            if self.model.config.num_layers in capture:
                captured[self.model.config.num_layers] = x
        return StepOutputs(self._logits(x, added, step.logit_rows, logits_out), captured)

    __call__ = forward

    def _norm(self, x: Tensor, added: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The normed rows of x + added, and that sum."""
        eps = self.model.config.rms_norm_eps
        if added is None:
            return rms_norm(x, weight, eps, checked=False)
        return rms_norm(added, weight, eps, residual=x, checked=False)

    def _attend(
        self, index: int, layer: LayerWeights, normed: Tensor, step: StepInputs, plans: dict[int, Step]
    ) -> Tensor:
        """[R, Hq, D]. Rows that belong to no request stay as they were allocated."""
        c = self.model.config
        k_cache, v_cache = self.kv.layer(index)
        qkv = linear(normed, layer.qkv, layer.qkv_bias, checked=False)
        q = rope_write_kv(
            qkv, self.model.cos, self.model.sin, step.positions, step.slots, k_cache, v_cache, q_norm=layer.q_norm,
            k_norm=layer.k_norm, eps=c.rms_norm_eps, checked=False,
        )
        window = c.windows[index]
        # early: what runs just before writes the step's own keys only, and came after the plan.
        return self._attention[window].run(plans[window], q, k_cache, v_cache, scale=self._scale, early=True)

    def _logits(self, x: Tensor, added: Tensor | None, rows: Tensor, out: Tensor | None) -> Tensor:
        """added None: x is summed up already, and only `rows` of it are wanted."""
        weights, dtype = self.model.weights, self.model.lm_head_dtype
        if added is None:
            x = x[rows] if len(rows) != len(x) else x
        if not len(x):  # a pass of prefill chunks alone
            return torch.empty(0, len(weights.head), dtype=dtype, device=x.device)
        normed = self._norm(x, added, weights.norm)[0].to(dtype)
        return linear(normed, weights.head, out=out, checked=False)


@contextmanager
def ieee_products(needed: bool) -> Iterator[None]:
    """fp32 products in full precision, whatever the caller has chosen for its own (TF32 keeps 10 bits of mantissa); the
    caller's choice is back afterwards. torch has no per-call switch."""
    matmul = torch.backends.cuda.matmul
    if not needed:
        yield
        return
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)
