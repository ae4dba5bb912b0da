"""The sizes that target passes are captured in, and which one holds a step. Pure arithmetic: no torch, no device.

A graph of (batch, nodes) serves any division of batch * nodes rows among at most `batch` requests, since its kernels
take ragged node_indptr. nodes = 1 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_ROWS = 256  # beyond, a pass takes so long (7.6 ms of products at 7B on an H200) that eager launches hide behind it
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NODES = (1, 4, 8, 16, 32, 64)
# A small model's pass never takes that long: with 135 M parameters a step of 512 rows took some 23 ms eagerly, one of
# 256 rows 4 ms from a graph (H200, by tokens a second). Plain steps of such models, and they alone, have graphs beyond
# MAX_ROWS: as one of 384 requests, 20 trees of 16 nodes would be drafted for as 384.
SMALL = 2_000_000_000  # parameters
SMALL_ROWS = 512


@dataclass(frozen=True)
class GraphKey:
    batch: int
    nodes: int

    @property
    def rows(self) -> int:
        return self.batch * self.nodes

    def holds(self, batch: int, rows: int) -> bool:
        """Whether a step of `batch` requests with `rows` rows in all may run in it."""
        return self.batch >= batch and self.rows >= rows and (self.rows <= MAX_ROWS or rows == batch)

    def __str__(self) -> str:
        return f"{self.batch}x{self.nodes}"


@dataclass(frozen=True)
class ExtendKey(GraphKey):
    """The learned drafter's entries of a walk's tokens. nodes: columns of the walk, the depth of the trees + 1. target:
    the graph of the verifications, between whose static tensors this one goes."""

    target: GraphKey

    def __str__(self) -> str:
        return f"extend {self.batch}x{self.nodes} for {self.target}"


@dataclass(frozen=True)
class DraftKey(GraphKey):
    """The learned drafter's levels, and the selection of the trees. nodes: how many levels, the depth of the trees.
    top_k: children of a node. target: as ExtendKey's."""

    top_k: int
    target: GraphKey

    def __str__(self) -> str:
        return f"draft {self.batch}x{self.nodes}x{self.top_k} for {self.target}"


class Buckets:
    """keys: all sizes, largest first, as they are captured up front: a small graph then fits into memory that a large
    one has left in the pool."""

    def __init__(self, keys: Iterable[GraphKey]) -> None:
        self.keys = tuple(sorted(set(keys), key=lambda k: (k.rows, k.batch), reverse=True))
        self._ascending = self.keys[::-1]
        self._chosen: dict[tuple[int, int], GraphKey | None] = {}  # looking through 38 sizes takes 4 us, each step

    def choose(self, batch: int, rows: int) -> GraphKey | None:
        """The smallest size that holds the step: fewest rows, then fewest requests. None: no size does."""
        if (batch, rows) not in self._chosen:
            self._chosen[batch, rows] = next((key for key in self._ascending if key.holds(batch, rows)), None)
        return self._chosen[batch, rows]


def default_buckets(max_num_seqs: int, verify: int, parameters: int = SMALL, *, full: bool = False) -> Buckets:
    """For engines of up to max_num_seqs samples and draft trees of up to `verify` nodes: every pair of BATCHES and
    NODES up to the first that holds these, within MAX_ROWS rows; plain steps of models of fewer than SMALL parameters
    within SMALL_ROWS. full: trees mostly have all `verify` nodes, so there are graphs for just that (at 32 x 6, padding
    to 8 nodes would cost 1 ms of 7.6)."""
    batches, nodes = _up_to(BATCHES, max_num_seqs), _up_to(NODES, verify)
    if full:
        nodes = [n for n in nodes if n < verify] + [verify]
    plain = SMALL_ROWS if parameters < SMALL else MAX_ROWS
    return Buckets(GraphKey(b, v) for b in batches for v in nodes if b * v <= (plain if v == 1 else MAX_ROWS))


def _up_to(sizes: tuple[int, ...], need: int) -> list[int]:
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < need]
