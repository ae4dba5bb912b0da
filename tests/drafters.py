"""Scripted drafters for tests: each satisfies the Drafter protocol and knows nothing of the engine that
calls it.

Equal output hides a drafter's faults, since the walk repairs any proposal; so all of them record what they
proposed (`rows`), how much of it was accepted (`accepted`) and which samples ended (`finished`), for tests
to assert on. Randomness is a hash of (seed, sample, position, use), never a global generator: a proposal
depends on its context alone, not on the batch, the schedule or the number of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice

from tlt_engine.speculation.drafter import DraftContext
from tlt_engine.speculation.tree import DraftTree
from tlt_engine.types import MAX_NODES

Continuations = Mapping["str | tuple[int, ...]", Mapping[int, Sequence[int]]]
TargetFn = Callable[[Sequence[int], DraftContext], int]


def hashed(*words: int) -> int:
    """A 64-bit hash of integers."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def budget(context: DraftContext) -> int:
    """Draft nodes (root excluded) that the tree may hold."""
    return min(context.max_nodes, MAX_NODES) - 1


class RecordingDrafter:
    """rows: nodes of each proposed tree, by seq_id. accepted: drafts accepted of each, by seq_id. finished:
    seq_ids."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.accepted: dict[int, list[int]] = {}
        self.finished: list[int] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        trees = [self.tree(c) for c in contexts]
        for c, tree in zip(contexts, trees):
            self.rows.setdefault(c.seq_id, []).append(len(tree))
        return trees

    def tree(self, context: DraftContext) -> DraftTree:
        raise NotImplementedError

    def observe(self, context: DraftContext, accepted: int) -> None:
        self.accepted.setdefault(context.seq_id, []).append(accepted)

    def finish(self, seq_id: int) -> None:
        self.finished.append(seq_id)

    def memory_bytes(self) -> int:
        return 0

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts a step, over all samples."""
        counts = [n for per_sample in self.accepted.values() for n in per_sample]
        return sum(counts) / max(len(counts), 1)


class NullDrafter(RecordingDrafter):
    """Plain decoding: the root alone."""

    def tree(self, context: DraftContext) -> DraftTree:
        return DraftTree.root(context.token_ids[-1])


class ReplayDrafter(RecordingDrafter):
    """Proposes the known continuation of a sample, with chosen errors.

    continuations: {prompt ids as a tuple, or group: {sample index: output ids}}, the output of plain
    decoding. error_rate: chance that the token at a position is replaced by a wrong one (fixed per position,
    so a retry at the same position errs again). depth: draft levels. shape "chain": one draft a level. shape
    "tree": `width` siblings a level, the right one (if no error fell there) in a random slot, the path going
    on below it; below a wrong level the path goes on with right tokens that cannot be accepted.
    Contexts it has no continuation for, and the end of a continuation, get the root alone.
    """

    def __init__(
        self, continuations: Continuations, error_rate: float = 0.0, seed: int = 0, depth: int = 4,
        width: int = 1, shape: str = "chain",
    ) -> None:
        super().__init__()
        if shape not in ("chain", "tree"):
            raise ValueError(f"shape: expected 'chain' or 'tree', got {shape!r}; pick one")
        self.continuations = continuations
        self.error_rate, self.seed, self.depth = error_rate, seed, depth
        self.width = width if shape == "tree" else 1
        known = {t for samples in continuations.values() for ids in samples.values() for t in ids}
        self.alphabet = sorted(known | set(range(self.width + 1)))

    def _output(self, context: DraftContext) -> Sequence[int]:
        prompt = tuple(context.token_ids[: context.prompt_len])
        samples = self.continuations.get(prompt) or self.continuations.get(context.group) or {}
        return samples.get(context.sample, ())

    def _wrong(self, right: int, count: int, *words: int) -> list[int]:
        """`count` different ids, none of them `right`, from the ids that occur (so all lie in the
        vocabulary)."""
        start, size = hashed(self.seed, *words) % len(self.alphabet), len(self.alphabet)
        turned = (self.alphabet[(start + i) % size] for i in range(size))  # not a copy: it may hold 100,000
        return list(islice((t for t in turned if t != right), count))

    def tree(self, context: DraftContext) -> DraftTree:
        tokens, parents, parent = [context.token_ids[-1]], [-1], 0
        at = len(context.token_ids) - context.prompt_len
        output = self._output(context)[at : at + min(self.depth, context.max_depth)]
        for d, right in enumerate(output):
            position = len(context.token_ids) + d
            count = min(self.width, budget(context) + 1 - len(tokens))
            if count < 1:
                break
            siblings = self._wrong(right, count, context.sample, position, 0)
            slot = hashed(self.seed, context.sample, position, 1) % len(siblings)
            if hashed(self.seed, context.sample, position, 2) >= self.error_rate * 2**64:
                siblings[slot] = right
            tokens += siblings
            parents += [parent] * len(siblings)
            parent = len(tokens) - len(siblings) + slot
        return DraftTree(tuple(tokens), tuple(parents))


