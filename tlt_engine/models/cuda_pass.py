"""The forward pass on the GPU: Transformer.forward with fused kernels and attention planned once a step.

Shape legend: R packed rows, B requests, V vocabulary. Knows neither requests nor sampling. No host sync and no
data-dependent Python: a pass can be captured in a CUDA graph, the plan of its attention included.

The residual stream x and what a block adds to it travel apart, so that each norm does the sum: rms_norm(added,
residual=x) gives the normed rows and the new x in one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tlt_kernels import flashinfer_prefill
from tlt_kernels.flashinfer_prefill import ChunkAttention, ChunkShape
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
    from tlt_kernels.triton.attention import TreeAttention
    from tlt_kernels.triton.invariant import AnyInvariant

Attend = Callable[..., Tensor]  # run of a planned attention
logger = logging.getLogger("tlt_engine")


@dataclass(frozen=True)
class Chunks:
    """A step's causal chunks on the host, as StepInputs has them: they come last. first: requests in front of them,
    first_row: rows."""

    first: int
    first_row: int
    prefix_lens: Tensor  # of all requests
    node_indptr: Tensor
    page_table: Tensor


class CudaPass:
    """A model over one KV storage, for passes of at most max_rows rows and max_batch requests, one at a time, on one
    stream: attention's workspace is shared by all of them. Layers of one window share a plan.

    prefill_backend: EngineConfig's; afterwards, the one that was taken. `triton` attends to whatever a step holds,
    `flashinfer` to the causal chunks of a step whose forward is told of them. invariant:
    EngineConfig.batch_invariant: a row's bits depend on its own context alone, whatever else the pass holds. max_keys:
    of a request; None: all that kv holds."""

    def __init__(
        self, model: Transformer, kv: KVStorage, *, max_rows: int, max_batch: int,
        max_keys: int | None = None, prefill_backend: str = "auto", invariant: bool = False,
    ) -> None:
        try:
            from tlt_kernels.triton.attention import Geometry, TreeAttention
            from tlt_kernels.triton.invariant import make_invariant
        except ImportError as error:
            raise refuse("triton", "Triton, in which attention on the GPU is written", str(error),
                         "pip install triton") from error
        self.model, self.kv, self.invariant = model, kv, invariant
        c = model.config
        geometries = [
            Geometry(c.num_heads, c.num_kv_heads, c.head_dim, kv.page_size, model.dtype, window)
            for window in sorted(set(c.windows))
        ]
        self._attention: dict[int, TreeAttention] = {}
        self._invariant: dict[int, AnyInvariant] = {}
        self._scale = c.head_dim**-0.5
        for g in geometries:
            if invariant:
                self._invariant[g.window] = make_invariant(
                    g, max_rows=max_rows, max_batch=max_batch, max_keys=max_keys or kv.num_pages * kv.page_size,
                    device=model.device,
                )
            else:
                self._attention[g.window] = TreeAttention(
                    g, max_rows=max_rows, max_batch=max_batch, device=model.device
                )
        if invariant:
            self._chunks = None
            self.prefill_backend = check_invariant(model, self._invariant)
        else:
            self._chunks = chunk_attention(prefill_backend, model, kv, self._scale)
            self.prefill_backend = "triton" if self._chunks is None else "flashinfer"
        self._product = partial(linear, invariant=invariant, checked=False)
        self._ieee = torch.float32 in (model.dtype, model.lm_head_dtype)

    @property
    def bytes(self) -> int:
        chunks = 0 if self._chunks is None else self._chunks.workspace_bytes
        chunks += sum(attention.workspace_bytes for attention in self._invariant.values())
        return chunks + sum(attention.workspace_bytes for attention in self._attention.values())

    @torch.no_grad()
    def forward(
        self, step: StepInputs, *, capture: Sequence[int] = (), logits_out: Tensor | None = None,
        chunks: Chunks | None = None,
    ) -> StepOutputs:
        """As Transformer.forward. logits_out [Rl, V], contiguous: where the logits go. chunks: those of the step, where
        it has some; a pass to be captured may have none."""
        self.model.check_capture(capture)
        with ieee_products(self._ieee):
            return self._forward(step, capture, logits_out, chunks)

    def _plan(self, step: StepInputs, chunks: Chunks | None) -> dict[int, Attend]:
        """Attention of the step, by window: our plan of it; with FlashInfer's chunks, of the requests before them."""
        whole = (step.page_table, step.prefix_lens, step.node_indptr, step.ancestors, step.causal, step.positions)
        if self.invariant:
            return {
                window: partial(attention.run, attention.plan(*whole, chunks=chunks is not None))
                for window, attention in self._invariant.items()
            }
        if chunks is None or self._chunks is None:
            return {window: partial(a.run, a.plan(*whole)) for window, a in self._attention.items()}
        requests, rows = chunks.first, chunks.first_row
        self._chunks.plan(chunks.prefix_lens[requests:], chunks.node_indptr[requests:], chunks.page_table[requests:])
        return {
            window: partial(attention.run, attention.plan(
                step.page_table[:requests], step.prefix_lens[:requests], step.node_indptr[: requests + 1],
                step.ancestors[:rows], step.causal[:requests], step.positions[:rows],
            ))
            for window, attention in self._attention.items()
        }

    def _forward(
        self, step: StepInputs, capture: Sequence[int], logits_out: Tensor | None, chunks: Chunks | None
    ) -> StepOutputs:
        weights = self.model.weights
        captured: dict[int, Tensor] = {}
        plans = self._plan(step, chunks)
        chunks = chunks if self._chunks is not None else None
        x = F.embedding(step.token_ids, weights.embed)
        added: Tensor | None = None
        for i, layer in enumerate(weights.layers):
            normed, x = self._norm(x, added, layer.input_norm)
            if i in capture:
                captured[i] = x
            mixed = self._attend(i, layer, normed, step, plans, chunks)
            mixed = self._product(mixed.view(len(x), -1), layer.o, layer.o_bias)
            normed, x = self._norm(x, mixed, layer.post_norm)
            gated = self._product(normed, layer.gate_up, layer.gate_up_bias, silu_mul=True)
            added = self._product(gated, layer.down, layer.down_bias)
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
        self, index: int, layer: LayerWeights, normed: Tensor, step: StepInputs, plans: dict[int, Attend],
        chunks: Chunks | None,
    ) -> Tensor:
        """[R, Hq, D]. Rows that belong to no request stay as they were allocated."""
        c = self.model.config
        k_cache, v_cache = self.kv.layer(index)
        qkv = self._product(normed, layer.qkv, layer.qkv_bias)
        q = rope_write_kv(
            qkv, self.model.cos, self.model.sin, step.positions, step.slots, k_cache, v_cache, q_norm=layer.q_norm,
            k_norm=layer.k_norm, eps=c.rms_norm_eps, checked=False,
        )
        window = c.windows[index]
        out, rows = torch.empty_like(q), len(q) if chunks is None else chunks.first_row
        # early: what runs just before writes the step's own keys only, and came after the plan.
        plans[window](q[:rows], k_cache, v_cache, scale=self._scale, out=out[:rows], early=True)
        if chunks is not None and self._chunks is not None:
            self._chunks.run(window, q[rows:], k_cache, v_cache, out=out[rows:])
        return out

    def _logits(self, x: Tensor, added: Tensor | None, rows: Tensor, out: Tensor | None) -> Tensor:
        """added None: x is summed up already, and only `rows` of it are wanted."""
        weights, dtype = self.model.weights, self.model.lm_head_dtype
        if added is None:
            x = x[rows] if len(rows) != len(x) else x
        if not len(x):  # a pass of prefill chunks alone
            return torch.empty(0, len(weights.head), dtype=dtype, device=x.device)
        normed = self._norm(x, added, weights.norm)[0].to(dtype)
        return self._product(normed, weights.head, out=out)


