"""The token-id core: schedule, draft, one target pass, commit. Knows no text but stop strings, no prompts, no seeds."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from tlt_kernels.params import GREEDY_BELOW

from tlt_engine.config import SpeculationConfig, refuse
from tlt_engine.engine.counters import Counters
from tlt_engine.engine.hidden import HiddenConsumers, Kept, PassHidden, hidden_rows
from tlt_engine.engine.runner import Drafted, Emitted, Flight, ModelRunner, StepResult, Taken, prompt_logprobs
from tlt_engine.engine.sample import Sample
from tlt_engine.engine.stops import Stop, StopRule
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.scheduler.sequence import Batch, Decode, Sequence, Status
from tlt_engine.speculation.drafter import DraftContext, Drafter
from tlt_engine.speculation.elastic import Elastic
from tlt_engine.speculation.hidden import HiddenRecorder
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.tree import DraftTree, clip_trees
from tlt_engine.types import MAX_NODES


@dataclass(frozen=True)
class Pass:
    """A launched target pass. lengths: tokens of each decoding sample when it was launched; one that has another number
    by now, or has ended, takes no part in its results. whole: every tree had the pages it wanted."""

    batch: Batch
    trees: list[DraftTree]
    samples: list[Sample]
    lengths: list[int]
    flight: Flight
    whole: bool


class EngineCore:
    """Runs samples to their ends. on_end(sample) is called once for each, after its pages have been released."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, drafter: Drafter | None, speculation: SpeculationConfig,
        on_end: Callable[[Sample], None],
    ) -> None:
        self.scheduler, self.runner, self.drafter = scheduler, runner, drafter
        self.speculation = speculation
        self.elastic = Elastic(speculation.enable_below)
        self.counters = Counters()
        self.samples: dict[int, Sample] = {}  # unfinished, by seq_id
        self.version = "0"
        self._on_end = on_end
        self._scoring = 0  # unfinished samples of `score`
        self._ahead: Pass | None = None  # launched before the pass in front of it was read
        self._steady = False  # nothing has come, gone or been prefilled since the last schedule
        self._consumers = HiddenConsumers(drafter)
        self._capture()

    def attach(self, recorder: HiddenRecorder) -> None:
        """Hand it the hidden states of committed tokens from the next pass on. Between steps."""
        self.runner.model.check_capture(recorder.hidden_layers)
        self._consumers.add(recorder)
        self._capture()

    def detach(self, recorder: HiddenRecorder) -> None:
        self._consumers.remove(recorder)
        self._capture()

    def _capture(self) -> None:
        if self.runner.capture != self._consumers.layers:
            self._ahead = None  # it was launched without these hidden states
            self.runner.set_capture(self._consumers.layers)

    def add(self, sample: Sample) -> None:
        self.samples[sample.seq.seq_id] = sample
        self._scoring += sample.forced is not None
        self._steady = False
        self.scheduler.add(sample.seq)

    def forget_ahead(self) -> None:
        """The pass ahead, if any, ran under weights or KV that are no longer the ones to go on from."""
        self._ahead = None

    def step(self) -> bool:
        """One target pass over everything that runs. False when nothing could."""
        batch: Batch | None = None
        self.elastic.step(len(self.samples))
        if self._ahead is None or not any(self._rides(self._ahead)):
            batch = self.scheduler.schedule(self._max_nodes)
            if not batch:
                return False
        try:
            current = self._launch(batch) if batch is not None else self._ahead
            assert current is not None
            self._ahead = self._launch_ahead(current)
            if self._ahead is None and self._goes_on(current):
                # While the GPU is at the pass: of 64 samples they take 40 us.
                contexts = self._contexts(current.batch.decodes, current.samples)
                self._go_on(current, contexts, self.runner.take(current.flight))
            else:
                self._finish(current)
        except BaseException:
            # A drafter, a logits processor or Ctrl-C broke off the step: page copies may not have been made, tokens may
            # stand without their KV. Nobody else's request may go on from that.
            self._ahead = None
            self.scheduler.recompute_all()
            raise
        return True

    def _launch(self, batch: Batch) -> Pass:
        samples = [self.samples[d.seq.seq_id] for d in batch.decodes]
        self._consumers.fork(batch.forks, self.samples)
        trees = self._propose(batch.decodes, samples, self._contexts(batch.decodes, samples))
        self._steady = not (batch.chunks or batch.copies or batch.preempted)
        whole = all(d.max_nodes == self._max_nodes(d.seq) for d in batch.decodes)
        return Pass(batch, trees, samples, _lengths(samples), self.runner.launch(batch, trees, samples), whole)

    def _launch_ahead(self, current: Pass) -> Pass | None:
        """The plain step after `current`, if that is what schedule() would come to: the same samples, no drafts, and
        none known to end but by its tokens. What a sample that ends meanwhile then computes is thrown away: it wrote
        behind its own keys, on a page that nobody else can have been given before that pass."""
        samples = current.samples
        if self._drafts(current):
            return self._launch_drafted(current)
        if not self._steady or not all(self._rides(current)):
            return None
        if all(s.end <= length + 1 for s, length in zip(samples, current.lengths)):
            return None
        sequences = [s.seq for s in samples]
        if not self.scheduler.look_ahead((seq, 2) for seq in sequences):
            return None
        keep = self._consumers.recorded or not self.runner.stores_hidden
        flight = self.runner.launch_ahead(current.flight, sequences, keep)
        if flight is None:
            return None
        return replace(current, lengths=[n + 1 for n in current.lengths], flight=flight)

    def _launch_drafted(self, current: Pass) -> Pass | None:
        """The verification after `current`, of trees that the device drafts from the tokens of `current`, if that is
        what schedule() and the drafter would come to. What a sample that ends meanwhile computes is thrown away, as in
        a plain step ahead; its lane is its own until then. Lengths are known once `current` has been committed."""
        samples = current.samples
        if not (self._steady and current.whole and current.flight.draftable):
            return None
        if not all(self._rides(current)) or not all(s.seq.speculate and s.forced is None for s in samples):
            return None
        if all(s.end <= length + 1 for s, length in zip(samples, current.lengths)):
            return None
        columns = self.speculation.profile.depth + 1
        decodes = current.batch.decodes
        if not self.scheduler.look_ahead((d.seq, min(columns, d.seq.room) + d.max_nodes) for d in decodes):
            return None
        flight = self.runner.launch_drafted(current.flight, samples, self._consumers.recorded)
        return None if flight is None else replace(current, trees=[], lengths=[], flight=flight)

    def _drafts(self, current: Pass) -> bool:
        return self.drafter is not None and self.elastic.on and any(s.seq.speculate for s in current.samples)

    def _goes_on(self, current: Pass) -> bool:
        """Whether schedule() would come to the same samples and trees as large again, if none of them ends, and there
        are pages for that whatever is accepted. The drafter needs the tokens, so this step ahead can be launched only
        after them."""
        if not (self._steady and current.whole and current.flight.by_ids and self._drafts(current)):
            return False
        if not all(self._rides(current)):
            return False
        return self.scheduler.look_ahead(
            (d.seq, min(max(tree.depths) + 1, d.seq.room) + d.max_nodes)
            for d, tree in zip(current.batch.decodes, current.trees)
        )

    def _go_on(self, current: Pass, contexts: list[DraftContext | None], taken: Taken) -> None:
        """Tokens and drafts first, then the next launch; all that it does not need is done while the GPU is at it.
        contexts: as they were before the tokens came."""
        try:
            self.scheduler.extend(current.batch.decodes, taken.tokens)
            for context, new in zip(contexts, taken.tokens):
                if context is not None:
                    context.max_depth -= len(new)
            if taken.passed is not None:
                nodes = [len(tree) for tree in current.trees]
                self._hand_out_hidden(current, taken.passed, [True] * len(nodes), [], nodes, stored=False)
            self._observe(contexts, taken.accepted)
            if not taken.ended:
                self._ahead = self._launch_next(current, contexts)
        finally:  # a drafter that fails here fails the next step: this one's tokens are out
            self._hand_on(current, taken)

    def _launch_next(self, current: Pass, contexts: list[DraftContext | None]) -> Pass:
        trees = self._propose(current.batch.decodes, current.samples, contexts)
        flight = self.runner.launch_next(current.flight, trees)
        return replace(current, trees=trees, lengths=_lengths(current.samples), flight=flight)

    def _hand_on(self, current: Pass, taken: Taken) -> None:
        """The rest of a pass whose tokens the sequences have already."""
        result = current.flight.result()
        self._count_step(len(current.samples))
        rows = zip(current.samples, current.trees, result.emitted, taken.accepted, current.lengths)
        for i, (sample, tree, emitted, accepted, length) in enumerate(rows):
            kept = len(sample.seq.token_ids) - length
            sample.record(self.version, *emitted.first(kept))
            self.scheduler.settle(sample.seq, kept, flying=self._ahead is not None)
            self._count_pass(sample, len(tree), max(tree.depths), min(accepted, kept), kept)
            if i in taken.ended and kept == len(taken.tokens[i]):
                self.end(sample, self._stop_of(sample, emitted, kept))

    def _rides(self, launched: Pass) -> list[bool]:
        """Which of its samples still stand where the pass takes them on from. For a pass ahead that is true once the
        pass in front of it has been committed."""
        return [
            s.output.finish_reason is None and s.seq.status is Status.RUNNING and len(s.seq.token_ids) == length
            for s, length in zip(launched.samples, launched.lengths)
        ]

    def _finish(self, current: Pass) -> None:
        result = current.flight.result()
        batch, rides = current.batch, self._rides(current)
        self._count_step(sum(rides) + len(batch.chunks))
        self._take_prompt_logits(result)
        shapes = result.drafted or [Drafted(len(tree), max(tree.depths), 0.0) for tree in current.trees]
        if result.drafted is not None:
            self._tell_drafter(current.samples, result.drafted)
        drafted_behind = self._ahead is not None and not self._ahead.lengths  # it has taken the hidden states
        firsts = [chunk.seq.kv_len for chunk in batch.chunks]
        for chunk in batch.chunks:
            self.counters.prefill_passes += 1
            self.counters.prefill_tokens += chunk.count
            self.scheduler.advance_prefill(chunk)
        rows = zip(batch.decodes, current.samples, shapes, result.emitted, rides)
        stops = [
            (sample, self._commit(decode, sample, shape, emitted, drafted_behind))
            for decode, sample, shape, emitted, rode in rows if rode
        ]
        going_on = [sample for sample, stop in stops if stop is None]
        stored = self._ahead is not None and self.runner.stores_hidden
        if drafted_behind:
            self._follow_drafts(going_on)
        elif stored:
            self._follow_stored(going_on)
        if result.hidden:
            nodes = [shape.nodes for shape in shapes]
            self._hand_out_hidden(current, result.passed, rides, firsts, nodes, stored)
        for sample, stop in stops:
            if stop is not None:
                self.end(sample, stop)

    def _tell_drafter(self, samples: Seq[Sample], drafted: Seq[Drafted]) -> None:
        assert isinstance(self.drafter, EagleDrafter), "trees that the device drafted with nothing"
        for sample, tree in zip(samples, drafted):
            if tree.nodes > 1:
                greedy = sample.request.params.temperature < GREEDY_BELOW
                self.drafter.drafted(sample.seq.seq_id, greedy, tree.expected)

    def _follow_drafts(self, going_on: Seq[Sample]) -> None:
        """The pass whose tokens these samples have just been given has been drafted from already."""
        assert self._ahead is not None and isinstance(self.drafter, EagleDrafter)
        self._ahead = replace(self._ahead, lengths=_lengths(self._ahead.samples))
        for sample in going_on:
            self.drafter.extended(sample.seq.seq_id, sample.seq.kv_len)

    def _follow_stored(self, going_on: Seq[Sample]) -> None:
        """As for drafts, of a plain pass."""
        assert isinstance(self.drafter, EagleDrafter)
        for sample in going_on:
            if sample.seq.speculate:
                self.drafter.stored(sample.seq.seq_id, sample.seq.kv_len)

    def _hand_out_hidden(
        self, current: Pass, passed: PassHidden, rides: list[bool], firsts: list[int], nodes: list[int], stored: bool
    ) -> None:
        """The samples have their new tokens by now. firsts: where each chunk began. nodes: of each tree. stored: the
        drafter's have been taken on the device, by the pass behind this one."""
        decodes = [
            Kept(s, rows, length - 1, len(s.seq.token_ids) - length if rode else 0)
            for s, rows, length, rode in zip(current.samples, nodes, current.lengths, rides)
        ]
        chunks = [(c, first, self.samples[c.seq.seq_id]) for c, first in zip(current.batch.chunks, firsts)]
        self._consumers.take(hidden_rows(passed, decodes, chunks), stored)

    def target_changed(self, recomputed: bool) -> None:
        """New weights, of self.version. recomputed: live samples start over."""
        self.forget_ahead()
        self._consumers.target_changed(self.version, recomputed)

    def end(self, sample: Sample, stop: Stop) -> None:
        """Release all that the sample holds and seal its output."""
        self._steady = False
        out = sample.output
        out.finish_reason, out.stop_reason, out.noise = stop.finish_reason, stop.stop_reason, sample.noise
        if sample.text is not None:
            sample.text.flush()
            out.text = sample.text.text
        self.scheduler.abort(sample.seq)
        if self.drafter is not None:
            self.drafter.finish(sample.seq.seq_id)
        self._consumers.ended(sample)
        del self.samples[sample.seq.seq_id]
        self._scoring -= sample.forced is not None
        self._on_end(sample)

    # ---------------------------------------------------------------- drafting

    def _max_nodes(self, seq: Sequence) -> int:
        sample = self.samples[seq.seq_id]
        if sample.forced is not None:
            # A scoring sample takes the prefill budget's share, so that logits of one step stay small.
            share = max(self.scheduler.max_num_batched_tokens // self._scoring, 1)
            return min(share, MAX_NODES, len(sample.forced) - len(sample.output.token_ids))
        if self.drafter is None or not self.elastic.on or not seq.speculate:
            return 1
        return self.speculation.profile.verify

    def _contexts(self, decodes: Seq[Decode], samples: Seq[Sample]) -> list[DraftContext | None]:
        """None for a sample that decodes without drafts."""
        if self.drafter is None:
            return [None] * len(decodes)
        return [
            _context(sample, decode.max_nodes) if sample.seq.speculate and sample.forced is None else None
            for decode, sample in zip(decodes, samples)
        ]

    def _propose(
        self, decodes: Seq[Decode], samples: Seq[Sample], contexts: list[DraftContext | None]
    ) -> list[DraftTree]:
        asked = [c for c in contexts if c is not None and c.max_nodes > 1 and c.max_depth > 0]
        if asked and len(asked) == len(contexts):
            return self._ask(asked)
        proposed = iter(self._ask(asked) if asked else ())
        trees = []
        for decode, sample, context in zip(decodes, samples, contexts):
            root = sample.seq.token_ids[-1]
            if sample.forced is not None:
                done = len(sample.output.token_ids)
                trees.append(DraftTree.chain(root, sample.forced[done : done + decode.max_nodes - 1]))
            elif context is not None and context.max_nodes > 1 and context.max_depth > 0:
                trees.append(next(proposed))
            else:
                trees.append(DraftTree.root(root))
        return trees

    def _ask(self, contexts: list[DraftContext]) -> list[DraftTree]:
        assert self.drafter is not None
        proposed = self.drafter.propose(contexts)
        if len(proposed) != len(contexts):
            raise refuse("Drafter.propose", f"{len(contexts)} trees, one a context", len(proposed), "mend the drafter")
        limits = [(c.token_ids[-1], c.max_nodes, c.max_depth) for c in contexts]
        return clip_trees(proposed, limits, self.runner.model.config.vocab_size)

    def _observe(self, contexts: list[DraftContext | None], accepted: list[int]) -> None:
        assert self.drafter is not None
        for context, taken in zip(contexts, accepted):
            if context is not None:
                self.drafter.observe(context, taken)

    # ---------------------------------------------------------------- after the pass

    def _commit(
        self, decode: Decode, sample: Sample, shape: Drafted, emitted: Emitted, flying: bool
    ) -> Stop | None:
        """Append what was emitted up to the first stop; what lies behind it leaves no trace. flying: a pass behind it
        has look-ahead pages in use."""
        stop: Stop | None = None
        kept = 0
        rule = StopRule(sample.request.params, self.runner.eos_ids)
        for i, token in enumerate(emitted.tokens):
            if token < 0:
                stop = _no_distribution(sample)
                break
            sample.append(
                token, emitted.logprobs[i], emitted.raw[i] if emitted.raw else None,
                emitted.top[i] if emitted.top else None, self.version,
            )
            kept += 1
            stop = rule.after(sample, token)
            if stop is not None:
                break
        self.scheduler.commit(decode, kept, flying=flying and stop is None)
        if sample.forced is None:
            accepted = min(kept, len(emitted.tokens) - 1)
            self._count_pass(sample, shape.nodes, shape.deepest, accepted, kept)
            if self.drafter is not None and decode.seq.speculate:
                self.drafter.observe(_context(sample, decode.max_nodes), accepted)
        return stop

    def _stop_of(self, sample: Sample, emitted: Emitted, kept: int) -> Stop:
        """Why it ended behind its first `kept` tokens, all in its output by now."""
        if kept < len(emitted.tokens) and emitted.tokens[kept] < 0:
            return _no_distribution(sample)
        stop = StopRule(sample.request.params, self.runner.eos_ids).after(sample, emitted.tokens[kept - 1])
        assert stop is not None, f"sequence {sample.seq.seq_id}: ended after {kept} tokens for no reason"
        return stop

    def _count_step(self, running: int) -> None:
        self.counters.steps += 1
        self.counters.running_per_step.append(running)

    def _count_pass(self, sample: Sample, nodes: int, deepest: int, accepted: int, kept: int) -> None:
        for counts in (self.counters.spec, sample.output.spec):
            counts.add_pass(nodes, deepest, accepted, kept)
        version = getattr(self.drafter, "version", None)
        if version is not None and nodes > 1:
            sample.output.add_drafter_version(version, kept)

    def _take_prompt_logits(self, result: StepResult) -> None:
        for chunk, logits in result.prompt_logits:
            request = self.samples[chunk.seq.seq_id].request
            entries = request.prompt_logprobs
            count = request.params.prompt_logprobs
            assert entries is not None and count is not None
            first = chunk.seq.kv_len + 1  # the row of token i scores token i + 1
            last = min(first + chunk.count, len(request.prompt_ids))
            if last > first:
                targets = chunk.seq.token_ids[first:last]
                entries[first:last] = prompt_logprobs(logits[: last - first], targets, count)


def _lengths(samples: Seq[Sample]) -> list[int]:
    return [len(s.seq.token_ids) for s in samples]


def _context(sample: Sample, max_nodes: int) -> DraftContext:
    seq = sample.seq
    return DraftContext(
        seq.seq_id, seq.group, seq.token_ids, seq.prompt_len, seq.key, seq.sample, seq.segment, seq.params, max_nodes,
        max_depth=sample.end - len(seq.token_ids) - 1,  # the bonus token takes one of the places left
    )


def _no_distribution(sample: Sample) -> Stop:
    return Stop(
        "error",
        sample.fault or
        f"the target gave no valid distribution (NaN, +inf, or every id barred) for output token "
        f"{len(sample.output.token_ids)}; check the weights and the request's masks",
    )
