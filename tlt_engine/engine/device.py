"""The target pass on the GPU: one copy in, a graph or an eager pass, the draw, one copy out.

Knows packed steps, addresses and streams; knows no stops and no outputs. Nothing waits for the device but
`DeviceFlight.result`, which reads what was emitted, and requests that need the host in the middle of a pass (logits
processors, top log-probabilities, scoring).

A plain step can be launched before the step in front of it has been read: the device turns the tokens it drew itself
into the next inputs (`launch_ahead`). Behind a verification the host takes the tokens, drafts and launches
(`launch_next`), or, with a learned drafter, the device drafts by itself (`launch_drafted`, drafting.py). Either way
stops, where they need text, and outputs are handled while the GPU is on the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from tlt_kernels import RowParams, SampleResult, Walk, copy_pages, cuda
from torch import Tensor

from tlt_engine.engine.drafting import DeviceDrafting, Ground
from tlt_engine.engine.hidden import PassHidden
from tlt_engine.engine.layout import DeviceView, Layout, frame_sections
from tlt_engine.engine.packing import Lanes, PackedStep, StepBuffers, needs_host, noise_ids, pack_step, row_params
from tlt_engine.engine.runner import Drafted, Emitted, Flight, Landed, ModelRunner, StepResult, Taken, top_logprobs
from tlt_engine.engine.sample import Sample
from tlt_engine.engine.staging import Frame, Results, Sections, Staging, sections_bytes
from tlt_engine.graphs.buckets import Buckets, DraftKey, ExtendKey, GraphKey
from tlt_engine.graphs.cache import Graph, GraphCache
from tlt_engine.graphs.capture import CapturedGraph, Capturer
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models import Transformer
from tlt_engine.models.cuda_pass import Chunks, CudaPass
from tlt_engine.scheduler.sequence import Batch, Chunk, Sequence
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.tree import DraftTree
from tlt_engine.types import MAX_NODES, StepInputs, StepOutputs

I64, I32, F32 = torch.int64, torch.int32, torch.float32
PARAMS = tuple(f.name for f in fields(RowParams) if f.name != "temperature")
PARAM_SLACK = 1 << 20  # bytes a step for filters, biases and short histories, beside the inputs of the largest step


def result_sections(requests: int, rows: int, steps: int) -> Sections:
    return {
        "accept_lens": ((requests,), I32), "paths": ((requests, steps), I32), "tokens": ((requests, steps), I64),
        "logprobs": ((rows,), F32), "raw": ((rows,), F32), "drawn": ((rows,), I64),
        "indptr": ((requests + 1,), I32), "deepest": ((requests,), I32), "expected": ((requests,), F32),
    }


@dataclass
class _Draw:
    """What the draw after a pass needs, and what a step ahead takes over. nodes: rows of each request. steps: columns
    of the walk, the deepest node's depth + 1. lanes: None for a step with chunks, and where the device has drafted.
    pages: how many of each sequence's pages the device knows. bucket: of a pass that `launch_drafted` may go on from:
    the results lie where they lie for all of that size, and view is the whole layout."""

    view: DeviceView
    nodes: Seq[int]
    params: RowParams
    steps: int
    want_raw: bool
    samples: Seq[Sample]
    lanes: Lanes | None
    pages: list[int]
    bucket: GraphKey | None = None
    drafted: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Requests, rows and columns that the results have room for."""
        if self.bucket is None:
            return len(self.nodes), sum(self.nodes), self.steps
        return self.bucket.batch, self.bucket.rows, self.steps


