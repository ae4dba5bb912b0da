"""The whole engine on a GPU, on tiny models: the CPU engine's tokens, with and without speculation and graphs.

fp32 on both sides; a difference is excused only as engine/equality.py says, and counted. Row counts differ between a
padded graph and the CPU, so a few ties in the tens of thousands of tokens here are expected, not more.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.engines import CUSTOM, OFF, greedy, shared_hf, tiny_engine, tokens
from tlt_engine import RolloutEngine, SamplingParams
from tlt_engine.engine.equality import compare_runs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6, list(range(20, 45))]
PARAMS = SamplingParams(temperature=1.0, max_tokens=60, n=3, seed=7, stop_token_ids=[3])


def gpu_engine(drafter: Any = None, **config: Any) -> RolloutEngine:
    return tiny_engine(drafter=drafter, device="cuda", **config)


def same_tokens(plain: Any, other: Any, params: Any, judge: RolloutEngine, ties: int = 1) -> int:
    """Compared tokens; fails on an unexcused difference or more than `ties` excused ones."""
    result = compare_runs(judge, plain, other, params)
    assert result.equal and result.excused_ties <= ties, "\n".join(map(str, result.differences))
    assert result.max_logprob_error < 2e-4
    return result.tokens


@pytest.mark.parametrize("arch,model", [
    ("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 9}),
    ("llama", {"tie_word_embeddings": True}),
])
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_of_the_cpu_engine(arch: str, model: dict[str, Any], eager: bool) -> None:
    for params in (PARAMS, SamplingParams(temperature=0.0, max_tokens=60)):
        judge = tiny_engine(arch=arch, model=model)
        expected = judge.generate(PROMPTS, params)
        engine = gpu_engine(arch=arch, model=model, enforce_eager=eager)
        assert same_tokens(expected, engine.generate(PROMPTS, params), params, judge) > 100
        engine.check_integrity()
        graphs = engine.stats()["graphs"]
        if not eager:
            assert sum(b["hits"] for b in graphs["buckets"].values()) > 40 and set(graphs["eager_steps"]) == {"prefill"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=80, n=3, seed=7)
    judge = tiny_engine()
    expected = judge.generate(PROMPTS, params)
    known = {tuple(p): dict(enumerate(samples)) for p, samples in zip(PROMPTS, tokens(expected))}
    for drafter in (
        ReplayDrafter(known, depth=6), ReplayDrafter(known, error_rate=0.3, depth=5, shape="tree", width=3),
        AdversarialDrafter(64, eos_ids=(3,)),
    ):
        for eager in (False, True):
            engine = gpu_engine(drafter, enforce_eager=eager)
            same_tokens(expected, engine.generate(PROMPTS, params), params, judge)
            same_tokens(expected, engine.generate(PROMPTS, params, speculate=False), params, judge)
            engine.check_integrity()
        if isinstance(drafter, ReplayDrafter):
            assert drafter.mean_accepted > 1


def test_all_kinds_of_requests() -> None:
    kinds: list[dict[str, Any]] = [
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {4: 5.0, 5: float("-inf")}}, {"min_tokens": 20, "stop_token_ids": [1, 2, 3, 4, 5]},
        {"allowed_token_ids": [1, 2, 3, 40, 41]}, {"logprobs": 3}, {"logprobs": 0, "raw_logprobs": True},
        {"temperature": 0.0}, {"logits_processor": lambda ids, logits: logits.roll(len(ids))}, {"prompt_logprobs": 2},
    ]
    params = [SamplingParams(**{"seed": i, "max_tokens": 40, **kind}) for i, kind in enumerate(kinds)]
    prompts = [[i, i + 1, i + 2] for i in range(len(kinds))]
    judge = tiny_engine()
    expected = judge.generate(prompts, params)
    engine = gpu_engine()
    outputs = engine.generate(prompts, params)
    same_tokens(expected, outputs, params, judge)
    for a, b in zip(expected[5].outputs[0].logprobs, outputs[5].outputs[0].logprobs):
        assert list(a) == list(b)
    assert outputs[6].outputs[0].raw_logprobs == pytest.approx(expected[6].outputs[0].raw_logprobs, abs=2e-4)
    assert [list(e or ()) for e in outputs[9].prompt_logprobs] == [list(e or ()) for e in expected[9].prompt_logprobs]
    score = engine.score(prompts[0], outputs[0].outputs[0].token_ids, params[0])
    assert score == pytest.approx(outputs[0].outputs[0].sampled_logprobs, abs=2e-4)


def test_batches_that_shrink_from_nine_to_one() -> None:
    """G09."""
    prompts = [[i, i + 1] for i in range(9)]
    params = [SamplingParams(seed=i, max_tokens=8 + 6 * i) for i in range(9)]
    judge = tiny_engine()
    expected = judge.generate(prompts, params)
    engine = gpu_engine(max_num_seqs=8)  # graphs up to 8; then 9 at once, of which one waits
    same_tokens(expected, engine.generate(prompts, params), params, judge)
    engine = gpu_engine(max_num_seqs=16)
    same_tokens(expected, engine.generate(prompts, params), params, judge)
    assert set(engine.stats()["graphs"]["buckets"]) == {"1x1", "2x1", "4x1", "8x1", "16x1"}
    for i in range(9):
        part = gpu_engine()
        same_tokens(expected[: i + 1], part.generate(prompts[: i + 1], params[: i + 1]), params[: i + 1], judge)


def check_writes(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """G10: a pass changes pages of its own samples, and with its padding the last page, which is marked before each."""
    runner = engine._core.runner
    data, dummy = runner.kv.data, runner.kv.data.shape[2] - 1
    changes: list[tuple[set[int], set[int]]] = []

    def watch(name: str, pages_of: Any) -> None:
        honest = getattr(runner, name)

        def launch(first: Any, second: Any, *rest: Any) -> Any:
            data[:, :, dummy] = 77.0
            before = data.clone()
            flight = honest(first, second, *rest)
            torch.cuda.synchronize()
            changed = (data != before).any(-1).any(-1).any(-1).any(0).any(0).nonzero()[:, 0].tolist()
            if flight is not None:
                changes.append((set(changed), pages_of(first, second)))
            return flight

        monkeypatch.setattr(runner, name, launch)

    def held_by(sequences: Any) -> set[int]:
        return {page for seq in sequences for page in seq.pages}

    watch("launch", lambda batch, _: held_by(work.seq for work in (*batch.decodes, *batch.chunks)))
    watch("launch_ahead", lambda _, sequences: held_by(sequences))
    watch("launch_next", lambda flight, _: held_by(s.seq for s in flight.draw.samples))
    passes = engine.stats()["steps"]
    engine.generate([[i, i + 1, i + 2] for i in range(3)], [greedy(12 + 5 * i) for i in range(3)])
    assert len(changes) >= engine.stats()["steps"] - passes, "passes that nobody watched"
    assert sum(dummy in changed for changed, _ in changes) > 5
    for changed, held in changes:
        assert changed - {dummy} <= held and dummy not in held


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_padding_writes_to_the_dummy_page_alone(
    speculate: bool, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """broken: padding goes to a page that requests are given."""
    engine = gpu_engine(AdversarialDrafter(64) if speculate else None)
    if broken:
        engine._core.runner._dummy_page = 0
    engine.generate([list(range(i, i + 30)) for i in range(4)], greedy(20))
    if not broken:
        check_writes(engine, monkeypatch)
        return
    with pytest.raises(AssertionError):
        check_writes(engine, monkeypatch)


def test_chunks_preemption_and_prefix_hits() -> None:
    prompts = [list(range(i, i + 25)) for i in range(8)]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    judge = tiny_engine()
    expected = judge.generate(prompts, params)
    engine = gpu_engine(num_pages=40, max_num_batched_tokens=7)
    for _ in range(2):
        same_tokens(expected, engine.generate(prompts, params), params, judge)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0
    engine.check_integrity()


def test_requests_that_come_and_go() -> None:
    expected = tokens(tiny_engine().generate([[7, 8], [9, 10], [11, 12], [13]], greedy(30)))
    engine = gpu_engine()
    ids = [engine.add_request(p, greedy(30)) for p in ([7, 8], [9, 10])]
    outputs = {}
    for step in range(60):
        if step == 6:
            ids.append(engine.add_request([11, 12], greedy(30)))
        if step == 11:
            engine.abort(ids[1])
        if step == 12:
            ids.append(engine.add_request([13], greedy(30)))
        for out in engine.step():
            outputs[out.request_id] = out.outputs[0].token_ids
    assert outputs == {ids[0]: expected[0][0], ids[2]: expected[2][0], ids[3]: expected[3][0]}
    engine.check_integrity()


def test_a_row_of_nan_fails_its_request_alone() -> None:
    prompts = [[1, 2], [3, 63], [4, 5]]
    params = [greedy(20, logit_bias={63: float("-inf")}) for _ in prompts]
    engine = gpu_engine()
    clean = tokens(engine.generate(prompts, params))
    engine.model.weights.embed[63] = float("nan")
    engine.reset_prefix_cache()
    outputs = engine.generate(prompts, params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert tokens(outputs)[0] == clean[0] and tokens(outputs)[2] == clean[2]


def test_new_weights_under_captured_graphs() -> None:
    """H01: nothing moves, and a replay computes what an eager pass and a fresh engine do."""
    new = {name: t.clone() for name, t in shared_hf("qwen3", 5).state_dict().items()}
    engine = gpu_engine(arch="qwen3")
    engine.generate(PROMPTS, PARAMS)
    held = [t for _, t in engine.model.named_weights()]
    held += [engine.model.cos, engine.model.sin, engine._core.runner.kv.data]
    before = [t.data_ptr() for t in held]
    captures = sum(b["captures"] for b in engine.stats()["graphs"]["buckets"].values())
    engine.update_weights(new)
    outputs = tokens(engine.generate(PROMPTS, PARAMS))
    assert before == [t.data_ptr() for t in held]
    assert captures == sum(b["captures"] for b in engine.stats()["graphs"]["buckets"].values())
    for eager in (False, True):
        fresh = gpu_engine(arch="qwen3", model_seed=5, enforce_eager=eager)
        same_tokens(fresh.generate(PROMPTS, PARAMS), engine.generate(PROMPTS, PARAMS), PARAMS, fresh)
    assert outputs == tokens(engine.generate(PROMPTS, PARAMS))


def test_weights_that_change_under_a_step_in_flight() -> None:
    new = {name: t.clone() for name, t in shared_hf(seed=5).state_dict().items()}
    got = []
    for device in ("cpu", "cuda"):
        engine = tiny_engine(device=device)
        engine.add_request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=30, seed=1))
        for _ in range(10):
            engine.step()
        engine.update_weights(new)
        outputs: list[Any] = []
        while not outputs:
            outputs = engine.step()
        got.append(tokens(outputs))
    assert got[0] == got[1]


def test_fp32_is_not_tf32_and_the_callers_setting_stays() -> None:
    matmul = torch.backends.cuda.matmul
    judge = tiny_engine(model={"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    engine = gpu_engine(model={"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    params = SamplingParams(temperature=1.0, max_tokens=50, seed=3)
    expected = judge.generate(PROMPTS, params)
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        result = compare_runs(judge, expected, engine.generate(PROMPTS, params), params)
        assert matmul.allow_tf32 is True
        x = torch.randn(256, 256, device="cuda")
        loose = (x @ x - (x.double() @ x.double())).abs().max()
        assert loose > 1e-3, "this device has no TF32: the test shows nothing"
    finally:
        matmul.allow_tf32 = before
    assert result.equal and result.excused_ties <= 1 and result.max_logprob_error < 5e-5


def test_bf16_graphs_equal_eager_passes_bit_for_bit() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True)
    engines = [gpu_engine(dtype="bfloat16", enforce_eager=eager) for eager in (False, True, False)]
    runs = [engine.generate(PROMPTS, params) for engine in engines]
    assert tokens(runs[0]) == tokens(runs[1]) == tokens(runs[2])
    logprobs = [[o.outputs[0].sampled_logprobs for o in run] for run in runs]
    assert logprobs[0] == logprobs[1] == logprobs[2]


def test_two_engines_share_no_pool() -> None:
    """G15."""
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3)
    first, second = gpu_engine(), gpu_engine(arch="qwen2")
    expected = tokens(first.generate(PROMPTS, params)), tokens(second.generate(PROMPTS, params))
    assert tokens(first.generate(PROMPTS, params)) == expected[0]
    del first
    gc.collect()
    torch.cuda.empty_cache()
    filler = torch.full((64 << 20,), float("nan"), device="cuda")
    assert tokens(second.generate(PROMPTS, params)) == expected[1]
    del filler


def test_released_graphs_give_memory_back_and_return() -> None:
    engine = gpu_engine(CUSTOM and AdversarialDrafter(64), max_num_seqs=64)
    expected = tokens(engine.generate(PROMPTS, PARAMS))
    engine.capture_graphs()
    report = engine.stats()["graphs"]
    assert report["graphs"] == len(engine._core.runner._graphs.buckets.keys)
    used = torch.cuda.mem_get_info()[0]
    engine.release_graphs()
    assert torch.cuda.mem_get_info()[0] - used >= 0.5 * report["bytes"] > 0
    assert engine.stats()["graphs"]["bytes"] == 0
    assert tokens(engine.generate(PROMPTS, PARAMS)) == expected


def test_out_of_memory_in_a_capture_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """G11: the process may take no more than it holds. Every second of sixteen 1 MB blocks is free, each in a segment
    that torch cannot give back: room for an eager step, none for another stream or a graph's pool."""
    engine = gpu_engine()
    expected = tokens(engine.generate(PROMPTS, PARAMS))
    engine.release_graphs()
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del blocks[::2]
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.stats()["graphs"]["eager_steps"]["no memory for the graph"] > 0
    assert sum("run without a graph" in r.getMessage() for r in caplog.records) == 1
    del blocks
    engine.release_graphs()
    assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    assert engine.stats()["graphs"]["graphs"] > 0


