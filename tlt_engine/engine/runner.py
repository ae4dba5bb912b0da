"""One target pass: pack, forward, sample, walk, commit KV. Knows models and ops; knows no stops and no outputs.

ModelRunner does it step by step, on whatever device the packed step is on; device.DeviceRunner is the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from tlt_kernels import (
    NoiseIds,
    RowParams,
    SampleResult,
    commit_kv,
    copy_pages,
    process_logits,
    sample,
    verify_tree,
)
from torch import Tensor

from tlt_engine.engine.hidden import PassHidden
from tlt_engine.engine.packing import PackedStep, StepBuffers, noise_ids, pack_step, row_params
from tlt_engine.engine.sample import CallInsideStep, Sample
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models import Transformer
from tlt_engine.outputs import Logprob
from tlt_engine.scheduler.sequence import Batch, Chunk, Sequence
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.tree import DraftTree


@dataclass(frozen=True)
class Emitted:
    """What one decode's pass emitted, in order; the last token is the bonus token. A token of -1 means that its row
    had no valid distribution. path: the local nodes that the tokens were drawn at, root first; left out where nobody
    wants hidden states."""

    tokens: list[int]
    logprobs: list[float]
    raw: list[float] | None
    top: list[dict[int, Logprob]] | None
    path: list[int] = field(default_factory=list)

    def first(
        self, count: int
    ) -> tuple[list[int], list[float], list[float] | None, list[dict[int, Logprob]] | None]:
        """Its first four fields, cut."""
        cut = slice(count)
        return self.tokens[cut], self.logprobs[cut], self.raw and self.raw[cut], self.top and self.top[cut]


@dataclass(frozen=True)
class Drafted:
    """What the host learns of a tree that the device drafted: nodes, root included, the deepest one's depth, and the
    sum of the chances it gave its drafts."""

    nodes: int
    deepest: int
    expected: float


@dataclass(frozen=True)
class StepResult:
    """drafted: of each decode, where the device drafted its tree."""

    emitted: list[Emitted]
    prompt_logits: list[tuple[Chunk, Tensor]]  # logits [count, V] of the chunks that asked
    hidden: dict[int, Tensor] = field(default_factory=dict)  # as StepOutputs.hidden, if captured
    drafted: list[Drafted] | None = None

    @property
    def passed(self) -> PassHidden:
        return PassHidden(self.hidden, [emitted.path for emitted in self.emitted])


@dataclass(slots=True)
class Taken:
    """What is kept of a decode pass whose samples end by ids and lengths alone: for each its tokens up to the first
    stop, and how many of them are drafts. ended: indices of those that stop. passed: None if nothing is captured."""

    tokens: list[list[int]]
    accepted: list[int]
    ended: list[int]
    passed: PassHidden | None = None


class Flight(Protocol):
    """A pass that has been launched."""

    @property
    def by_ids(self) -> bool:
        """It did nothing but decode, and ids and lengths alone decide where its samples end: its tokens can be taken
        before the rest."""

    @property
    def draftable(self) -> bool:
        """Whether the device can go on to the next verification by itself: ModelRunner.launch_drafted."""

    def result(self) -> StepResult:
        """Waits for the pass. Called once, before the launch after the next one."""


@dataclass(frozen=True)
class Landed:
    """A pass that was over when its launch returned."""

    landed: StepResult
    by_ids = False  # there is no rest to put off
    draftable = False

    def result(self) -> StepResult:
        return self.landed


class ModelRunner:
    prefill_backend = "cpp"  # tree_attention's, on the CPU

    def __init__(
        self, model: Transformer, kv: KVStorage, buffers: StepBuffers, *, vocab_limit: int | None,
        eos_ids: frozenset[int],
    ) -> None:
        self.model, self.kv, self.buffers = model, kv, buffers
        self.vocab_limit, self.eos_ids = vocab_limit, eos_ids
        self.page_size = kv.page_size
        self.capture: tuple[int, ...] = ()  # hidden states that every pass hands out

    def set_capture(self, layers: tuple[int, ...]) -> None:
        """From the next pass on; numbered as StepOutputs.hidden."""
        self.model.check_capture(layers)
        self.capture = layers

    @property
    def buffer_bytes(self) -> int:
        return self.buffers.bytes

    def launch(self, batch: Batch, trees: list[DraftTree], samples: Seq[Sample]) -> Flight:
        """trees[i] and samples[i] belong to batch.decodes[i]."""
        return Landed(self.run(batch, trees, samples))

    def launch_ahead(self, flight: Flight, sequences: Seq[Sequence], keep_hidden: bool) -> Flight | None:
        """The plain step after `flight`, which may still be running, for the same sequences in the same order, each
        with a page for one more slot. keep_hidden: the hidden states of `flight` stay readable until the launch after
        this one; otherwise its result has none. None where the step cannot be launched without the tokens of `flight`.
        """
        return None

    def draft_on_device(self, drafter: EagleDrafter) -> None:
        """Let the device draft with it between verifications, where it can. Once, before any step."""

    @property
    def stores_hidden(self) -> bool:
        """Whether launch_ahead and launch_drafted take the drafter's hidden states of the pass in front on the device.
        """
        return False

    def launch_drafted(self, flight: Flight, samples: Seq[Sample], keep_hidden: bool) -> Flight | None:
        """The verification after `flight`, which is draftable and may still be running, for the same samples, of trees
        that the device drafts from its tokens; each sample has pages for the most that this can write. keep_hidden: as
        launch_ahead's. None where the host must draft."""
        return None

    def take(self, flight: Flight) -> Taken:
        """Waits for the tokens of a flight that is by_ids; its `result` has the rest. Called once at most, before."""
        raise NotImplementedError("take: every pass of this runner has landed when it is launched")

    def launch_next(self, flight: Flight, trees: list[DraftTree]) -> Flight:
        """The step after `flight`, whose tokens have been taken and none of whose samples has ended: trees[i] from the
        root of its i-th sample. Nothing else is launched between the two."""
        raise NotImplementedError("launch_next: nothing can have been taken")

    def capture_graphs(self) -> None:
        """Nothing to capture here: CUDA graphs are DeviceRunner's."""

    def release_graphs(self) -> None:
        """Nor to give back."""

    def graph_buffers(self) -> list[Tensor]:
        """Static results of graphs, for RolloutEngine.sleep."""
        return []

    def graph_report(self) -> dict[str, Any] | None:
        return None

    @torch.inference_mode()
    def run(self, batch: Batch, trees: Seq[DraftTree], samples: Seq[Sample]) -> StepResult:
        if batch.copies:
            source, destination = zip(*batch.copies)
            copy_pages(self.kv.data, torch.tensor(source), torch.tensor(destination))
        packed = pack_step(batch, trees, self.buffers, self.page_size)
        out = self.model.forward(packed.inputs, self.kv, capture=self.capture)
        logits = out.logits
        emitted: list[Emitted] = []
        if trees:
            ids = noise_ids([s.seq for s in samples], packed)
            params = row_params(samples, packed, self.eos_ids, self.model.config.vocab_size)
            emitted = self.verify(packed, logits[: packed.decode_rows], ids, params, trees, samples)
        return StepResult(emitted, [(chunk, logits[rows]) for chunk, rows in packed.prompt_rows], out.hidden)

    def verify(
        self, packed: PackedStep, logits: Tensor, ids: NoiseIds, params: RowParams, trees: Seq[DraftTree],
        samples: Seq[Sample],
    ) -> list[Emitted]:
        """Draw, walk and commit for any kind of request, all tensors on one device; waits for it."""
        want_raw = any(s.request.params.raw_logprobs for s in samples)
        starts = np.cumsum(packed.nodes) - packed.nodes
        unmodified = self._apply_processors(samples, starts, logits)
        result = sample(logits, ids, params, vocab_limit=self.vocab_limit, want_raw=want_raw)
        if result.raw_logprobs is not None:
            for row, before in unmodified.items():
                result.raw_logprobs[row] = torch.log_softmax(before, -1)[result.tokens[row].clamp_min(0)]
        if any(s.forced is not None for s in samples):
            result = self._force(result, logits, ids, params, trees, samples, starts, want_raw)

        walk = verify_tree(result.tokens, packed.trees)
        decodes = len(samples)
        commit_kv(self.kv.data, packed.inputs.page_table[:decodes], packed.inputs.prefix_lens[:decodes], walk)
        lens = walk.accept_lens.tolist()
        return self._collect(packed, logits, params, samples, result, lens, walk.paths, walk.tokens)

    def _force(
        self, drawn: SampleResult, logits: Tensor, ids: NoiseIds, params: RowParams, trees: Seq[DraftTree],
        samples: Seq[Sample], starts: np.ndarray, want_raw: bool,
    ) -> SampleResult:
        """`score`: at a row of a forced sample the token is given. Its tree is the chain of the given tokens, so the
        walk accepts all of it."""
        tokens = drawn.tokens.clamp_min(0)
        for s, tree, start in zip(samples, trees, starts):
            if s.forced is not None:
                done = len(s.output.token_ids)
                given = s.forced[done : done + len(tree)]
                tokens[start : start + len(given)] = torch.tensor(given, device=tokens.device)
        scored = sample(logits, ids, params, vocab_limit=self.vocab_limit, forced=tokens, want_raw=want_raw)
        return replace(scored, tokens=torch.where(drawn.tokens < 0, drawn.tokens, scored.tokens))

    def _apply_processors(self, samples: Seq[Sample], starts: np.ndarray, logits: Tensor) -> dict[int, Tensor]:
        """Run the logits processors, in place. Their samples decode without speculation, so a processor sees committed
        prefixes only, one call a token. Returns the rows' unmodified logits, for raw log-probabilities."""
        before: dict[int, Tensor] = {}
        for s, row in zip(samples, starts.tolist()):
            processor = s.request.params.logits_processor
            if processor is not None and s.forced is None:
                before[row] = logits[row].float().clone()
                try:
                    processed = processor(tuple(s.output.token_ids), before[row].cpu().clone())
                    logits[row] = _checked(processed, len(before[row])).to(logits.device, logits.dtype)
                except CallInsideStep:
                    raise
                except Exception as error:  # it ends its own request; the others' step goes on
                    s.fault = f"logits_processor: {type(error).__name__}: {error}"
                    logits[row] = float("nan")
        return before

    def _collect(
        self, packed: PackedStep, logits: Tensor, params: RowParams, samples: Seq[Sample], result: SampleResult,
        lens: list[int], paths: Tensor, tokens: Tensor,
    ) -> list[Emitted]:
        starts = torch.from_numpy(np.cumsum(packed.nodes) - packed.nodes).to(paths.device)
        rows = paths.long().clamp_min(0) + starts[:, None]
        logprobs = result.logprobs[rows].tolist()
        raw = result.raw_logprobs[rows].tolist() if result.raw_logprobs is not None else None
        wants_top = [s.request.params.logprobs for s in samples]
        processed = None
        if any(n is not None and n > 0 for n in wants_top):
            processed = process_logits(logits, params, vocab_limit=self.vocab_limit)
        nodes = paths.tolist() if self.capture else [[]] * len(samples)
        emitted = []
        for i, (s, n, row_tokens) in enumerate(zip(samples, lens, tokens.tolist())):
            top, count = None, wants_top[i]
            if count is not None:
                scores = None if processed is None else processed[rows[i, :n]]
                top = top_logprobs(scores, row_tokens[:n], logprobs[i][:n], count)
            keep_raw = raw[i][:n] if raw is not None and s.request.params.raw_logprobs else None
            emitted.append(Emitted(row_tokens[:n], logprobs[i][:n], keep_raw, top, nodes[i][:n]))
        return emitted


