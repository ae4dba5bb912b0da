"""Drafts that the device makes itself, on the GPU's runner played on the CPU (tests/engine/emulated.py): the next
verification is drafted and launched before the last one has been read, and nothing of that can be seen from outside:
tokens, counts of drafts and of accepted ones, cached pages are those of the plain runner, whose drafter is asked by the
host every step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.eagle import Spy, random_drafter
from tests.engine.emulated import emulation
from tests.engine.engines import shared_hf, tiny_engine, tokens
from tests.engine.test_device import PROMPTS, cpu_runner
from tests.engine.test_device_ahead import FREE, stepped
from tests.engine.test_learned import MODEL, check, learned
from tests.engine.test_learned_hidden import Recorder
from tests.engine.test_learned_hidden import check as check_rows
from tests.tiny import tiny_target
from tlt_engine import Profile, RequestOutput, RolloutEngine, SamplingParams
from tlt_engine.engine import core
from tlt_engine.engine.core import EngineCore
from tlt_engine.engine.device import DeviceRunner
from tlt_engine.engine.drafting import DeviceDrafting
from tlt_engine.graphs.buckets import GraphKey, default_buckets
from tlt_engine.models.eagle import EagleModel
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.static_draft import StaticDraft

TREE = Profile(depth=3, top_k=3, verify=9)
STOPS = SamplingParams(temperature=0.9, max_tokens=37, n=2, seed=7, stop_token_ids=[3, 9, 11])


@pytest.fixture(autouse=True)
def gpu():
    with emulation():
        yield


@pytest.fixture(scope="module")
def model() -> EagleModel:
    return random_drafter(tiny_target(**MODEL), window=9)


def engine_with(model: EagleModel, profile: Profile = TREE, speculation: Any = None, **config: Any) -> RolloutEngine:
    spec = speculation or learned(profile=profile, sharpness=1.5)
    return tiny_engine(model=MODEL, drafter=model, speculation=spec, **config)


def drafting(engine: RolloutEngine) -> dict[str, Any]:
    return engine.stats()["graphs"]["drafting"]


def traces(engine: RolloutEngine, outputs: list[RequestOutput]) -> dict[str, Any]:
    stats = engine.stats()
    prefix = engine._prefix
    assert prefix is not None
    hidden = ("memory", "graphs", "pages", "prefill_backend", "drafter")
    return {
        "samples": [
            (o.token_ids, [round(x, 4) for x in o.sampled_logprobs], o.finish_reason, o.stop_reason, o.finish_order,
             o.spec, o.weight_versions, o.noise, o.drafter_versions)
            for output in outputs for o in output.outputs
        ],
        "stats": {k: v for k, v in stats.items() if k not in hidden},
        "prefix": set(prefix._page_of),
        "drafter": {k: v for k, v in stats["drafter"].items() if k != "proposals"},
        "observed": (engine._core.drafter._watch._passes, engine._core.drafter._watch._accepted),
    }


def both(
    model: EagleModel, params: Any, prompts: Any = PROMPTS, **config: Any
) -> tuple[dict[str, Any], dict[str, Any], RolloutEngine]:
    """Traces with the device's drafts and with the host's."""
    engine = engine_with(model, **config)
    mine = traces(engine, stepped(engine, prompts, params))
    with cpu_runner():
        plain = engine_with(model, **config)
        return mine, traces(plain, stepped(plain, prompts, params)), engine


@pytest.mark.parametrize(
    "profile", [TREE, Profile(4, 1, 5), Profile(2, 6, 16), Profile(6, 2, 4)], ids=["tree", "chain", "wide", "few"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_traces_as_the_hosts_drafts(model: EagleModel, profile: Profile, temperature: float) -> None:
    mine, plain, engine = both(model, replace(STOPS, temperature=temperature), profile=profile)
    for what in mine:
        assert mine[what] == plain[what], what
    steps = mine["stats"]["steps"]
    assert drafting(engine)["steps"] > steps // 4, f"{drafting(engine)} of {steps} steps"
    assert mine["stats"]["accepted_tokens"] > 0 or not temperature
    names = set(engine.stats()["graphs"]["buckets"])
    assert any(n.startswith("extend") for n in names) and any(n.startswith("draft") for n in names)
    engine.check_integrity()


def test_nobody_is_asked_while_the_device_drafts(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample, no stops: the host drafts for the first verification alone; and it never has to wait between a read
    and the next launch, since the next one has been launched when it reads."""
    order: list[str] = []
    for name in ("launch", "launch_drafted"):
        honest = getattr(DeviceRunner, name)

        def noted(self: Any, *args: Any, honest: Any = honest, name: str = name) -> Any:
            flight = honest(self, *args)
            order.append(name if flight is not None else "refused")
            return flight

        monkeypatch.setattr(DeviceRunner, name, noted)
    engine = engine_with(model)
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0.9, max_tokens=40, seed=1, ignore_eos=True))
    steps, stats = engine.stats()["steps"], engine.stats()["drafter"]
    assert stats["proposals"] <= 2, "the first two: behind the prefill, and at the end"
    assert drafting(engine)["steps"] >= steps - 4
    assert order.count("launch_drafted") == drafting(engine)["steps"]
    assert sum(engine.stats()["graphs"]["eager_steps"].values()) <= 2, "the prefill"


