"""Bad rows, full pools, aborts, interrupts, threads, several engines (cases G, I, K)."""

from __future__ import annotations

import copy
import gc
import logging
import random
import threading
from itertools import pairwise

import pytest
import torch

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.engines import greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.types import StepOutputs

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6, list(range(20, 45))]


def replayer(prompts, params, **more):
    expected = plain_outputs(prompts, params)
    known = {tuple(p): dict(enumerate(out)) for p, out in zip(prompts, expected)}
    return expected, ReplayDrafter(known, **{"error_rate": 0.3, "depth": 6, "shape": "tree", "width": 2, **more})


def drain(engine):
    done = {}
    while engine.has_unfinished():
        for out in engine.step():
            done[out.request_id] = out
        engine.check_integrity()
    return done


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_g01_committed_kv_is_that_of_a_plain_prefill(page_size, batch):
    prompts = PROMPTS[:batch]
    params = greedy(24)
    _, drafter = replayer(prompts, params, error_rate=0.2, width=3)
    engine = tiny_engine(drafter=drafter, page_size=page_size)
    for i, p in enumerate(prompts):
        engine.add_request(p, params, request_id=str(i))
    rounds = 0
    while engine.has_unfinished():
        engine.step()
        rounds += 1
        for sample in engine._core.samples.values():
            seq = sample.seq
            if rounds % 3 or not seq.kv_len:
                continue
            held = _logical_kv(engine, seq.pages, seq.kv_len, page_size)
            fresh = tiny_engine(page_size=page_size)
            fresh.add_request(seq.token_ids[: seq.kv_len + 1], greedy(8))
            fresh.step()
            other = next(iter(fresh._core.samples.values())).seq
            torch.testing.assert_close(
                held, _logical_kv(fresh, other.pages, seq.kv_len, page_size), atol=1e-5, rtol=1e-5
            )
    assert drafter.mean_accepted > 1