def _checked(processed: object, size: int) -> Tensor:
    if isinstance(processed, Tensor) and processed.shape == (size,):
        return processed
    got = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
    raise ValueError(f"expected it to return a tensor [{size}], got {got}; return the logits it was given, changed")


def top_logprobs(
    scores: Tensor | None, tokens: Seq[int], logprobs: Seq[float], count: int
) -> list[dict[int, Logprob]]:
    """For each position {id: Logprob}: the sampled token first, then the `count` most likely ones that survive the
    filters. scores [n, V]: unnormalised, -inf = filtered."""
    if scores is None or count == 0:
        return [{t: Logprob(lp)} for t, lp in zip(tokens, logprobs)]
    normal = torch.log_softmax(scores.float(), dim=-1)
    best = torch.topk(normal, min(count, normal.shape[-1]), dim=-1)
    entries = []
    for row, token, lp in zip(range(len(tokens)), tokens, logprobs):
        rank = int((normal[row] > normal[row, max(token, 0)]).sum()) + 1
        entry = {token: Logprob(lp, rank)}
        ranked = zip(best.indices[row].tolist(), best.values[row].tolist())
        for position, (other, value) in enumerate(ranked, start=1):
            if value > float("-inf"):
                entry.setdefault(other, Logprob(value, position))
        entries.append(entry)
    return entries


def prompt_logprobs(logits: Tensor, targets: Seq[int], count: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of the prompt's own tokens: of the unmodified logits [n, V] at temperature 1, as in vLLM."""
    normal = torch.log_softmax(logits.float(), dim=-1)
    chosen = normal.gather(1, torch.tensor(targets, device=normal.device)[:, None])
    values = chosen[:, 0].tolist()
    ranks = ((normal > chosen).sum(dim=-1) + 1).tolist()
    if count == 0:
        return [{t: Logprob(lp, rank)} for t, lp, rank in zip(targets, values, ranks)]
    return top_logprobs(normal, targets, values, count)