def test_hidden_states_are_not_handed_out_twice(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass behind the current one has overwritten is taken by the device alone."""
    engine = engine_with(model)
    taken: list[int] = []
    drafter = engine._core.drafter
    assert isinstance(drafter, EagleDrafter)
    honest = drafter.take
    monkeypatch.setattr(drafter, "take", lambda rows: (taken.append(len(rows.runs)), honest(rows)))
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0.9, max_tokens=40, seed=1, ignore_eos=True))
    assert len(taken) + drafting(engine)["steps"] == engine.stats()["steps"]


def cpu_tokens(model: EagleModel, prompts: Any, params: Any, **config: Any) -> list[list[list[int]]]:
    with cpu_runner():
        return tokens(engine_with(model, **config).generate(prompts, params))


def test_requests_that_come_and_go(model: EagleModel) -> None:
    """Added, aborted, graphs released and captured up front, the prefix cache dropped, drafters swapped in between:
    each gets its own tokens, those aborted a prefix of them."""
    rng = random.Random(5)
    prompts = [[rng.randrange(64) for _ in range(rng.randint(1, 12))] for _ in range(12)]
    params = [SamplingParams(temperature=1.0, max_tokens=rng.randint(5, 40), seed=i) for i in range(len(prompts))]
    expected = cpu_tokens(model, prompts, params)
    engine = engine_with(model, num_pages=90)
    others = [random_drafter(tiny_target(**MODEL), seed=s, window=9) for s in (1, 2)]
    names: dict[str, int] = {}
    done: dict[int, list[int]] = {}
    aborted: set[int] = set()
    waiting = list(range(len(prompts)))
    while waiting or engine.has_unfinished():
        event = rng.random()
        if waiting and event < 0.15:
            i = waiting.pop()
            names[engine.add_request(prompts[i], params[i])] = i
        elif names and event < 0.18:
            for out in engine.abort(rng.choice(list(names))):
                aborted.add(names[out.request_id])
                done[names[out.request_id]] = out.outputs[0].token_ids
        elif event < 0.22:
            engine.release_graphs() if rng.random() < 0.5 else engine.capture_graphs()
        elif event < 0.24:
            engine.reset_prefix_cache()
        elif event < 0.28:
            engine.update_drafter(rng.choice(others))
        for out in engine.step():
            done[names[out.request_id]] = out.outputs[0].token_ids
        engine.check_integrity()
    for i, ids in done.items():
        want = expected[i][0]
        assert ids == want[: len(ids)] and (i in aborted or len(ids) == len(want)), i
    report = drafting(engine)
    assert len(done) == len(prompts) and aborted and report["steps"] > 40
    assert report["refused"].get("catch-up"), "after a swap the host catches up once"


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests in each plain step that was launched ahead."""
    seen: list[int] = []
    honest = DeviceRunner.launch_ahead

    def launch_ahead(self: Any, flight: Any, sequences: Any, keep_hidden: bool) -> Any:
        launched = honest(self, flight, sequences, keep_hidden)
        seen.extend([len(sequences)] * (launched is not None))
        return launched

    monkeypatch.setattr(DeviceRunner, "launch_ahead", launch_ahead)
    return seen


def switching(model: EagleModel, **more: Any) -> RolloutEngine:
    """Off while more than 3 of 5 samples run."""
    spec = learned(profile=TREE, sharpness=1.5, enable_below=3)
    params = [SamplingParams(temperature=0.9, max_tokens=n, seed=3, ignore_eos=True) for n in (60, 5, 30, 22, 50)]
    prompts = [*PROMPTS, [11]]
    engine = engine_with(model, speculation=spec)
    spy = Spy(engine, more["spied"]) if more else None
    assert tokens(engine.generate(prompts, params)) == cpu_tokens(model, prompts, params)
    assert engine.stats()["speculation_switches"] == 1
    engine.check_integrity()
    if spy is not None:
        check(spy, model, rows=40)
    return engine


def test_switched_off_and_on_by_load(model: EagleModel, ahead: list[int]) -> None:
    """While off, steps are plain and launched ahead."""
    engine = switching(model)
    assert len(ahead) > 10 and max(ahead) >= 4
    assert drafting(engine)["steps"] > 10 and drafting(engine)["refused"] == {}


def test_rings_are_kept_while_off(model: EagleModel, monkeypatch: pytest.MonkeyPatch, ahead: list[int]) -> None:
    """By the device, for steps ahead: what the host drafts from them afterwards has the logits of its definition."""
    monkeypatch.setattr(DeviceRunner, "_drafts_for", lambda self, lanes, rows: None)
    switching(model, spied=monkeypatch)
    assert len(ahead) > 10


def test_sabotage_rings_not_kept_while_off_are_seen(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticDraft, "store", lambda self, seats, committed, hidden: None)
    with pytest.raises(AssertionError, match="not close"):
        test_rings_are_kept_while_off(model, monkeypatch, [0] * 11)


def test_any_drafter_is_switched_on_behind_a_step_ahead(ahead: list[int]) -> None:
    """That step was launched without the host, whose lengths of its samples are those of steps before."""
    spec = replace(FREE, enable_below=3)
    params = [SamplingParams(temperature=0.9, max_tokens=n, seed=3, ignore_eos=True) for n in (60, 5, 30, 22, 50)]
    prompts = [*PROMPTS, [11]]
    engine = tiny_engine(speculation=spec)
    with cpu_runner():
        expected = tokens(tiny_engine(speculation=spec).generate(prompts, params))
    assert tokens(engine.generate(prompts, params)) == expected
    assert engine.stats()["speculation_switches"] == 1 and len(ahead) > 10
    engine.check_integrity()


def test_requests_without_speculation_ride_ahead(model: EagleModel, ahead: list[int]) -> None:
    engine = engine_with(model)
    params = SamplingParams(temperature=0.9, max_tokens=30, seed=3, ignore_eos=True)
    assert tokens(engine.generate(PROMPTS, params, speculate=False)) == cpu_tokens(model, PROMPTS, params)
    assert len(ahead) > 15


def test_preemption(model: EagleModel) -> None:
    prompts = [list(range(i, i + 25)) for i in range(8)]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    engine = engine_with(model, num_pages=60, max_num_batched_tokens=40)
    assert tokens(stepped(engine, prompts, params)) == cpu_tokens(model, prompts, params)
    assert engine.stats()["preemptions"] > 0 and drafting(engine)["steps"] > 5


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_new_weights_under_drafts_in_flight(model: EagleModel, in_flight: str) -> None:
    new = {name: t.clone() for name, t in shared_hf(seed=5, **MODEL).state_dict().items()}
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=1)

    def run(engine: RolloutEngine) -> tuple[list[int], int]:
        engine.add_request([1, 2, 3], params)
        while len(next(iter(engine._core.samples.values())).output.token_ids) < 12:
            engine.step()
        at = len(next(iter(engine._core.samples.values())).output.token_ids)
        engine.update_weights(new, in_flight=in_flight)
        while not (outputs := engine.step()):
            pass
        return outputs[0].outputs[0].token_ids, at

    mine = engine_with(model)
    got, at = run(mine)
    with cpu_runner():
        want, same = run(engine_with(model))
    assert (got, at) == (want, same) and len(got) == 40 and drafting(mine)["steps"] > 5


