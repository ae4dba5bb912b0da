"""What sleeps, what comes back, and who is woken: partial wakes, failures half-way, drafters, waiting calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.engines import plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, EngineHalted, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine import sleep as sleep_module
from tlt_engine.engine.sleep import Storages
from tlt_engine.models import load_model
from tlt_engine.models.eagle import EagleConfig, EagleModel

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6]
PARAMS = SamplingParams(max_tokens=24, seed=5)
LONG = SamplingParams(max_tokens=200, seed=5)
NORM = "model.norm.weight"


def nbytes(*tensors: torch.Tensor) -> int:
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def weight_bytes(engine: RolloutEngine) -> int:
    return sum(t.untyped_storage().nbytes() for _, t in engine.model.named_weights())


def kv_bytes(engine: RolloutEngine) -> int:
    return engine._core.runner.kv.data.untyped_storage().nbytes()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs it beside; the result or the error comes in the list."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---------------------------------------------------------------- partial sleep


@pytest.mark.parametrize("awake", ["weights", "kv_cache"])
def test_sleeping_again_after_a_partial_wake_gives_all_of_it_back(awake):
    engine = tiny_engine()
    expected, sums = tokens(engine.generate(PROMPTS, PARAMS)), engine.weight_checksums()
    engine.sleep()
    engine.wake_up([awake])
    engine.sleep()
    assert weight_bytes(engine) == kv_bytes(engine) == 0
    engine.wake_up()
    assert engine.weight_checksums() == sums
    again = SamplingParams(max_tokens=24, seed=6)
    assert tokens(engine.generate(PROMPTS, again)) == plain_outputs(PROMPTS, again)
    assert expected == plain_outputs(PROMPTS, PARAMS)


def test_a_deeper_sleep_discards_what_a_lighter_one_kept():
    engine = tiny_engine()
    engine.sleep(1)
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(EngineHalted, match=r"sleep\(2\) discarded"):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights(shared_hf())
    assert tokens(engine.generate(PROMPTS, PARAMS)) == plain_outputs(PROMPTS, PARAMS)


@pytest.mark.parametrize("begun", [False, True])
def test_weights_discarded_under_a_stream_are_not_finished_by_the_rest_of_it(begun):
    """Sleep level 2 throws away the pieces that have come; the announced rest would make half a policy look whole."""
    engine, state = tiny_engine(), dict(shared_hf(seed=9).state_dict())
    if begun:
        engine.start_weight_update(list(state), [t.shape for t in state.values()])
        engine.update_weights({n: t for n, t in state.items() if n != NORM})
    else:
        engine.start_weight_update([NORM], [state[NORM].shape], strict=False)
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(ValueError, match=r"missing|start one"):
        engine.update_weights({NORM: state[NORM]})
        engine.finish_weight_update()
    with pytest.raises(EngineHalted, match="invalid"):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights(state)
    assert tokens(engine.generate(PROMPTS, PARAMS)) == plain_outputs(PROMPTS, PARAMS, model_seed=9)


@pytest.mark.parametrize("chunk", [1000, 4096, 1 << 28])
def test_the_hosts_copy_is_one_row_of_chunks(monkeypatch, chunk):
    """Storages of odd sizes, across the chunks' borders and several chunks long; one that is empty."""
    monkeypatch.setattr(sleep_module, "CHUNK", chunk)
    sizes = (1, 511, 512, 513, 999, 1000, 1001, 5000, 0)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    expected, storages = [t.clone() for t in tensors], Storages([*tensors, tensors[3][5:]])
    for _ in range(2):
        storages.offload(keep=True)
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        storages.restore()
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected))
    if chunk == 1000:
        monkeypatch.setattr(sleep_module, "ALIGNED", 1)  # what overlaps must show
        monkeypatch.setattr(Storages, "_places", lambda self: iter([0] * len(sizes)))
        storages.offload(keep=True)
        storages.restore()
        assert not all(torch.equal(a, b) for a, b in zip(tensors, expected))


# ---------------------------------------------------------------- failures half-way


def test_no_host_memory_while_falling_asleep_loses_nothing(monkeypatch):
    engine = tiny_engine()
    taken = []

    def full(size, pinned):
        if len(taken) == 5:
            raise RuntimeError("cudaHostAlloc: out of memory")
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(sleep_module, "CHUNK", 4096)
    monkeypatch.setattr(sleep_module, "_host_memory", full)
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, PARAMS, request_id=str(i))
    for _ in range(4):
        engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.sleep()
    assert not engine.is_sleeping
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert [done[str(i)] for i in range(3)] == [out[0] for out in plain_outputs(PROMPTS, PARAMS)]


