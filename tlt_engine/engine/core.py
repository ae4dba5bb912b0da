"""The token-id core: schedule, draft, one target pass, commit. Knows no text but stop strings, no prompts and no seeds."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from tlt_engine.config import SpeculationConfig, refuse
from tlt_engine.engine.counters import Counters
from tlt_engine.engine.runner import Emitted, ModelRunner, StepResult, prompt_logprobs
from tlt_engine.engine.sample import Sample
from tlt_engine.engine.stops import Stop, StopRule
from tlt_engine.scheduler.scheduler import Scheduler
from tlt_engine.scheduler.sequence import Decode, Sequence
from tlt_engine.speculation.drafter import DraftContext, Drafter
from tlt_engine.speculation.tree import DraftTree, clip_tree
from tlt_engine.types import MAX_NODES


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

    def add(self, sample: Sample) -> None:
        self.samples[sample.seq.seq_id] = sample
        self._scoring += sample.forced is not None
        self.scheduler.add(sample.seq)

    def step(self) -> bool:
        """One target pass over everything that runs. False when nothing could."""
        batch = self.scheduler.schedule(self._max_nodes)
        if not batch:
            return False
        samples = [self.samples[d.seq.seq_id] for d in batch.decodes]
        trees = self._propose(batch.decodes, samples)
        result = self.runner.run(batch, trees, samples)
        self.counters.steps += 1
        self.counters.running_per_step.append(len(batch.decodes) + len(batch.chunks))
        self._take_prompt_logits(result)
        for chunk in batch.chunks:
            self.counters.prefill_passes += 1
            self.counters.prefill_tokens += chunk.count
            self.scheduler.advance_prefill(chunk)
        for decode, sample, tree, emitted in zip(batch.decodes, samples, trees, result.emitted):
            stop = self._commit(decode, sample, tree, emitted)
            if stop is not None:
                self.end(sample, stop)
        return True

    def end(self, sample: Sample, stop: Stop) -> None:
        """Release all that the sample holds and seal its output."""
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
                raise refuse("Drafter.propose", f"{len(contexts)} trees, one a context", len(proposed), "mend the drafter")
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


def _context(sample: Sample, max_nodes: int) -> DraftContext:
    seq = sample.seq
    end = seq.max_len if sample.quota_end is None else min(seq.max_len, sample.quota_end)
    return DraftContext(
        seq.seq_id, seq.group, seq.token_ids, seq.prompt_len, seq.key, seq.sample, seq.segment, seq.params, max_nodes,
        max_depth=end - len(seq.token_ids) - 1,  # the bonus token takes one of the places left
    )


def _no_distribution(sample: Sample) -> Stop:
    return Stop(
        "error",
        f"the target gave no valid distribution (NaN, +inf, or every id barred) for output token "
        f"{len(sample.output.token_ids)}; check the weights and the request's masks",
    )
