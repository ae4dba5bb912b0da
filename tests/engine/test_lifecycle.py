"""Sleep and wake, pause and resume (DESIGN section 9)."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.engine.engines import plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, EngineHalted, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models import load_model

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6]
PARAMS = SamplingParams(max_tokens=24, seed=5)
LONG = SamplingParams(max_tokens=200, seed=5)


def in_flight():
    """An engine five steps into PROMPTS."""
    engine = tiny_engine()
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, PARAMS, request_id=str(i))
    for _ in range(5):
        engine.step()
    return engine


def drain(engine):
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
    return [done[i].outputs[0].token_ids for i in sorted(done)]


def held_bytes(engine) -> int:
    tensors = (*dict(engine.model.named_weights()).values(), engine.model.weights.head, engine._core.runner.kv.data)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("speculation", ["off", "model_free"])
def test_sleep_gives_memory_back_and_waking_gives_the_same_tokens(speculation):
    engine = tiny_engine(speculation=SpeculationConfig(method=speculation), model={"tie_word_embeddings": True})
    expected = tokens(engine.generate(PROMPTS, PARAMS))
    before, sums = held_bytes(engine), engine.weight_checksums()
    for _ in range(3):
        engine.sleep()
        assert engine.is_sleeping and held_bytes(engine) == 0
        for call in (lambda: engine.generate(PROMPTS, PARAMS), lambda: engine.score([1], [2]), engine.step,
                     lambda: engine.next_logits([1]), engine.weight_checksums,
                     lambda: engine.update_weights(shared_hf(seed=9))):
            with pytest.raises(EngineHalted, match="wake_up"):
                call()
        engine.wake_up()
        assert not engine.is_sleeping and held_bytes(engine) == before
        assert engine.weight_checksums() == sums
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    engine.check_integrity()


def test_requests_in_flight_survive_sleep():
    expected = [out[0] for out in plain_outputs(PROMPTS, PARAMS)]
    engine = in_flight()
    engine.sleep()
    engine.wake_up(["weights"])
    with pytest.raises(EngineHalted, match="kv_cache"):
        engine.step()
    engine.wake_up(["kv_cache"])
    assert drain(engine) == expected


def test_discarded_weights_must_come_back_whole():
    engine = tiny_engine()
    expected = tokens(engine.generate(PROMPTS, PARAMS))
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(EngineHalted, match=r"sleep\(2\) discarded"):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights({"model.norm.weight": torch.ones(32)}, strict=False)
    with pytest.raises(EngineHalted):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights(shared_hf())
    assert tokens(engine.generate(PROMPTS, PARAMS)) == expected


def test_kv_is_zero_after_waking():
    """A kernel multiplies masked values by 0: garbage that is NaN would come through."""
    engine = tiny_engine()
    engine.generate(PROMPTS, PARAMS)
    engine._core.runner.kv.data.fill_(float("nan"))
    engine.sleep()
    engine.wake_up()
    assert not engine._core.runner.kv.data.isnan().any()


def test_bad_arguments_are_refused():
    engine = tiny_engine()
    for call in (lambda: engine.sleep(3), lambda: engine.wake_up(["wieghts"]), lambda: engine.pause_generation("now"),
                 lambda: engine.update_weights(shared_hf(), in_flight="drop")):
        with pytest.raises(ValueError, match="expected"):
            call()
    assert not engine.is_sleeping and not engine._paused


def test_a_model_that_others_use_does_not_sleep():
    loaded = load_model(shared_hf())
    config = EngineConfig(speculation=SpeculationConfig(method="off"), page_size=4)
    one, two = RolloutEngine(loaded, config), RolloutEngine(loaded, config)
    with pytest.raises(ValueError, match="2 engines on it"):
        one.sleep()
    assert tokens(two.generate(PROMPTS, PARAMS)) == plain_outputs(PROMPTS, PARAMS)


def test_pause_keep_and_resume():
    expected = [out[0] for out in plain_outputs(PROMPTS, PARAMS)]
    engine = in_flight()
    engine.pause_generation("keep")
    emitted = engine.stats()["emitted_tokens"]
    assert engine.step() == [] and engine.stats()["emitted_tokens"] == emitted
    with pytest.raises(EngineHalted, match="resume_generation"):
        engine.generate(PROMPTS, PARAMS)
    engine.resume_generation()
    assert drain(engine) == expected


def test_pause_abort_returns_what_there_is():
    engine = in_flight()
    engine.pause_generation("abort", clear_cache=True)
    done = {o.request_id: o for o in engine.step()}
    assert len(done) == 3 and {o.outputs[0].finish_reason for o in done.values()} == {"abort"}
    expected = plain_outputs(PROMPTS, PARAMS)
    for i in range(3):
        got = done[str(i)].outputs[0].token_ids
        assert got and got == expected[i][0][: len(got)]
    engine.resume_generation()
    engine.check_integrity()
    assert tokens(engine.generate(PROMPTS, PARAMS))


def test_pause_wait_runs_everything_to_its_end():
    engine = tiny_engine()
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, PARAMS, request_id=str(i))
    engine.pause_generation("wait")
    done = {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert [done[str(i)] for i in range(3)] == [out[0] for out in plain_outputs(PROMPTS, PARAMS)]


def test_a_call_of_another_thread_waits_while_paused():
    expected = plain_outputs(PROMPTS, LONG)
    engine = tiny_engine()
    done: list = []
    thread = threading.Thread(target=lambda: done.extend(engine.generate(PROMPTS, LONG)))
    thread.start()
    while not engine.stats()["emitted_tokens"]:
        pass
    engine.pause_generation("keep")
    steps = engine.stats()["steps"]
    time.sleep(0.05)
    assert engine.stats()["steps"] == steps and thread.is_alive() and not done
    engine.resume_generation()
    thread.join(60)
    assert not thread.is_alive() and tokens(done) == expected