def chunk_attention(wanted: str, model: Transformer, kv: KVStorage, scale: float) -> ChunkAttention | None:
    """FlashInfer for a model's chunks; None: Triton takes them. wanted: "auto" (FlashInfer if it can, and a word in the
    log if not), "flashinfer" (or ValueError) or "triton"."""
    c = model.config
    shape = ChunkShape(c.num_heads, c.num_kv_heads, c.head_dim, kv.page_size, model.dtype)
    if wanted == "triton":
        return None
    why, cause = shape.unsupported or "the package flashinfer-python is not installed", None
    if shape.unsupported is None and flashinfer_prefill.installed():
        try:
            return ChunkAttention(shape, windows=c.windows, scale=scale, device=model.device)
        except Exception as error:  # of its compiler, too: anything at all
            why, cause = f"{type(error).__name__}: {str(error).strip()[:300]}", error
    if wanted == "flashinfer":
        remedy = "pip install flashinfer-python, or set prefill_backend='triton'"
        raise refuse("EngineConfig.prefill_backend", "a model and a machine for FlashInfer", why, remedy) from cause
    _say_once(f"Prefill runs on our Triton kernel, not on FlashInfer: {why}")
    return None


def check_invariant(model: Transformer, attention: Mapping[int, AnyInvariant]) -> str:
    """The kernels that attend in batch-invariant mode, "cuda" or "triton". One word in the log where something takes a
    slow path; ValueError where nothing does."""
    capability = torch.cuda.get_device_capability(model.device)
    if capability < (8, 0):
        raise refuse("EngineConfig.batch_invariant", "a GPU of compute capability 8.0 or more", capability,
                     "turn it off, or use another GPU")
    slow = [f"compute capability {capability[0]}.{capability[1]}, not 9.0"] if capability != (9, 0) else []
    slow += [f"the dtype {d}" for d in sorted({str(model.dtype), str(model.lm_head_dtype)}) if "float32" in d]
    taken = "cuda" if all(type(a).__name__ == "CudaInvariantAttention" for a in attention.values()) else "triton"
    if taken == "triton":
        c = model.config
        slow.append(f"heads of {c.head_dim} in groups of {c.num_heads // c.num_kv_heads}")
    if slow:
        _say_once(f"batch_invariant takes slow kernels here: {', '.join(slow)}")
    return taken


@cache
def _say_once(text: str) -> None:
    logger.warning("%s.", text)


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
