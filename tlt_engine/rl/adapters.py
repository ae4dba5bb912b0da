"""Outputs in the shapes of verl, slime, NeMo-RL and OpenRLHF, and their sampling settings in ours.

Pure data conversion, as of their sources in 2026: no trainer is imported, none is run here. Each function gives the
fields by name, so that `TokenOutput(**to_verl(...))` and the like build the trainer's own object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import SamplingParams, refuse
from tlt_engine.outputs import CompletionOutput, RequestOutput

# Names that trainers pass and what they are called here; a value of None means "not set".
RENAMED = {
    "max_new_tokens": "max_tokens", "n": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "min_p": "min_p", "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "max_tokens": "max_tokens", "min_tokens": "min_tokens",
    "min_new_tokens": "min_tokens", "stop": "stop", "stop_strings": "stop", "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos", "seed": "seed", "sampling_seed": "seed", "logprobs": "logprobs",
    "skip_special_tokens": "skip_special_tokens", "include_stop_str_in_output": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output", "logit_bias": "logit_bias", "detokenize": "detokenize",
}
IGNORED = {"spaces_between_special_tokens"}  # of the text alone, which is the tokenizer's own here


def sampling_params(settings: Mapping[str, Any], **overrides: Any) -> SamplingParams:
    """A trainer's dict, with the names of vLLM or SGLang. logprobs True means the sampled token's only, False none.
    ValueError for settings this engine does not have, unless their value says "off", and for two names of one setting
    that contradict each other."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        if name in RENAMED:
            field = RENAMED[name]
            if value is not None and fields.setdefault(field, value) != value:
                raise refuse(f"sampling_params[{name!r}]", f"{fields[field]!r}, as another name of {field} says", value,
                             "keep one of them")
        elif name not in IGNORED and value and not (name == "best_of" and value == 1):
            raise refuse(f"sampling_params[{name!r}]", f"one of {sorted(RENAMED)}", value, "leave it out")
    if isinstance(fields.get("logprobs"), bool):
        fields["logprobs"] = 0 if fields["logprobs"] else None
    return SamplingParams(**(fields | overrides))


def spec_metrics(sample: CompletionOutput) -> dict[str, int]:
    """verl's names. Its accept length is the mean over samples of 1 + accepted / verify steps."""
    spec = sample.spec
    return {
        "spec_num_draft_tokens": spec.drafted, "spec_num_accepted_tokens": spec.accepted,
        "spec_num_verify_steps": spec.passes,
    }


def to_verl(sample: CompletionOutput) -> dict[str, Any]:
    """Fields of verl's TokenOutput. An aborted or paused sample is "aborted": its caller resends prompt + token_ids."""
    _refuse_failed(sample)
    cut = sample.finish_reason in ("abort", "paused", None)
    return {
        "token_ids": list(sample.token_ids), "log_probs": list(sample.sampled_logprobs),
        "stop_reason": "aborted" if cut else "completed", "num_preempted": sample.preemptions,
        "extra_fields": {
            "weight_versions": [tuple(span) for span in sample.weight_versions], **spec_metrics(sample),
        },
    }


def to_slime(output: RequestOutput, index: int = 0) -> dict[str, Any]:
    """Attributes of slime's Sample; status as the value of Sample.Status. tokens: prompt and response. loss_mask: one
    entry a response token."""
    sample = output.outputs[index]
    spec = sample.spec
    status = {"stop": "completed", "length": "truncated", "abort": "aborted", "paused": "aborted", "error": "failed"}
    return {
        "tokens": output.prompt_token_ids + output.prior_output_ids + sample.token_ids,
        "response": sample.text, "response_length": len(sample.token_ids),
        "loss_mask": [1] * len(sample.token_ids), "rollout_log_probs": list(sample.sampled_logprobs),
        "weight_versions": [span.version for span in sample.weight_versions],
        "status": status[sample.finish_reason or "abort"],
        "spec_info": {
            "spec_accept_token_num": spec.accepted, "spec_draft_token_num": spec.drafted,
            "spec_verify_ct": spec.passes, "completion_token_num": len(sample.token_ids),
        },
    }


def from_nemo_rl(batch: Mapping[str, Any]) -> list[list[int]]:
    """Prompt ids of NeMo-RL's right-padded input_ids [B, S] and input_lengths [B]."""
    ids, lengths = batch["input_ids"], batch["input_lengths"].tolist()
    if len(lengths) != len(ids) or max(lengths, default=0) > ids.shape[1]:
        raise refuse("input_lengths", f"{len(ids)} lengths of at most {ids.shape[1]}", lengths, "send the batch whole")
    return [row[:n] for row, n in zip(ids.tolist(), lengths)]


def to_nemo_rl(outputs: Sequence[RequestOutput], pad_token_id: int) -> dict[str, Tensor]:
    """One sample a request, as NeMo-RL asks: output_ids int64 [B, S] right-padded, prompt included; logprobs fp32
    [B, S], 0 on prompt and padding; generation_lengths, unpadded_sequence_lengths int64 [B]; truncated bool [B]."""
    if any(len(output.outputs) != 1 for output in outputs):
        raise refuse("outputs", "one sample a request", [len(o.outputs) for o in outputs], "use n=1")
    for output in outputs:
        _refuse_failed(output.outputs[0])
    whole = [o.prompt_token_ids + o.prior_output_ids + o.outputs[0].token_ids for o in outputs]
    width = max((len(ids) for ids in whole), default=0)
    output_ids = torch.full((len(outputs), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(outputs), width)
    for i, (ids, output) in enumerate(zip(whole, outputs)):
        sampled = output.outputs[0].sampled_logprobs
        output_ids[i, : len(ids)] = torch.tensor(ids)
        logprobs[i, len(ids) - len(sampled) : len(ids)] = torch.tensor(sampled)
    return {
        "output_ids": output_ids, "logprobs": logprobs,
        "generation_lengths": torch.tensor([len(o.outputs[0].token_ids) for o in outputs], dtype=torch.int64),
        "unpadded_sequence_lengths": torch.tensor([len(ids) for ids in whole], dtype=torch.int64),
        "truncated": torch.tensor([o.outputs[0].finish_reason != "stop" for o in outputs], dtype=torch.bool),
    }


class OpenRLHFEpisode:
    """The token space of one agent episode, as OpenRLHF's agents return it: what was observed and what was acted, in
    one list. Feed it turns in order; `fields` is what the agent emits."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.tokens = list(prompt_token_ids)
        self.action_ranges: list[tuple[int, int]] = []
        self.logprobs = [0.0] * len(self.tokens)

    def act(self, sample: CompletionOutput) -> None:
        _refuse_failed(sample)
        start = len(self.tokens)
        self.tokens += sample.token_ids
        self.logprobs += sample.sampled_logprobs
        self.action_ranges.append((start, len(self.tokens)))

    def observe(self, token_ids: Sequence[int]) -> None:
        """The environment's tokens: log-probability 0, part of no action."""
        self.tokens += token_ids
        self.logprobs += [0.0] * len(token_ids)

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "observation_tokens": list(self.tokens), "action_ranges": list(self.action_ranges),
            "rollout_log_probs": list(self.logprobs),
        }


def _refuse_failed(sample: CompletionOutput) -> None:
    """These shapes have no place for a failure: passing it on would train on it."""
    if sample.finish_reason == "error":
        raise refuse("sample", "one that did not end in an error", sample.stop_reason, "drop it or mask it yourself")
