"""Hidden states of committed tokens, as the engine hands them out: the right rows of the right positions, once each,
and nothing of what was not kept. Compared with transformers' on the finished text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import tlt_engine.engine.core as core_module
from tests.drafters import ReplayDrafter
from tests.eagle import random_drafter
from tests.engine.emulated import emulation
from tests.engine.engines import plain_outputs, shared_hf, tiny_engine
from tests.tiny import tiny_target
from tlt_engine import Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.device import DeviceRunner
from tlt_engine.engine.hidden import Kept
from tlt_engine.speculation.hidden import HiddenRows

LAYERS = (0, 1, 3)
MODEL = {"num_hidden_layers": 3}


class Recorder:
    """rows: {seq_id: {position: [layers, H]}} of samples in flight. done: (token ids, rows) of those that ended."""

    hidden_layers = LAYERS

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, Tensor]] = {}
        self.done: list[tuple[list[int], dict[int, Tensor]]] = []
        self.discarded: list[int] = []
        self.policies: list[str] = []
        self.forks: list[tuple[int, int, int]] = []
        self.again = 0

    def take(self, rows: HiddenRows) -> None:
        for run in rows.runs:
            known = self.rows.setdefault(run.seq_id, {})
            for i, row in enumerate(run.rows):
                self.again += run.first + i in known
                known[run.first + i] = torch.stack([rows.hidden[layer][row] for layer in LAYERS]).clone()

    def fork(self, source: int, seq_id: int, length: int) -> None:
        self.forks.append((source, seq_id, length))

    def finish(self, seq_id: int, token_ids: list[int]) -> None:
        self.done.append((list(token_ids), self.rows.pop(seq_id)))

    def discard(self, seq_id: int) -> None:
        self.discarded.append(seq_id)
        self.rows.pop(seq_id, None)

    def new_policy(self, label: str) -> None:
        self.policies.append(label)


def engine_with(recorder: Recorder, **config: Any) -> RolloutEngine:
    engine = tiny_engine(model=MODEL, **config)
    engine._core.attach(recorder)
    return engine


def expected(ids: list[int], seed: int = 0) -> Tensor:
    """[n, layers, H]: transformers' hidden states. Its last one stands behind the final norm: ours is before it."""
    model = shared_hf("llama", seed, **MODEL)
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return torch.stack([(last[0] if layer == 3 else states[layer])[0] for layer in LAYERS], 1)


def check(recorder: Recorder, starts: list[int] | None = None) -> None:
    """Every finished sample has the hidden states of its positions but the last, from its start on. starts: sorted
    first positions, 0 for all by default."""
    found = sorted(min(rows) for _, rows in recorder.done)
    assert found == (starts or [0] * len(recorder.done))
    for ids, rows in recorder.done:
        first = min(rows)
        assert sorted(rows) == list(range(first, len(ids) - 1)), "one row a position, none behind the last kept token"
        ours = torch.stack([rows[p] for p in sorted(rows)])
        torch.testing.assert_close(ours, expected(ids)[first : len(ids) - 1], atol=3e-5, rtol=1e-4)


PROMPTS = [[5, 9, 2], [7] * 9, list(range(30)), [11]]
PARAMS = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)


def replay(prompts: list[list[int]], params: SamplingParams, error_rate: float = 0.2) -> ReplayDrafter:
    told = plain_outputs(prompts, params, model=MODEL)
    known = {tuple(p): dict(enumerate(outputs)) for p, outputs in zip(prompts, told)}
    return ReplayDrafter(known, error_rate=error_rate, depth=5, width=3, shape="tree")


Make = Callable[..., RolloutEngine]


@contextmanager
def place(name: str) -> Iterator[None]:
    with emulation() if name == "device" else nullcontext():
        yield


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("drafted", [False, True])
def test_rows_are_transformers_hidden_states(where: str, drafted: bool) -> None:
    with place(where):
        recorder = Recorder()
        engine = engine_with(recorder, drafter=replay(PROMPTS, PARAMS) if drafted else None, max_num_batched_tokens=11)
        engine.generate(PROMPTS, PARAMS)
        assert len(recorder.done) == len(PROMPTS) and not recorder.rows and not recorder.again
        if drafted:
            assert engine.stats()["accept_length"] > 2
        check(recorder)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_nothing_behind_a_stop(where: str) -> None:
    """The drafts go past the stop and are right, so the pass accepts them; they are cut off afterwards."""
    told = plain_outputs(PROMPTS, PARAMS, model=MODEL)
    stops = sorted({outputs[0][7] for outputs in told})
    with place(where):
        recorder = Recorder()
        engine = engine_with(recorder, drafter=replay(PROMPTS, PARAMS, error_rate=0.0))
        params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, stop_token_ids=stops)
        outputs = engine.generate(PROMPTS, params)
        assert all(len(o.outputs[0].token_ids) <= 8 for o in outputs)
        assert engine.stats()["accept_length"] > 2
        check(recorder)


