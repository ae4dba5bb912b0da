"""Async streaming: what comes is the plain output in pieces; early leavers, errors and pauses harm nobody."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.engine.engines import plain_outputs, shared_hf, tiny_engine
from tests.rl.common import tokenizer
from tlt_engine import EngineConfig, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.streaming import AsyncRolloutEngine

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6]
PARAMS = SamplingParams(max_tokens=24, seed=5, n=2)


def run(scenario, engine=None, **config):
    engine = engine or tiny_engine(**config)

    async def main():
        async with AsyncRolloutEngine(engine) as rollouts:
            return await asyncio.wait_for(scenario(rollouts), 60)

    result = asyncio.run(main())
    engine.check_integrity()
    assert not engine.has_unfinished()
    return result


async def collect(rollouts, prompt, params=PARAMS, **more):
    return [output async for output in rollouts.generate(prompt, params, **more)]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
@pytest.mark.parametrize("speculation", ["off", "model_free"])
def test_pieces_make_up_the_plain_output(kind, speculation):
    async def scenario(rollouts):
        return await asyncio.gather(*(collect(rollouts, p, stream=kind) for p in PROMPTS))

    streams = run(scenario, speculation=SpeculationConfig(method=speculation))
    for pieces, expected in zip(streams, plain_outputs(PROMPTS, PARAMS)):
        assert pieces[-1].finished and all(not p.finished for p in pieces[:-1])
        assert len(pieces) == 1 if kind == "final" else len(pieces) > 5
        for i in range(2):
            ids = [p.outputs[i].token_ids for p in pieces]
            lps = [p.outputs[i].sampled_logprobs for p in pieces]
            assert [len(a) for a in ids] == [len(b) for b in lps]
            if kind == "delta":
                assert [t for part in ids for t in part] == expected[i]
                spans = [s for p in pieces for s in p.outputs[i].weight_versions]
                assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])] and spans[-1].end == 24
            else:
                assert ids[-1] == expected[i]
                assert all(ids[-1][: len(a)] == a for a in ids), "earlier pieces do not change afterwards"


def text_engine() -> RolloutEngine:
    config = EngineConfig(page_size=4, mask_padding_ids=True, speculation=SpeculationConfig(method="off"))
    return RolloutEngine(shared_hf(), config, tokenizer=tokenizer())


@pytest.mark.parametrize("stop", [None, "3 w", "w1 "])
def test_text_comes_in_pieces_and_never_has_to_be_taken_back(stop):
    params = SamplingParams(max_tokens=40, seed=3, stop=stop)
    expected = text_engine().generate([PROMPTS[0]], params)[0].outputs[0]

    async def scenario(rollouts):
        return await collect(rollouts, PROMPTS[0], params, stream="delta")

    pieces = run(scenario, text_engine())
    text = "".join(p.outputs[0].text for p in pieces)
    assert text.lstrip() == expected.text.lstrip()  # a whole decode of this tokenizer drops the space in front
    assert pieces[-1].outputs[0].finish_reason == expected.finish_reason
    if stop is None:
        assert sum(bool(p.outputs[0].text) for p in pieces) > 5


def test_leaving_early_aborts_and_harms_nobody():
    async def leave(rollouts):
        stream = rollouts.generate(PROMPTS[0], SamplingParams(max_tokens=200, seed=1))
        async for output in stream:
            if len(output.outputs[0].token_ids) >= 3:
                break
        await stream.aclose()

    async def scenario(rollouts):
        return (await asyncio.gather(leave(rollouts), collect(rollouts, PROMPTS[1])))[1]

    pieces = run(scenario)
    assert [o.token_ids for o in pieces[-1].outputs] == plain_outputs(PROMPTS, PARAMS)[1]


def test_a_cancelled_task_aborts():
    async def scenario(rollouts):
        task = asyncio.create_task(collect(rollouts, PROMPTS[0], SamplingParams(max_tokens=200)))
        while not rollouts.engine.steps:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)


def test_abort_by_id_ends_the_stream():
    async def scenario(rollouts):
        pieces = []
        async for output in rollouts.generate(PROMPTS[0], SamplingParams(max_tokens=200), request_id="x"):
            pieces.append(output)
            if len(pieces) == 2:
                await rollouts.abort("x")
        return pieces

    pieces = run(scenario)
    assert pieces[-1].outputs[0].finish_reason == "abort" and 0 < len(pieces[-1].outputs[0].token_ids) < 200


def test_bad_input_is_raised_to_its_own_caller():
    async def scenario(rollouts):
        with pytest.raises(ValueError, match="prompt"):
            await collect(rollouts, [])
        with pytest.raises(ValueError, match="stream"):
            await collect(rollouts, PROMPTS[0], stream="words")
        return await collect(rollouts, PROMPTS[0])

    assert run(scenario)[-1].finished


def test_an_error_of_a_step_reaches_all_and_the_engine_goes_on():
    engine = tiny_engine()

    async def scenario(rollouts):
        launch = engine._core.runner.launch

        def broken(*args):
            engine._core.runner.launch = launch
            raise RuntimeError("device lost")

        engine._core.runner.launch = broken
        results = await asyncio.gather(*(collect(rollouts, p) for p in PROMPTS[:1]), return_exceptions=True)
        assert any(isinstance(r, RuntimeError) and "device lost" in str(r) for r in results)
        return await collect(rollouts, PROMPTS[1])

    pieces = run(scenario, engine)
    assert [o.token_ids for o in pieces[-1].outputs] == plain_outputs(PROMPTS, PARAMS)[1]


def test_streams_wait_while_paused_and_go_on_after_an_update():
    engine = tiny_engine()

    async def scenario(rollouts):
        task = asyncio.create_task(collect(rollouts, PROMPTS[0], SamplingParams(max_tokens=150, seed=2)))
        while not engine.steps:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.pause_generation, "keep")
        steps = engine.steps
        await asyncio.sleep(0.1)
        assert engine.steps == steps and not task.done()
        await asyncio.to_thread(engine.update_weights, shared_hf(seed=9), weight_version="new")
        engine.resume_generation()
        return await task

    pieces = run(scenario, engine)
    assert [s.version for s in pieces[-1].outputs[0].weight_versions] == ["0", "new"]


def test_a_closed_one_refuses():
    async def scenario():
        rollouts = AsyncRolloutEngine(tiny_engine())
        rollouts.close()
        with pytest.raises(RuntimeError, match="closed"):
            await collect(rollouts, PROMPTS[0])

    asyncio.run(scenario())


def test_after_an_error_of_a_step_nothing_stays_in_flight():
    engine = tiny_engine()

    async def scenario(rollouts):
        def broken(*args):
            raise RuntimeError("device lost")

        engine._core.runner.launch, launch = broken, engine._core.runner.launch
        with pytest.raises(RuntimeError, match="device lost"):
            await collect(rollouts, PROMPTS[0])
        engine._core.runner.launch = launch
        for _ in range(400):
            if not engine.has_unfinished():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the failed request holds pages, and nobody steps or waits for it")

    run(scenario, engine)


def test_a_call_that_overlaps_the_closing_is_refused_and_does_not_hang():
    rollouts = AsyncRolloutEngine(tiny_engine())
    errors: list[BaseException] = []

    def call() -> None:
        try:
            asyncio.run(asyncio.wait_for(collect(rollouts, PROMPTS[0]), 10))
        except BaseException as error:
            errors.append(error)

    with rollouts._wake:  # the call stands at the door while it is closed
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.2)
        rollouts._closed = True
        rollouts._wake.notify_all()
    thread.join(20)
    rollouts.close()
    assert len(errors) == 1 and isinstance(errors[0], RuntimeError) and "closed" in str(errors[0])
    assert not rollouts.engine.has_unfinished()


def test_a_busy_engine_does_not_stop_the_event_loop():
    """While another thread holds the engine (an update that waits for its source), callers' loops go on: that source
    may well be fed by them."""
    engine = tiny_engine()

    async def scenario(rollouts):
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with engine._lock:
                held.set()
                release.wait(20)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(20)
        task = asyncio.create_task(collect(rollouts, PROMPTS[0]))
        leaver = asyncio.create_task(collect(rollouts, PROMPTS[1]))
        began = time.monotonic()
        await asyncio.sleep(0.05)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        loop_was_free = time.monotonic() - began < 5
        release.set()
        assert loop_was_free
        return await task

    pieces = run(scenario, engine)
    assert [o.token_ids for o in pieces[-1].outputs] == plain_outputs(PROMPTS, PARAMS)[0]


def test_an_id_in_flight_is_refused_and_the_other_stream_goes_on():
    async def scenario(rollouts):
        first = asyncio.create_task(collect(rollouts, PROMPTS[0], request_id="x"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="not in flight"):
            await collect(rollouts, PROMPTS[1], request_id="x")
        return await first

    assert [o.token_ids for o in run(scenario)[-1].outputs] == plain_outputs(PROMPTS, PARAMS)[0]