def _logical_kv(engine, pages, length, page_size):
    data = engine._core.runner.kv.data
    slots = torch.tensor([pages[i // page_size] * page_size + i % page_size for i in range(length)])
    return data.flatten(2, 3)[:, :, slots]


@pytest.mark.parametrize("page_size", [4, 16])
def test_g04_drafts_over_the_page_border(page_size):
    for length in (page_size - 1, page_size, page_size + 1):
        prompt = [i % 60 + 1 for i in range(length)]
        for depth in range(1, 9):
            expected, drafter = replayer([prompt], greedy(20), depth=depth)
            engine = tiny_engine(drafter=drafter, page_size=page_size)
            assert tokens(engine.generate([prompt], greedy(20))) == expected


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_g05_look_ahead_pages_all_come_back(page_size):
    draw = random.Random(page_size)
    engine = tiny_engine(drafter=AdversarialDrafter(64, eos_ids=(3,)), page_size=page_size, enable_prefix_caching=False)
    total = engine.stats()["pages"]["free"]
    for i in range(60):
        engine.add_request([i % 60 + 1] * draw.randint(1, 20), SamplingParams(
            max_tokens=draw.randint(1, 12), stop_token_ids=[3], seed=i, n=draw.randint(1, 3)), request_id=str(i))
        engine.step()
        if draw.random() < 0.2:
            engine.abort(str(draw.randint(0, i)))
    drain(engine)
    assert engine.stats()["pages"] == {"total": total, "free": total, "idle": 0, "used": 0}


def test_g06_a_full_pool_preempts_and_changes_nothing():
    params = [SamplingParams(max_tokens=34, seed=i, min_tokens=30) for i in range(4)]
    prompts = [[i + 1] * 6 for i in range(4)]
    expected = [plain_outputs([p], s)[0] for p, s in zip(prompts, params)]
    known = {tuple(p): {0: out[0]} for p, out in zip(prompts, expected)}
    for drafter in (None, ReplayDrafter(known, error_rate=0.3, depth=4, shape="tree", width=2), AdversarialDrafter(64)):
        engine = tiny_engine(drafter=drafter, num_pages=15, max_model_len=60)
        assert tokens(engine.generate(prompts, params)) == expected
        assert engine.stats()["preemptions"] > 0
        engine.check_integrity()
    with pytest.raises(ValueError, match="expected a sequence that fits the KV pool alone"):
        tiny_engine(num_pages=5).generate([prompts[0]], params[0])


def test_g07_requests_leave_and_join_in_any_order():
    lengths = [12, 4, 9, 2, 15, 3, 7, 1]
    prompts = [[i + 1, i + 2] for i in range(8)]
    params = [SamplingParams(max_tokens=n, seed=i) for i, n in enumerate(lengths)]
    expected = [plain_outputs([p], s)[0][0] for p, s in zip(prompts, params)]
    known = {tuple(p): {0: out} for p, out in zip(prompts, expected)}
    make = lambda: ReplayDrafter(known, error_rate=0.4, depth=3, seed=2)  # noqa: E731
    solo = [tiny_engine(drafter=make()).generate([p], s)[0].outputs[0].spec for p, s in zip(prompts, params)]
    engine = tiny_engine(drafter=make(), max_num_seqs=3)
    done = {}
    for i in range(8):
        engine.add_request(prompts[i], params[i], request_id=str(i))
        done |= {o.request_id: o for o in engine.step()}
    done |= drain(engine)
    for i in range(8):
        assert done[str(i)].outputs[0].token_ids == expected[i]
        assert done[str(i)].outputs[0].spec == solo[i]


def test_g08_abort_at_every_step_harms_nobody():
    params = SamplingParams(max_tokens=16, seed=3)
    expected, _ = replayer(PROMPTS, params)
    for step in range(7):
        _, drafter = replayer(PROMPTS, params)
        engine = tiny_engine(drafter=drafter)
        for i, p in enumerate(PROMPTS):
            engine.add_request(p, params, request_id=str(i))
        done = {}
        for _ in range(step):
            done |= {o.request_id: o for o in engine.step()}
        aborted = engine.abort("1")
        for out in aborted:
            got = out.outputs[0].token_ids
            assert out.outputs[0].finish_reason == "abort" and got == expected[1][0][: len(got)]
        engine.check_integrity()
        if "1" not in done:
            engine.add_request(PROMPTS[1], params, request_id="1")
        done |= drain(engine)
        assert [done[str(i)].outputs[0].token_ids for i in range(4)] == [e[0] for e in expected]
    assert engine.abort(["nobody"]) == []
    with pytest.raises(ValueError, match="request_id: expected an id that is not in flight"):
        engine.add_request([1], greedy(2), request_id="x")
        engine.add_request([1], greedy(2), request_id="x")


def test_i02_i04_profiles_of_any_size_even_none():
    params = SamplingParams(max_tokens=20, seed=3)
    expected = plain_outputs(PROMPTS, params)
    for profile in (Profile(0, 1, 1), Profile(1, 1, 2), Profile(8, 8, 32), Profile(16, 2, 128)):
        known = {tuple(p): {0: out[0]} for p, out in zip(PROMPTS, expected)}
        drafter = ReplayDrafter(known, depth=profile.depth)
        engine = tiny_engine(drafter=drafter, speculation=SpeculationConfig(method="custom", profile=profile))
        assert tokens(engine.generate(PROMPTS, params)) == expected
        if profile.verify == 1:
            assert not drafter.rows, "no drafter call for trees of the root alone"
            assert engine.stats()["decode_rows"] == engine.stats()["decode_passes"]


class Poisoned:
    """A target whose logits are `value` in every row at `position`."""

    def __init__(self, inner, position, value):
        self._inner, self._position, self._value = inner, position, value

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, step, kv, **more):
        out = self._inner.forward(step, kv, **more)
        logits = out.logits.clone()
        logits[step.positions[step.logit_rows] == self._position] = self._value
        return StepOutputs(logits, out.hidden)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_k01_a_poisoned_row_fails_its_request_alone(temperature, shape, value):
    prompts = [[1, 2, 3], list(range(30)), [7, 8, 9]]  # only the long one ever reaches the poisoned position
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=1)
    vocab = {"vocab_size": 100}
    expected = plain_outputs(prompts, params, model=vocab)
    known = {tuple(p): {0: out[0]} for p, out in zip(prompts, expected)}
    drafter = None if shape == "none" else ReplayDrafter(known, depth=5, shape=shape, width=2)
    engine = tiny_engine(drafter=drafter, model=vocab)
    engine._core.runner.model = Poisoned(engine.model, 32, value)
    outs = engine.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in (outs[0], outs[2])] == [expected[0][0], expected[2][0]]
    failed = outs[1].outputs[0]
    assert failed.token_ids == expected[1][0][:3] and failed.finish_reason == "error"
    assert "no valid distribution" in failed.stop_reason and len(failed.sampled_logprobs) == 3
    engine.check_integrity()
    engine._core.runner.model = engine.model
    assert tokens(engine.generate(prompts, params)) == expected


