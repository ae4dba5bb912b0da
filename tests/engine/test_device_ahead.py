"""Verifications on the GPU's runner, played on the CPU (tests/engine/emulated.py): the next step is launched before the
last one's outputs are made, and nothing of that can be seen from outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.emulated import PlayedOps, emulation
from tests.engine.engines import greedy, shared_hf, tiny_engine, tokens
from tests.engine.test_device import PROMPTS, cpu, cpu_runner
from tlt_engine import Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine import core, packing
from tlt_engine.engine.core import EngineCore
from tlt_engine.engine.device import DeviceRunner

EOS = 2
FREE = SpeculationConfig(method="model_free", profile=Profile(depth=4, top_k=3, verify=12))


@pytest.fixture(autouse=True)
def gpu():
    with emulation():
        yield


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """For each step launched behind a verification: tokens that its sequences have and their outputs do not, yet."""
    seen: list[int] = []
    honest = DeviceRunner.launch_next

    def launch_next(self, flight, trees):
        seen.append(sum(
            len(s.seq.token_ids) - s.new_start - len(s.output.token_ids) for s in flight.draw.lanes.samples
        ))
        return honest(self, flight, trees)

    monkeypatch.setattr(DeviceRunner, "launch_next", launch_next)
    return seen


def drafter_for(prompts: Any, params: Any, **more: Any) -> ReplayDrafter:
    """Knows 80 tokens of each continuation, whatever ends it earlier."""
    longer = replace(params, max_tokens=80, stop_token_ids=None, ignore_eos=True)
    known = {tuple(p): dict(enumerate(ids)) for p, ids in zip(prompts, cpu(prompts, longer))}
    return ReplayDrafter(known, **({"depth": 3, "error_rate": 0.2} | more))


def stepped(engine: RolloutEngine, prompts: Any, params: Any, **more: Any) -> list[RequestOutput]:
    """The caller's own loop."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add_request(p, sp, **more) for p, sp in zip(prompts, each)]
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output
        engine.check_integrity()
        if engine._core._ahead is None:  # nothing writes behind the roots
            for seq in engine._core.scheduler.running:
                assert len(seq.pages) <= -(-(seq.kv_len + 1) // 4), f"{len(seq.pages)} pages for {seq.kv_len} keys"
    return [done[i] for i in ids]


def traces(engine: RolloutEngine, outputs: list[RequestOutput], drafter: Any) -> dict[str, Any]:
    """All that a pass leaves behind."""
    stats = engine.stats()
    prefix = engine._prefix
    assert prefix is not None
    return {
        "samples": [
            (o.token_ids, [round(x, 4) for x in o.sampled_logprobs], o.finish_reason, o.stop_reason, o.finish_order,
             o.spec, o.weight_versions, o.noise)
            for output in outputs for o in output.outputs
        ],
        "stats": {k: v for k, v in stats.items() if k not in ("memory", "graphs", "pages", "prefill_backend")},
        "pages": {k: v for k, v in stats["pages"].items() if k != "total"},
        "prefix": set(prefix._page_of),
        "drafter": None if drafter is None else (drafter.accepted, drafter.finished),
    }


STOPS = SamplingParams(temperature=0.9, max_tokens=37, n=2, seed=7, stop_token_ids=[3, 9, 11])


def both(params: SamplingParams, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Traces on the GPU's runner and on the CPU's."""
    found = []
    for where in (None, cpu_runner):
        drafter = drafter_for(PROMPTS, params)
        if where is None:
            engine = tiny_engine(drafter=drafter)
            outputs = stepped(engine, PROMPTS, params, **more)
        else:
            with where():
                engine = tiny_engine(drafter=drafter)
                outputs = stepped(engine, PROMPTS, params, **more)
        found.append(traces(engine, outputs, drafter))
    return found[0], found[1]


@pytest.mark.parametrize("more", [{}, {"token_quota": 25}])
def test_the_same_traces_as_on_the_cpu(launched, more):
    """Ids, log-probabilities, reasons, order, counts, cached pages and what the drafter was told."""
    gpu, plain = both(STOPS, **more)
    for what in gpu:
        assert gpu[what] == plain[what], what
    reasons = {sample[2] for sample in gpu["samples"]}
    assert reasons == ({"stop", "length"} if not more else {"stop", "paused"})
    assert gpu["stats"]["accepted_tokens"] > gpu["stats"]["steps"]
    assert len(launched) > gpu["stats"]["steps"] // 4 and min(launched) > 0, "outputs come after the launch"


def sabotage_no_stops(patch):
    patch.setattr(packing, "stop_ids", lambda params, eos: frozenset())


def sabotage_late_end(patch):
    patch.setattr(packing.Sample, "end", property(lambda s: s.seq.max_len + 3))


def sabotage_pages_kept(patch):
    honest = core.Scheduler.settle
    patch.setattr(core.Scheduler, "settle", lambda self, seq, n, flying=False: honest(self, seq, n, flying=True))


def sabotage_pages_back(patch):
    honest = core.Scheduler.settle
    patch.setattr(core.Scheduler, "settle", lambda self, seq, n, flying=False: honest(self, seq, n))


def sabotage_stale_tree(patch):
    honest = DeviceRunner.launch_next
    patch.setattr(DeviceRunner, "launch_next", lambda self, old, trees: honest(self, old, old_trees(old, trees)))


def old_trees(flight, trees):
    """With the roots of the step before."""
    roots = [s.seq.token_ids[-2] for s in flight.draw.lanes.samples]
    return [type(t)((root, *t.tokens[1:]), t.parents) for root, t in zip(roots, trees)]


def sabotage_uncached(patch):
    honest = core.Scheduler.settle
    patch.setattr(core.Scheduler, "settle", lambda self, seq, n, flying=False: honest(self, seq, 0, flying=flying))


def sabotage_accepted(patch):
    patch.setattr(EngineCore, "_observe", lambda self, contexts, accepted: None)


def sabotage_old_depths(patch):
    honest = EngineCore._go_on

    def go_on(self, current, contexts, taken):
        for context, new in zip(contexts, taken.tokens):
            context.max_depth += len(new)
        honest(self, current, contexts, taken)

    patch.setattr(EngineCore, "_go_on", go_on)


@pytest.mark.parametrize(
    "sabotage",
    [sabotage_no_stops, sabotage_late_end, sabotage_pages_kept, sabotage_pages_back, sabotage_stale_tree,
     sabotage_uncached, sabotage_accepted, sabotage_old_depths],
    ids=lambda f: f.__name__,
)
def test_sabotage_is_seen(monkeypatch, sabotage):
    expected = both(STOPS)[1]
    sabotage(monkeypatch)
    try:
        drafter = drafter_for(PROMPTS, STOPS)
        engine = tiny_engine(drafter=drafter)
        outputs = stepped(engine, PROMPTS, STOPS)
    except (AssertionError, ValueError):
        return
    assert traces(engine, outputs, drafter) != expected


def test_the_next_turn_finds_the_kept_tokens_alone():
    """Prompt + output hits at most what was kept, and goes on from right KV."""
    drafter = drafter_for(PROMPTS, STOPS)
    engine = tiny_engine(drafter=drafter)
    first = stepped(engine, PROMPTS, STOPS)
    turns = [o.prompt_token_ids + s.token_ids for o in first for s in o.outputs]
    before = engine.stats()["prefix_hit_tokens"]
    second = tokens(engine.generate(turns, greedy(12)))
    assert engine.stats()["prefix_hit_tokens"] > before
    assert second == cpu(turns, greedy(12))


@pytest.mark.parametrize("method", ["model_free", "adversarial"])
def test_drafters_of_ragged_trees(launched, method):
    drafter = None if method == "model_free" else AdversarialDrafter(64, eos_ids=(3,))
    params = SamplingParams(temperature=0.8, max_tokens=40, n=3, seed=1)
    engine = tiny_engine(drafter=drafter, **({} if drafter else {"speculation": FREE}))
    for _ in range(2):
        assert tokens(engine.generate(PROMPTS, params)) == cpu(PROMPTS, params)
    engine.check_integrity()
    assert len(launched) > engine.stats()["steps"] // 3
    assert len(engine.stats()["graphs"]["buckets"]) > 2, "trees of several sizes"


KINDS: list[dict[str, Any]] = [
    {"top_k": 5, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {4: 5.0, 5: float("-inf")}}, {"min_tokens": 20, "stop_token_ids": [1, 2, 3, 4, 5]},
    {"allowed_token_ids": [1, 2, 3, 40, 41]}, {"logprobs": 0, "raw_logprobs": True}, {"temperature": 0.0},
]


def of_all_kinds() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [SamplingParams(**{"seed": i, "max_tokens": 50, **kind}) for i, kind in enumerate(KINDS)]
    return [[i, i + 1, i + 2] for i in range(len(KINDS))], params


def test_all_parameters_are_those_of_the_new_rows(launched):
    prompts, params = of_all_kinds()
    engine = tiny_engine(speculation=FREE)
    engine.generate(prompts, params)
    launched.clear()
    outputs = engine.generate(prompts, params)  # drafts are good now
    assert tokens(outputs) == cpu(prompts, params)
    assert len(launched) > 4 and engine.stats()["accepted_tokens"] > 50
    assert len(outputs[5].outputs[0].raw_logprobs) == len(outputs[5].outputs[0].logprobs) == 50


def test_sabotage_parameters_of_the_step_before_are_seen(monkeypatch, launched):
    honest = DeviceRunner._put_params
    kept: list[Any] = []

    def stale(self, *args):
        kept.append(honest(self, *args))
        return kept[-2] if len(kept) > 1 and len(kept[-2].temperature) == len(kept[-1].temperature) else kept[-1]

    prompts, params = of_all_kinds()
    expected = cpu(prompts, params)
    monkeypatch.setattr(DeviceRunner, "_put_params", stale)
    engine = tiny_engine(speculation=FREE)
    try:
        got = [tokens(engine.generate(prompts, params)) for _ in range(2)]
    except ValueError as error:  # histories of the wrong length
        assert "params.history" in str(error)
    else:
        assert got != [expected] * 2
    assert launched


@pytest.mark.parametrize(
    "kind", [{"stop": ["zz", "q"]}, {"logprobs": 2}, {"logits_processor": lambda ids, logits: logits.roll(len(ids))}]
)
def test_what_needs_the_host_keeps_the_slow_order(launched, letters, kind):
    """A stop string is known after the text alone; nobody in its batch goes ahead."""
    def engine() -> RolloutEngine:
        return tiny_engine(tokenizer=letters, speculation=FREE)

    params = [SamplingParams(temperature=1.0, max_tokens=40, seed=4, **kind), SamplingParams(max_tokens=40, seed=5)]
    prompts = [[1, 2, 3], [4, 5]]
    got = engine().generate(prompts, params)
    with cpu_runner():
        want = engine().generate(prompts, params)
    assert tokens(got) == tokens(want) and [o.outputs[0].text for o in got] == [o.outputs[0].text for o in want]
    alone = [len(ids) for request in tokens(got) for ids in request]
    assert len(launched) <= max(alone) - min(alone), "only once it was alone"


def test_requests_that_come_and_go(launched):
    """Added, aborted, in between reweighed graphs: each gets its own tokens, those aborted a prefix of them."""
    rng = random.Random(3)
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 12))] for _ in range(14)]
    params = [SamplingParams(temperature=1.0, max_tokens=rng.randint(5, 50), seed=i) for i in range(len(prompts))]
    expected = cpu(prompts, params)
    engine = tiny_engine(speculation=FREE, num_pages=70)
    names: dict[str, int] = {}
    done: dict[int, list[int]] = {}
    aborted: set[int] = set()
    waiting = list(range(len(prompts)))
    while waiting or engine.has_unfinished():
        event = rng.random()
        if waiting and event < 0.2:
            i = waiting.pop()
            names[engine.add_request(prompts[i], params[i])] = i
        elif names and event < 0.25:
            for out in engine.abort(rng.choice(list(names))):
                aborted.add(names[out.request_id])
                done[names[out.request_id]] = out.outputs[0].token_ids
        elif event < 0.3:
            engine.release_graphs() if rng.random() < 0.5 else engine.capture_graphs()
        elif event < 0.33:
            engine.reset_prefix_cache()
        for out in engine.step():
            done[names[out.request_id]] = out.outputs[0].token_ids
        engine.check_integrity()
    for i, ids in done.items():
        want = expected[i][0]
        assert ids == want[: len(ids)] and (i in aborted or len(ids) == len(want)), i
    assert len(done) == len(prompts) and aborted and len(launched) > 40


def test_preemption_under_verifications(launched):
    prompts = [list(range(i, i + 25)) for i in range(8)]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    engine = tiny_engine(speculation=FREE, num_pages=44, max_num_batched_tokens=40)
    for _ in range(2):
        assert tokens(stepped(engine, prompts, params)) == cpu(prompts, params)
    assert engine.stats()["preemptions"] > 0 and launched


def test_new_weights_under_a_verification_in_flight(launched):
    new = {name: t.clone() for name, t in shared_hf(seed=5).state_dict().items()}
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=1)

    def run(engine: RolloutEngine) -> list[int]:
        engine.generate([[1, 2, 3]], params)
        engine.add_request([1, 2, 3], params)
        for _ in range(6):
            engine.step()
        engine.update_weights(new)
        while not (outputs := engine.step()):
            pass
        return outputs[0].outputs[0].token_ids

    got = run(tiny_engine(speculation=FREE))
    with cpu_runner():
        want = run(tiny_engine(speculation=FREE))
    assert got == want and len(got) == 40 and launched


def test_a_broken_row_ends_its_request_alone(monkeypatch):
    honest, calls = PlayedOps.sample, {"n": 0}

    def sample(logits, ids, params, **more):
        calls["n"] += 1
        if calls["n"] == 6:
            logits[: len(logits) // 3] = float("nan")
        return honest(logits, ids, params, **more)

    engine = tiny_engine(drafter=AdversarialDrafter(64))
    monkeypatch.setattr(PlayedOps, "sample", staticmethod(sample))
    outputs = engine.generate([[1], [2], [3]], greedy(20))
    expected = cpu([[1], [2], [3]], greedy(20))
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "length"]
    assert tokens(outputs)[1:] == expected[1:]
    assert tokens(outputs)[0][0] == expected[0][0][: len(tokens(outputs)[0][0])]
    engine.check_integrity()


class Failing(ReplayDrafter):
    """Breaks off its `at`-th call of `method`."""

    def __init__(self, known: Any, method: str, at: int, error: Callable[[], BaseException]) -> None:
        super().__init__(known, depth=5, error_rate=0.2)
        self.method, self.left, self.error = method, at, error

    def _count(self, method: str) -> None:
        self.left -= method == self.method
        if not self.left and method == self.method:
            raise self.error()

    def propose(self, contexts):
        self._count("propose")
        return super().propose(contexts)

    def observe(self, context, accepted):
        super().observe(context, accepted)
        self._count("observe")


def after_a_failure(method: str, at: int, error: Any) -> list[list[int]]:
    """Tokens of three requests whose drafter fails once, in the caller's loop."""
    prompts, params = [[1, 2], [3, 4, 5], [6]], SamplingParams(temperature=1.0, max_tokens=30, seed=2)
    known = {tuple(p): dict(enumerate(ids)) for p, ids in zip(prompts, cpu(prompts, params))}
    engine = tiny_engine(drafter=Failing(known, method, at, error))
    ids = [engine.add_request(p, params) for p in prompts]
    done: dict[str, list[int]] = {}
    failures = 0
    while engine.has_unfinished():
        try:
            for output in engine.step():
                done[output.request_id] = output.outputs[0].token_ids
        except error:
            failures += 1
            for sample in engine._core.samples.values():
                assert sample.seq.token_ids[sample.new_start :] == sample.output.token_ids
                assert len(sample.output.sampled_logprobs) == len(sample.output.token_ids)
        engine.check_integrity()
    assert failures == 1
    return [done[i] for i in ids]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("method", "at"), [("propose", 4), ("observe", 7)])
def test_a_drafter_that_fails_ahead_loses_no_token(method, at, error, launched):
    """The step whose tokens were out is finished, then the error is raised; the next step starts from them."""
    prompts, params = [[1, 2], [3, 4, 5], [6]], SamplingParams(temperature=1.0, max_tokens=30, seed=2)
    assert after_a_failure(method, at, error) == [request[0] for request in cpu(prompts, params)]
    assert launched


def test_sabotage_outputs_dropped_with_the_failure_are_seen(monkeypatch):
    def careless(self, current, contexts, taken):
        self.scheduler.extend(current.batch.decodes, taken.tokens)
        contexts = self._contexts(current.batch.decodes, current.samples)
        self._observe(contexts, taken.accepted)
        if not taken.ended:
            self._ahead = self._launch_next(current, contexts)
        self._hand_on(current, taken)

    monkeypatch.setattr(EngineCore, "_go_on", careless)
    with pytest.raises(AssertionError):
        after_a_failure("propose", 4, RuntimeError)
