"""The token-id core: schedule, draft, one target pass, commit. Knows no text but stop strings, no prompts, no seeds."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tlt_engine.config import SpeculationConfig, refuse
from tlt_engine.engine.counters import Counters
from tlt_engine.engine.runner import Emitted, Flight, ModelRunner, StepResult, prompt_logprobs
from tlt_engine.engine.sample import Sample
from tlt_engine.engine.stops import Stop, StopRule
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.scheduler.sequence import Batch, Decode, Sequence, Status
from tlt_engine.speculation.drafter import DraftContext, Drafter
from tlt_engine.speculation.tree import DraftTree, clip_tree
from tlt_engine.types import MAX_NODES


@dataclass(frozen=True)
class Pass:
    """A launched target pass. lengths: tokens of each decoding sample when it was launched; one that has another number
    by now, or has ended, takes no part in its results."""

    batch: Batch
    trees: list[DraftTree]
    samples: list[Sample]
    lengths: list[int]
    flight: Flight


class EngineCore:
    """Runs samples to their ends. on_end(sample) is called once for each, after its pages have been released."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, drafter: Drafter | None, speculation: SpeculationConfig,
        on_end: Callable[[Sample], None],
    ) -> None:
        self.scheduler, self.runner, self.drafter = scheduler, runner, drafter
        self.speculation = speculation
        self.counters = Counters()
        self.samples: dict[int, Sample] = {}  # unfinished, by seq_id
        self.version = "0"
        self._on_end = on_end
        self._scoring = 0  # unfinished samples of `score`
        self._ahead: Pass | None = None  # launched before the pass in front of it was read
        self._steady = False  # nothing has come, gone or been prefilled since the last schedule

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
        if self._ahead is None or not any(self._rides(self._ahead)):
            batch = self.scheduler.schedule(self._max_nodes)
            if not batch:
                return False
        try:
            current = self._launch(batch) if batch is not None else self._ahead
            assert current is not None
            self._ahead = self._launch_ahead(current)
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
        trees = self._propose(batch.decodes, samples)
        self._steady = not (batch.chunks or batch.copies or batch.preempted)
        return Pass(batch, trees, samples, _lengths(samples), self.runner.launch(batch, trees, samples))

    def _launch_ahead(self, current: Pass) -> Pass | None:
        """The plain step after `current`, if that is what schedule() would come to: the same samples, no drafts, and
        none known to end but by its tokens. What a sample that ends meanwhile then computes is thrown away: it wrote
        behind its own keys, on a page that nobody else can have been given before that pass."""
        samples = current.samples
        drafting = self.drafter is not None and any(s.seq.speculate for s in samples)
        if not self._steady or drafting or not all(self._rides(current)):
            return None
        if all(_end(s) <= length + 1 for s, length in zip(samples, current.lengths)):
            return None
        sequences = [s.seq for s in samples]
        if not self.scheduler.look_ahead(sequences):
            return None
        flight = self.runner.launch_ahead(current.flight, sequences)
        if flight is None:
            return None
        return Pass(current.batch, current.trees, samples, [n + 1 for n in current.lengths], flight)

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
        self.counters.steps += 1
        self.counters.running_per_step.append(sum(rides) + len(batch.chunks))
        self._take_prompt_logits(result)
        for chunk in batch.chunks:
            self.counters.prefill_passes += 1
            self.counters.prefill_tokens += chunk.count
            self.scheduler.advance_prefill(chunk)
        rows = zip(batch.decodes, current.samples, current.trees, result.emitted, rides)
        for decode, sample, tree, emitted, rode in rows:
            stop = self._commit(decode, sample, tree, emitted) if rode else None
            if stop is not None:
                self.end(sample, stop)

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
        if self.drafter is None or not seq.speculate:
            return 1
        return self.speculation.profile.verify

    def _propose(self, decodes: Seq[Decode], samples: Seq[Sample]) -> list[DraftTree]:
        trees = [DraftTree.root(decode.seq.token_ids[-1]) for decode in decodes]
        asked: list[tuple[int, DraftContext]] = []
        for i, (decode, sample) in enumerate(zip(decodes, samples)):
            if sample.forced is not None:
                done = len(sample.output.token_ids)
                trees[i] = DraftTree.chain(trees[i].tokens[0], sample.forced[done : done + decode.max_nodes - 1])
            elif self.drafter is not None and decode.seq.speculate and decode.max_nodes > 1:
                context = _context(sample, decode.max_nodes)
                if context.max_depth > 0:
                    asked.append((i, context))
        if asked:
            assert self.drafter is not None
            contexts = [context for _, context in asked]
            proposed = self.drafter.propose(contexts)
            if len(proposed) != len(contexts):
                expected = f"{len(contexts)} trees, one a context"
                raise refuse("Drafter.propose", expected, len(proposed), "mend the drafter")
            vocab = self.runner.model.config.vocab_size
            for (i, context), tree in zip(asked, proposed):
                trees[i] = clip_tree(tree, context.token_ids[-1], context.max_nodes, context.max_depth, vocab)
        return trees

    # ---------------------------------------------------------------- after the pass

    def _commit(self, decode: Decode, sample: Sample, tree: DraftTree, emitted: Emitted) -> Stop | None:
        """Append what was emitted up to the first stop; what lies behind it leaves no trace."""
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
        self.scheduler.commit(decode, kept)
        if sample.forced is None:
            accepted = min(kept, len(emitted.tokens) - 1)
            for counts in (self.counters.spec, sample.output.spec):
                counts.add_pass(len(tree), max(tree.depths), accepted, kept)
            if self.drafter is not None and decode.seq.speculate:
                self.drafter.observe(_context(sample, decode.max_nodes), accepted)
        return stop

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


def _end(sample: Sample) -> int:
    """The length at which it ends for certain."""
    return sample.seq.max_len if sample.quota_end is None else min(sample.seq.max_len, sample.quota_end)


def _lengths(samples: Seq[Sample]) -> list[int]:
    return [len(s.seq.token_ids) for s in samples]


def _context(sample: Sample, max_nodes: int) -> DraftContext:
    seq = sample.seq
    return DraftContext(
        seq.seq_id, seq.group, seq.token_ids, seq.prompt_len, seq.key, seq.sample, seq.segment, seq.params, max_nodes,
        max_depth=_end(sample) - len(seq.token_ids) - 1,  # the bonus token takes one of the places left
    )


def _no_distribution(sample: Sample) -> Stop:
    return Stop(
        "error",
        sample.fault or
        f"the target gave no valid distribution (NaN, +inf, or every id barred) for output token "
        f"{len(sample.output.token_ids)}; check the weights and the request's masks",
    )
