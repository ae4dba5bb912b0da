"""Sleep, waking and updates on a GPU: memory by the allocator's count, graphs captured anew, pinned sources."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.engine.engines import OFF, shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models import load_model
from tlt_engine.models.eagle import EagleConfig, EagleModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6]
PARAMS = SamplingParams(max_tokens=40, seed=5)
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}


def engine_with(method: str) -> RolloutEngine:
    config = EngineConfig(
        device="cuda", page_size=16, max_num_seqs=8, kv_cache_bytes=2**26,
        speculation=OFF if method == "off" else SpeculationConfig(method=method, min_chance=0.0),
    )
    if method != "learned":
        return RolloutEngine(shared_hf(**SIZES), config)
    target = load_model(shared_hf(**SIZES), device="cuda")
    drafter = EagleModel(EagleConfig.for_target(target.config, window=32), device=torch.device("cuda"))
    drafter.initialise(torch.Generator().manual_seed(0))
    return RolloutEngine(target, config, drafter=drafter)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("method", ["off", "model_free", "learned"])
def test_asleep_little_is_left_and_awake_the_tokens_are_the_same(method: str, level: int) -> None:
    engine = engine_with(method)
    expected, sums = tokens(engine.generate(PROMPTS, PARAMS)), engine.weight_checksums()
    memory = engine.stats()["memory"]
    awake = allocated()
    for _ in range(3):
        engine.sleep(level)
        drafter = memory["drafter"] if method == "learned" else 0
        assert awake - allocated() >= 0.95 * (memory["weights"] + memory["kv"] + drafter)
        if level == 2:
            engine.wake_up(["weights"])
            engine.update_weights(shared_hf(**SIZES))
        engine.wake_up()
        assert engine.weight_checksums() == sums
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    assert allocated() <= awake + 2**20


def test_requests_in_flight_survive_sleep_with_a_pass_ahead() -> None:
    engine = engine_with("off")
    expected = [out[0] for out in tokens(engine.generate(PROMPTS, PARAMS))]
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, PARAMS, request_id=str(i))
    done = {}
    for step in range(200):
        done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        if step in (5, 20):
            engine.sleep()
            engine.wake_up()
        if not engine.has_unfinished():
            break
    assert [done[str(i)] for i in range(3)] == expected


def test_a_source_may_fill_one_pinned_buffer_again_and_again() -> None:
    """A copy that is still under way when its source goes on would take the next tensor's values."""
    state = {n: t.detach() for n, t in shared_hf(seed=9, **SIZES).state_dict().items()}
    buffer = torch.empty(max(t.numel() for t in state.values()), pin_memory=True)

    def pieces():
        for name, value in state.items():
            view = buffer[: value.numel()].view(value.shape)
            yield name, view.copy_(value)

    engine = engine_with("off")
    engine.start_weight_update(list(state), [t.shape for t in state.values()])
    engine.update_weights(pieces())
    engine.finish_weight_update("new")
    assert engine.weight_checksums() == tiny_engine(model_seed=9, model=SIZES).weight_checksums()
