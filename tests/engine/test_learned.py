"""The learned drafter in the engine: every logit that it drafts from is the one of its definition, whatever happened to
the sample before, and the tokens are those of plain decoding.

Equal output would hide any fault of a drafter, so what is compared is what it computed (tests/eagle.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eagle import Spy, draft_logits, random_drafter
from tests.engine.emulated import emulation
from tests.engine.engines import plain_outputs, shared_hf, tiny_engine, tokens
from tests.tiny import tiny_target
from tlt_engine import Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.device import DeviceRunner
from tlt_engine.models.eagle import EagleModel
from tlt_engine.models.eagle_checkpoint import export_drafter
from tlt_engine.models.rope import RopeConfig

MODEL = {"num_hidden_layers": 3}
PROMPTS = [[5, 9, 2], [7] * 9, list(range(30)), [11], [3, 4]]
PARAMS = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
PROFILE = Profile(depth=4, top_k=3, verify=12)

# Tolerance: fp32 sums of 32 to 96 terms in another order, through one layer.
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


def learned(**overrides: Any) -> SpeculationConfig:
    """sharpness fixed: what is drafted for one sample must not depend on what came true for others."""
    shape = {"profile": PROFILE, "min_chance": 0.0, "sharpness": 1.5}
    return SpeculationConfig(**{"method": "learned", **shape, **overrides})


def engine_with(
    drafter: EagleModel | Path, speculation: SpeculationConfig | None = None, **config: Any
) -> RolloutEngine:
    return tiny_engine(model=MODEL, drafter=drafter, speculation=speculation or learned(), **config)


def check(spy: Spy, model: EagleModel, rows: int = 12) -> None:
    """Some recorded rows against the definition, spread over the run, the last ones among them."""
    target = model.target
    assert len(spy.rows) > rows
    for row in [*spy.rows[:: len(spy.rows) // rows], *spy.rows[-3:]]:
        expected = draft_logits(model, target, row.ids, row.branch, row.origin)
        torch.testing.assert_close(row.logits, expected, **CLOSE)


SHAPES: dict[str, dict[str, Any]] = {
    "window": {"window": 6},
    "all": {"window": None},
    "reduced": {"window": 6, "draft_vocab_size": 24},
    "eagle1": {"window": 5, "kind": "eagle1"},
    "other heads": {"window": 7, "num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "rope": RopeConfig(rotary_dim=16)},
    "narrow": {"window": 6, "hidden_size": 24, "draft_vocab_size": 64},
    "one entry": {"window": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_draft_logits_are_the_definitions(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(**MODEL)
    model = random_drafter(target, **SHAPES[shape])
    engine = engine_with(model, max_num_batched_tokens=11)
    spy = Spy(engine, monkeypatch)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert tokens(outputs) == plain_outputs(PROMPTS, PARAMS, model=MODEL)
    check(spy, model)
    assert engine.stats()["drafter"]["lanes"] == 0
    engine.check_integrity()


def test_on_the_devices_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states come from graphs' buffers there, and the next step is drafted before the last one's outputs. By the
    host: what the device drafts is tests/engine/test_drafting.py's."""
    monkeypatch.setattr(DeviceRunner, "draft_on_device", lambda self, drafter: None)
    model = random_drafter(tiny_target(**MODEL), window=6)
    on_host = engine_with(model).generate(PROMPTS, PARAMS)
    with emulation():
        engine = engine_with(model)
        spy = Spy(engine, monkeypatch)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert tokens(outputs) == tokens(on_host)
        assert [o.outputs[0].spec for o in outputs] == [o.outputs[0].spec for o in on_host]
        assert engine.stats()["graphs"] is not None
        check(spy, model)


