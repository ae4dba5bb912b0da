"""With the learned drafter the tokens and log-probabilities are those of plain decoding, through everything that can
happen to a request; what it says of itself is right. The drafters are random: mostly wrong, and sometimes not."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.copies import bigram
from tests.eagle import random_drafter
from tests.engine.emulated import emulation
from tests.engine.engines import OFF, shared_hf, tiny_engine, tokens
from tests.tiny import tiny_target
from tlt_engine import EngineConfig, Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation import learned as learned_module
from tlt_engine.speculation.elastic import HOLD, Elastic

MODEL = {"num_hidden_layers": 3}
PROMPTS = [[5, 9, 2], [7] * 9, list(range(30)), [11], [3, 4]]
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {}, "greedy": {"temperature": 0.0, "repetition_penalty": 1.2}, "n": {"n": 3, "temperature": 0.7},
    "filters": {"temperature": 0.8, "top_p": 0.8, "min_p": 0.05, "top_k": 20},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": -0.3, "frequency_penalty": 0.6},
    "masks": {"allowed_token_ids": list(range(2, 40)), "logit_bias": {4: 1.5, 9: -2.0}, "min_tokens": 6,
              "stop_token_ids": [8, 12, 30]},
    "raw": {"raw_logprobs": True, "logprobs": 2, "prompt_logprobs": 1},
}


def learned(**overrides: Any) -> SpeculationConfig:
    profile = Profile(depth=4, top_k=3, verify=12)
    return SpeculationConfig(**{"method": "learned", "profile": profile, "min_chance": 0.0, **overrides})


def drafter(seed: int = 0, **overrides: Any) -> EagleModel:
    return random_drafter(tiny_target(**MODEL), seed, **{"window": 9, **overrides})


def engine_with(speculation: SpeculationConfig | None = None, **config: Any) -> RolloutEngine:
    return tiny_engine(model=MODEL, drafter=drafter(), speculation=speculation or learned(), **config)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True, **more})


def same(ours: list[RequestOutput], plain: list[RequestOutput]) -> None:
    assert tokens(ours) == tokens(plain)
    for a, b in zip(ours, plain):
        for one, other in zip(a.outputs, b.outputs):
            assert one.sampled_logprobs == pytest.approx(other.sampled_logprobs, abs=1e-5)
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert len(one.logprobs or []) == len(other.logprobs or [])


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_equal_under_all_parameters(sampling: str, where: str) -> None:
    plain = tiny_engine(model=MODEL).generate(PROMPTS, params(**SAMPLING[sampling]))
    with emulation() if where == "device" else nullcontext():
        engine = engine_with(num_pages=60, max_num_batched_tokens=13)
        outputs = engine.generate(PROMPTS, params(**SAMPLING[sampling]))
        same(outputs, plain)
        assert engine.stats()["accepted_tokens"] > 4
        engine.check_integrity()


@pytest.mark.parametrize("speculation", [
    {"shared_noise": False}, {"ranking": "q"}, {"merge_model_free": True}, {"min_chance": 0.2},
    {"profile": Profile(7, 1, 8)}, {"profile": Profile(1, 5, 6)}, {"profile": Profile(3, 60, 128)},
    {"profile": Profile(12, 20, 40)}, {"profile": Profile(2, 2, 1)}, {"profile": Profile(0, 2, 4)}, {"audit": 1.0},
])
def test_equal_with_every_kind_of_tree(speculation: dict[str, Any]) -> None:
    plain = tiny_engine(model=MODEL).generate(PROMPTS, params())
    engine = engine_with(learned(**speculation))
    same(engine.generate(PROMPTS, params()), plain)
    stats = engine.stats()
    drafts = engine.config.speculation.profile.verify > 1 and engine.config.speculation.profile.depth > 0
    assert (stats["drafted_tokens"] > 0) == drafts
    assert stats["audit"]["checked"] == (5 if "audit" in speculation else 0) and not stats["audit"]["differing"]


def test_cut_and_resumed_with_new_weights_in_between() -> None:
    """The cut is by tokens, so both engines stand at the same place when the weights change."""
    new = shared_hf("llama", 7, **MODEL).state_dict()
    results = []
    for engine in (engine_with(), tiny_engine(model=MODEL)):
        cut = engine.generate(PROMPTS, params(), token_quota=9)
        engine.update_weights(new)
        results.append(engine.resume(cut))
        engine.check_integrity()
    same(*results)
    spans = [span for o in results[0] for span in o.outputs[0].drafter_versions]
    assert spans and all(0 <= s.start < s.end <= 24 and s.version == "0" for s in spans)
    assert all(o.outputs[0].drafter_versions == [] for o in results[1])


def test_an_aborted_request_leaves_its_lane_and_no_trace_in_the_others() -> None:
    plain = tiny_engine(model=MODEL).generate(PROMPTS[1:], params())
    engine = engine_with()
    ids = [engine.add_request(p, params()) for p in PROMPTS]
    for _ in range(4):
        engine.step()
    assert engine.stats()["drafter"]["lanes"] == 5
    engine.abort(ids[0])
    assert engine.stats()["drafter"]["lanes"] == 4
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
    same([done[i] for i in ids[1:]], plain)
    assert engine.stats()["drafter"]["lanes"] == 0


def test_a_failing_drafter_fails_one_step_and_the_next_is_right() -> None:
    plain = tiny_engine(model=MODEL).generate(PROMPTS, params())
    engine = engine_with()
    for prompt in PROMPTS:
        engine.add_request(prompt, params())
    for _ in range(3):
        engine.step()
    forward, engine._core.drafter._pass.level = engine._core.drafter._pass.level, None
    with pytest.raises(TypeError):
        engine.step()
    engine._core.drafter._pass.level = forward
    done = []
    while engine.has_unfinished():
        done += engine.step()
    same(sorted(done, key=lambda o: PROMPTS.index(o.prompt_token_ids)), plain)
    engine.check_integrity()


def test_up_to_the_context_end() -> None:
    for length in (40, 43):
        plain = tiny_engine(model=MODEL, max_model_len=length).generate(PROMPTS, params(max_tokens=None))
        engine = engine_with(max_model_len=length)
        same(engine.generate(PROMPTS, params(max_tokens=None)), plain)


def test_a_vocabulary_larger_than_the_tokenizers_is_never_drafted(letters: Any) -> None:
    """E01: padding ids of the target are barred from drafts as from output."""
    model = {**MODEL, "vocab_size": 72}
    own = random_drafter(tiny_target(**model), window=9)
    with torch.no_grad():
        own.initialise(torch.Generator().manual_seed(1))
    plain = tiny_engine(model=model, tokenizer=letters).generate(PROMPTS, params())
    engine = tiny_engine(model=model, tokenizer=letters, drafter=own, speculation=learned(profile=Profile(3, 60, 100)))
    seen: set[int] = set()
    propose = engine._core.drafter.propose
    engine._core.drafter.propose = lambda contexts: [
        tree for tree in propose(contexts) if not seen.update(tree.tokens)
    ]
    same(engine.generate(PROMPTS, params()), plain)
    assert len(seen) > 50 and max(seen) < 64


def test_bf16_runs_and_its_drafts_are_sound() -> None:
    config = EngineConfig(dtype="bfloat16", page_size=4, max_num_seqs=8, speculation=learned())
    engine = RolloutEngine(shared_hf("llama", 0, **MODEL), config, drafter=drafter())
    assert engine._core.drafter.model.dtype == torch.bfloat16
    outputs = engine.generate(PROMPTS, params())
    assert all(len(o.outputs[0].token_ids) == 24 for o in outputs) and engine.stats()["accepted_tokens"] > 10


# ---------------------------------------------------------------- merged with the model-free drafter


def test_merged_proposals_take_more_than_either_where_text_repeats() -> None:
    """The random drafter knows nothing of rollouts, the model-free one all of them."""
    prompts, p = [[5, 9, 2], [7] * 9], params(temperature=0.0, max_tokens=40)
    lengths = {}
    for name, spec, model in (
        ("learned", learned(), drafter()), ("merged", learned(merge_model_free=True), drafter()),
        ("free", SpeculationConfig(profile=learned().profile, min_chance=0.0), None),
    ):
        engine = tiny_engine(model=MODEL, drafter=model, speculation=spec)
        first = engine.generate(prompts, p)
        before = engine.stats()
        assert tokens(engine.generate(prompts, p)) == tokens(first)
        after = engine.stats()
        lengths[name] = (after["emitted_tokens"] - before["emitted_tokens"]) / (
            after["decode_passes"] - before["decode_passes"]
        )
    assert lengths["merged"] > 1.5 * lengths["learned"] and lengths["merged"] > 0.8 * lengths["free"]


# ---------------------------------------------------------------- the policy and the alarm


def test_the_threshold_switches_after_a_while_and_either_way() -> None:
    policy = Elastic(4)
    loads = [8] * 3 + [4, 5] * 6 + [4] * HOLD + [5, 3] * 6 + [5] * HOLD + [9]
    on = [policy.step(load) for load in loads]
    first_on = 3 + 12 + HOLD - 1
    first_off = 3 + 12 + HOLD + 12 + HOLD - 1
    assert on == [first_on <= i < first_off for i in range(len(loads))]
    assert policy.switches == 2
    assert Elastic(4).step(3) and not Elastic(4).step(5) and Elastic(None).step(10**6)


def test_the_alarm_rings_once_for_a_drafter_that_is_never_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_module, "ALARM_PASSES", 64)
    chain = learned(profile=Profile(1, 1, 2))
    target, copy = bigram()
    right = RolloutEngine(target, EngineConfig(speculation=chain), drafter=copy)
    wrong = drafter(draft_vocab_size=2)
    wrong.set_vocabulary(torch.tensor([62, 63]))
    engine = tiny_engine(model=MODEL, drafter=wrong, speculation=chain)
    with caplog.at_level(logging.WARNING, "tlt_engine"):
        right.generate(PROMPTS, params(max_tokens=80))
        assert right.stats()["accepted_tokens"] > 128
        assert right.stats()["drafter"]["alarms"] == 0 and not caplog.records
        engine.generate(PROMPTS, params(max_tokens=60))
        barred = params(allowed_token_ids=list(range(60)))
        assert engine.generate(PROMPTS, barred)[0].outputs[0].spec.drafted == 0, "barred ids are not proposed"
        assert 2 <= engine.stats()["drafter"]["alarms"] <= 5 * 59 // 64  # a block may have three lucky drafts
        assert sum("accept length fell" in r.message for r in caplog.records) == 1
        engine.update_drafter(wrong)
        engine.generate(PROMPTS, params(max_tokens=60))
    assert sum("accept length fell" in r.message for r in caplog.records) == 2


def test_memory_is_reported() -> None:
    engine = engine_with()
    lanes = engine._core.drafter._lanes
    # 16 samples; a ring of 9 positions of 3 states of 32 floats; slots for the window and a tree of 9 nodes, 2 KV
    # heads of 8.
    assert lanes.ring.nbytes == 16 * 9 * 3 * 32 * 4
    assert lanes.kv.bytes == 2 * (16 * 20 + 4) * 2 * 8 * 4  # and a page of 4 that is nobody's
    memory = engine.stats()["memory"]
    assert memory["drafter"] > lanes.bytes == engine.stats()["drafter"]["lane_bytes"]
    assert tiny_engine(model=MODEL, speculation=OFF).stats()["drafter"] is None
