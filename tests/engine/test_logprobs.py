"""Log-probabilities are the target's own, one a token, of the distribution that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.drafters import ReplayDrafter
from tests.engine.engines import greedy, plain_outputs, tiny_engine
from tests.engine.test_exactness import scripted
from tlt_engine import EngineConfig, RolloutEngine, SamplingParams
from tlt_engine.config import SpeculationConfig

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10, 11, 12, 13]]


def teacher_forced(engine, prompt, output, temperature=1.0):
    return [
        torch.log_softmax(engine.next_logits(prompt + output[:i]) / temperature, -1)[t].item()
        for i, t in enumerate(output)
    ]


def test_d02_d03_each_entry_belongs_to_its_token_whatever_was_accepted():
    params = SamplingParams(max_tokens=32, seed=1, temperature=0.8)
    expected = plain_outputs(PROMPTS, params)
    known = {tuple(p): {0: out[0]} for p, out in zip(PROMPTS, expected)}
    engine = tiny_engine(drafter=ReplayDrafter(known, error_rate=0.3, depth=4))
    for prompt, request in zip(PROMPTS, engine.generate(PROMPTS, params)):
        out = request.outputs[0]
        assert len(out.sampled_logprobs) == len(out.token_ids) == 32
        assert out.sampled_logprobs == pytest.approx(teacher_forced(engine, prompt, out.token_ids, 0.8), abs=1e-4)
        assert out.cumulative_logprob == pytest.approx(sum(out.sampled_logprobs))
        assert engine.score(prompt, out.token_ids, params) == pytest.approx(out.sampled_logprobs, abs=1e-4)
    assert engine.stats()["accepted_tokens"] > 0


def test_greedy_logprobs_are_those_of_temperature_1():
    engine = tiny_engine()
    out = engine.generate([PROMPTS[0]], greedy(8))[0].outputs[0]
    assert out.sampled_logprobs == pytest.approx(teacher_forced(engine, PROMPTS[0], out.token_ids), abs=1e-4)


def test_d04_raw_logprobs_are_of_the_unmodified_logits():
    params = SamplingParams(temperature=0.5, repetition_penalty=1.3, max_tokens=12, seed=3, raw_logprobs=True)
    engine = tiny_engine()
    out = engine.generate([PROMPTS[0]], params)[0].outputs[0]
    assert out.raw_logprobs == pytest.approx(teacher_forced(engine, PROMPTS[0], out.token_ids), abs=1e-4)
    assert out.raw_logprobs != pytest.approx(out.sampled_logprobs, abs=1e-2)


def test_d04_d05_values_by_hand():
    def one(p, **params):
        engine = RolloutEngine(scripted(p, vocab=len(p)), EngineConfig(speculation=SpeculationConfig("off")))
        outs = engine.generate([[1, 0]], SamplingParams(n=64, max_tokens=1, seed=1, raw_logprobs=True, **params))
        return next(o for o in outs[0].outputs if o.token_ids == [0])

    halved = one([0.73105858, 0.26894142], temperature=0.5)
    assert halved.raw_logprobs == pytest.approx([-0.3133], abs=1e-4)
    assert halved.sampled_logprobs == pytest.approx([-0.1269], abs=1e-4)
    # 0.7999, not 0.8: a cut exactly at the threshold may fall either way in fp32 (an excused tie).
    kept = one([0.5, 0.3, 0.15, 0.05], top_p=0.7999)
    assert kept.raw_logprobs == pytest.approx([-0.6931], abs=1e-4)
    assert kept.sampled_logprobs == pytest.approx([-0.4700], abs=1e-4)


def test_d07_top_n():
    params = SamplingParams(max_tokens=10, seed=5, temperature=0.9)
    expected = plain_outputs([PROMPTS[0]], params)[0][0]
    drafter = ReplayDrafter({tuple(PROMPTS[0]): {0: expected}}, depth=4)
    for count in (0, 1, 5, 64):
        seen = []
        for engine in (tiny_engine(), tiny_engine(drafter=drafter)):
            out = engine.generate([PROMPTS[0]], replace(params, logprobs=count))[0].outputs[0]
            assert out.token_ids == expected
            assert len(out.logprobs) == 10
            for token, value, entry in zip(out.token_ids, out.sampled_logprobs, out.logprobs):
                assert entry[token].logprob == pytest.approx(value, abs=1e-5)
                assert len(entry) in ((1,) if count == 0 else (count, count + 1))
                best = sorted((lp.logprob for t, lp in entry.items()), reverse=True)
                ranks = sorted(lp.rank for lp in entry.values() if lp.rank is not None)
                assert count == 0 or ranks[:count] == list(range(1, count + 1))
                assert best[0] <= 0
            seen.append([{t: round(lp.logprob, 4) for t, lp in e.items()} for e in out.logprobs])
        assert seen[0] == seen[1]
    with pytest.raises(ValueError, match="logprobs: expected at most the vocabulary size 64, got 65"):
        tiny_engine().generate([PROMPTS[0]], replace(params, logprobs=65))
    with pytest.raises(ValueError, match="logprobs: expected an integer"):
        SamplingParams(logprobs=True)


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs(budget):
    prompt = list(range(1, 13))
    engine = tiny_engine(max_num_batched_tokens=budget)
    engine.generate([prompt], greedy(2))  # the prefix is cached now; prompt logits must still be computed
    out = engine.generate([prompt], greedy(3, prompt_logprobs=2, n=2))[0]
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
    for i in range(1, len(prompt)):
        normal = torch.log_softmax(engine.next_logits(prompt[:i]), -1)
        entry = out.prompt_logprobs[i]
        assert entry[prompt[i]].logprob == pytest.approx(normal[prompt[i]].item(), abs=1e-4)
        assert {1, 2} <= {lp.rank for lp in entry.values()}
    assert engine.generate([[5]], greedy(1, prompt_logprobs=0))[0].prompt_logprobs == [None]


def test_score_bars_stops_before_min_tokens_as_rollouts_do():
    params = SamplingParams(n=3, max_tokens=12, min_tokens=8, seed=3, stop_token_ids=[3, 5, 7])
    engine = tiny_engine()
    for out in engine.generate([PROMPTS[0]], params)[0].outputs:
        assert engine.score(PROMPTS[0], out.token_ids, params) == pytest.approx(out.sampled_logprobs, abs=1e-5)
        unbarred = engine.score(PROMPTS[0], out.token_ids, replace(params, min_tokens=0))
        assert unbarred[:8] != pytest.approx(out.sampled_logprobs[:8], abs=1e-3)
    assert engine.score(PROMPTS[0], [9, 3], params)[1] == float("-inf")


def test_score_is_minus_inf_for_a_filtered_token_and_refuses_bad_ids():
    engine = tiny_engine()
    top = int(engine.next_logits(PROMPTS[0]).argmax())
    other = (top + 1) % 64
    assert engine.score(PROMPTS[0], [top], SamplingParams(top_k=1)) == pytest.approx([0.0], abs=1e-6)
    assert engine.score(PROMPTS[0], [other], SamplingParams(top_k=1)) == [float("-inf")]
    with pytest.raises(ValueError, match=r"params\.logits_processor: expected None in score"):
        engine.score(PROMPTS[0], [top], SamplingParams(logits_processor=lambda ids, logits: logits))
    with pytest.raises(ValueError, match=r"output_ids: expected at least one token"):
        engine.score(PROMPTS[0], [])
    with pytest.raises(ValueError, match=r"output_ids\[0\]: expected an id in"):
        engine.score(PROMPTS[0], [64])
    long = [i % 64 for i in range(150)]
    assert engine.score([1], long) == pytest.approx(teacher_forced(engine, [1], long), abs=1e-4)
    engine.check_integrity()
