"""What callers get back, with vLLM's names where they exist. Plain picklable data: no tensors, no engine handles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tlt_engine.config import SamplingParams


class Logprob(NamedTuple):
    """One token's log-probability (nats) of the processed distribution, its rank there (1 = most likely), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class WeightSpan(NamedTuple):
    """Output tokens [start, end) were drawn under `version`."""

    version: str
    start: int
    end: int


class NoiseIdentity(NamedTuple):
    """Whose noise a sample drew (docs/seeds.md). key: signed 64-bit pattern; segment: of its last token."""

    key: int
    sample: int
    segment: int


@dataclass
class SpecCounts:
    """Raw counts of speculation. Only committed tokens count: drafts cut off by a stop are neither.

    passes: target passes with a tree (one a step; a root alone counts). rows: tree nodes computed, roots included.
    drafted: draft nodes proposed. accepted: drafts committed. emitted: tokens committed, bonus tokens included.
    drafted_per_position[i]: passes whose tree had a node at depth i + 1; accepted_per_position[i]: passes that
    committed one. Accept length, bonus included, pooled: emitted / passes; without the bonus: accepted / passes.
    """

    passes: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def add_pass(self, nodes: int, depth: int, accepted: int, emitted: int) -> None:
        self.passes += 1
        self.rows += nodes
        self.drafted += nodes - 1
        self.accepted += accepted
        self.emitted += emitted
        for counts, reached in ((self.drafted_per_position, depth), (self.accepted_per_position, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for position in range(reached):
                counts[position] += 1

    @property
    def accept_length(self) -> float:
        """Tokens committed a target pass, bonus token included; 0 before the first pass."""
        return self.emitted / self.passes if self.passes else 0.0

    def copy(self) -> SpecCounts:
        return replace(
            self,
            drafted_per_position=list(self.drafted_per_position),
            accepted_per_position=list(self.accepted_per_position),
        )


@dataclass
class CompletionOutput:
    """One sample. token_ids: new output ids (prior_output_ids excluded), the ending EOS or stop id included.
    sampled_logprobs: one a token, of the processed distribution. raw_logprobs: of the unmodified logits, if asked for.
    logprobs: one dict {id: Logprob} a token when SamplingParams.logprobs is set, the sampled id always among them.
    finish_reason: "stop", "length", "abort", "paused" (token_quota), or "error"; None while running. stop_reason: the
    stop id or string that matched (None for EOS), or the error's text.
    drafter_versions: spans of tokens from passes with drafts of a learned drafter, by its version; others are in none.
    finish_order: 0 for the first sample of the engine's life to end, then rising; None for a paused or running one.
    preemptions: how often its KV was dropped for want of pages and computed again; known once it has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    sampled_logprobs: list[float]
    raw_logprobs: list[float] | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] = field(default_factory=list)
    drafter_versions: list[WeightSpan] = field(default_factory=list)
    finish_order: int | None = None
    noise: NoiseIdentity | None = None
    spec: SpecCounts = field(default_factory=SpecCounts)
    preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float:
        return float(sum(self.sampled_logprobs))

    def add_drafter_version(self, version: str, count: int) -> None:
        """The last `count` tokens came from a pass with drafts of this version."""
        end = len(self.token_ids)
        spans = self.drafter_versions
        if spans and spans[-1].version == version and spans[-1].end == end - count:
            spans[-1] = spans[-1]._replace(end=end)
        elif count:
            spans.append(WeightSpan(version, end - count, end))


@dataclass(frozen=True)
class SampleState:
    """Where one sample stood when it was paused: its noise identity and the weights it last ran under."""

    noise: NoiseIdentity
    weights: str
    token_ids: tuple[int, ...]  # prompt, prior output and output
    output: CompletionOutput


@dataclass(frozen=True)
class ResumeState:
    """All that `resume` needs, in this engine or another with the same tokenizer. Picklable, if its params'
    logits_processor is."""

    request_id: str
    group_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prior_len: int
    params: SamplingParams
    samples: tuple[SampleState, ...]


@dataclass
class RequestOutput:
    """All samples of one prompt. prompt_logprobs: None, or one entry a prompt token, the first None.
    state: set when a sample is paused; pass the output to `resume`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    group_id: str
    prior_output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    state: ResumeState | None = None
