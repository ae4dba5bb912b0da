"""The tensor that holds keys and values. Knows neither who owns a page nor what is in it."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_engine.config import refuse


class KVStorage:
    """data [layers, 2, num_pages, page_size, kv_heads, head_dim], keys at index 0 and values at 1; all pages are
    usable. Zeroed, because a kernel may multiply a masked value by 0, and 0 * NaN is NaN. The address never changes."""

    def __init__(
        self, layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, 2, num_pages, page_size, kv_heads, head_dim)
        if min(shape) < 1:
            raise refuse("KVStorage", "layers, 2, pages, page_size, kv_heads, head_dim >= 1", shape, "enlarge them")
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(self.data[i, 0], self.data[i, 1]) for i in range(layers)]

    @property
    def num_pages(self) -> int:
        return self.data.shape[2]

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each a view [num_pages, page_size, kv_heads, head_dim]."""
        return self._layers[index]