def test_no_device_memory_while_waking_gives_back_what_was_taken_and_can_be_tried_again(monkeypatch):
    engine = tiny_engine()
    sums = engine.weight_checksums()
    engine.sleep()
    taken, allocate = [], Storages._allocate

    def full(self, key):
        if len(taken) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append(key)
        allocate(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Storages, "_allocate", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.wake_up()
    assert len(taken) == 7 and weight_bytes(engine) == 0, "half of the weights would be in the trainer's way"
    with pytest.raises(EngineHalted, match="weights and kv_cache"):
        engine.step()
    engine.wake_up()
    assert engine.weight_checksums() == sums
    assert tokens(engine.generate(PROMPTS, PARAMS)) == plain_outputs(PROMPTS, PARAMS)


# ---------------------------------------------------------------- drafters


def learned_engine(seed: int = 0) -> RolloutEngine:
    target = load_model(shared_hf(num_hidden_layers=3))
    drafter = EagleModel(EagleConfig.for_target(target.config, window=32))
    drafter.initialise(torch.Generator().manual_seed(seed))
    spec = SpeculationConfig(method="learned", min_chance=0.0)
    return RolloutEngine(target, EngineConfig(page_size=4, max_num_seqs=8, speculation=spec), drafter=drafter)


def drafter_tensors(engine: RolloutEngine) -> list[torch.Tensor]:
    drafter = engine.drafter
    return [*drafter.model.parameters(), *drafter.model.buffers(), drafter._lanes.kv.data, drafter._lanes.ring]


@pytest.mark.parametrize("level", [1, 2])
def test_a_learned_drafter_sleeps_too_and_drafts_as_before(level):
    def roll(engine, seed):
        before = engine.spec_counts
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=24, seed=seed))
        after = engine.spec_counts
        return tokens(outputs), after.accepted - before.accepted, after.passes - before.passes

    engine, twin = learned_engine(), learned_engine()
    assert roll(engine, 1) == roll(twin, 1)
    held = nbytes(*drafter_tensors(engine))
    engine.sleep(level)
    assert nbytes(*drafter_tensors(engine)) == 0
    assert engine.stats()["memory"]["drafter"] < twin.stats()["memory"]["drafter"]
    with pytest.raises(EngineHalted, match="wake_up"):
        engine.update_drafter(EagleModel(engine.drafter.model.config))
    engine.wake_up(["weights"])
    if level == 2:
        engine.update_weights(shared_hf(num_hidden_layers=3))
    engine.wake_up()
    assert nbytes(*drafter_tensors(engine)) == held
    twin.reset_prefix_cache()  # a cached prompt has no hidden states to draft from
    assert roll(engine, 2) == roll(twin, 2)
    engine.check_integrity()