def test_k01_minus_infinity_is_just_a_barred_id():
    engine = tiny_engine()

    class Barred(Poisoned):
        def forward(self, step, kv, **more):
            out = self._inner.forward(step, kv, **more)
            logits = out.logits.clone()
            logits[:, ::2] = float("-inf")
            return StepOutputs(logits, out.hidden)

    engine._core.runner.model = Barred(engine.model, 0, 0)
    outs = engine.generate(PROMPTS, SamplingParams(max_tokens=10, seed=1))
    assert all(t % 2 for o in outs for t in o.outputs[0].token_ids)


@pytest.mark.parametrize("prompt", [list(range(1, 20)), [5] * 20, [9], [1, 2, 3, 1, 2]])
def test_k03_model_free_with_and_without_matches(prompt):
    config = SpeculationConfig(profile=Profile(6, 2, 12), min_chance=0.0)
    engine = tiny_engine(speculation=config)
    for params in (greedy(24), SamplingParams(max_tokens=24, seed=1, n=4)):
        for _ in range(2):
            assert tokens(engine.generate([prompt], params)) == plain_outputs([prompt], params)


def test_k04_an_interrupt_leaves_a_usable_engine():
    calls = []

    def interrupts(output, logits):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return logits

    engine = tiny_engine()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, [SamplingParams(max_tokens=9, logits_processor=interrupts)] + [greedy(9)] * 3)
    assert not engine.has_unfinished()
    engine.check_integrity()
    assert tokens(engine.generate(PROMPTS, greedy(9))) == plain_outputs(PROMPTS, greedy(9))


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (lambda ids, logits: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda ids, logits: None, "expected it to return a tensor [64], got NoneType"),
        (lambda ids, logits: logits.sum(), "expected it to return a tensor [64], got []"),
        (lambda ids, logits: logits[:3], "expected it to return a tensor [64], got [3]"),
    ],
)
def test_a_faulty_processor_ends_its_own_request_alone(processor, reason):
    params = SamplingParams(max_tokens=8, seed=3)

    def late(ids, logits):
        return processor(ids, logits) if len(ids) == 3 else logits

    faulty = SamplingParams(max_tokens=8, seed=3, logits_processor=late)
    expected = plain_outputs(PROMPTS, params)
    engine = tiny_engine()
    outs = engine.generate(PROMPTS, [params, faulty, params, params])
    assert [outs[i].outputs[0].token_ids for i in (0, 2, 3)] == [expected[i][0] for i in (0, 2, 3)]
    failed = outs[1].outputs[0]
    assert failed.token_ids == expected[1][0][:3] and failed.finish_reason == "error"
    assert failed.stop_reason.startswith("logits_processor: ") and reason in failed.stop_reason
    engine.check_integrity()


def test_k05_engines_live_side_by_side_and_leave_nothing():
    def tensors():
        gc.collect()
        return sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects())

    one, two = tiny_engine(arch="qwen2"), tiny_engine(arch="qwen3")
    params = SamplingParams(max_tokens=10, seed=1)
    expected = [plain_outputs(PROMPTS, params, arch=a) for a in ("qwen2", "qwen3")]
    for i, p in enumerate(PROMPTS):
        one.add_request(p, params, request_id=str(i))
        two.add_request(p, params, request_id=str(i))
    done = [{}, {}]
    while one.has_unfinished() or two.has_unfinished():
        for engine, out in zip((one, two), done):
            out |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert [[[out[str(i)]] for i in range(4)] for out in done] == expected
    del one, two
    before = tensors()
    for _ in range(5):
        tiny_engine(arch="qwen2").generate(PROMPTS, params)
    assert tensors() <= before + 2


