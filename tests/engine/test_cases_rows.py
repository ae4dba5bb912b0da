"""Cases that no other file holds: marginals under odd drafters, slot ownership, changing profiles, frozen drafters."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tlt_kernels import NoiseIds, gumbel_noise

from tests.drafters import AdversarialDrafter, CopyDrafter, RecordingDrafter, ReplayDrafter, hashed
from tests.engine.engines import OFF, greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tests.engine.test_exactness import draws, scripted
from tests.tiny import hf_logits, prefill_logits, tiny_target
from tlt_engine import DraftContext, DraftTree, EngineConfig, RolloutEngine, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6, list(range(20, 45))]
P = [0.4, 0.3, 0.2, 0.1]


def noise(context: DraftContext, depth: int, vocab: int) -> np.ndarray:
    """The noise that the target will use for a child of a node at `depth`."""
    identity = (context.key, len(context.token_ids) + depth, context.sample, context.segment)
    return gumbel_noise(NoiseIds(*(torch.tensor([x]) for x in identity)), vocab)[0].numpy()


class Drawing(RecordingDrafter):
    """Chains drawn from q: with noise of its own, or with the target's."""

    def __init__(self, q: list[float], shared: bool) -> None:
        super().__init__()
        self.q, self.shared = np.array(q), shared

    def tree(self, context: DraftContext) -> DraftTree:
        drafts = []
        for depth in range(min(3, context.max_depth)):
            if self.shared:
                with np.errstate(divide="ignore"):
                    drafts.append(int(np.argmax(np.log(self.q) + noise(context, depth, len(self.q)))))
            else:
                u = hashed(context.sample, len(context.token_ids), depth) / 2**64
                drafts.append(int(np.searchsorted(np.cumsum(self.q), u, side="right").clip(0, len(self.q) - 1)))
        return DraftTree.chain(context.token_ids[-1], drafts[: context.max_nodes - 1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("q", [[4 / 7, 3 / 7, 0.0, 0.0], [0.1, 0.15, 0.35, 0.4]])
def test_b07_b10_marginals_hold_whatever_the_drafter_draws_from(q, shared):
    """B07: drafts from a cut q' give [.571, .429, 0, 0] if it is taken for q. B10: drafts with the target's own noise
    give [.426, .275, .199, .1] under a rejection rule that draws again with it."""
    got = draws(scripted(P, vocab=4), SamplingParams(), Drawing(q, shared), count=5000)
    counts = np.stack([np.bincount(got[:, position], minlength=4) for position in range(got.shape[1])])
    for row in counts:
        assert stats.chisquare(row, np.array(P) * len(got)).pvalue > 1e-4
    for biased in ([4 / 7, 3 / 7, 1e-9, 1e-9], [0.426, 0.275, 0.199, 0.1]):
        assert stats.chisquare(counts.sum(0), np.array(biased) / sum(biased) * got.size).pvalue < 1e-6


# ---------------------------------------------------------------- slots


def watch_slots(engine: RolloutEngine) -> None:
    """After each step: KV has changed only on pages that a running request owned alone during the step."""
    scheduler, data = engine._core.scheduler, engine._core.runner.kv.data
    honest_schedule, honest_step = scheduler.schedule, engine._core.step
    own: set[int] = set()

    def schedule(max_nodes: Any) -> Any:
        batch = honest_schedule(max_nodes)
        own.clear()
        for seq in (*(d.seq for d in batch.decodes), *(c.seq for c in batch.chunks)):
            own.update(page for page in seq.pages if scheduler.pool.holders(page) == 1)
        return batch

    def step() -> bool:
        before = data.clone()
        ran = honest_step()
        changed = (data != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
        assert set(changed) <= own, f"pages {sorted(set(changed) - own)} were written by nobody who owns them"
        return ran

    scheduler.schedule, engine._core.step = schedule, step


@pytest.mark.parametrize("page_size", [4, 16])
def test_g04_every_written_slot_belongs_to_its_request(page_size):
    for length in (page_size - 1, page_size, page_size + 1):
        prompts = [[i % 60 + 1 for i in range(length)], [i % 50 + 7 for i in range(length + 2)]]
        params = SamplingParams(n=2, max_tokens=9, seed=1)
        engine = tiny_engine(drafter=AdversarialDrafter(64), page_size=page_size)
        engine.generate([prompts[0]], params)  # leaves pages in the prefix cache, which nobody may write to
        watch_slots(engine)
        assert tokens(engine.generate(prompts, params)) == plain_outputs(prompts, params)


def test_g04_sabotage_a_slot_on_a_foreign_page_is_seen(monkeypatch):
    from tlt_engine.models import transformer

    honest = transformer.Transformer.forward

    def forward(self, step, kv, **more):
        out = honest(self, step, kv, **more)
        kv.data[:, :, -1] += 1  # the pool's last page: never handed out here
        return out

    engine = tiny_engine(drafter=AdversarialDrafter(64))
    watch_slots(engine)
    monkeypatch.setattr(transformer.Transformer, "forward", forward)
    with pytest.raises(AssertionError, match="written by nobody who owns them"):
        engine.generate(PROMPTS, greedy(4))


class Switching(ReplayDrafter):
    """Another profile at every step: a wide tree, a short chain, nothing, a tree of all that is allowed."""

    def tree(self, context: DraftContext) -> DraftTree:
        turn = hashed(context.sample, len(context.token_ids)) % 4
        if turn == 3:
            return AdversarialDrafter(64, continuations=self.continuations).tree(context)
        if turn == 2:
            return DraftTree.root(context.token_ids[-1])
        self.depth, self.width = ((8, 4), (2, 1))[turn]
        return super().tree(context)


@pytest.mark.parametrize("num_pages", [None, 24])
def test_i02_profiles_that_change_at_every_step(num_pages):
    params = SamplingParams(max_tokens=30, seed=3, n=2)
    expected = plain_outputs(PROMPTS, params)
    known = {tuple(p): dict(enumerate(out)) for p, out in zip(PROMPTS, expected)}
    drafter = Switching(known, error_rate=0.2, shape="tree", width=4)
    engine = tiny_engine(drafter=drafter, num_pages=num_pages, max_model_len=64)
    watch_slots(engine)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, request_id=str(i))
    done: dict[str, Any] = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step()}
        engine.check_integrity()
    assert [tokens([done[str(i)]])[0] for i in range(4)] == expected
    assert {1, 3} < {n for rows in drafter.rows.values() for n in rows}
    assert engine.stats()["accepted_tokens"] > 40
    assert (engine.stats()["preemptions"] > 0) == (num_pages is not None)


# ---------------------------------------------------------------- weights


def checksum(model: Any) -> list[float]:
    return [float(t.double().sum()) for _, t in model.named_weights()]


def test_h03_an_update_of_the_target_leaves_a_frozen_drafter_alone():
    """The drafter is a model of its own with the target's names. It is right at every depth while the target has the
    same weights, before the update and after a second one that restores them."""
    frozen = tiny_target()
    before = checksum(frozen)
    drafter = CopyDrafter(lambda ids, _: int(prefill_logits(frozen, list(ids))[0][-1].argmax()), depth=4)
    engine = tiny_engine(drafter=drafter)
    old, new = (dict(shared_hf("llama", seed).state_dict()) for seed in (0, 99))

    def accept_length() -> float:
        return engine.generate([PROMPTS[1]], greedy(20))[0].outputs[0].spec.accept_length

    assert accept_length() == 5.0
    engine.update_weights(new)
    assert accept_length() < 2 and checksum(frozen) == before
    assert tokens(engine.generate(PROMPTS, greedy(9))) == plain_outputs(PROMPTS, greedy(9), model_seed=99)
    engine.update_weights(old)
    assert accept_length() == 5.0 and checksum(frozen) == before


def test_h06_log_probabilities_after_an_update_are_those_of_a_fresh_engine():
    params = SamplingParams(max_tokens=12, seed=3)
    engine = tiny_engine()
    engine.generate(PROMPTS, params)
    scaled = {n: t * 1.5 if "layers.1.mlp.down" in n else t for n, t in shared_hf().state_dict().items()}
    engine.update_weights(scaled)
    hits = engine.stats()["prefix_hit_tokens"]
    got = engine.generate(PROMPTS, params)
    model = copy.deepcopy(shared_hf())
    model.load_state_dict(scaled)
    fresh = RolloutEngine(model, EngineConfig(speculation=OFF, page_size=4)).generate(PROMPTS, params)
    assert tokens(got) == tokens(fresh) and engine.stats()["prefix_hit_tokens"] == hits
    for a, b in zip(got, fresh):
        assert a.outputs[0].sampled_logprobs == pytest.approx(b.outputs[0].sampled_logprobs, abs=1e-5)


def test_h08_a_refused_update_changes_neither_weights_nor_version():
    engine = tiny_engine()
    state = dict(shared_hf("llama", 99).state_dict())
    engine.add_request(PROMPTS[0], greedy(12), request_id="a")
    engine.step()
    name = "model.layers.1.self_attn.q_proj.weight"
    for bad in (
        {f"module.{n}": t for n, t in state.items()}, {**state, name: state[name][:5]},
        {**state, "no.such": torch.ones(1)}, {n: t for n, t in state.items() if n != name},
        {**state, name: state[name].numpy()}, {}, {**state, name: state[name].to("meta")},
        {**state, name: state[name].to_sparse()}, {**state, name: state[name].char()},
        {**state, name: state[name].to(torch.complex64)},
    ):
        with pytest.raises(ValueError, match="weights: expected"):
            engine.update_weights(bad, weight_version="never")
    done = []
    while engine.has_unfinished():
        done += engine.step()
    out = done[0].outputs[0]
    assert out.token_ids == plain_outputs([PROMPTS[0]], greedy(12))[0][0] and out.noise.segment == 0
    assert engine.weight_version == "0" and [s.version for s in out.weight_versions] == ["0"]
    engine.update_weights({n: t.double() for n, t in state.items()})  # master weights of another dtype are cast
    assert tokens(engine.generate(PROMPTS, greedy(9))) == plain_outputs(PROMPTS, greedy(9), model_seed=99)


# ---------------------------------------------------------------- seeds and the rest


def test_n06_sampling_defaults_of_a_model_are_not_taken():
    plain, preset = copy.deepcopy(shared_hf()), copy.deepcopy(shared_hf())
    for name, value in {"top_p": 0.8, "top_k": 5, "temperature": 0.3, "repetition_penalty": 1.3}.items():
        setattr(preset.generation_config, name, value)
    preset.generation_config.do_sample = True
    params = SamplingParams(max_tokens=24, seed=4)
    outs = [RolloutEngine(m, EngineConfig(speculation=OFF)).generate(PROMPTS, params) for m in (plain, preset)]
    assert tokens(outs[0]) == tokens(outs[1])
    filtered = replace(params, top_p=0.8, repetition_penalty=1.3)
    assert tokens(outs[0]) != plain_outputs(PROMPTS, filtered), "the settings would have shown"


def test_n01_successive_sample_indices_end_at_the_last_one():
    params = SamplingParams(max_tokens=3, seed=1, sample_index=2**32 - 2)
    engine = tiny_engine()
    assert len({tuple(o[0]) for o in tokens(engine.generate([[1], [1]], params))}) == 2
    with pytest.raises(ValueError, match="sample_index: expected at most"):
        engine.generate([[1]] * 3, params)
    assert not engine.has_unfinished()


def test_a12_stop_strings_may_start_but_not_end_within_min_tokens(letters):
    whole = plain_outputs([PROMPTS[0]], greedy(12))[0][0]
    text = "".join(letters.letter(t) for t in whole)
    params = greedy(12, stop=[text[1:4]])
    for min_tokens in (0, 1, 2, 3, 4):
        engine = tiny_engine(tokenizer=letters)
        out = engine.generate([PROMPTS[0]], replace(params, min_tokens=min_tokens))[0].outputs[0]
        cut = engine.generate([PROMPTS[0]], replace(params, min_tokens=min_tokens), token_quota=3)
        resumed = engine.resume(cut)[0].outputs[0]
        assert (resumed.text, resumed.token_ids) == (out.text, out.token_ids), "a cut forgets no part of the rule"
        at = text.find(text[1:4], max(min_tokens - 3 + 1, 0))
        assert out.text == (text if at < 0 else text[:at])
        assert len(out.token_ids) == (12 if at < 0 else at + 3)


def test_a04_stops_given_twice_nested_and_included(letters):
    params = SamplingParams(max_tokens=12, seed=17)
    whole = plain_outputs([PROMPTS[0]], params)[0][0]
    text = "".join(letters.letter(t) for t in whole)
    assert len(set(text[:7])) == 7, "the strings below are to occur once"
    inner, outer = text[3:5], text[2:6]
    known = {tuple(PROMPTS[0]): {0: whole}}
    for stops, kept, shown in (
        ([inner, inner], 5, 3), ([outer, inner], 5, 3), ([inner, outer], 5, 3), ([text[4:5], inner], 5, 3),
    ):
        for drafter in (None, ReplayDrafter(known, depth=8)):
            engine = tiny_engine(drafter=drafter, tokenizer=letters)
            out = engine.generate([PROMPTS[0]], replace(params, stop=stops))[0].outputs[0]
            assert len(out.token_ids) == kept and out.text == text[:shown]
            included = replace(params, stop=stops, include_stop_str_in_output=True)
            assert engine.generate([PROMPTS[0]], included)[0].outputs[0].text == text[:kept]


def test_k07_a_trainer_in_another_thread_keeps_its_gradients():
    """Rollouts run without gradients; that must not leak into a thread that trains meanwhile, nor the reverse."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=12, seed=1)
    expected = plain_outputs(PROMPTS, params)
    model = copy.deepcopy(shared_hf())
    running, losses = threading.Event(), []
    running.set()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while running.is_set() or len(losses) < 3:
            loss = model(torch.tensor([PROMPTS[3]])).logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    for _ in range(5):
        assert tokens(engine.generate(PROMPTS, params)) == expected
    running.clear()
    trainer.join(60)
    assert not trainer.is_alive() and losses[-1] < losses[0]
    assert torch.allclose(engine.next_logits(PROMPTS[0]), hf_logits(shared_hf(), PROMPTS[0])[-1], atol=1e-4)