@dataclass
class DeviceFlight:
    """A launched pass whose results are on their way to `frame.host`."""

    layout: Layout
    key: GraphKey | None
    draw: _Draw
    frame: Frame
    walk: Walk
    done: torch.cuda.Event
    prompt_logits: list[tuple[Chunk, Tensor]]
    repeatable: bool
    hidden: dict[int, Tensor]  # none where the pass behind has overwritten them

    @property
    def by_ids(self) -> bool:
        return self.draw.lanes is not None and self.draw.lanes.by_ids

    @property
    def draftable(self) -> bool:
        return self.draw.bucket is not None

    def result(self) -> StepResult:
        self.done.synchronize()
        host, draw, count = self.frame.host, self.draw, len(self.draw.samples)
        lens, tokens = host["accept_lens"][:count].tolist(), host["tokens"].tolist()
        nodes = np.diff(host["indptr"])[:count] if draw.drafted else np.array(draw.nodes)
        starts = np.cumsum(nodes) - nodes
        rows = np.maximum(host["paths"][:count], 0) + starts[:, None]
        logprobs = host["logprobs"][rows].tolist()
        raw = host["raw"][rows].tolist() if draw.want_raw else None
        paths = host["paths"].tolist() if self.hidden else [[]] * len(lens)
        emitted = []
        for i, (sample, n) in enumerate(zip(draw.samples, lens)):
            params = sample.request.params
            top = top_logprobs(None, tokens[i][:n], logprobs[i][:n], 0) if params.logprobs is not None else None
            keep_raw = raw[i][:n] if raw is not None and params.raw_logprobs else None
            emitted.append(Emitted(tokens[i][:n], logprobs[i][:n], keep_raw, top, paths[i][:n]))
        drafted = None
        if draw.drafted:
            columns = (nodes.tolist(), host["deepest"].tolist(), host["expected"].tolist())
            drafted = [Drafted(*values) for values in zip(*columns)]
        return StepResult(emitted, self.prompt_logits, self.hidden, drafted)


