"""The drafter in the loop: it learns between phases, gives way at once, and never changes a token."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.engine.engines import shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, EngineHalted, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import load_model
from tlt_engine.rl.adaptive import AdaptiveConfig, AdaptiveDrafter
from tlt_engine.training.gate import GateConfig
from tlt_engine.training.loss import LossConfig
from tlt_engine.training.trainer import TrainerConfig

TARGET = {"num_hidden_layers": 3}
PROMPTS = [[i % 50 + 1, i % 7 + 3, 5] for i in range(12)]
TRAINER = TrainerConfig(lr=1e-2, clip=10.0, micro_rows=128, warmup_steps=5, loss=LossConfig(steps=2))
LEARNED = SpeculationConfig(method="learned", profile=Profile(depth=3, top_k=2, verify=6), min_chance=0.0)


def params(step: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, seed=step * 100 + i) for i in range(len(PROMPTS))]


def make(config: AdaptiveConfig | None = None) -> tuple[RolloutEngine, AdaptiveDrafter]:
    target = load_model(shared_hf(**TARGET))
    drafter = EagleModel(EagleConfig.for_target(target.config, window=32))
    drafter.initialise(torch.Generator().manual_seed(0))
    engine = RolloutEngine(target, EngineConfig(page_size=4, max_num_seqs=16, speculation=LEARNED), drafter=drafter)
    return engine, AdaptiveDrafter(engine, config or AdaptiveConfig(trainer=TRAINER, slice_ms=5.0))


def test_it_learns_between_phases_and_changes_no_token():
    engine, adaptive = make()
    plain = tiny_engine(model=TARGET)
    lengths = []
    for step in range(4):
        before = engine.spec_counts
        outputs = engine.generate(PROMPTS, params(step))
        assert tokens(outputs) == tokens(plain.generate(PROMPTS, params(step)))
        after = engine.spec_counts
        lengths.append((after.emitted - before.emitted) / (after.passes - before.passes))
        report = adaptive.train_drafter(budget_s=0.5)
        assert report["trained"] and report["accept_length"] == pytest.approx(lengths[-1])
        while report["steps"] < 25 * (step + 1):  # as much on a slow machine as on a fast one
            report = adaptive.train_drafter(budget_s=0.5)
        assert report["version"] == f"0.{report['steps']}" == engine.stats()["drafter"]["version"]
    assert max(lengths[1:]) > lengths[0] + 0.1, lengths
    assert 0.5 < report["idle_share_used"] <= 1.01


def test_the_budget_holds_and_the_gate_is_asked():
    engine, adaptive = make(AdaptiveConfig(trainer=TRAINER, slice_ms=5.0, gate=GateConfig(mode="interval", every=2)))
    assert not adaptive.train_drafter(1.0, gated=False)["trained"], "nothing recorded yet"
    engine.generate(PROMPTS, params(0))
    assert not adaptive.train_drafter(5.0)["trained"], "the gate says: every second time"
    began = time.perf_counter()
    assert adaptive.train_drafter(0.3)["trained"]
    assert time.perf_counter() - began < 2.0


def test_a_request_that_arrives_stops_the_training_at_once():
    engine, adaptive = make()
    engine.generate(PROMPTS, params(0))
    expected = tokens(tiny_engine(model=TARGET).generate(PROMPTS, params(1)))
    got: list = []
    with adaptive.on_idle():
        while not adaptive.trainer.steps:
            time.sleep(0.001)
        thread = threading.Thread(target=lambda: got.extend(engine.generate(PROMPTS, params(1))))
        thread.start()
        thread.join(60)
        steps = adaptive.trainer.steps
        time.sleep(0.1)
        assert adaptive.trainer.steps == steps, "it does not go on while the block lasts"
    assert tokens(got) == expected
    assert engine.stats()["drafter"]["version"] == f"0.{adaptive.trainer.steps}"


def test_training_waits_while_requests_are_in_flight():
    engine, adaptive = make()
    engine.generate(PROMPTS, params(0))
    engine.add_request(PROMPTS[0], params(1)[0])
    engine.step()
    assert not adaptive.train_drafter(1.0)["trained"]
    while engine.has_unfinished():
        engine.step()
    assert adaptive.train_drafter(0.3)["trained"]


def test_updates_of_the_target_and_swaps_of_the_drafter_mid_rollout():
    engine, adaptive = make()
    engine.generate(PROMPTS, params(0))
    adaptive.train_drafter(0.3)
    plain = tiny_engine(model=TARGET)
    new = shared_hf(seed=9, **TARGET)
    for e in (engine, plain):
        for i, p in enumerate(PROMPTS[:4]):
            e.add_request(p, params(1)[i], request_id=str(i))
    # Without speculation: one token a step. With it: cut where the same number of tokens stand, by quota below.
    done = {}
    for _ in range(3):
        done |= {o.request_id: o for o in engine.step()}
    begun = {i: len(r.samples[0].output.token_ids) for i, r in engine._requests.items()}
    engine.update_drafter(adaptive.model, version="swapped")
    engine.update_weights(new, weight_version="new")
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
    for i, count in begun.items():
        out = done[i].outputs[0]
        assert [(s.version, s.start) for s in out.weight_versions] == [("0", 0), ("new", count)]
        assert len(out.token_ids) == len(out.sampled_logprobs) == 24
    assert adaptive.train_drafter(0.3)["version"].startswith("new.")
    engine.check_integrity()


def test_errors_of_the_training_reach_the_caller():
    engine, adaptive = make()
    engine.generate(PROMPTS, params(0))

    def broken(budget):
        raise RuntimeError("no memory")

    adaptive.trainer.step = broken
    with pytest.raises(RuntimeError, match="no memory"), adaptive.on_idle():
        time.sleep(0.05)
    assert tokens(engine.generate(PROMPTS, params(1))) == tokens(
        tiny_engine(model=TARGET).generate(PROMPTS, params(1)))


def test_it_needs_a_learned_drafter_and_lets_go_when_closed():
    with pytest.raises(ValueError, match="method='learned'"):
        AdaptiveDrafter(tiny_engine())
    engine, adaptive = make()
    with pytest.raises(ValueError, match="one callback at a time"):
        engine.before_work(lambda: None)
    adaptive.close()
    engine.generate(PROMPTS, params(0))
    assert adaptive.buffer.stats()["taken_rows"] == 0
    AdaptiveDrafter(engine).close()


def test_a_sleeping_engine_is_not_trained_on_and_the_trainers_memory_sleeps_too():
    engine, adaptive = make()
    engine.generate(PROMPTS, params(0))
    adaptive.train_drafter(0.2)
    steps = adaptive.trainer.steps
    states = [*adaptive.model.parameters(), *(m for k in adaptive.trainer._moments.values() for m in k.values())]
    before = [t.detach().clone() for t in states]
    engine.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in states)
    with pytest.raises(EngineHalted, match="wake_up"):
        adaptive.train_drafter(0.2)
    with pytest.raises(EngineHalted, match="wake_up"), adaptive.on_idle():
        pass
    engine.wake_up()
    assert all(torch.equal(t, b) for t, b in zip([*adaptive.model.parameters()], before))
    assert all(torch.equal(t, b) for t, b in zip(states, before))
    assert adaptive.train_drafter(0.3)["steps"] > steps
    assert tokens(engine.generate(PROMPTS, params(1))) == tokens(tiny_engine(model=TARGET).generate(PROMPTS, params(1)))


@pytest.mark.parametrize("while_decoding", [False, True])
def test_sleep_in_the_middle_of_idle_training_stops_it_without_an_error(while_decoding):
    engine, adaptive = make(AdaptiveConfig(trainer=TRAINER, slice_ms=5.0, while_decoding=while_decoding))
    engine.generate(PROMPTS, params(0))
    with adaptive.on_idle():
        while not adaptive._trainer.steps:
            time.sleep(0.001)
        engine.sleep()
        steps = adaptive._trainer.steps
        time.sleep(0.1)
        assert adaptive._trainer.steps == steps
    assert engine.stats()["drafter"]["version"] == "0", "asleep, it takes no weights"
    engine.wake_up()
    assert adaptive.train_drafter(0.3)["version"].startswith("0.")


def test_training_beside_decoding_takes_its_share_and_no_more():
    engine, adaptive = make(AdaptiveConfig(trainer=TRAINER, slice_ms=1.0, while_decoding=True, decoding_share=0.1))
    engine.generate(PROMPTS, params(0))
    engine.add_request(PROMPTS[0], params(1)[0])  # in flight all the while
    engine.step()
    began = time.perf_counter()
    report = adaptive.train_drafter(1.5)
    took = time.perf_counter() - began
    assert report["trained"] and took > 1.0
    micro = max(adaptive.trainer._times, default=0.0)
    assert adaptive._trained_s <= 0.1 * took + 2 * micro + 0.05, (adaptive._trained_s, took)
    while engine.has_unfinished():
        engine.step()


def test_shares_beyond_one_are_refused():
    with pytest.raises(ValueError, match="decoding_share"):
        AdaptiveConfig(decoding_share=1.5)


def test_built_and_used_in_inference_mode():
    with torch.inference_mode():
        engine, adaptive = make()
        engine.generate(PROMPTS, params(0))
        assert adaptive.train_drafter(0.2)["trained"]
    assert adaptive.train_drafter(0.2)["trained"]
