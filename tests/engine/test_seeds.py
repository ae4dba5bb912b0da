"""Seeds, samples, turns and resumption (cases N, C; docs/seeds.md)."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace

import numpy as np
import pytest

from tests.drafters import ReplayDrafter
from tests.engine.engines import greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import SamplingParams, derive_seed
from tlt_engine.rng import KeyStream, check_seed, noise_key

PROMPT = [1, 2, 3, 4]
PARAMS = SamplingParams(max_tokens=20, seed=9)


def new_weights(seed: int = 99) -> dict:
    return dict(shared_hf("llama", seed).state_dict())


def test_n01_equal_entries_of_one_call_are_different_samples(caplog):
    with caplog.at_level(logging.WARNING, "tlt_engine"):
        outs = tokens(tiny_engine().generate([PROMPT] * 8, PARAMS))
    assert len({tuple(o[0]) for o in outs}) == 8
    assert sum("equal prompts with one seed" in r.message for r in caplog.records) == 1
    assert [o[0] for o in outs] == plain_outputs([PROMPT], replace(PARAMS, n=8))[0]


def test_n02_a_shorter_second_turn_draws_other_noise():
    first = plain_outputs([PROMPT], PARAMS)[0][0]
    second = plain_outputs([PROMPT[:2]], PARAMS)[0][0]
    assert noise_key(9, PROMPT) != noise_key(9, PROMPT[:2])
    assert first[:18] != second[2:]


@pytest.mark.parametrize("seed", [-1, np.int32(5), np.int64(-(2**63)), 2**63 - 1])
def test_n04_int64_seeds_of_any_integer_type(seed):
    out = plain_outputs([PROMPT], replace(PARAMS, seed=seed))
    assert out == plain_outputs([PROMPT], replace(PARAMS, seed=int(seed)))
    assert check_seed(seed) == int(seed)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.0, True, "1", np.uint64(2**63)])
def test_n04_other_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed: expected an"):
        SamplingParams(seed=seed)


def test_n05_unseeded_engines_differ_and_seeded_ones_repeat():
    params = replace(PARAMS, seed=None)
    assert plain_outputs([PROMPT], params) != plain_outputs([PROMPT], params)
    seeded = [tokens(tiny_engine(seed=4).generate([PROMPT, PROMPT], params)) for _ in range(2)]
    assert seeded[0] == seeded[1] and seeded[0][0] != seeded[0][1]


def test_keys_are_a_function_of_seed_and_prompt():
    assert noise_key(1, [2, 3]) == noise_key(1, (2, 3))
    assert len({noise_key(s, p) for s in range(50) for p in ([1], [2], [1, 2])}) == 150
    assert derive_seed(1, 2, "a") != derive_seed(1, 2, "b") != derive_seed(1, 3, "b")
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, "3")
    one, two = KeyStream(1), KeyStream(1)
    keys = [one.next() for _ in range(3)]
    assert keys == [two.next() for _ in range(3)] and len(set(keys)) == 3


def test_frozen_noise_across_weights_warns_once(caplog):
    engine = tiny_engine()
    with caplog.at_level(logging.WARNING, "tlt_engine"):
        engine.generate([PROMPT], PARAMS)
        engine.generate([PROMPT], PARAMS)
        assert not caplog.records
        for seed in (98, 99):
            engine.update_weights(new_weights(seed))
            engine.generate([PROMPT], PARAMS)
    assert sum("noise frozen across policy" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("quota", [1, 3, 7, 100])
def test_n03_a_cut_and_resume_is_the_uninterrupted_stream(quota):
    params = replace(PARAMS, n=3, repetition_penalty=1.2, min_tokens=5, stop_token_ids=[3], logprobs=1)
    whole = tiny_engine().generate([PROMPT], params)[0]
    known = {tuple(PROMPT): {i: o.token_ids for i, o in enumerate(whole.outputs)}}
    for drafter in (None, ReplayDrafter(known, depth=5)):
        engine, other = tiny_engine(drafter=drafter), tiny_engine(drafter=drafter)
        out = engine.generate([PROMPT], params, token_quota=quota)
        for calls in range(1, 30):
            cut = [len(o.token_ids) for o in out[0].outputs]
            expected = [min(calls * quota, len(o.token_ids)) for o in whole.outputs]
            assert cut == expected, "the cut does not depend on speculation"
            if out[0].finished:
                break
            assert any(o.finish_reason == "paused" for o in out[0].outputs)
            moved = pickle.loads(pickle.dumps(out))
            out = (other if calls % 2 else engine).resume(moved, token_quota=quota)
        for a, b in zip(out[0].outputs, whole.outputs):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
            assert a.sampled_logprobs == pytest.approx(b.sampled_logprobs, abs=1e-4)
            assert len(a.logprobs) == len(a.token_ids) and a.weight_versions == b.weight_versions
        engine.check_integrity()
        other.check_integrity()


def test_n03_resume_under_new_weights_takes_a_fresh_segment():
    engine = tiny_engine()
    cut = engine.generate([PROMPT], PARAMS, token_quota=6)
    head = cut[0].outputs[0].token_ids
    frozen = pickle.loads(pickle.dumps(cut))
    engine.update_weights(new_weights(), weight_version="step-1")
    out = engine.resume(cut)[0].outputs[0]
    assert out.token_ids[:6] == head
    assert [(s.version, s.start, s.end) for s in out.weight_versions] == [("0", 0, 6), ("step-1", 6, 20)]
    assert out.noise.segment == 1 and cut[0].state.samples[0].noise.segment == 0
    # The same cut, resumed in a second engine that carries the new weights under the OLD label: the fingerprint tells.
    second = tiny_engine(model_seed=99)
    again = second.resume(frozen)[0].outputs[0]
    assert again.token_ids == out.token_ids and again.noise.segment == 1


def test_update_in_flight_raises_the_segment_and_recomputes_kv():
    """Cases H07: tokens before the update come from the old weights, later log-probabilities from the new alone."""
    engine = tiny_engine()
    old = plain_outputs([PROMPT], PARAMS)[0][0]
    engine.add_request(PROMPT, PARAMS)
    while engine.stats()["emitted_tokens"] < 5:
        engine.step()
    engine.update_weights(new_weights(), weight_version="new")
    done = []
    while engine.has_unfinished():
        done += engine.step()
    out = done[0].outputs[0]
    assert out.token_ids[:5] == old[:5] and out.noise.segment == 1
    assert [s.version for s in out.weight_versions] == ["0", "new"]
    after = engine.score(PROMPT + out.token_ids[:5], out.token_ids[5:])
    assert out.sampled_logprobs[5:] == pytest.approx(after, abs=1e-4)
    engine.check_integrity()


def test_h06_old_prefixes_never_serve_new_weights():
    engine = tiny_engine()
    prompt = list(range(1, 20))
    engine.generate([prompt], PARAMS)
    engine.update_weights(new_weights())
    assert tokens(engine.generate([prompt], PARAMS)) == plain_outputs([prompt], PARAMS, model_seed=99)
    with pytest.raises(ValueError, match="weights: expected"):
        engine.update_weights({"model.norm.weight": np.zeros(3)})
    assert tokens(engine.generate([prompt], PARAMS)) == plain_outputs([prompt], PARAMS, model_seed=99)


def test_h08_a_subset_is_taken_when_asked_for_and_reported():
    engine, norm = tiny_engine(), "model.norm.weight"
    weights = new_weights()
    before = tokens(engine.generate([PROMPT], PARAMS))
    with pytest.raises(ValueError, match="missing"):
        engine.update_weights({norm: weights[norm]})
    assert tokens(engine.generate([PROMPT], PARAMS)) == before
    report = engine.update_weights({norm: weights[norm], "model.unknown": weights[norm]}, strict=False)
    assert report.loaded == (norm,) and report.unexpected == ("model.unknown",) and len(report.missing) > 5
    merged = engine.model.named_weights()
    assert dict(merged)[norm].tolist() == weights[norm].tolist() and engine.weight_version == "1"


def test_prior_output_counts_as_output_and_is_part_of_the_key():
    prior = [10, 11, 12]
    params = SamplingParams(
        max_tokens=10, seed=9, presence_penalty=1.5, min_tokens=6, stop_token_ids=[3], logit_bias={3: 50.0}
    )
    engine = tiny_engine()
    out = engine.generate([PROMPT], params, prior_output_ids=[prior])[0].outputs[0]
    assert 3 not in out.token_ids[:3] and out.token_ids[3] == 3, "min_tokens counts the prior tokens"
    free = replace(params, min_tokens=0, logit_bias=None, stop_token_ids=None)
    out = engine.generate([PROMPT], free, prior_output_ids=[prior])[0].outputs[0]
    assert len(out.token_ids) == 7, "max_tokens counts the prior tokens"
    assert out.noise.key == noise_key(9, PROMPT + prior)
    as_prompt = engine.generate([PROMPT + prior], free)[0].outputs[0]
    assert as_prompt.noise.key == out.noise.key
    with pytest.raises(ValueError, match="prior_output_ids: expected fewer than 10 tokens"):
        engine.generate([PROMPT], params, prior_output_ids=[[1] * 10])


def test_finish_order_and_group_ids():
    engine = tiny_engine()
    lengths = [9, 3, 6]
    outs = engine.generate([[1], [2], [3]], [greedy(n) for n in lengths], group_ids=["a", "a", "b"])
    order = sorted(range(3), key=lambda i: outs[i].outputs[0].finish_order)
    assert order == [1, 2, 0] and [o.group_id for o in outs] == ["a", "a", "b"]
    same, other = engine.generate([[1], [2]], greedy(1))
    assert same.group_id != other.group_id
    assert engine.generate([[1]], greedy(1))[0].group_id == same.group_id