def test_up_to_the_end_of_the_context(model: EagleModel) -> None:
    """No tree, and so no walk, reaches behind the last token that there is room for."""
    mine, plain, engine = both(model, replace(STOPS, n=1, max_tokens=200, stop_token_ids=None), max_model_len=48)
    assert mine == plain and drafting(engine)["steps"] > 3


@pytest.mark.parametrize("letters_stop", [["zz", "q"]])
def test_stop_strings_are_seen_one_step_late(model: EagleModel, letters: Any, letters_stop: list[str]) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=40, seed=4, stop=letters_stop), SamplingParams(
        max_tokens=40, seed=5)]
    mine, plain, engine = both(model, params, [[1, 2, 3], [4, 5]], tokenizer=letters)
    assert mine == plain and drafting(engine)["steps"] > 3


@pytest.mark.parametrize(
    "kind", [{"top_p": 0.8}, {"repetition_penalty": 1.3}, {"min_tokens": 8}, {"logprobs": 2}, {"raw_logprobs": True,
             "logprobs": 0}]
)
def test_what_the_host_must_draft_is_counted(model: EagleModel, kind: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "seed": 4, **kind})
    mine, plain, engine = both(model, params, [[1, 2, 3], [4, 5]])
    assert mine == plain
    report = drafting(engine)
    assert report["refused"]["requests with more than a temperature"] > 3
    assert report["steps"] == 0 or kind == {"min_tokens": 8}