def test_preempted_samples_are_computed_again_and_no_position_is_lost() -> None:
    recorder = Recorder()
    engine = engine_with(recorder, drafter=replay(PROMPTS, PARAMS), num_pages=22, enable_prefix_caching=False)
    engine.generate(PROMPTS, PARAMS)
    assert engine.stats()["preemptions"] > 0 and recorder.again > 0
    check(recorder)


def test_forks_and_prefix_hits_start_where_their_own_passes_do() -> None:
    prompt = list(range(30))
    recorder = Recorder()
    engine = engine_with(recorder)
    engine.generate([prompt], SamplingParams(n=3, max_tokens=8, seed=1, ignore_eos=True))
    check(recorder, [0, 29, 29])
    recorder.done.clear()
    engine.generate([[*prompt, 40, 41, 42]], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    check(recorder, [28])  # 7 full pages of 4


def test_scores_and_aborted_samples_are_left_out() -> None:
    recorder = Recorder()
    engine = engine_with(recorder)
    engine.score([5, 9, 2], [1, 2, 3])
    assert not recorder.done and not recorder.rows
    request = engine.add_request([5, 9, 2], SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert recorder.rows
    engine.abort(request)
    assert not recorder.rows and not recorder.done and len(recorder.discarded) == 1


def test_new_weights_give_new_hidden_states_and_a_new_policy() -> None:
    recorder = Recorder()
    engine = engine_with(recorder)
    engine.add_request([5, 9, 2], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.update_weights(shared_hf("llama", 7, **MODEL).state_dict(), weight_version="7")
    while engine.has_unfinished():
        engine.step()
    assert recorder.policies == ["7"] and recorder.again > 0
    ids, rows = recorder.done[0]
    assert sorted(rows) == list(range(len(ids) - 1))
    ours = torch.stack([rows[p] for p in sorted(rows)])
    torch.testing.assert_close(ours, expected(ids, seed=7)[:-1], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_drafter_and_a_recorder_take_what_each_needs(where: str) -> None:
    drafter = random_drafter(tiny_target(**MODEL), window=6, aux_layers=(2,))
    spec = SpeculationConfig(method="learned", profile=Profile(3, 3, 8), min_chance=0.0)
    with place(where):
        recorder = Recorder()
        engine = engine_with(recorder, drafter=drafter, speculation=spec)
        assert engine._core.runner.capture == (0, 1, 2, 3)
        engine.generate(PROMPTS, PARAMS)
        assert len(recorder.done) == len(PROMPTS) and engine.stats()["accepted_tokens"] > 0
        check(recorder)
        if where == "device":  # and neither keeps the other from it
            assert engine.stats()["graphs"]["drafting"]["steps"] > engine.stats()["steps"] // 2


@pytest.mark.parametrize("drafts", [True, False])
def test_rows_that_the_pass_behind_has_overwritten_are_seen(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ahead, plain ones or drafted on the device: without the copy a recorder gets the next pass's rows."""
    model = random_drafter(tiny_target(**MODEL), window=6, aux_layers=(2,)) if drafts else None
    spec = SpeculationConfig(method="learned" if drafts else "off", profile=Profile(3, 3, 8), min_chance=0.0)
    for sabotaged in (False, True):
        if sabotaged:
            monkeypatch.setattr(DeviceRunner, "_keep_hidden", lambda *args: None)
        with emulation():
            recorder = Recorder()
            engine_with(recorder, drafter=model, speculation=spec).generate(PROMPTS, PARAMS)
        with pytest.raises(AssertionError) if sabotaged else nullcontext():
            check(recorder)


def test_capture_ends_with_the_last_recorder() -> None:
    first, second = Recorder(), Recorder()
    engine = engine_with(first)
    engine._core.attach(second)
    engine._core.detach(first)
    engine.generate([[5, 9, 2]], PARAMS)
    assert not first.done and len(second.done) == 1
    engine._core.detach(second)
    assert engine._core.runner.capture == ()


def wrong_root(kept: Kept) -> Kept:
    return Kept(kept.sample, kept.rows, kept.root + 1, kept.count)


def one_behind_the_stop(kept: Kept) -> Kept:
    return Kept(kept.sample, kept.rows, kept.root, kept.count + 1)


@pytest.mark.parametrize("fault", [wrong_root, one_behind_the_stop])
def test_the_check_sees_faults(fault: Callable[[Kept], Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    right = core_module.hidden_rows
    monkeypatch.setattr(core_module, "hidden_rows", lambda p, kept, chunks: right(p, [fault(k) for k in kept], chunks))
    with pytest.raises(AssertionError):
        test_nothing_behind_a_stop("cpu")