class CopyDrafter(RecordingDrafter):
    """A chain of what `target_fn(token_ids, context)` says comes next: the target itself makes every draft
    right."""

    def __init__(self, target_fn: TargetFn, depth: int = 4) -> None:
        super().__init__()
        self.target_fn, self.depth = target_fn, depth

    def tree(self, context: DraftContext) -> DraftTree:
        ids = list(context.token_ids)
        for _ in range(min(self.depth, context.max_depth, budget(context))):
            ids.append(self.target_fn(ids, context))
        return DraftTree.chain(context.token_ids[-1], ids[len(context.token_ids) :])


class AdversarialDrafter(RecordingDrafter):
    """Always the largest tree allowed, its style changing from step to step:

    random: random tokens under random parents (ragged widths, children of late and early nodes interleaved);
    eos: an EOS id wherever siblings allow; repeat: a chain of the root's own token, equal tokens at all
    depths; star: all nodes children of the root; comb: a chain with wrong siblings at every level, the chain
    last.

    With `continuations` (as ReplayDrafter's) no draft at depth 1 is ever right, so every accept length must
    be 1.
    """

    STYLES = ("random", "eos", "repeat", "star", "comb")

    def __init__(
        self, vocab_size: int, eos_ids: Sequence[int] = (), seed: int = 0, styles: Sequence[str] = STYLES,
        continuations: Continuations | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.eos_ids, self.seed = vocab_size, tuple(eos_ids), seed
        self.styles = tuple(styles)
        self._replay = ReplayDrafter(continuations or {}, depth=1)

    def _barred(self, context: DraftContext) -> int:
        right = self._replay.tree(context).tokens
        return right[1] if len(right) > 1 else -1

    def _parents(self, style: str, draw: int, depths: Sequence[int], max_depth: int) -> Iterable[int]:
        """Parents to try for the next node, the style's own first, then any that still has room below it."""
        i = len(depths)
        wanted = {"star": 0, "repeat": i - 1, "comb": (i - 1) // 3 * 3}.get(style, draw % i)
        return (p for p in (wanted, *range(i)) if depths[p] < max_depth)

    def _candidates(self, style: str, root: int, draw: int) -> Iterable[int]:
        if style == "repeat":
            yield root
        if style == "eos" or draw % 5 == 0:
            yield from self.eos_ids
        start = draw % self.vocab_size
        yield from ((start + k) % self.vocab_size for k in range(self.vocab_size))

    def tree(self, context: DraftContext) -> DraftTree:
        root, now = context.token_ids[-1], len(context.token_ids)
        style = self.styles[hashed(self.seed, context.sample, now) % len(self.styles)]
        taken = {(0, self._barred(context))}
        tokens, parents, depths = [root], [-1], [0]
        for i in range(1, budget(context) + 1):
            draw = hashed(self.seed, context.sample, now, i)
            edges = (
                (parent, token)
                for parent in self._parents(style, draw >> 8, depths, context.max_depth)
                for token in self._candidates(style, root, draw)
                if (parent, token) not in taken
            )
            edge = next(edges, None)
            if edge is None:
                break
            taken.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
            depths.append(depths[edge[0]] + 1)
        return DraftTree(tuple(tokens), tuple(parents))
