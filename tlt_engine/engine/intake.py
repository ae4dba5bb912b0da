"""From a caller's prompt to a Request with its samples: validation, noise identities, resumption.

Everything is checked here before the engine's state changes; what comes out can be queued.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from tlt_kernels.params import GREEDY_BELOW

from tlt_engine.config import SamplingParams, refuse
from tlt_engine.engine.prompts import Prompt, check_ids, tokenize_prompt
from tlt_engine.engine.sample import Request, Sample
from tlt_engine.engine.text import IncrementalText
from tlt_engine.outputs import CompletionOutput, RequestOutput, ResumeState, SampleState
from tlt_engine.rng import KeyStream, noise_key
from tlt_engine.scheduler.sequence import Sequence

logger = logging.getLogger("tlt_engine")
LAST_SAMPLE = 2**32 - 1  # a counter word
REMEMBERED_IDENTITIES = 65536  # for the frozen-noise warning; oldest dropped


class Intake:
    """can_fit(tokens): whether a sequence of that length can ever have its pages."""

    def __init__(self, *, vocab_size: int, max_model_len: int, tokenizer: Any, seed: int | None, can_fit: Any) -> None:
        self._vocab_size, self._max_model_len, self._tokenizer = vocab_size, max_model_len, tokenizer
        self._keys = KeyStream(seed)
        self._can_fit = can_fit
        self._next_seq = 0
        self._seen: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._warned: set[str] = set()

    def request(
        self, prompt: Prompt, params: SamplingParams, *, name: str = "prompt", request_id: str | None = None,
        group_id: str | None = None, prior: Seq[int] | None = None, speculate: bool = True,
        token_quota: int | None = None, forced: tuple[int, ...] | None = None, streamed: bool = False,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise refuse("sampling_params", "a SamplingParams", type(params).__name__, "build one")
        text, ids = tokenize_prompt(prompt, self._tokenizer, self._vocab_size, name)
        prior_ids = check_ids(prior or (), self._vocab_size, "prior_output_ids", allow_empty=True)
        self._check_params(params)
        max_len = self._max_len(ids, prior_ids, params, name)
        self._warn_once_about(params)
        key = self._keys.next() if params.seed is None else noise_key(params.seed, ids + prior_ids)
        group = group_id if group_id is not None else blake2b(repr(ids).encode(), digest_size=16).hexdigest()
        request = Request(request_id or "", group, text, ids, len(prior_ids), params, streamed=streamed)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(ids)
        for index in range(1 if forced is not None else params.n):
            seq = Sequence(
                self._seq_id(), group, params, ids + prior_ids, len(ids), max_len, key, params.sample_index + index,
                prompt_logits=params.prompt_logprobs is not None and index == 0,
                speculate=speculate and params.logits_processor is None,
            )
            sample = Sample(request, seq, _new_output(index, params), forced=forced)
            sample.quota_end = _quota_end(seq, token_quota)
            sample.text = self._text(sample)
            request.samples.append(sample)
        return request

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise refuse("stop", "stop_token_ids (this engine has no tokenizer)", params.stop,
                         "pass tokenizer= to RolloutEngine")

    def _max_len(self, ids: list[int], prior: list[int], params: SamplingParams, name: str) -> int:
        """Where the sequence must end; refuses what can never run."""
        limit = self._max_model_len
        max_len = limit if params.max_tokens is None else min(len(ids) + params.max_tokens, limit)
        have = len(ids) + len(prior)
        if len(ids) >= limit:
            bound = f"at most {limit - 1} tokens (max_model_len {limit}, one for the output)"
            raise refuse(name, bound, len(ids), "shorten it")
        if have >= max_len:
            bound = f"max_tokens {params.max_tokens}, max_model_len {limit}"
            bound = f"fewer than {max_len - len(ids)} tokens, so that one can follow ({bound})"
            raise refuse("prior_output_ids", bound, len(prior), "raise max_tokens, or take the response as finished")
        if not self._can_fit(max_len):
            raise refuse(name, "a sequence that fits the KV pool alone",
                         f"{max_len} tokens (prompt {len(ids)} + output)",
                         "lower max_tokens, or raise EngineConfig.num_pages or kv_cache_bytes")
        return max_len

    def separate_equal_entries(self, requests: Seq[Request], weights: str) -> None:
        """Entries of one call with equal prompt and explicit seed get successive sample indices where theirs are
        taken, so that they are different samples; warns about that, and about noise frozen across weights."""
        taken: dict[int, set[int]] = {}
        for request in requests:
            if request.params.seed is None:
                continue
            used = taken.setdefault(request.samples[0].seq.key, set())
            if any(sample.seq.sample in used for sample in request.samples):
                shift = max(used) + 1 - request.samples[0].seq.sample
                if request.samples[-1].seq.sample + shift > LAST_SAMPLE:
                    raise refuse("sample_index", f"at most {LAST_SAMPLE} for each of the equal entries of a call",
                                 request.params.sample_index, "lower it")
                for sample in request.samples:
                    sample.seq.sample += shift
                self._warn(
                    "equal-entries",
                    "equal prompts with one seed in one call: they get successive sample indices, so their samples "
                    "differ; use n= for samples of one prompt, or derive_seed for each entry",
                )
            for sample in request.samples:
                used.add(sample.seq.sample)
                self._remember(sample.seq, weights)

    def _remember(self, seq: Sequence, weights: str) -> None:
        identity = (seq.key, seq.sample)
        before = self._seen.get(identity)
        if before is not None and before != weights:
            self._warn(
                "frozen-noise",
                "the same (prompt, seed, sample) was drawn under other weights before: noise frozen across policy "
                "updates correlates the rollouts of different steps and can stall GRPO; use "
                "rng.derive_seed(run, step, prompt)",
            )
        self._seen[identity] = weights
        self._seen.move_to_end(identity)
        if len(self._seen) > REMEMBERED_IDENTITIES:
            self._seen.popitem(last=False)

    def restore(
        self, output: RequestOutput, state: ResumeState, weights: str, *, speculate: bool, token_quota: int | None
    ) -> Request:
        """A paused request, ready to be queued: its ended samples as they were, its paused ones to go on."""
        check_ids(state.prompt_token_ids, self._vocab_size, "state.prompt_token_ids")
        self._check_params(state.params)
        request = Request(
            state.request_id, state.group_id, state.prompt, list(state.prompt_token_ids), state.prior_len, state.params,
            prompt_logprobs=output.prompt_logprobs,
        )
        max_len = self._max_len(request.prompt_ids, [], state.params, "state.prompt_token_ids")
        for saved in state.samples:
            request.samples.append(self._restore_sample(request, saved, max_len, weights, speculate, token_quota))
        return request

    def _restore_sample(
        self, request: Request, saved: SampleState, max_len: int, weights: str, speculate: bool, token_quota: int | None
    ) -> Sample:
        paused = saved.output.finish_reason == "paused"
        check_ids(saved.token_ids, self._vocab_size, "state.token_ids")
        if paused and len(saved.token_ids) >= max_len:
            bound = f"fewer than {max_len} tokens, so that one can follow (max_model_len {self._max_model_len})"
            raise refuse("state.token_ids", bound, len(saved.token_ids), "raise max_model_len")
        segment = saved.noise.segment + (paused and saved.weights != weights)
        seq = Sequence(
            self._seq_id(), request.group, request.params, list(saved.token_ids), len(request.prompt_ids), max_len,
            saved.noise.key, saved.noise.sample, segment=segment,
            speculate=speculate and request.params.logits_processor is None,
        )
        out = saved.output
        output = replace(
            out, token_ids=list(out.token_ids), sampled_logprobs=list(out.sampled_logprobs),
            raw_logprobs=None if out.raw_logprobs is None else list(out.raw_logprobs),
            logprobs=None if out.logprobs is None else list(out.logprobs),
            weight_versions=list(out.weight_versions), drafter_versions=list(out.drafter_versions),
            spec=out.spec.copy(),
            finish_reason=None if paused else out.finish_reason,
        )
        sample = Sample(request, seq, output)
        if paused:
            sample.quota_end = _quota_end(seq, token_quota)
            sample.text = self._text(sample)
        return sample

    def audit(self, sample: Sample) -> Sample:
        """A sample with the same identity that starts over from the prompt and never speculates."""
        seq = sample.seq
        again = Sequence(
            self._seq_id(), seq.group, seq.params, seq.token_ids[: sample.new_start], seq.prompt_len, seq.max_len,
            seq.key, seq.sample, segment=seq.segment, speculate=False,
        )
        shadow = Sample(sample.request, again, _new_output(sample.output.index, seq.params), audit_of=sample)
        shadow.text = self._text(shadow)
        return shadow

    def _text(self, sample: Sample) -> IncrementalText | None:
        """Stop strings and streams need the text token by token; otherwise it is decoded once at the end."""
        params = sample.request.params
        streamed = sample.request.streamed and self._tokenizer is not None and params.detokenize
        if not (params.stop or streamed) or sample.forced is not None:
            return None
        text = IncrementalText(
            self._tokenizer, sample.seq.token_ids[: sample.new_start], params.skip_special_tokens
        )
        for token in sample.output.token_ids:
            text.append(token)
        return text

    def _warn_once_about(self, params: SamplingParams) -> None:
        if params.temperature >= GREEDY_BELOW and (params.top_k or params.top_p < 1 or params.min_p > 0):
            self._warn(
                "filters",
                "top_k / top_p / min_p renormalise the returned log-probabilities over the kept tokens: a ratio "
                "against a trainer's full softmax is off by the kept mass; use 0 / 1 / 0 for RL, or raw_logprobs",
            )
        if params.logits_processor is not None:
            self._warn(
                "processor",
                "requests with a logits_processor decode without speculation, with a host call for each token",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message)

    def _seq_id(self) -> int:
        self._next_seq += 1
        return self._next_seq


def _new_output(index: int, params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(
        index, "", [], [], raw_logprobs=[] if params.raw_logprobs else None,
        logprobs=[] if params.logprobs is not None else None,
    )


def _quota_end(seq: Sequence, token_quota: int | None) -> int | None:
    if token_quota is None:
        return None
    if isinstance(token_quota, bool) or not hasattr(token_quota, "__index__") or token_quota < 1:
        expected = "an integer >= 1 (new tokens a sample in this call)"
        raise refuse("token_quota", expected, token_quota, "pass None for no cut")
    return len(seq.token_ids) + int(token_quota)