class DeviceRunner(ModelRunner):
    """graph_bytes: budget of the captured graphs. buckets None: never capture. kv has one page more than the pool knows
    of, its last: the dummy page."""

    def __init__(
        self, model: Transformer, kv: KVStorage, buffers: StepBuffers, *, vocab_limit: int | None,
        eos_ids: frozenset[int], buckets: Buckets | None, graph_bytes: int, prefill_backend: str = "auto",
        invariant: bool = False,
    ) -> None:
        super().__init__(model, kv, buffers, vocab_limit=vocab_limit, eos_ids=eos_ids)
        self.device = kv.data.device
        largest = buckets.keys[0] if buckets is not None else None
        rows = max(buffers.max_rows, largest.rows if largest else 0)
        requests = max([buffers.max_requests] + [key.batch for key in (buckets.keys if buckets else ())])
        self._pages = buffers.page_table.shape[1]
        self._dummy_page = kv.num_pages - 1
        self._staging = Staging(
            sections_bytes(frame_sections(requests, rows, rows, self._pages)) + PARAM_SLACK, self.device
        )
        self._results = Results(result_sections, (requests, rows, MAX_NODES), self.device)
        self._pass = CudaPass(
            model, kv, max_rows=rows, max_batch=requests, max_keys=self._pages * kv.page_size,
            prefill_backend=prefill_backend, invariant=invariant,
        )
        self.prefill_backend = self._pass.prefill_backend
        self._layouts: dict[GraphKey, Layout] = {}
        self._grounds: dict[GraphKey, Ground] = {}
        self._graphs: GraphCache | None = None
        if buckets is not None and largest is not None:
            self._logits = torch.empty(
                largest.rows, model.config.vocab_size, dtype=model.lm_head_dtype, device=self.device
            )
            self._capturer = Capturer(self.device)
            self._graphs = GraphCache(buckets, self._capture, graph_bytes)
        self._captured = self._kept = torch.empty(0, device=self.device)  # [layers, rows, hidden]; see _keep_hidden
        self._hidden: dict[int, Tensor] = {}  # its layers: where the graphs leave what is captured
        self._stream: torch.cuda.Stream | None = None
        self._latest: DeviceFlight | None = None  # whose inputs are still what the device holds
        self._drafting: DeviceDrafting | None = None

    @property
    def stores_hidden(self) -> bool:
        return self._drafting is not None

    def draft_on_device(self, drafter: EagleDrafter) -> None:
        if self._graphs is not None and not drafter.needs_host:
            pad_slot = self._dummy_page * self.page_size
            self._drafting = DeviceDrafting(
                drafter, self._graphs.buckets, self.device, page_size=self.page_size, pad_slot=pad_slot
            )

    def set_capture(self, layers: tuple[int, ...]) -> None:
        """Graphs write these hidden states or none: they are captured again."""
        super().set_capture(layers)
        self.release_graphs()
        rows = self._logits.shape[0] if self._graphs is not None else 0
        shape = (len(layers), rows, self.model.config.hidden_size)
        self._captured = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        self._kept = self._captured[:0]
        self._hidden = dict(zip(layers, self._captured))
        self._grounds.clear()

    @property
    def buffer_bytes(self) -> int:
        logits = self._logits.nbytes if self._graphs is not None else 0
        hidden = self._captured.nbytes + self._kept.nbytes
        drafting = 0 if self._drafting is None else self._drafting.bytes
        runs = self._staging.bytes + self._results.bytes + self._pass.bytes
        return self.buffers.bytes + runs + logits + hidden + drafting

    # ---------------------------------------------------------------- a step

    @torch.inference_mode()
    def launch(self, batch: Batch, trees: list[DraftTree], samples: Seq[Sample]) -> Flight:
        with torch.cuda.device(self.device):
            self._follow_stream()
            self._staging.wait()
            if batch.chunks:
                return self._launch_mixed(batch, trees, samples)
            return self._launch_decodes(Lanes(samples, self.eos_ids), trees, batch.copies)

    def take(self, flight: Flight) -> Taken:
        assert isinstance(flight, DeviceFlight) and flight.draw.lanes is not None, "take: more than ids decides"
        self._follow_stream()
        self._staging.wait()
        native, addresses = flight.draw.lanes.native, flight.frame.addresses
        flight.done.synchronize()
        passed = PassHidden(flight.hidden, flight.frame.host["paths"].tolist()) if flight.hidden else None
        tokens, accepted, ended = native.commit(addresses["accept_lens"], addresses["tokens"], flight.draw.steps)
        return Taken(tokens, accepted, ended, passed)

    def launch_next(self, flight: Flight, trees: list[DraftTree]) -> Flight:
        assert isinstance(flight, DeviceFlight) and flight.draw.lanes is not None, "launch_next: nothing was taken"
        return self._launch_decodes(flight.draw.lanes, trees, [])

    def _launch_decodes(self, lanes: Lanes, trees: list[DraftTree], copies: list[tuple[int, int]]) -> Flight:
        """After _follow_stream and a wait for the staging. The GPU may be idle until its launch: what the pass does not
        need comes behind."""
        self._latest = None
        nodes = [len(tree.tokens) for tree in trees]
        rows = sum(nodes)
        bucket = self._drafts_for(lanes, rows)
        if bucket is not None and self._drafting is not None and self._graphs is not None:
            for drafts in self._drafting.keys(bucket):
                self._graphs.prepare(drafts)  # they may write to the frame, which is nobody's before it is filled
        graph, key = self._graph_for(len(trees), rows, bucket)
        layout = self._layout(len(trees), rows, rows) if key is None else self._layout_of(key)
        self._staging.open(layout.frame)
        rows, deepest = layout.fill_decodes(trees, lanes)
        params = None if lanes.plain else self._put_params(lanes, layout, trees, rows)
        self._flush(copies, layout.frame, lanes.sequences)
        if graph is not None:
            graph.replay()
        with torch.cuda.device(self.device), torch.inference_mode():
            if key is None:
                out = self._pass.forward(layout.inputs, capture=self.capture)
            else:
                out = StepOutputs(self._logits[:rows], {i: self._hidden[i][:rows] for i in self.capture})
            logits, view = out.logits, layout.view(len(trees), rows)
            if params is None:
                params = RowParams(view.temperature)
            if lanes.needs_host:
                step = PackedStep(view.inputs, view.trees, np.array(nodes), [])
                emitted = self.verify(step, logits, view.ids, params, trees, lanes.samples)
                return Landed(StepResult(emitted, [], out.hidden))
            # What a step ahead may not change: biases hold until min_tokens, histories grow.
            constant = params.bias_row is None and params.history_row is None
            repeatable = len(trees) == rows and graph is not None and constant
            pages = [len(s.seq.pages) for s in lanes.samples] if repeatable else []
            draw = _Draw(view, nodes, params, deepest + 1, lanes.wants_raw, lanes.samples, lanes, pages)
            if bucket is not None and key is not None and self._drafting is not None:
                pages = [len(s.seq.pages) for s in lanes.samples]
                whole, columns = layout.view(key.batch, key.rows), self._drafting.columns
                draw = replace(draw, view=whole, steps=columns, pages=pages, bucket=key)
            return self._draw(layout, key, draw, out, [], repeatable)

    def _launch_mixed(self, batch: Batch, trees: list[DraftTree], samples: Seq[Sample]) -> Flight:
        """Prefill chunks, and maybe trees beside them: no graph."""
        self._latest = None
        if self._graphs is not None:
            self._graphs.count_eager("prefill")
        packed = pack_step(batch, trees, self.buffers, self.page_size)
        rows = packed.decode_rows
        layout = self._layout(len(packed.inputs.prefix_lens), len(packed.inputs.token_ids), rows)
        self._staging.open(layout.frame)
        temperatures = [s.request.params.temperature for s in samples]
        layout.fill(packed, noise_ids([s.seq for s in samples], packed), np.repeat(temperatures, packed.nodes))
        params = None
        if trees:
            params = self._put(row_params(samples, packed, self.eos_ids, self.model.config.vocab_size), layout, rows)
        inputs = self._logit_rows(layout.inputs, packed)
        self._flush(batch.copies, layout.frame, [d.seq for d in batch.decodes] + [c.seq for c in batch.chunks])
        host = packed.inputs
        chunks = Chunks(len(trees), rows, host.prefix_lens, host.node_indptr, host.page_table)
        out = self._pass.forward(inputs, chunks=chunks, capture=self.capture)
        prompt_logits = [(chunk, out.logits[where]) for chunk, where in packed.prompt_rows]
        if params is None:
            return Landed(StepResult([], prompt_logits, out.hidden))
        view, out = layout.view(len(trees), rows), replace(out, logits=out.logits[:rows])
        if any(map(needs_host, samples)):
            step = PackedStep(view.inputs, view.trees, packed.nodes, [])
            emitted = self.verify(step, out.logits, view.ids, params, trees, samples)
            return Landed(StepResult(emitted, prompt_logits, out.hidden))
        deepest = max(max(tree.depths) for tree in trees)
        want_raw = any(s.request.params.raw_logprobs for s in samples)
        draw = _Draw(view, packed.nodes.tolist(), params, deepest + 1, want_raw, samples, None, [])
        return self._draw(layout, None, draw, out, prompt_logits, False)

    @torch.inference_mode()
    def launch_ahead(self, flight: Flight, sequences: Seq[Sequence], keep_hidden: bool) -> Flight | None:
        if not isinstance(flight, DeviceFlight) or flight is not self._latest or not flight.repeatable:
            return None
        with torch.cuda.device(self.device):
            self._follow_stream()
            layout, draw, rows = flight.layout, flight.draw, len(sequences)
            if draw.lanes is not None:  # what they know in the extension stays behind: nobody can take from this flight
                draw = replace(draw, lanes=None)
            assert self._graphs is not None and flight.key is not None
            graph = self._graphs.get(flight.key, rows, capture=False)
            if graph is None:  # released in between
                return None
            drafting = self._drafting if self.capture else None
            if drafting is not None and not drafting.seat_to_store(draw.samples, self.eos_ids):
                return None
            self._refresh_pages(layout, draw, sequences)
            d = layout.frame.device
            cuda.advance(flight.walk, d["prefix_lens"][:rows], d["token_ids"][:rows])
            if drafting is not None:
                drafting.store(d["prefix_lens"][:rows], self._hidden)
            self._keep_hidden(flight, rows, keep_hidden)
            cuda.step_inputs(
                d["node_indptr"], d["depths"], d["prefix_lens"], d["page_table"], page=self.page_size,
                pad_slot=self._dummy_page * self.page_size, positions=d["positions"], draws=d["draws"],
                slots=d["slots"],
            )
            graph.replay()
            out = StepOutputs(self._logits[:rows], {i: self._hidden[i][:rows] for i in self.capture})
            return self._draw(layout, flight.key, draw, out, [], True)

    @torch.inference_mode()
    def launch_drafted(self, flight: Flight, samples: Seq[Sample], keep_hidden: bool) -> Flight | None:
        drafting = self._drafting
        assert drafting is not None and self._graphs is not None and isinstance(flight, DeviceFlight)
        if flight is not self._latest:
            drafting.refuse("graphs were captured in between")
            return None
        assert flight.draw.bucket is not None
        with torch.cuda.device(self.device):
            self._follow_stream()
            layout, draw, key = flight.layout, flight.draw, flight.draw.bucket
            rows = min(len(samples) * drafting.verify, key.rows)
            graph = self._graphs.get(key, rows, capture=False)
            if graph is None:
                drafting.refuse("its graph has been released")
                return None
            reason = drafting.seat(samples, self.eos_ids)
            if reason is not None:
                drafting.refuse(reason)
                return None
            self._refresh_pages(layout, draw, [s.seq for s in samples])
            extend, draft = (self._graphs.get(k, len(samples) * k.nodes, capture=False) for k in drafting.keys(key))
            drafting.step((extend, draft), self._ground_of(key))
            self._keep_hidden(flight, key.rows, keep_hidden)
            graph.replay()
            temperature = RowParams(layout.frame.device["temperature"][:rows])
            draw = replace(draw, nodes=(), params=temperature, lanes=None, drafted=True)
            out = StepOutputs(self._logits[:rows], {i: self._hidden[i][:rows] for i in self.capture})
            return self._draw(layout, key, draw, out, [], False)

    def _draw(
        self, layout: Layout, key: GraphKey | None, draw: _Draw, out: StepOutputs,
        prompt_logits: list[tuple[Chunk, Tensor]], repeatable: bool,
    ) -> DeviceFlight:
        view, logits = draw.view, out.logits
        frame = self._results.open(draw.sizes)
        d, rows = frame.device, len(logits)
        drawn = SampleResult(d["drawn"][:rows], d["logprobs"][:rows], d["raw"] if draw.want_raw else None)
        ids = view.ids if draw.bucket is None else view.ids[:rows]
        cuda.sample(logits, ids, draw.params, vocab_limit=self.vocab_limit, out=drawn)
        walk = Walk(d["accept_lens"], d["paths"], d["tokens"])
        cuda.verify_tree(d["drawn"], view.trees, steps=draw.steps, out=walk)
        if draw.steps > 1:  # a root's KV is where it belongs
            cuda.commit_kv(self.kv.data, view.inputs.page_table, view.inputs.prefix_lens, walk)
        done = self._results.fetch(frame)
        self._latest = DeviceFlight(layout, key, draw, frame, walk, done, prompt_logits, repeatable, out.hidden)
        return self._latest

    def _keep_hidden(self, flight: DeviceFlight, rows: int, keep: bool) -> None:
        """Before the replay that overwrites them. One copy on the device, 4 us of the largest step at 7B; it holds
        until the next one, which comes behind all that reads it."""
        if not keep:
            flight.hidden = {}
        elif flight.hidden:
            if not len(self._kept):
                with torch.inference_mode(False):  # RolloutEngine.sleep empties and fills it
                    self._kept = torch.empty_like(self._captured)
            self._kept[:, :rows].copy_(self._captured[:, :rows])
            flight.hidden = {i: states[:rows] for i, states in zip(self._hidden, self._kept)}

    # ---------------------------------------------------------------- inputs

    def _follow_stream(self) -> None:
        """Work goes to the caller's stream; buffers of the step before may still be in use on another one."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = self._staging.stream = stream

    def _layout(self, requests: int, rows: int, decode_rows: int) -> Layout:
        frame = self._staging.frame(frame_sections(requests, rows, decode_rows, self._pages))
        return Layout(frame, self.page_size, self._dummy_page)

    def _layout_of(self, key: GraphKey) -> Layout:
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(key.batch, key.rows, key.rows)
        return layout

    def _ground_of(self, key: GraphKey) -> Ground:
        ground = self._grounds.get(key)
        if ground is None:
            assert self._drafting is not None, f"{key}: nobody drafts"
            d = self._results.view((key.batch, key.rows, self._drafting.columns))
            walk = Walk(d["accept_lens"], d["paths"], d["tokens"])
            ground = self._grounds[key] = Ground(key, self._layout_of(key).frame.device, d, walk, self._hidden)
        return ground

    def _put_params(self, lanes: Lanes, layout: Layout, trees: list[DraftTree], rows: int) -> RowParams:
        packed = layout.packed(trees, rows)
        return self._put(row_params(lanes.samples, packed, self.eos_ids, self.model.config.vocab_size), layout, rows)

    def _put(self, params: RowParams, layout: Layout, rows: int) -> RowParams:
        given = {name: value for name in PARAMS if (value := getattr(params, name)) is not None}
        temperature = layout.frame.device["temperature"][:rows]
        return RowParams(temperature, **{name: self._staging.put(value) for name, value in given.items()})

    def _flush(self, copies: list[tuple[int, int]], frame: Frame, sequences: Seq[Sequence]) -> None:
        """Sends the inputs of a step of these sequences, then makes the page copies of the scheduler."""
        pages = [self._staging.put(torch.tensor(ends)) for ends in zip(*copies)]
        columns = max(len(seq.pages) for seq in sequences) if frame.wide else 0
        self._staging.flush(frame, len(sequences), columns)
        if pages:
            copy_pages(self.kv.data, *pages)

    def _logit_rows(self, inputs: StepInputs, packed: PackedStep) -> StepInputs:
        wanted = packed.inputs.logit_rows
        if len(wanted) == len(packed.inputs.token_ids):
            return inputs
        return replace(inputs, logit_rows=self._staging.put(wanted))

    def _refresh_pages(self, layout: Layout, draw: _Draw, sequences: Seq[Sequence]) -> None:
        known = draw.pages  # a sequence that runs only gets pages, behind those it has
        changed = [i for i, seq in enumerate(sequences) if len(seq.pages) != known[i]]
        if changed:
            self._staging.wait()
            table, first = layout.frame.host["page_table"], min(known[i] for i in changed)
            for i in changed:
                table[i, known[i] : len(sequences[i].pages)] = sequences[i].pages[known[i] :]
                known[i] = len(sequences[i].pages)
            end = max(known[i] for i in changed)
            self._staging.flush_block(layout.frame, (changed[0], changed[-1] + 1), (first, end))

    # ---------------------------------------------------------------- graphs

    def _drafts_for(self, lanes: Lanes, rows: int) -> GraphKey | None:
        """The graph that a decode step must take for `launch_drafted` to go on from it; None: it cannot. A step without
        drafts is left as small as it is."""
        if self._drafting is None or rows == len(lanes.samples):
            return None
        if not lanes.plain or lanes.needs_host or lanes.wants_raw:
            self._drafting.refuse("requests with more than a temperature")
            return None
        key = self._drafting.key(len(lanes.samples))
        if key is None:
            self._drafting.refuse("whole trees are larger than every graph")
        return key

    def _graph_for(
        self, requests: int, rows: int, bucket: GraphKey | None = None
    ) -> tuple[Graph | None, GraphKey | None]:
        """The graph that serves the step, captured if need be; (None, None): it runs eagerly at its own size. bucket:
        take this one."""
        key = bucket
        if key is None and self._graphs is not None:
            key = self._graphs.choose(requests, rows)
        if self._graphs is None or key is None:
            return None, None
        graph = self._graphs.get(key, rows)
        return (graph, key) if graph is not None else (None, None)

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedGraph:
        """On a step of padding alone, so that running it any number of times touches nobody's KV."""
        self._latest = None
        if isinstance(key, ExtendKey | DraftKey):
            assert self._drafting is not None, f"graph {key}: nobody drafts"
            return self._drafting.capture(key, self._capturer, self._ground_of(key.target))
        layout = self._layout_of(key)
        self._staging.begin(layout.frame)
        layout.clear()
        self._staging.flush(layout.frame, 0, 0)
        logits = self._logits[: key.rows]

        def run() -> None:
            out = self._pass.forward(layout.inputs, logits_out=logits, capture=self.capture)
            for i, states in out.hidden.items():
                self._hidden[i][: key.rows].copy_(states)

        return self._capturer.capture(run)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """All sizes up front, as far as the budget goes."""
        if self._graphs is not None:
            with torch.cuda.device(self.device):
                self._follow_stream()
                self._graphs.capture_all(() if self._drafting is None else self._drafting.all_keys())

    def release_graphs(self) -> None:
        if self._graphs is not None:
            torch.cuda.synchronize(self.device)
            self._graphs.release()
            torch.cuda.empty_cache()

    def graph_buffers(self) -> list[Tensor]:
        """Where graphs leave their results. Addresses are in the graphs: release those first."""
        return [*([self._logits] if self._graphs is not None else []), self._captured, self._kept]

    def graph_report(self) -> dict[str, Any] | None:
        if self._graphs is None:
            return None
        report = self._graphs.report()
        return report if self._drafting is None else report | {"drafting": self._drafting.report()}
