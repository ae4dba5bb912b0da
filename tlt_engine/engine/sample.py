"""A request and its samples while they run: what has been emitted, and why it ended. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from tlt_engine.config import SamplingParams
from tlt_engine.engine.text import IncrementalText
from tlt_engine.outputs import (
    CompletionOutput,
    Logprob,
    NoiseIdentity,
    RequestOutput,
    ResumeState,
    SampleState,
    WeightSpan,
)
from tlt_engine.scheduler.sequence import Sequence


class CallInsideStep(RuntimeError):
    """A callback called the engine in the middle of a step. The caller's own mistake: it is raised, not a request's
    end."""


@dataclass(eq=False)
class Sample:
    """One sample: its scheduler sequence and its output so far.

    forced: for `score`, the output ids whose log-probabilities are wanted; they are emitted instead of draws.
    quota_end: length of seq.token_ids at which it pauses. audit_of: the sample that this one re-decodes.
    fault: what its logits_processor did wrong; the sample ends with it.
    """

    request: Request
    seq: Sequence
    output: CompletionOutput
    text: IncrementalText | None = None
    forced: tuple[int, ...] | None = None
    quota_end: int | None = None
    audit_of: Sample | None = None
    fault: str | None = None

    @property
    def ended(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def noise(self) -> NoiseIdentity:
        return NoiseIdentity(self.seq.key, self.seq.sample, self.seq.segment)

    @property
    def internal(self) -> bool:
        """Not part of any output that a caller sees: a scoring or auditing sample."""
        return self.forced is not None or self.audit_of is not None

    @property
    def new_start(self) -> int:
        """Index in seq.token_ids of the first token of this output (after the prompt and prior_output_ids)."""
        return self.seq.prompt_len + self.request.prior_len

    @property
    def end(self) -> int:
        """The length of seq.token_ids at which it ends for certain."""
        return self.seq.max_len if self.quota_end is None else min(self.seq.max_len, self.quota_end)

    def append(
        self, token: int, logprob: float, raw: float | None, top: dict[int, Logprob] | None, version: str
    ) -> None:
        self.seq.token_ids.append(token)
        self.record(version, [token], [logprob], None if raw is None else [raw], None if top is None else [top])

    def record(
        self, version: str, tokens: Seq[int], logprobs: Seq[float], raw: Seq[float] | None,
        top: Seq[dict[int, Logprob]] | None,
    ) -> None:
        """Into the output: tokens that seq.token_ids has already."""
        if not tokens:
            return
        out = self.output
        out.token_ids += tokens
        out.sampled_logprobs += logprobs
        if out.raw_logprobs is not None and raw is not None:
            out.raw_logprobs += raw
        if out.logprobs is not None and top is not None:
            out.logprobs += top
        start, end = len(out.token_ids) - len(tokens), len(out.token_ids)
        spans = out.weight_versions
        if spans and spans[-1].version == version:
            spans[-1] = WeightSpan(version, spans[-1].start, end)
        else:
            spans.append(WeightSpan(version, start, end))


@dataclass(eq=False)
class Request:
    """A prompt and its n samples. request_id: "" until the engine has given it one. prior_len: how many ids of
    `prior_output_ids` follow the prompt in each sequence."""

    request_id: str
    group: str
    prompt: str | None
    prompt_ids: list[int]
    prior_len: int
    params: SamplingParams
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    streamed: bool = False  # somebody looks at it as it grows
    owned_by_call: bool = False  # a generate() call collects it; step() does not return it
    unfinished: int = 0  # samples still to end; counted, since asking all n after each end is O(n^2)

    def so_far(self, weights: str) -> RequestOutput:
        """As to_output, a copy that stays as it is. The text of a streamed request holds back what may yet turn out to
        be part of a stop string."""
        held = max((len(stop) for stop in self.params.stop or ()), default=1) - 1
        output = self.to_output(weights)
        output.outputs = [
            replace(
                s.output, token_ids=list(s.output.token_ids), sampled_logprobs=list(s.output.sampled_logprobs),
                raw_logprobs=None if s.output.raw_logprobs is None else list(s.output.raw_logprobs),
                logprobs=None if s.output.logprobs is None else list(s.output.logprobs),
                weight_versions=list(s.output.weight_versions), spec=s.output.spec.copy(),
                text=s.output.text if s.ended or s.text is None else s.text.text[: len(s.text.text) - held],
            )
            for s in self.samples
        ]
        return output

    @property
    def prior_ids(self) -> list[int]:
        start = len(self.prompt_ids)
        return self.samples[0].seq.token_ids[start : start + self.prior_len]

    def to_output(self, weights: str) -> RequestOutput:
        outputs = [sample.output for sample in self.samples]
        paused = any(out.finish_reason == "paused" for out in outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prior_output_ids=self.prior_ids,
            outputs=outputs,
            finished=not self.unfinished and not paused,
            group_id=self.group,
            prompt_logprobs=self.prompt_logprobs,
            state=self._resume_state(weights) if paused else None,
        )

    def _resume_state(self, weights: str) -> ResumeState:
        states = tuple(
            SampleState(s.noise, weights, tuple(s.seq.token_ids), s.output)
            for s in self.samples
        )
        return ResumeState(
            self.request_id, self.group, self.prompt, tuple(self.prompt_ids), self.prior_len, self.params, states
        )


def stop_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end the output, and that min_tokens bars."""
    return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_ids)
