"""Who holds which KV page. A page is a number in [0, num_pages); it knows no tokens, tensors or sequences.

Every page is in exactly one of three states, so that free + idle + used == total at all times:

    free   no holder, content worthless
    idle   no holder, but the prefix cache keeps it; evicted when needed, least recently used first
    used   one holder or more
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tlt_engine.config import refuse


class PagePool:
    """Reference counts of `num_pages` pages. Every operation is O(1) a page.

    on_evict(page) is called when an idle page is taken for other content; the prefix cache forgets it there.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise refuse("num_pages", "at least 1", num_pages, "give the KV cache memory for one page or more")
        self.total = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._holders = [0] * num_pages
        self._kept = bytearray(num_pages)  # 1 while the prefix cache keeps the page
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the warmest in cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def used(self) -> int:
        return self.total - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Pages that allocate() can hand out: free ones, then idle ones."""
        return len(self._free) + len(self._idle)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def kept(self, page: int) -> bool:
        return bool(self._kept[page])

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each, or None (and nothing changed) when fewer are available."""
        if count > self.available:
            return None
        if count > len(self._free):
            self.evict(count - len(self._free))
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, page: int) -> None:
        """One more holder of a used or idle page."""
        if not self._holders[page]:
            assert self._kept[page], f"page {page}: shared while free; its content belongs to nobody"
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer. The last one leaves the page idle if the prefix cache keeps it, else free."""
        holders = self._holders[page] - 1
        assert holders >= 0, f"page {page}: released with 0 holders; it was released twice"
        self._holders[page] = holders
        if not holders:
            if self._kept[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def release_all(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.release(page)

    def keep(self, page: int) -> None:
        """The prefix cache wants the content of this used page to outlive its holders."""
        assert self._holders[page], f"page {page}: kept while nobody holds it"
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache no longer wants the page: an idle one becomes free, a used one will."""
        self._kept[page] = 0
        if not self._holders[page] and page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def evict(self, count: int) -> int:
        """Make up to `count` idle pages free, least recently used first. Returns how many."""
        count = min(count, len(self._idle))
        for _ in range(count):
            page = next(iter(self._idle))
            if self.on_evict is not None:
                self.on_evict(page)
            self.drop(page)
        return count

    def check(self) -> None:
        """Raise AssertionError, with both sides, if a page is in no state or in two."""
        used = sum(1 for holders in self._holders if holders)
        assert self.free + self.idle + used == self.total, (
            f"pages: free {self.free} + cached idle {self.idle} + used {used} = {self.free + self.idle + used}, "
            f"total {self.total}"
        )
        free = set(self._free)
        assert len(free) == self.free, f"free list: {self.free} entries, {len(free)} distinct pages"
        for page in free:
            assert not self._holders[page] and not self._kept[page], (
                f"page {page}: in the free list, with {self._holders[page]} holders and kept = {self._kept[page]}"
            )
        for page in self._idle:
            assert not self._holders[page] and self._kept[page], (
                f"page {page}: in the idle list, with {self._holders[page]} holders and kept = {self._kept[page]}"
            )