def test_steady_steps_wait_for_nothing_but_the_tokens() -> None:
    """torch raises at every implicit synchronization: a pageable copy, .item(), .tolist() of a device tensor."""
    engine = gpu_engine()
    for p in PROMPTS:
        engine.add_request(p, greedy(60))
    for _ in range(8):
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(40):
            engine.step()
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine._core.runner._latest is not None


def test_random_switches_between_graphs() -> None:
    """Sizes chosen at random, graphs evicted all the time: tokens stay those of one engine that keeps them all."""
    rng = torch.Generator().manual_seed(0)
    roomy = gpu_engine(max_num_seqs=16)
    keeping = tokens(roomy.generate([[i] for i in range(16)], greedy(12)))
    sizes = [b["bytes"] for b in roomy.stats()["graphs"]["buckets"].values()]
    tight = gpu_engine(max_num_seqs=16, graph_bytes=max(2 * max(sizes), 1))
    for _ in range(40):
        count = int(torch.randint(1, 17, (1,), generator=rng))
        assert tokens(tight.generate([[i] for i in range(count)], greedy(12))) == keeping[:count]


def test_model_free_speculation() -> None:
    from tlt_engine import Profile, SpeculationConfig

    params = SamplingParams(temperature=0.3, max_tokens=100, n=4, seed=1)
    judge = tiny_engine(speculation=OFF)
    expected = judge.generate(PROMPTS, params)
    engine = gpu_engine(speculation=SpeculationConfig(profile=Profile(6, 3, 12), min_chance=0.0))
    for _ in range(2):
        same_tokens(expected, engine.generate(PROMPTS, params), params, judge)
    assert engine.stats()["accept_length"] > 1.5
