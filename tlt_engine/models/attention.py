"""Attention of a whole pass on the GPU: planned once a step, run in every layer. Knows neither weights nor requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.config import ModelConfig
from tlt_engine.types import StepInputs

if TYPE_CHECKING:
    from tlt_kernels.triton.attention import Step, TreeAttention


class PlannedAttention:
    """Workspace for passes of at most max_rows rows and max_batch requests, one at a time, on one stream. Layers of one
    window share a plan. Nothing here waits for the device, so a pass can be captured in a CUDA graph, plan included."""

    def __init__(
        self, config: ModelConfig, *, page_size: int, dtype: torch.dtype, device: torch.device, max_rows: int,
        max_batch: int,
    ) -> None:
        try:
            from tlt_kernels.triton.attention import Geometry, TreeAttention
        except ImportError as error:
            raise refuse("triton", "Triton, which attention on the GPU is written in", str(error),
                         "pip install 'tlt-engine[cuda]'") from error
        self._scale = config.head_dim**-0.5
        self._by_window: dict[int, TreeAttention] = {
            window: TreeAttention(
                Geometry(config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype, window),
                max_rows=max_rows, max_batch=max_batch, device=device,
            )
            for window in sorted(set(config.windows))
        }

    @property
    def bytes(self) -> int:
        return sum(attention.workspace_bytes for attention in self._by_window.values())

    def plan(self, step: StepInputs) -> dict[int, Step]:
        """By window, for `run`."""
        return {
            window: attention.plan(
                step.page_table, step.prefix_lens, step.node_indptr, step.ancestors, step.causal, step.positions
            )
            for window, attention in self._by_window.items()
        }

    def run(self, plans: dict[int, Step], window: int, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[R, Hq, D] of a layer. Rows beyond node_indptr[B] are not written."""
        return self._by_window[window].run(plans[window], q, k_cache, v_cache, scale=self._scale)
