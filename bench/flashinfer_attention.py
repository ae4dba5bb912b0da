"""FlashInfer's kernels on the inputs of bench/kernels_attention.py. Knows no other engine and records nothing.

Importing it needs flashinfer-python; its first call compiles kernels (about 40 s), which it keeps in
$FLASHINFER_WORKSPACE_BASE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

if TYPE_CHECKING:
    from bench.kernels_attention import Inputs, Load


class Rival:
    """A planned wrapper for each set of pages: decode at one row a request, else prefill with the chain as a mask."""

    def __init__(self, load: Load, inputs: Inputs) -> None:
        self.inputs = inputs
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        self.wrappers = [self._planned(load, table, workspace) for table in inputs.tables]

    def _planned(self, load: Load, table: torch.Tensor, workspace: torch.Tensor) -> Any:
        g, batch, nodes = load.geometry, load.batch, load.nodes
        keys = load.context + nodes
        pages = table.shape[1]
        requests = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        indptr = requests * pages
        last = torch.full((batch,), keys - (pages - 1) * g.page, dtype=torch.int32, device="cuda")
        types = {"q_data_type": g.dtype, "kv_data_type": g.dtype, "sm_scale": g.head_dim**-0.5}
        if nodes == 1:
            decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            decode.plan(indptr, table.flatten(), last, g.heads, g.kv_heads, g.head_dim, g.page, **types)
            return decode
        mask = torch.ones(nodes, keys, dtype=torch.bool, device="cuda").tril(load.context)
        prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        prefill.plan(
            requests * nodes, indptr, table.flatten(), last, g.heads, g.kv_heads, g.head_dim, g.page,
            custom_mask=mask.flatten().repeat(batch), **types,
        )
        return prefill

    def calls(self) -> Sequence[Callable[[], object]]:
        """As many as kernels_attention.time_load makes of ours."""
        i = self.inputs
        repeats = max(1, -(-8 // len(self.wrappers)))
        return [partial(w.run, i.q, (i.k_cache, i.v_cache), out=i.out) for w in self.wrappers] * repeats


if __name__ == "__main__":  # compiles both kernels, so that a benchmark need not wait for them
    from bench.kernels_attention import Inputs, Load

    for nodes in (1, 4):
        small = Load(2, nodes, 256)
        inputs = Inputs(small)
        for call in Rival(small, inputs).calls()[:1]:
            call()
        torch.cuda.synchronize()
    print("compiled")