def test_k07_threads_share_an_engine():
    prompts = [[i + 1, i + 2, i + 3] for i in range(20)]
    params = SamplingParams(max_tokens=12, seed=1)
    expected = [plain_outputs([p], params)[0] for p in prompts]
    engine = tiny_engine(speculation=SpeculationConfig(profile=Profile(4, 2, 8), min_chance=0.0))
    results: dict[int, list] = {}

    def work(thread):
        for i in range(thread, 20, 4):
            results[i] = tokens(engine.generate([prompts[i]], params))[0]

    threads = [threading.Thread(target=work, args=(t,), daemon=True) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert [results[i] for i in range(20)] == expected
    engine.check_integrity()


def test_k08_warnings_come_once_and_nothing_is_printed(caplog, capsys):
    engine = tiny_engine(drafter=AdversarialDrafter(64))
    with caplog.at_level(logging.INFO):
        for i in range(10):
            engine.generate(PROMPTS, SamplingParams(max_tokens=10, top_p=0.9, seed=i))
    assert len({r.message for r in caplog.records}) == len(caplog.records) <= 1
    assert capsys.readouterr() == ("", "")


def test_callers_rng_and_grad_mode_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine = tiny_engine()
    engine.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert torch.is_grad_enabled() and torch.equal(torch.rand(3), expected)


def test_audit_counts_what_differs(monkeypatch):
    params = SamplingParams(max_tokens=12, seed=3, n=2)
    expected, drafter = replayer(PROMPTS, params)
    config = SpeculationConfig(method="custom", profile=Profile(6, 3, 12), audit=1.0)
    engine = tiny_engine(drafter=drafter, speculation=config)
    assert tokens(engine.generate(PROMPTS, params)) == expected
    assert engine.stats()["audit"] == {"checked": 8, "differing": 0}
    engine.check_integrity()

    from tlt_engine.engine import runner

    honest = runner.verify_tree

    def broken(sampled, trees):  # sabotage: whenever something was drafted, the root's token is off by one
        wrong = sampled.clone()
        starts = trees.node_indptr.tolist()
        for start, end in pairwise(starts):
            if end - start > 1:
                wrong[start] = (wrong[start] + 1) % 64
        return honest(wrong, trees)

    monkeypatch.setattr(runner, "verify_tree", broken)
    engine.generate(PROMPTS, params)
    assert engine.stats()["audit"]["differing"] > 0


def test_a_faulty_drafter_is_named():
    class WrongRoot(ReplayDrafter):
        def tree(self, context):
            from tlt_engine import DraftTree

            return DraftTree.chain((context.token_ids[-1] + 1) % 64, [1])

    engine = tiny_engine(drafter=WrongRoot({}))
    with pytest.raises(ValueError, match=r"DraftTree.tokens\[0\]: expected the root"):
        engine.generate(PROMPTS, greedy(5))
    engine.check_integrity()
    with pytest.raises(ValueError, match="drafter: expected a Drafter exactly when"):
        RolloutEngine(shared_hf(), EngineConfig(speculation=SpeculationConfig(method="custom")))


def test_prompt_is_prefilled_once_for_its_samples():
    prompt = list(range(1, 40))
    for entries, n in ((1, 8), (8, 1)):
        engine = tiny_engine()
        engine.generate([prompt] * entries, SamplingParams(n=n, max_tokens=4, seed=1))
        assert engine.stats()["prefill_tokens"] == len(prompt) - 1


def test_in_memory_weights_are_copied():
    hf = copy.deepcopy(shared_hf())
    engine = RolloutEngine(hf, EngineConfig(speculation=SpeculationConfig("off"), page_size=4))
    before = tokens(engine.generate(PROMPTS, greedy(6)))
    with torch.no_grad():
        for p in hf.parameters():
            p.zero_()
    engine.reset_prefix_cache()
    assert tokens(engine.generate(PROMPTS, greedy(6))) == before
