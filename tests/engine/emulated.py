"""The GPU's runner on the CPU: streams, events and graphs are played, kernels are their CPU twins.

All of device.py, staging.py and graphs/cache.py runs as it is: layouts, padding, the steps launched ahead, which inputs
a captured graph reads. What cannot be seen here is asynchrony and the kernels themselves; tests/gpu has those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import tlt_kernels
import torch
from tlt_kernels import NoiseIds, PackedTrees, RowParams, SampleResult, Walk
from torch import Tensor

from tlt_engine.engine import build, device, drafting, engine, staging
from tlt_engine.engine.device import DeviceRunner
from tlt_engine.graphs.buckets import Buckets, GraphKey
from tlt_engine.graphs.cache import CaptureOutOfMemoryError
from tlt_engine.models.cuda_pass import Chunks
from tlt_engine.types import StepInputs, StepOutputs

BUCKETS = Buckets(GraphKey(b, v) for b in (1, 2, 4, 8) for v in (1, 4, 16) if b * v <= 64)


class PlayedEvent:
    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class PlayedGraph:
    bytes = 1000

    def __init__(self, run: Callable[[], object]) -> None:
        self._run, self.released = run, False

    def replay(self) -> None:
        assert not self.released, "replay of a released graph"
        self._run()

    def release(self) -> None:
        self.released = True


class PlayedCapturer:
    """memory: captures that fit before it runs out."""

    memory = 10**9

    def __init__(self, where: torch.device) -> None: ...

    def capture(self, run: Callable[[], object]) -> PlayedGraph:
        if type(self).memory < 1:
            raise CaptureOutOfMemoryError("played")
        type(self).memory -= 1
        run()
        run()
        return PlayedGraph(run)


class PlayedPass:
    bytes = 0

    prefill_backend = "played"

    def __init__(self, model: Any, kv: Any, *, max_rows: int, max_batch: int, **config: Any) -> None:
        self.model, self.kv = model, kv

    def forward(
        self, step: Any, *, capture: Any = (), logits_out: Tensor | None = None, chunks: Chunks | None = None
    ) -> Any:
        if chunks is not None:
            assert step.causal.tolist() == [0] * chunks.first + [1] * (len(step.causal) - chunks.first)
            assert int(step.node_indptr[chunks.first]) == chunks.first_row
        rows, live = len(step.token_ids), int(step.node_indptr[-1])
        out = self.model.forward(_live(step, live), self.kv, capture=capture) if live else None
        page = self.kv.page_size
        for slot in step.slots[live:].tolist():  # what the padding rows of the real pass write
            for layer in range(len(self.kv.data)):
                for cache in self.kv.layer(layer):
                    cache[slot // page, slot % page] = float("nan")
        if logits_out is None:
            assert live == rows, "an eager pass has no padding"
            return out
        logits_out.fill_(float("nan"))
        hidden = {i: torch.full((rows, self.model.config.hidden_size), float("nan")) for i in capture}
        if out is not None:
            logits_out[:live] = out.logits
            for i, states in out.hidden.items():
                hidden[i][:live] = states
        return StepOutputs(logits_out, hidden)


def _live(step: StepInputs, live: int) -> StepInputs:
    requests = int((step.node_indptr.diff() > 0).sum())
    cut = {name: getattr(step, name)[:live] for name in ("token_ids", "positions", "slots", "ancestors")}
    cut |= {name: getattr(step, name)[:requests] for name in ("page_table", "prefix_lens", "causal")}
    cut["node_indptr"] = step.node_indptr[: requests + 1]
    everything = len(step.logit_rows) == len(step.token_ids)
    return replace(step, **cut, logit_rows=torch.arange(live) if everything else step.logit_rows)


class PlayedOps:
    """tlt_kernels.cuda on CPU tensors."""

    @staticmethod
    def sample(
        logits: Tensor, ids: NoiseIds, params: RowParams, *, vocab_limit: int | None, out: SampleResult
    ) -> SampleResult:
        result = tlt_kernels.sample(
            logits.contiguous(), ids, params, vocab_limit=vocab_limit, want_raw=out.raw_logprobs is not None
        )
        assert len(out.tokens) == len(result.tokens)
        out.tokens.copy_(result.tokens)
        out.logprobs.copy_(result.logprobs)
        if out.raw_logprobs is not None and result.raw_logprobs is not None:
            out.raw_logprobs.copy_(result.raw_logprobs)
        return out

    @staticmethod
    def verify_tree(sampled: Tensor, trees: PackedTrees, *, steps: int, out: Walk) -> Walk:
        live, rows = _live_trees(trees.node_indptr)
        cut = PackedTrees(*(getattr(trees, name)[:rows] for name in ("tokens", "parents", "depths", "ancestors")),
                          trees.node_indptr[: live + 1])
        walk = tlt_kernels.verify_tree(sampled[:rows], cut)
        out.accept_lens.fill_(0)
        out.paths.fill_(-1)
        out.tokens.fill_(-1)
        columns = walk.paths.shape[1]
        assert columns <= steps, f"a walk of {columns} columns in {steps}"
        out.accept_lens[:live].copy_(walk.accept_lens)
        out.paths[:live, :columns] = walk.paths
        out.tokens[:live, :columns] = walk.tokens
        return out

    @staticmethod
    def tree_from_candidates(
        tokens: Tensor, parents: Tensor, scores: Tensor, cand_indptr: Tensor, budgets: Tensor, *, rows: int,
        widest: int, out: PackedTrees,
    ) -> PackedTrees:
        live, end = _live_trees(cand_indptr)
        assert int(cand_indptr.diff().max()) <= widest
        out.node_indptr.zero_()
        if live:
            packed = tlt_kernels.tree_from_candidates(
                tokens[:end], parents[:end], scores[:end], cand_indptr[: live + 1], budgets[:live]
            )
            count = len(packed.tokens)
            assert count <= rows
            out.node_indptr[: live + 1] = packed.node_indptr
            out.node_indptr[live + 1 :] = count
            for name in ("tokens", "parents", "depths", "ancestors"):
                getattr(out, name)[:count] = getattr(packed, name)
        return out

    @staticmethod
    def commit_kv(kv: Tensor, page_table: Tensor, prefix_lens: Tensor, walk: Walk) -> None:
        live = int((walk.accept_lens > 0).sum())
        lens, paths, tokens = walk.accept_lens[:live], walk.paths[:live].contiguous(), walk.tokens[:live].contiguous()
        assert not walk.accept_lens[live:].any(), "padding stands last"
        tlt_kernels.commit_kv(kv, page_table[:live], prefix_lens[:live], Walk(lens, paths, tokens))

    @staticmethod
    def advance(walk: Walk, prefix_lens: Tensor, roots: Tensor) -> None:
        last = walk.tokens.gather(1, (walk.accept_lens.long() - 1).clamp_min(0)[:, None])[:, 0]
        prefix_lens += walk.accept_lens
        roots.copy_(torch.where(walk.accept_lens > 0, last.clamp_min(0), roots))

    @staticmethod
    def step_inputs(
        node_indptr: Tensor, depths: Tensor, prefix_lens: Tensor, page_table: Tensor, *, page: int, pad_slot: int,
        positions: Tensor, draws: Tensor, slots: Tensor,
    ) -> None:
        bounds = node_indptr.tolist()
        positions.fill_(0)
        draws.fill_(1)
        slots.fill_(pad_slot)
        for b in range(len(prefix_lens)):
            for row in range(bounds[b], bounds[b + 1]):
                prefix = int(prefix_lens[b])
                slot = prefix + row - bounds[b]
                positions[row] = prefix + depths[row]
                draws[row] = positions[row] + 1
                inside = slot // page < page_table.shape[1]
                slots[row] = page_table[b, slot // page] * page + slot % page if inside else pad_slot


def _live_trees(indptr: Tensor) -> tuple[int, int]:
    """Requests before the padding, which has no nodes, and where they end."""
    sizes = indptr.diff()
    live = int((sizes > 0).sum())
    assert bool((sizes[:live] > 0).all()), "padding stands last"
    return live, int(indptr[live])


def played_copy_block(to: Tensor, source: Tensor, start: int, pitch: int, width: int, rows: int, where: Any) -> None:
    for at in range(start, start + rows * pitch, pitch):
        to[at : at + width] = source[at : at + width]


@contextmanager
def emulation(buckets: Buckets | None = BUCKETS, graph_bytes: int = 10**9, memory: int = 10**9) -> Iterator[None]:
    """Engines built inside run on the GPU's runner, played on the CPU."""

    def build_kv(config: Any, model: Any, max_model_len: int) -> Any:
        pool, prefix, kv = build.build_kv(config, model, max_model_len)
        return pool, prefix, model.new_kv(kv.num_pages + 1, kv.page_size)

    def build_runner(config: Any, model: Any, kv: Any, max_model_len: int, *, vocab_limit: Any, eos_ids: Any) -> Any:
        return DeviceRunner(
            model, kv, build.build_buffers(config, max_model_len), vocab_limit=vocab_limit, eos_ids=eos_ids,
            buckets=None if config.enforce_eager else buckets, graph_bytes=graph_bytes,
            prefill_backend=config.prefill_backend,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlayedCapturer, "memory", memory)
        patch.setattr(engine, "build_kv", build_kv)
        patch.setattr(engine, "build_runner", build_runner)
        patch.setattr(staging, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
        patch.setattr(staging, "copy_bytes", lambda to, source, a, b, where: to[a:b].copy_(source[a:b]))
        patch.setattr(staging, "copy_block", played_copy_block)
        patch.setattr(device, "Capturer", PlayedCapturer)
        patch.setattr(device, "CudaPass", PlayedPass)
        patch.setattr(device, "cuda", PlayedOps)
        patch.setattr(drafting, "cuda", PlayedOps)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.cuda, "Event", PlayedEvent)
        patch.setattr(torch.cuda, "current_stream", lambda where=None: None)
        patch.setattr(torch.cuda, "device", lambda where: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda where=None: None)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        yield