def test_more_stop_ids_than_a_seat_holds(model: EagleModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=4, stop_token_ids=list(range(40, 60)))
    mine, plain, engine = both(model, params, [[1, 2, 3]])
    assert mine == plain and drafting(engine)["steps"] == 0
    assert any("stop ids" in reason for reason in drafting(engine)["refused"])


def test_a_recorder_comes_while_the_device_drafts(model: EagleModel) -> None:
    """It joins and leaves between two verifications; the first row is of the pass that was at work when it came."""
    engine, recorder = engine_with(model), Recorder()
    params = SamplingParams(temperature=1.0, max_tokens=50, seed=4, ignore_eos=True)
    engine.add_request([1, 2, 3], params)
    for _ in range(4):
        engine.step()
    before = drafting(engine)["steps"]
    engine.record_hidden(recorder)
    while not (outputs := engine.step()):
        pass
    assert tokens(outputs) == cpu_tokens(model, [[1, 2, 3]], params)
    steps = engine.stats()["steps"]
    assert before > 0 and steps - drafting(engine)["steps"] < 6, drafting(engine)
    first = min(recorder.done[0][1])
    assert 3 <= first < 20
    check_rows(recorder, [first])


def test_no_memory_for_the_drafters_graphs(model: EagleModel) -> None:
    """The target's are captured first; the drafter's kernels then run one by one, and are counted."""
    expected = cpu_tokens(model, PROMPTS[:1], STOPS)
    with emulation(memory=3):
        engine = engine_with(model)
        assert tokens(engine.generate(PROMPTS[:1], STOPS)) == expected
        report = engine.stats()["graphs"]
    assert report["drafting"]["steps"] > 0 and report["eager_steps"]["no memory for the graph"] > 0