class Drift:
    """Ways to be wrong that no output shows."""

    @staticmethod
    def hidden_of_the_layer_above(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        take = drafter._lanes.take
        patch.setattr(drafter._lanes, "take", lambda rows, layers: take(rows, (1, 2, 3)))
        drafter.hidden_layers = (0, 1, 2, 3)  # captured, for (0, 1, 2)

    @staticmethod
    def token_of_the_entry_itself(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        entries = drafter._entries

        def shifted(contexts: Any, spans: Any) -> Any:
            return entries([replace(c, token_ids=[0, *c.token_ids]) for c in contexts], spans)

        patch.setattr(drafter, "_entries", shifted)

    @staticmethod
    def tree_nodes_one_position_late(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        level = drafter._pass.level

        def late(beam: Any, *args: Any) -> Any:
            beam.position = beam.position + (beam.depth == 0)
            return level(beam, *args)

        patch.setattr(drafter._pass, "level", late)

    @staticmethod
    def keys_not_rolled_back(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        """G02: what a tree wrote counts as committed."""
        extend = drafter._lanes.extend

        def zombie(seq_id: int, tokens: int) -> Any:
            lane = drafter._lanes._lanes.get(seq_id)
            if lane is not None and lane.kv_end > lane.origin:
                lane.kv_end = min(lane.kv_end + 3, tokens - 1)
            return extend(seq_id, tokens)

        patch.setattr(drafter._lanes, "extend", zombie)


@pytest.mark.parametrize("fault", [n for n in vars(Drift) if not n.startswith("_")])
def test_the_check_sees_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_drafter(tiny_target(**MODEL), window=6)
    engine = engine_with(model)
    getattr(Drift, fault)(engine._core.drafter, monkeypatch)
    engine._core._capture()
    spy = Spy(engine, monkeypatch)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert tokens(outputs) == plain_outputs(PROMPTS, PARAMS, model=MODEL), "a wrong drafter is slow, never wrong"
    with pytest.raises(AssertionError, match="not close"):
        check(spy, model, rows=60)


def test_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, num_pages=22)
    spy = Spy(engine, monkeypatch)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert tokens(outputs) == plain_outputs(PROMPTS, PARAMS, model=MODEL)
    assert engine.stats()["preemptions"] > 0
    check(spy, model, rows=24)
    engine.check_integrity()


def test_forks_share_what_the_first_sample_has_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(30))
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, enable_prefix_caching=False)
    spy = Spy(engine, monkeypatch)
    params = SamplingParams(n=4, max_tokens=12, seed=3, ignore_eos=True)
    outputs = engine.generate([prompt], params)
    assert tokens(outputs) == plain_outputs([prompt], params, model=MODEL)
    assert engine.stats()["forks"] == 3
    first_looks = [row for row in spy.rows if len(row.ids) == 30 and not row.branch]
    assert len(first_looks) == 4 and all(row.origin <= 29 - 9 for row in first_looks)
    check(spy, model)


def test_a_fork_from_a_sample_that_has_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats for two: the third sample forks when one has ended, from a sibling whose ring has moved on."""
    prompt = list(range(12))
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, enable_prefix_caching=False, max_num_seqs=2)
    spy = Spy(engine, monkeypatch)
    stop = plain_outputs([prompt], SamplingParams(n=2, max_tokens=6, seed=3, ignore_eos=True), model=MODEL)[0][1][3]
    params = SamplingParams(n=3, max_tokens=20, seed=3, ignore_eos=True, stop_token_ids=[stop])
    outputs = engine.generate([prompt], params)
    assert tokens(outputs) == plain_outputs([prompt], params, model=MODEL)
    assert engine.stats()["forks"] == 2
    check(spy, model)


def test_a_prefix_from_the_cache_is_unknown_to_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(30))
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model)
    engine.generate([prompt], SamplingParams(max_tokens=4, seed=3, ignore_eos=True))
    spy = Spy(engine, monkeypatch)
    longer = [*prompt, 40, 41]
    outputs = engine.generate([longer], PARAMS)
    assert tokens(outputs) == plain_outputs([longer], PARAMS, model=MODEL)
    assert {row.origin for row in spy.rows} == {28}  # 7 full pages of 4
    check(spy, model)


def test_lanes_follow_their_samples_whatever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """G07: samples end in another order than they came, new ones join; each is drafted for as if it were alone."""
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, max_num_seqs=3)
    spy = Spy(engine, monkeypatch)
    params = [SamplingParams(max_tokens=n, seed=3, ignore_eos=True) for n in (23, 5, 14, 9, 17)]
    together = engine.generate(PROMPTS, params)
    alone = [engine_with(model).generate([p], q)[0] for p, q in zip(PROMPTS, params)]
    for ours, solo in zip(together, alone):
        assert ours.outputs[0].token_ids == solo.outputs[0].token_ids
        assert ours.outputs[0].spec == solo.outputs[0].spec
    check(spy, model)


# ---------------------------------------------------------------- off and on again


def test_off_keeps_the_ring_and_on_needs_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, learned(enable_below=2))
    spy = Spy(engine, monkeypatch)
    params = [SamplingParams(max_tokens=n, seed=3, ignore_eos=True) for n in (60, 5, 30, 9, 50)]
    outputs = engine.generate(PROMPTS, params)
    assert tokens(outputs) == [plain_outputs([p], q, model=MODEL)[0] for p, q in zip(PROMPTS, params)]
    stats = engine.stats()
    assert stats["speculation_switches"] == 1 and stats["speculating"]
    assert stats["prefill_tokens"] == sum(len(p) - 1 for p in PROMPTS), "no token's KV was computed twice"
    assert max(spy.entries) == 9, "the first draft caught up over the window, no further"
    assert min(len(row.ids) for row in spy.rows) > 30, "drafted before three of five had ended"
    check(spy, model)


def test_nothing_is_drafted_above_the_threshold() -> None:
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model, learned(enable_below=4))
    engine.generate(PROMPTS, PARAMS)
    assert engine.stats()["drafted_tokens"] == 0 and not engine.stats()["speculating"]
    engine.generate(PROMPTS[:4], PARAMS)
    assert engine.stats()["drafted_tokens"] > 0 and engine.stats()["speculation_switches"] == 1


# ---------------------------------------------------------------- swaps and updates


def test_a_swap_in_flight_drafts_with_the_new_weights_from_kept_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(**MODEL)
    old, new = random_drafter(target, 0, window=9), random_drafter(target, 1, window=9)
    engine = engine_with(old)
    spy = Spy(engine, monkeypatch)
    ids = [engine.add_request(p, PARAMS) for p in PROMPTS]
    done = []
    for _ in range(5):
        done += engine.step()
    addresses = [t.data_ptr() for _, t in engine._core.drafter.model.named_tensors()]
    prefilled = engine.stats()["prefill_tokens"]
    check(spy, old)
    spy.rows.clear()
    assert engine.update_drafter({name: t.detach() for name, t in new.named_tensors()}, version="b") == "b"
    assert [t.data_ptr() for _, t in engine._core.drafter.model.named_tensors()] == addresses
    while engine.has_unfinished():
        done += engine.step()
    check(spy, new)
    assert engine.stats()["prefill_tokens"] == prefilled
    by_id = {o.request_id: o for o in done}
    assert [[by_id[i].outputs[0].token_ids] for i in ids] == plain_outputs(PROMPTS, PARAMS, model=MODEL)
    assert all([s.version for s in by_id[i].outputs[0].drafter_versions] in (["0", "b"], ["b"]) for i in ids)
    assert any([s.version for s in by_id[i].outputs[0].drafter_versions] == ["0", "b"] for i in ids)


def test_the_engines_drafter_is_a_copy() -> None:
    target = tiny_target(**MODEL)
    model = random_drafter(target, window=9)
    engine = engine_with(model, enable_prefix_caching=False)
    before = engine.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        model.qkv.zero_()
    after = engine.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].spec for o in before] == [o.outputs[0].spec for o in after]


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_an_update_of_the_target_leaves_the_drafter_alone_and_is_seen_by_it(
    in_flight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H03, H04: the drafter's own tensors stay, what it shares is the new target's, and so are the hidden states."""
    target = tiny_target(**MODEL, tie_word_embeddings=True)
    model = random_drafter(target, window=9)
    engine = tiny_engine(
        model={**MODEL, "tie_word_embeddings": True}, drafter=model, speculation=learned(), enable_prefix_caching=False
    )
    own = engine._core.drafter.model
    before = [t.detach().clone() for _, t in own.named_tensors()]
    spy = Spy(engine, monkeypatch)
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    for _ in range(6):
        engine.step()
    new = shared_hf("llama", 7, **MODEL, tie_word_embeddings=True).state_dict()
    engine.update_weights(new, in_flight=in_flight)
    spy.rows.clear()
    while engine.has_unfinished():
        engine.step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, own.named_tensors()))
    assert own.embedding.data_ptr() == engine.model.weights.embed.data_ptr()
    target.load_weights({name: t for name, t in new.items() if name in target.weights.names})
    if in_flight == "recompute":
        check(spy, model)
    else:  # hidden states and KV of mixed policies, as the caller asked; only the logits' source can be compared
        assert len(spy.rows) > 20 and all(row.logits.isfinite().all() for row in spy.rows)
    engine.check_integrity()


