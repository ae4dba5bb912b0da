"""Host memory of the hidden-state buffer, in pages of rows. Knows neither sequences nor models."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from tlt_engine.config import refuse

SLAB_BYTES = 64 * 2**20  # pinning costs about a millisecond a MiB, so memory is pinned as it is needed


class Arena:
    """Pages of `page_rows` rows [width] of `dtype`, at most `byte_budget` bytes together, allocated in slabs on demand.
    pinned: page-locked memory, for copies that run beside a GPU's kernels."""

    def __init__(self, byte_budget: int, page_rows: int, width: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.page_rows, self.width, self.dtype, self.pinned = page_rows, width, dtype, pinned
        self.page_bytes = page_rows * width * torch.empty(0, dtype=dtype).element_size()
        self.total_pages = byte_budget // self.page_bytes
        if self.total_pages < 1:
            remedy = f"give at least {self.page_bytes} bytes, or fewer rows a page than {page_rows}"
            raise refuse("byte_budget", f"room for a page of {page_rows} rows", byte_budget, remedy)
        self.slab_pages = min(self.total_pages, max(1, SLAB_BYTES // self.page_bytes))
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._holders: dict[int, int] = {}  # of pages in use
        self._made = 0

    @property
    def used_pages(self) -> int:
        return self._made - len(self._free)

    @property
    def bytes(self) -> int:
        """Of the slabs' storages."""
        return sum(slab.untyped_storage().nbytes() for slab in self._slabs)

    def take(self) -> int | None:
        """A page nobody has, or None when the budget is spent."""
        if not self._free and self._made < self.total_pages:
            count = min(self.slab_pages, self.total_pages - self._made)
            # Called from within a step's inference_mode, a plain allocation would be barred from autograd for ever.
            with torch.inference_mode(False):
                shape = (count, self.page_rows, self.width)
                self._slabs.append(torch.empty(shape, dtype=self.dtype, pin_memory=self.pinned))
            self._free.extend(reversed(range(self._made, self._made + count)))
            self._made += count
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """One holder more for each."""
        for page in pages:
            self._holders[page] += 1

    def shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def give(self, pages: list[int]) -> None:
        """One holder fewer for each; without one a page is free."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                self._free.append(page)

    def page(self, index: int) -> Tensor:
        """[page_rows, width], a view."""
        return self._slabs[index // self.slab_pages][index % self.slab_pages]

    def check(self, held: list[int]) -> None:
        """free + used = made, and every holder counted. held: the pages that their holders name, with repeats."""
        assert Counter(held) == self._holders, f"holders {Counter(held)} != {self._holders}"
        assert len(set(self._free)) == len(self._free) and not self._holders.keys() & set(self._free), "free twice"
        assert len(self._free) + len(self._holders) == self._made, (
            f"{len(self._free)} free + {len(self._holders)} held != {self._made} pages made"
        )