def test_requests_in_flight_are_drafted_for_again_after_sleep():
    engine, expected = learned_engine(), tiny_engine(model={"num_hidden_layers": 3}).generate(PROMPTS, PARAMS)
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, PARAMS, request_id=str(i))
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.wake_up()
    drafted, done = engine.spec_counts.drafted, {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert [[done[str(i)]] for i in range(3)] == tokens(expected)
    assert engine.spec_counts.drafted > drafted


# ---------------------------------------------------------------- calls of other threads


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_a_waiting_call_ends_when_its_requests_are_aborted(how):
    """Asleep or paused for good, an engine must still let go of who waits for it."""
    engine = tiny_engine()
    thread, result = in_thread(lambda: engine.generate(PROMPTS, LONG))
    wait_for(lambda: engine.stats()["emitted_tokens"])
    engine.sleep(2)
    thread.join(0.1)
    assert thread.is_alive()
    if how == "abort":
        engine.abort(list(engine._requests))
    else:
        engine.pause_generation("abort")
    thread.join(10)
    assert not thread.is_alive()
    assert [o.outputs[0].finish_reason for o in result[0]] == ["abort"] * 3


def test_a_waiting_call_goes_on_when_another_engine_makes_the_shared_weights_whole():
    loaded = load_model(shared_hf())
    config = EngineConfig(page_size=4, speculation=SpeculationConfig(method="off"))
    one, two = RolloutEngine(loaded, config), RolloutEngine(loaded, config)
    state = dict(shared_hf(seed=9).state_dict())
    two.start_weight_update(list(state), [t.shape for t in state.values()])
    thread, result = in_thread(lambda: one.generate(PROMPTS, LONG))
    wait_for(lambda: one.stats()["emitted_tokens"])
    with one._lock:  # between its steps
        two.update_weights(state)
    thread.join(0.1)
    assert thread.is_alive()
    two.finish_weight_update("new")
    thread.join(20)
    assert not thread.is_alive() and len(result[0]) == 3


def test_a_drain_lets_others_in_between_its_steps():
    """pause_generation("wait") of a long request: abort and new requests are served at the next border of a step, and
    what comes meanwhile stays for later."""
    engine = tiny_engine()
    engine.add_request(PROMPTS[0], LONG, request_id="long")
    engine.add_request(PROMPTS[1], LONG, request_id="longer")
    thread, _ = in_thread(lambda: engine.pause_generation("wait"))
    wait_for(lambda: engine.steps > 3)
    assert engine.add_request(PROMPTS[2], LONG, request_id="late") == "late"
    assert thread.is_alive()
    with pytest.raises(EngineHalted, match="paused"):
        engine.generate(PROMPTS, PARAMS)
    assert engine.abort("long")[0].outputs[0].finish_reason == "abort"
    assert thread.is_alive() or engine._paused
    thread.join(20)
    assert not thread.is_alive() and engine._paused and engine.has_unfinished()
    engine.resume_generation()
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert set(done) == {"longer", "late"} and len(done["late"]) == 200


def test_a_progress_bar_that_fails_leaves_no_request_behind(monkeypatch):
    from tlt_engine.engine import engine as module

    def broken(requests):
        raise ImportError("No module named tqdm")

    monkeypatch.setattr(module, "_progress_bar", broken)
    engine = tiny_engine()
    with pytest.raises(ImportError):
        engine.generate(PROMPTS, PARAMS, use_tqdm=True)
    assert not engine.has_unfinished()


def test_an_engine_built_in_inference_mode_can_be_updated_outside():
    with torch.inference_mode():
        engine = tiny_engine()
        engine.generate(PROMPTS, PARAMS)
        loaded = load_model(shared_hf())
        assert torch.is_inference_mode_enabled()
    engine.update_weights(shared_hf(seed=9))
    loaded.model.load_weights(shared_hf(seed=9))
    engine.sleep()
    engine.wake_up()
    assert tokens(engine.generate(PROMPTS, PARAMS)) == plain_outputs(PROMPTS, PARAMS, model_seed=9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_callers_modes_and_rng_stay_as_they_are(mode):
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_rng_state()
        engine = tiny_engine()
        engine.generate(PROMPTS, PARAMS)
        engine.update_weights(shared_hf(seed=9))
        engine.sleep()
        engine.wake_up()
        engine.score([1, 2], [3])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])


def test_calls_updates_pauses_sleeps_and_aborts_from_many_threads_never_lock_up():
    """Case K07, with everything else that may happen meanwhile. Under one policy (the updates send the same one) every
    finished call has its solo tokens, as far as its noise segment was never raised."""
    engine = tiny_engine(max_num_seqs=6)
    state = {n: t.clone() for n, t in shared_hf().state_dict().items()}
    expected = {s: plain_outputs(PROMPTS, SamplingParams(max_tokens=30, seed=s)) for s in range(20)}
    over, wrong, compared = threading.Event(), [], []

    def call(base: int) -> None:
        for i in range(5):
            params = SamplingParams(max_tokens=30, seed=base + i)
            while True:
                try:
                    outputs = engine.generate(PROMPTS, params)
                    break
                except EngineHalted:
                    time.sleep(0.002)
            for output, want in zip(outputs, expected[base + i]):
                sample = output.outputs[0]
                if sample.noise.segment == 0 and sample.finish_reason == "length":
                    compared.append(1)
                    wrong.extend([sample] if [sample.token_ids] != want else [])

    def disturb() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            try:
                (
                    lambda: engine.update_weights(state, in_flight="recompute"),
                    lambda: (engine.pause_generation("keep"), time.sleep(0.002), engine.resume_generation()),
                    lambda: (engine.sleep(1), time.sleep(0.002), engine.wake_up()),
                    lambda: engine.abort([next(iter(engine._requests), "")]),
                    lambda: (engine.pause_generation("wait"), engine.resume_generation()),
                    lambda: (engine.stats(), engine.next_logits([1, 2])),
                )[turn % 6]()
            except (EngineHalted, RuntimeError):  # another disturber was quicker
                engine.wake_up()
                engine.resume_generation()
            time.sleep(0.01)

    callers = [in_thread(lambda base=base: call(base)) for base in (0, 5, 10, 15)]
    others = [in_thread(disturb) for _ in range(2)]
    deadline = time.monotonic() + 60
    for thread, _ in callers:
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.05)
    over.set()
    for thread, _ in others:
        thread.join(20)
    assert not any(thread.is_alive() for thread, _ in (*callers, *others)), "it has locked up"
    assert not [r for _, r in (*callers, *others) if isinstance(r[0], BaseException)]
    assert compared and not wrong
    engine.check_integrity()
