"""The learned drafter in serving: EAGLE draft trees from the target's hidden states and the request's own noise.

Shape legend: B requests, M expanded nodes a request, k children of each, H hidden. Knows neither the scheduler nor the
target's pass: hidden states come through `take`, and trees go out through `propose`.

What it proposes are the k best ids of log q + g, q its own estimate under the request's own temperature, masks,
penalties and filters, and g the noise that the target will draw with at that position. Legal because verification is
equality (docs/guarantees.md): the emitted token never depends on the proposal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tlt_kernels.draft import noisy_top_k
from tlt_kernels.params import GREEDY_BELOW
from torch import Tensor

from tlt_engine.config import SpeculationConfig
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.candidates import Candidates, log_chances
from tlt_engine.speculation.draft_rows import DraftRows
from tlt_engine.speculation.drafter import DraftContext
from tlt_engine.speculation.hidden import HiddenRows
from tlt_engine.speculation.lanes import Lane, Lanes, Span
from tlt_engine.speculation.learned_pass import Beam, EaglePass, Entries, Output
from tlt_engine.speculation.model_free import ModelFreeDrafter
from tlt_engine.speculation.sharpness import Sharpness
from tlt_engine.speculation.static_draft import StaticDraft
from tlt_engine.speculation.tree import DraftTree
from tlt_engine.types import MAX_NODES

logger = logging.getLogger("tlt_engine")
ALARM_PASSES = 256  # drafted passes that are looked at together
ALARM_BELOW = 1.05  # tokens a pass, bonus token included: hardly a draft in twenty is right


class Watch:
    """Raises the alarm when drafts are hardly ever right: a drafter of another target, or one whose hidden states, ids
    or positions are off, shows in no output."""

    def __init__(self) -> None:
        self.alarms = 0
        self._warned = False
        self._passes = self._accepted = 0

    def count(self, accepted: int) -> None:
        self._passes += 1
        self._accepted += accepted
        if self._passes == ALARM_PASSES:
            length = 1 + self._accepted / self._passes
            self._passes = self._accepted = 0
            if length < ALARM_BELOW:
                self.alarms += 1
                if not self._warned:
                    logger.warning(
                        "the drafter's accept length fell to %.2f over %d passes: it is not this target's drafter, or "
                        "it has not followed the target; check it, train it, or switch it off", length, ALARM_PASSES,
                    )
                self._warned = True

    def reset(self) -> None:
        self._warned = False
        self._passes = self._accepted = 0


class EagleDrafter:
    """A Drafter (speculation/drafter.py) and HiddenDrafter (speculation/hidden.py).

    model: bound to the target; it is used as it is, so training it elsewhere needs a copy. lanes: samples that can be
    drafted for at once. max_model_len: of the engine. vocab_limit: as the target's sampler has it.
    model_free: its proposals compete with the learned ones, where given.
    """

    def __init__(
        self, model: EagleModel, config: SpeculationConfig, *, lanes: int, max_model_len: int,
        eos_ids: Sequence[int] = (), vocab_limit: int | None = None, page_size: int = 16,
        model_free: ModelFreeDrafter | None = None,
    ) -> None:
        self.model, self.config, self.eos_ids = model, config, tuple(eos_ids)
        self.hidden_layers = model.config.aux_layers
        self.version = "0"
        self._vocab_limit, self._model_free = vocab_limit, model_free
        self._sharpness = Sharpness(config.sharpness)
        depth = config.profile.depth
        self._width = min(config.profile.top_k, MAX_NODES // max(depth - 1, 1))  # nodes expanded a level
        c = model.config
        self._lanes = Lanes(
            lanes, window=c.window, max_len=min(max_model_len, c.max_position_embeddings),
            tree_slots=max(depth - 1, 1) * self._width, width=len(c.aux_layers) * c.target_hidden_size,
            kv_heads=c.num_kv_heads, head_dim=c.head_dim, page_size=page_size, dtype=model.dtype, device=model.device,
        )
        self._pass = EaglePass(model, self._lanes, max_model_len + depth)
        self._watch = Watch()
        self._loads = 0
        # By sample, of drafts that have not been observed yet: is it greedy, and how many should be accepted.
        self._drafted: dict[int, tuple[bool, float]] = {}
        self._static: StaticDraft | None = None
        self._proposals = 0

    # ---------------------------------------------------------------- what the engine calls

    @torch.inference_mode()
    def take(self, rows: HiddenRows) -> None:
        self._lanes.take(rows, self.hidden_layers)

    def fork(self, source: int, seq_id: int, length: int) -> None:
        self._lanes.fork(source, seq_id, length)

    def target_changed(self, recomputed: bool) -> None:
        """The embedding is the target's, so K and V are stale in any case."""
        if recomputed:
            self._lanes.clear()
        self._lanes.forget_kv()

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        self._proposals += 1
        trees = [DraftTree.root(c.token_ids[-1]) for c in contexts]
        others = None if self._model_free is None else self._model_free.propose_with_chances(contexts)
        asked: list[int] = []
        spans: list[Span] = []
        for i, context in enumerate(contexts):
            span = self._lanes.extend(context.seq_id, len(context.token_ids)) if self._depth(context) > 0 else None
            if span is not None:
                asked.append(i)
                spans.append(span)
            elif others is not None:
                trees[i] = others[i][0]
        if asked:
            chosen = [contexts[i] for i in asked]
            try:
                found, expected = self._draft(chosen, spans, None if others is None else [others[i] for i in asked])
            except BaseException:  # K and V that `extend` counts as computed may not be
                self._lanes.forget_kv()
                raise
            for i, tree, share in zip(asked, found, expected):
                trees[i] = tree
                if len(tree) > 1:
                    self._drafted[contexts[i].seq_id] = (contexts[i].params.temperature < GREEDY_BELOW, share)
        return trees

    def observe(self, context: DraftContext, accepted: int) -> None:
        drafted = self._drafted.pop(context.seq_id, None)
        if drafted is not None:
            self._watch.count(accepted)
            if self._model_free is None:  # whose drafts were accepted is not known otherwise
                self._sharpness.count(*drafted, accepted)
        if self._model_free is not None:
            self._model_free.observe(context, accepted)

    def finish(self, seq_id: int) -> None:
        self._lanes.drop(seq_id)
        self._drafted.pop(seq_id, None)
        if self._model_free is not None:
            self._model_free.finish(seq_id)

    def memory_bytes(self) -> int:
        """Weights, lanes and tables, static tensors, and the model-free drafter's."""
        weights = sum(t.untyped_storage().nbytes() for t in (*self.model.parameters(), *self.model.buffers()))
        others = 0 if self._model_free is None else self._model_free.memory_bytes()
        static = 0 if self._static is None else self._static.bytes
        return weights + self._lanes.bytes + self._pass.bytes + others + static

    def device_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """For RolloutEngine.sleep: weights, whose values must come back, and hidden states, K and V, which are computed
        again once target_changed(recomputed=True) has been called."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        return [t.detach() for t in weights], [self._lanes.ring, self._lanes.kv.data]

    def stats(self) -> dict[str, Any]:
        """version and how often weights were loaded; proposals: steps whose trees the host asked for; lanes that
        samples hold, and their bytes with those of the rings; sharpness: of the estimated chances, for requests with
        noise and for greedy ones; alarms: how often ALARM_PASSES drafted passes in a row had an accept length below
        ALARM_BELOW."""
        return {
            "version": self.version, "loads": self._loads, "proposals": self._proposals, "lanes": self._lanes.held,
            "lane_bytes": self._lanes.bytes,
            "sharpness": {"noise": self._sharpness.value[False], "greedy": self._sharpness.value[True]},
            "alarms": self._watch.alarms,
        }

    # ---------------------------------------------------------------- drafts that the device makes itself

    @property
    def needs_host(self) -> bool:
        """Proposals that no static pass can make: the model-free drafter's are among them."""
        return self._model_free is not None

    def static(self, batch: int) -> StaticDraft:
        """Over the same lanes, for at most `batch` requests."""
        assert not self.needs_host, "static: the model-free drafter has no place on the device"
        self._static = StaticDraft(
            self.model, self._lanes, self._pass, self.config, batch=batch, width=self._width,
            vocab_limit=self._vocab_limit,
        )
        return self._static

    def whole_lane(self, seq_id: int, stop: int) -> Lane | None:
        """Lanes.whole: None where the host must catch up first."""
        return self._lanes.whole(seq_id, stop)

    def known_lane(self, seq_id: int, stop: int) -> Lane | None:
        return self._lanes.known(seq_id, stop)

    def stored(self, seq_id: int, stop: int) -> None:
        """StaticDraft.store has been at the positions before `stop`, in place of `take`."""
        self._lanes.stored(seq_id, stop)

    def sharpness_of(self, greedy: bool) -> float:
        return self._sharpness.value[greedy]

    def extended(self, seq_id: int, stop: int) -> None:
        """StaticDraft.extend has been at the entries before `stop`, in place of `take`."""
        self._lanes.extended(seq_id, stop)

    def drafted(self, seq_id: int, greedy: bool, expected: float) -> None:
        """Before `observe`: of a tree that StaticDraft has made, with drafts in it."""
        self._drafted[seq_id] = (greedy, expected)

    # ---------------------------------------------------------------- weights

    def load(self, source: EagleModel | Mapping[str, Tensor], version: str | int | None = None) -> str:
        """New weights, copied in place between steps, under a version (default: a count): returned. K and V are
        computed again from the rings at the next draft; the target need not run for it. Refused whole, as
        EagleModel.copy_from does."""
        self.model.copy_from(source)
        self._lanes.forget_kv()
        self._watch.reset()
        self._loads += 1
        counted = str(int(self.version) + 1) if self.version.isdigit() else f"{self.version}+1"
        self.version = counted if version is None else str(version)
        return self.version

    # ---------------------------------------------------------------- drafting

    def _depth(self, context: DraftContext) -> int:
        """Levels that are worth drafting: the deepest node's parent must stand at a position that the drafter has."""
        reach = self._pass.length - len(context.token_ids) + 2
        return min(self.config.profile.depth, context.max_depth, reach) if context.max_nodes > 1 else 0

    def _draft(
        self, contexts: Sequence[DraftContext], spans: Sequence[Span],
        others: Sequence[tuple[DraftTree, Sequence[float]]] | None,
    ) -> tuple[list[DraftTree], list[float]]:
        device, model = self.model.device, self.model
        rows = DraftRows(contexts, self.eos_ids, model.config.vocab_size, device)
        depths = [self._depth(c) for c in contexts]
        candidates = Candidates(torch.tensor(depths, device=device), rows.stops, self.config.min_chance)
        entries = self._entries(contexts, spans)
        out = self._pass.extend(entries)
        batch = len(contexts)
        branches = torch.empty(batch, 1, 0, dtype=torch.int64, device=device)
        above = torch.zeros(batch, 1, device=device)
        indices = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._add(candidates, rows, out, branches, above, indices)
        beam = Beam(entries)
        first = -1  # index in the beam of the first node of the level above: -1, the root
        for _ in range(1, max(depths)):
            places, indices, tokens, above = self._expanded(candidates)
            if not tokens.shape[1]:
                break
            up = places // self._k  # which of the nodes expanded before is the parent
            hidden = out.hidden.unflatten(0, (batch, -1))
            hidden = hidden.gather(1, up[..., None].expand(-1, -1, hidden.shape[-1]))
            branches = branches.gather(1, up[..., None].expand(-1, -1, branches.shape[-1]))
            branches = torch.cat((branches, tokens[..., None]), 2)
            parents = up + first
            first = beam.nodes
            out = self._pass.level(beam, tokens, hidden, parents)
            self._add(candidates, rows, out, branches, above, indices)
        budgets = [min(c.max_nodes, self.config.profile.verify) for c in contexts]
        return candidates.trees([c.token_ids[-1] for c in contexts], budgets, others)

    @property
    def _k(self) -> int:
        return self.config.profile.top_k

    def _expanded(self, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        places, indices, tokens, scores = candidates.best(self._width)
        if scores.device.type != "cpu":  # looking would wait for the device
            return places, indices, tokens, scores
        alive = int((scores > -torch.inf).sum(1).max())  # on the CPU every row of a level costs its share
        return places[:, :alive], indices[:, :alive], tokens[:, :alive], scores[:, :alive]

    def _add(
        self, candidates: Candidates, rows: DraftRows, out: Output, branches: Tensor, above: Tensor, indices: Tensor
    ) -> None:
        """The k best children of each expanded node."""
        batch, width, depth = branches.shape
        model = self.model
        top = noisy_top_k(
            out.logits, rows.noise(depth, width), rows.params(depth, branches), self._k,
            d2t=None if model.head is None else model.d2t,
            target_vocab=None if model.head is None else model.config.vocab_size, vocab_limit=self._vocab_limit,
            noise=self.config.shared_noise,
        )
        chances = log_chances(top, rows.greedy.repeat_interleave(width), self._sharpness_of(rows, width))
        candidates.add(top.tokens.view(batch, -1), chances.view(batch, -1), above, indices)

    def _sharpness_of(self, rows: DraftRows, width: int) -> Tensor | None:
        """[B * M]; None where nodes are ranked by q alone."""
        if self.config.ranking == "q" or not self.config.shared_noise:
            return None
        value = self._sharpness.value
        return torch.where(rows.greedy, value[True], value[False]).repeat_interleave(width)

    def _entries(self, contexts: Sequence[DraftContext], spans: Sequence[Span]) -> Entries:
        lanes = self._lanes
        tokens: list[int] = []
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for context, span in zip(contexts, spans):
            positions = np.arange(span.start, span.stop)
            tokens += context.token_ids[span.start + 1 : span.stop + 1]
            parts.append((lanes.ring_rows(span.lane, positions), positions, lanes.slots(span.lane, positions)))
        ring, positions, slots = (np.concatenate(arrays) for arrays in zip(*parts))
        ends = np.cumsum([span.stop - span.start for span in spans]) - 1
        index = np.array([span.lane.index for span in spans])
        logical = np.array([span.logical for span in spans], np.int32)

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self.model.device)

        return Entries(
            ring=put(ring), tokens=put(np.array(tokens, np.int64)), positions=put(positions), slots=put(slots),
            last=put(ends), logical=put(logical), table=lanes.table.index_select(0, put(index)),
        )