# ---------------------------------------------------------------- limits


def test_beyond_its_positions_a_drafter_proposes_nothing() -> None:
    """A15: the target goes on, the long sample without drafts, the short one as if alone."""
    target = tiny_target(**MODEL)
    model = random_drafter(target, window=9, max_position_embeddings=32)
    engine = engine_with(model)
    short, long = [5] * 4, list(range(60))
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    outputs = engine.generate([short, long], params)
    assert tokens(outputs) == plain_outputs([short, long], params, model=MODEL)
    assert outputs[1].outputs[0].spec.drafted == 0
    alone = engine_with(model).generate([short], params)[0].outputs[0].spec
    assert outputs[0].outputs[0].spec == alone and alone.drafted > 0
    # 33 tokens: the last entry stands at 31, the last position; its children need no entry.
    drafted = sum(alone.drafted_per_position)
    assert drafted < alone.passes * PROFILE.depth


def test_samples_reach_the_drafters_limit_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level is computed for all requests; some have no position left for it."""
    model = random_drafter(tiny_target(**MODEL), window=9, max_position_embeddings=32)
    engine = engine_with(model)
    spy = Spy(engine, monkeypatch)
    prompts = [[5] * n for n in (4, 9, 12, 20)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    assert tokens(outputs) == plain_outputs(
        prompts, SamplingParams(max_tokens=40, seed=3, ignore_eos=True), model=MODEL
    )
    spy.rows = [row for row in spy.rows if len(row.ids) + len(row.branch) <= 33]
    check(spy, model, rows=20)


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
def test_a_drafters_folder_serves_as_the_drafter_does(form: str, tmp_path: Path) -> None:
    model = random_drafter(tiny_target(**MODEL), window=9, draft_vocab_size=40)
    folder = export_drafter(model, tmp_path / "drafter", to=form)
    outputs = engine_with(folder, enable_prefix_caching=False).generate(PROMPTS, PARAMS)
    again = engine_with(model, enable_prefix_caching=False).generate(PROMPTS, PARAMS)
    assert [o.outputs[0].spec for o in outputs] == [o.outputs[0].spec for o in again]


def test_prompts_of_one_token_begin_with_the_first_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A17: no entry for a prompt of one token; the first is (hidden of 0, token 1)."""
    model = random_drafter(tiny_target(**MODEL), window=9)
    engine = engine_with(model)
    spy = Spy(engine, monkeypatch)
    outputs = engine.generate([[11], [4, 6], list(range(40))], PARAMS)
    assert tokens(outputs) == plain_outputs([[11], [4, 6], list(range(40))], PARAMS, model=MODEL)
    first = [row for row in spy.rows if len(row.ids) == 2 and not row.branch]
    assert len(first) == 2 and all(row.origin == 0 for row in first)
    check(spy, model, rows=40)


def test_what_an_engine_cannot_serve_is_refused() -> None:
    model = random_drafter(tiny_target(**MODEL), window=9)
    with pytest.raises(ValueError, match=r"an EagleModel or its folder exactly when.*method='learned'"):
        tiny_engine(model=MODEL, drafter=model, speculation=SpeculationConfig(method="custom"))
    with pytest.raises(ValueError, match=r"an EagleModel or its folder exactly when.*pass drafter="):
        tiny_engine(model=MODEL, speculation=learned())
    with pytest.raises(ValueError, match="vocab_size"):
        tiny_engine(model={**MODEL, "vocab_size": 60}, drafter=model, speculation=learned())
    engine = engine_with(model)
    with pytest.raises(ValueError, match=r"fc.weight missing"):
        engine.update_drafter({})
    assert engine.stats()["drafter"]["version"] == "0"
    with pytest.raises(ValueError, match="method='learned'"):
        tiny_engine().update_drafter(model)