def test_captured_up_front_on_whatever_lies_in_the_results(model: EagleModel) -> None:
    """The walk that the graphs will read is then another layout's bytes: no index may come of them, and no lane."""
    engine = engine_with(model)
    runner, drafter = engine._core.runner, engine._core.drafter
    assert isinstance(runner, DeviceRunner) and isinstance(drafter, EagleDrafter)
    engine.generate(PROMPTS[:2], STOPS)
    runner._results._device.fill_(0x3F)
    lanes = drafter._lanes
    before = lanes.kv.data[:, :, : lanes.dummy_slot // lanes.kv.page_size].clone(), lanes.ring.clone()
    engine.release_graphs()
    engine.capture_graphs()
    after = lanes.kv.data[:, :, : lanes.dummy_slot // lanes.kv.page_size], lanes.ring
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    counts = engine.stats()["graphs"]["buckets"].items()
    names = {name.split(" for ")[0] for name, bucket in counts if bucket["captures"] > 0}
    assert {"extend 1x4", "extend 4x4", "draft 1x3x3", "draft 4x3x3"} <= names


def test_sabotage_a_capture_on_seats_in_use_is_seen(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceDrafting, "_unseat", lambda self: None)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        test_captured_up_front_on_whatever_lies_in_the_results(model)


@pytest.mark.parametrize("verify", [6, 32])
def test_the_graph_of_the_smallest_batch(model: EagleModel, verify: int) -> None:
    """A drafter's graph computes all of its bucket's requests; rows alone would choose 96 x 1 for 3 trees of 32."""
    with emulation(buckets=default_buckets(96, verify, full=True)):
        engine = engine_with(model, Profile(3, 8, verify), max_num_seqs=96)
        runner = engine._core.runner
        assert isinstance(runner, DeviceRunner) and runner._drafting is not None
        for requests in range(1, 97):
            key = runner._drafting.key(requests)
            held = [b for b in (1, 2, 4, 8, 16, 32, 48, 64, 96) if b >= requests]
            if key is None:
                assert requests * verify > 256 or held[0] * verify > 256
            else:
                assert key.rows >= requests * verify
                assert key.batch == held[0] or held[0] * verify > 256, "there is no graph of that batch"
        assert runner._drafting.key(3) == GraphKey(4, verify)


def test_no_drafts_in_the_large_graphs_of_plain_steps(model: EagleModel) -> None:
    """20 trees of 16 nodes are 320 rows: a graph of 384 x 1 would hold them, drafted as 384 requests."""
    buckets = default_buckets(512, 16, 1, full=True)
    assert GraphKey(384, 1) in buckets.keys
    with emulation(buckets=buckets):
        runner = engine_with(model, Profile(3, 8, 16), max_num_seqs=512)._core.runner
        assert isinstance(runner, DeviceRunner) and runner._drafting is not None
        assert runner._drafting.key(16) == GraphKey(16, 16)
        assert runner._drafting.key(20) is None
        assert runner._drafting._static.batch <= 256


def test_bytes_are_reported(model: EagleModel) -> None:
    engine = engine_with(model)
    with cpu_runner():
        plain = engine_with(model)
    assert engine.stats()["memory"]["drafter"] > plain.stats()["memory"]["drafter"]


# ---------------------------------------------------------------- what must be seen


class Sabotage:
    @staticmethod
    def pages_given_back(patch: pytest.MonkeyPatch) -> None:
        honest = core.Scheduler.commit
        patch.setattr(core.Scheduler, "commit", lambda self, decode, kept, flying=False: honest(self, decode, kept))

    @staticmethod
    def drafted_for_the_root_before(patch: pytest.MonkeyPatch) -> None:
        honest = StaticDraft.draft
        patch.setattr(StaticDraft, "draft", lambda self, seats, committed, roots: honest(
            self, seats, committed, (roots + 1) % 64
        ))

    @staticmethod
    def noise_of_the_wrong_owner(patch: pytest.MonkeyPatch) -> None:
        honest = DeviceDrafting._pack_by_torch

        def pack(self: Any, ground: Any) -> None:
            honest(self, ground)
            keys = ground.frame["keys"]
            keys.copy_(keys.roll(1))

        patch.setattr(DeviceDrafting, "_pack_by_torch", pack)

    @staticmethod
    def seats_of_the_samples_before(patch: pytest.MonkeyPatch) -> None:
        honest = DeviceDrafting._seat
        patch.setattr(DeviceDrafting, "_seat", lambda self, samples, *rest: honest(self, samples[::-1], *rest))

    @staticmethod
    def lanes_not_followed(patch: pytest.MonkeyPatch) -> None:
        """The next step's host would catch up from hidden states that were never handed out."""
        patch.setattr(EagleDrafter, "extended", lambda self, seq_id, stop: None)

    @staticmethod
    def ends_unknown(patch: pytest.MonkeyPatch) -> None:
        """Trees, and so walks, reach behind the last token that there is room for."""
        honest = DeviceDrafting._seat

        def seat(self: Any, *args: Any) -> None:
            honest(self, *args)
            self._seats.end.fill_(10**6)

        patch.setattr(DeviceDrafting, "_seat", seat)

    @staticmethod
    def drafts_not_observed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(EngineCore, "_tell_drafter", lambda self, samples, drafted: None)


@pytest.mark.parametrize("sabotage", [n for n in vars(Sabotage) if not n.startswith("_")])
def test_sabotage_is_seen(model: EagleModel, monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    spec = learned(profile=TREE)  # chances that follow what is observed
    params = replace(STOPS, n=1, max_tokens=200, stop_token_ids=None)
    where = {"speculation": spec, "max_model_len": 48}
    with cpu_runner():
        plain = engine_with(model, **where)
        expected = traces(plain, stepped(plain, PROMPTS, params))
    getattr(Sabotage, sabotage)(monkeypatch)
    try:
        engine = engine_with(model, **where)
        got = traces(engine, stepped(engine, PROMPTS, params))
    except (AssertionError, ValueError, IndexError, RuntimeError):
        return
    assert got != expected
