"""Trainers' shapes, field by field, as recorded from their sources in 2026."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch

from tests.engine.engines import tiny_engine
from tlt_engine import SamplingParams
from tlt_engine.rl.adapters import (
    OpenRLHFEpisode,
    from_nemo_rl,
    sampling_params,
    spec_metrics,
    to_nemo_rl,
    to_slime,
    to_verl,
)

PARAMS = SamplingParams(max_tokens=6, seed=1, temperature=1.0)


@dataclass
class TokenOutput:
    """verl/workers/rollout/replica.py"""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """slime/utils/types.py: the fields a rollout fills."""

    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    spec_info: dict[str, int] | None = None


def outputs(prompts=([1, 2, 3], [4, 5]), params=PARAMS, **engine):
    return tiny_engine(**engine).generate([list(p) for p in prompts], params)


def test_verl():
    sample = outputs()[0].outputs[0]
    out = TokenOutput(**to_verl(sample))
    assert out.token_ids == sample.token_ids and out.log_probs == sample.sampled_logprobs
    assert len(out.log_probs) == len(out.token_ids) and out.stop_reason == "completed" and out.num_preempted == 0
    assert out.extra_fields["spec_num_verify_steps"] == 6
    assert out.extra_fields["weight_versions"] == [("0", 0, 6)]


def test_verl_cut_samples_are_aborted():
    engine = tiny_engine()
    paused = engine.generate([[1, 2, 3]], PARAMS, token_quota=2)[0].outputs[0]
    assert to_verl(paused)["stop_reason"] == "aborted" and len(to_verl(paused)["token_ids"]) == 2
    request = engine.add_request([1, 2, 3], PARAMS)
    engine.step()
    assert to_verl(engine.abort(request)[0].outputs[0])["stop_reason"] == "aborted"


def test_slime():
    output = outputs()[0]
    values = to_slime(output)
    sample = Sample(**{**values, "status": Status(values["status"])})
    assert sample.tokens == [1, 2, 3, *output.outputs[0].token_ids]
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == 6
    assert sample.status is Status.TRUNCATED and sample.weight_versions == ["0"]
    assert sample.spec_info["completion_token_num"] == 6


@pytest.mark.parametrize("reason, status", [
    ("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("paused", "aborted"), ("error", "failed"),
    (None, "aborted"),
])
def test_slime_statuses(reason, status):
    output = outputs()[0]
    output.outputs[0].finish_reason = reason
    assert Status(to_slime(output)["status"]).value == status


def test_nemo_rl_round_trip():
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]), "input_lengths": torch.tensor([3, 2, 4])
    }
    prompts = from_nemo_rl(batch)
    assert prompts == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = [SamplingParams(max_tokens=n, seed=1) for n in (6, 2, 4)]
    rolled = outputs(prompts, params)
    rolled[1].outputs[0].finish_reason = "stop"
    out = to_nemo_rl(rolled, pad_token_id=63)
    assert set(out) == {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "truncated"}
    assert out["output_ids"].shape == out["logprobs"].shape == (3, 9)
    assert out["generation_lengths"].tolist() == [6, 2, 4] and out["unpadded_sequence_lengths"].tolist() == [9, 4, 8]
    assert out["truncated"].tolist() == [True, False, True]
    for i, (prompt, output) in enumerate(zip(prompts, rolled)):
        n, sample = len(prompt), output.outputs[0]
        end = n + len(sample.token_ids)
        assert out["output_ids"][i].tolist() == prompt + sample.token_ids + [63] * (9 - end)
        assert not out["logprobs"][i, :n].any() and not out["logprobs"][i, end:].any()
        torch.testing.assert_close(out["logprobs"][i, n:end], torch.tensor(sample.sampled_logprobs))


def test_nemo_rl_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="input_lengths"):
        from_nemo_rl({"input_ids": torch.zeros(1, 3, dtype=torch.int64), "input_lengths": torch.tensor([4])})
    with pytest.raises(ValueError, match="one sample a request"):
        to_nemo_rl(outputs(params=SamplingParams(n=2, max_tokens=2)), 0)


def test_openrlhf_episode():
    engine = tiny_engine()
    episode = OpenRLHFEpisode([1, 2, 3])
    first = engine.generate([episode.tokens], PARAMS)[0].outputs[0]
    episode.act(first)
    episode.observe([9, 9])
    second = engine.generate([episode.tokens], PARAMS)[0].outputs[0]
    episode.act(second)
    fields = episode.fields
    assert fields["observation_tokens"] == [1, 2, 3, *first.token_ids, 9, 9, *second.token_ids]
    assert fields["action_ranges"] == [(3, 9), (11, 17)]
    logprobs = fields["rollout_log_probs"]
    assert logprobs == [0.0] * 3 + first.sampled_logprobs + [0.0] * 2 + second.sampled_logprobs


def test_failed_samples_are_not_passed_on():
    output = outputs()[0]
    output.outputs[0].finish_reason = "error"
    for convert in (lambda: to_verl(output.outputs[0]), lambda: to_nemo_rl([output], 0),
                    lambda: OpenRLHFEpisode([1]).act(output.outputs[0])):
        with pytest.raises(ValueError, match="did not end in an error"):
            convert()


def test_sampling_settings_of_both_families():
    vllm = {"n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_tokens": 8, "logprobs": True, "best_of": None}
    sglang = {"temperature": 0.7, "max_new_tokens": 8, "sampling_seed": 3, "stop": None, "no_stop_trim": True}
    assert sampling_params(vllm) == SamplingParams(n=2, temperature=0.7, top_p=0.9, max_tokens=8, logprobs=0)
    expected = SamplingParams(temperature=0.7, max_tokens=8, seed=3, include_stop_str_in_output=True)
    assert sampling_params(sglang) == expected
    assert sampling_params({"logprobs": False}, seed=4) == SamplingParams(seed=4)
    with pytest.raises(ValueError, match="json_schema"):
        sampling_params({"json_schema": "{}"})


def test_accept_counts_are_raw():
    from tests.drafters import ReplayDrafter

    plain = outputs([[1, 2, 3]])
    known = {(1, 2, 3): {0: plain[0].outputs[0].token_ids}}
    sample = outputs([[1, 2, 3]], drafter=ReplayDrafter(known, error_rate=0.0, depth=3))[0].outputs[0]
    counts = spec_metrics(sample)
    assert sample.token_ids == plain[0].outputs[0].token_ids
    assert counts["spec_num_verify_steps"] < 6
    assert counts["spec_num_accepted_tokens"] == 6 - counts["spec_num_verify_steps"]


def test_settings_that_change_the_samples_are_never_passed_over():
    for wrong in ({"best_of": 4}, {"use_beam_search": True}, {"max_tokens": 8, "max_new_tokens": 16}):
        with pytest.raises(ValueError, match="sampling_params"):
            sampling_params(wrong)
    assert sampling_params({"best_of": 1, "use_beam_search": False, "detokenize": False}).detokenize is False
    assert sampling_params({"max_tokens": 8, "max_new_tokens": 8}).max_tokens == 8
