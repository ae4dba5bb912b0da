"""Which pages hold the KV of which token prefixes. Knows no sequences and no tensors: ids in, page numbers out.

Only full pages are cached. The key of a page is a chain, key(i) = BLAKE2b(key(i - 1), ids of page i), that starts at
the weight version: equal keys mean equal ids from position 0 on, under equal weights. A collision of 256-bit BLAKE2b
would be needed to serve foreign KV. (Hash chains over blocks: vLLM's automatic prefix caching.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tlt_engine.config import refuse
from tlt_engine.kvcache.pages import PagePool


def tokens_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """32 bytes that identify `token_ids` behind whatever `parent` identifies."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class PrefixCache:
    """Keeps full pages of `pool` findable after their holders are gone, until the pool needs them.

    Eviction is leaf first: whoever holds a page holds those before it, and lets go of the last one first
    (Scheduler releases in reverse), so a page is always idle for longer than its parent. A page whose content was
    computed twice is the exception: it is cached under the first copy, and children of the second copy may outlive it,
    unreachable until the parent's content comes back; they age out like any other.

    Callers that match and insert the same sequence again and again pass `keys`, a list that caches its page keys; it
    must be emptied when the version changes, and never be shared between sequences.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        if page_size < 1:
            raise refuse("page_size", "at least 1", page_size, "16 is a good choice")
        if pool.on_evict is not None:
            raise refuse("pool", "a pool without a prefix cache", "a second one", "use one cache a pool")
        self.page_size = page_size
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def match(
        self, token_ids: Sequence[int], version: int, limit: int, keys: list[bytes] | None = None
    ) -> list[int]:
        """Pages of the longest cached prefix of token_ids[:limit], whole pages only, each with one more holder."""
        pages = self.peek(token_ids, version, limit, keys)
        for page in pages:
            self._pool.share(page)
        return pages

    def peek(
        self, token_ids: Sequence[int], version: int, limit: int, keys: list[bytes] | None = None
    ) -> list[int]:
        """As match(), but nobody becomes a holder: an allocation may evict what was found."""
        keys = [] if keys is None else keys
        pages: list[int] = []
        for i in range(min(limit, len(token_ids)) // self.page_size):
            page = self._page_of.get(self._key(i, token_ids, version, keys))
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        kv_len: int,
        version: int,
        start: int = 0,
        keys: list[bytes] | None = None,
    ) -> None:
        """Cache the full pages among pages[: kv_len // page_size], which hold the KV of token_ids[:kv_len].

        `start`: keys committed when the caller last inserted; pages full by then are skipped. Content that is cached
        already keeps its first page.
        """
        keys = [] if keys is None else keys
        for i in range(start // self.page_size, kv_len // self.page_size):
            key = self._key(i, token_ids, version, keys)
            if key not in self._page_of:
                self._pool.keep(pages[i])
                self._page_of[key] = pages[i]
                self._key_of[pages[i]] = key

    def reset(self) -> None:
        """Forget everything: idle pages become free, used ones stay with their holders and will."""
        for page in self._key_of:
            self._pool.drop(page)
        self._key_of.clear()
        self._page_of.clear()

    def check(self) -> None:
        """Raise AssertionError, with both sides, if keys and pages do not map one to one."""
        assert len(self._page_of) == len(self._key_of), (
            f"prefix cache: {len(self._page_of)} keys, {len(self._key_of)} pages"
        )
        for page, key in self._key_of.items():
            assert self._page_of.get(key) == page, f"prefix cache: page {page} has the key of {self._page_of.get(key)}"
        kept = {page for page in range(self._pool.total) if self._pool.kept(page)}
        assert kept == set(self._key_of), (
            f"prefix cache: pool keeps {sorted(kept)}, cache holds {sorted(self._key_of)}"
        )

    def _key(self, i: int, token_ids: Sequence[int], version: int, keys: list[bytes]) -> bytes:
        while len(keys) <= i:
            begin = len(keys) * self.page_size
            parent = keys[-1] if keys else version.to_bytes(16, "little", signed=True)
            keys.append(tokens_key(parent, token_ids[begin : begin + self.page_size]))
        return keys[i]

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
