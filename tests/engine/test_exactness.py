"""The promise: tokens do not depend on drafter, batch, schedule or siblings (cases B, C, G, I)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.engines import OFF, greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import DraftTree, EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6, list(range(20, 45))]
MODEL_FREE = SpeculationConfig(profile=Profile(6, 3, 12), min_chance=0.0)


def drafters(prompts, expected):
    known = {tuple(p): dict(enumerate(samples)) for p, samples in zip(prompts, expected)}
    return {
        "replay": ReplayDrafter(known, error_rate=0.2, depth=6),
        "replay-tree": ReplayDrafter(known, error_rate=0.3, depth=5, shape="tree", width=3),
        "adversarial": AdversarialDrafter(64, eos_ids=(3,)),
        "always-wrong": AdversarialDrafter(64, continuations=known),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_are_the_same_for_every_drafter(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, n=3, seed=7, stop_token_ids=[3])
    expected = plain_outputs(PROMPTS, params)
    for name, drafter in drafters(PROMPTS, expected).items():
        engine = tiny_engine(drafter=drafter)
        assert tokens(engine.generate(PROMPTS, params)) == expected, name
        engine.check_integrity()
        if name.startswith("replay"):
            assert drafter.mean_accepted > 1
        if name == "always-wrong":
            assert drafter.mean_accepted == 0
    assert tokens(tiny_engine(speculation=MODEL_FREE).generate(PROMPTS, params)) == expected


def test_p0_equal_output_hides_no_drafter_fault(monkeypatch):
    """Sabotage: a walk that follows the first child whatever its token emits drafts the target never drew."""
    from tlt_engine.engine import runner

    params = SamplingParams(max_tokens=30, seed=7)
    expected = plain_outputs(PROMPTS, params)
    honest = runner.verify_tree

    def trusting(sampled, trees):
        forged = sampled.clone()
        parents = trees.parents.tolist()
        starts = trees.node_indptr.tolist()
        for start, end in pairwise(starts):
            for i in range(start + 1, end):
                forged[start + parents[i]] = trees.tokens[i]
        return honest(forged, trees)

    monkeypatch.setattr(runner, "verify_tree", trusting)
    assert tokens(tiny_engine(drafter=AdversarialDrafter(64)).generate(PROMPTS, params)) != expected


def test_c01_tokens_depend_on_neither_batch_nor_order_nor_history():
    params = SamplingParams(max_tokens=24, seed=7)
    alone = plain_outputs([PROMPTS[0]], params)[0]
    engine = tiny_engine()
    assert tokens(engine.generate(PROMPTS, params))[0] == alone
    assert tokens(engine.generate(PROMPTS[::-1], params))[-1] == alone
    engine.generate([[i, i + 1] for i in range(10)], SamplingParams(max_tokens=5, seed=1))
    assert tokens(engine.generate([PROMPTS[0]], params))[0] == alone
    assert plain_outputs([PROMPTS[0]], replace(params, seed=8))[0] != alone


def test_c02_unseeded_requests_leave_seeded_ones_alone():
    seeds = [None, 1, None, 2]
    for temperature in (0.1, 0.0):
        params = [SamplingParams(temperature=temperature, max_tokens=20, seed=s) for s in seeds]
        outs = tokens(tiny_engine().generate(PROMPTS, params))
        for i in (1, 3) if temperature else range(4):
            assert outs[i] == plain_outputs([PROMPTS[i]], params[i])[0]


def test_c03_samples_of_one_prompt_differ_and_repeat():
    params = SamplingParams(n=4, max_tokens=16, seed=42)
    before = repr(params)
    first, again = (plain_outputs([PROMPTS[0]], params)[0] for _ in range(2))
    assert first == again and repr(params) == before
    assert len({tuple(o) for o in first}) == 4
    assert plain_outputs([PROMPTS[0]], replace(params, n=1))[0][0] == first[0]
    assert plain_outputs([PROMPTS[0]], replace(params, n=1, sample_index=2))[0][0] == first[2]


def test_b02_every_row_has_its_own_parameters():
    kinds = [
        SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=1e-6),
        SamplingParams(temperature=0.7, top_k=3), SamplingParams(min_p=0.9),
    ]
    params = [replace(p, seed=5, max_tokens=20) for p in kinds]
    prompts = [[i + 1, i + 2, i + 3] for i in range(6)]
    solo = [plain_outputs([p], s)[0] for p, s in zip(prompts, params)]
    for i in (0, 2, 3):
        assert solo[i] == plain_outputs([prompts[i]], greedy(20))[0]
    known = {tuple(p): {0: out[0]} for p, out in zip(prompts, solo)}
    order = [3, 1, 5, 0, 4, 2]
    engine = tiny_engine(drafter=ReplayDrafter(known, error_rate=0.3, depth=4))
    assert tokens(engine.generate(prompts, params)) == solo
    shuffled = engine.generate([prompts[i] for i in order], [params[i] for i in order])
    assert tokens(shuffled) == [solo[i] for i in order]


def scripted(rows: dict[int, list[float]] | list[float], vocab: int = 8) -> RolloutEngine | object:
    """A target whose logits are log p of `rows` whatever the prefix: all layers and the embedding are silent, so
    the head sees a constant vector."""
    hf = shared_hf("qwen2", vocab_size=vocab, num_hidden_layers=1)
    import copy

    model = copy.deepcopy(hf)
    with torch.no_grad():
        for p in model.model.layers.parameters():
            p.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0 / float(model.config.hidden_size) ** 0.5
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.log(torch.tensor(rows))
    return model


def draws(model, params, drafter=None, count=6000, length=3):
    config = EngineConfig(
        speculation=SpeculationConfig(method="custom", profile=Profile(3, 4, 8)) if drafter else OFF,
        max_num_seqs=512, num_pages=4096,
    )
    engine = RolloutEngine(model, config, drafter=drafter)
    outs = engine.generate([[1, 2]], replace(params, n=count, max_tokens=length, seed=11, ignore_eos=True))[0]
    return np.array([o.token_ids for o in outs.outputs])


class Fixed(ReplayDrafter):
    """Always proposes the same siblings at every level."""

    def __init__(self, siblings):
        super().__init__({})
        self.siblings = siblings

    def tree(self, context):
        levels = min(3, context.max_depth)
        tokens_, parents = [context.token_ids[-1]], [-1]
        for _ in range(levels):
            parents += [len(tokens_) - 1 if len(tokens_) > 1 else 0] * len(self.siblings)
            tokens_ += self.siblings
        fits = min(len(tokens_), context.max_nodes)
        return DraftTree(tuple(tokens_[:fits]), tuple(parents[:fits]))


@pytest.mark.parametrize("siblings", [[2], [1, 2], [0], [3, 2]])
def test_b01_b09_b18_marginals_are_the_targets(siblings):
    p = [0.5, 0.3, 0.15, 0.05]
    got = draws(scripted(p, vocab=4), SamplingParams(), Fixed(siblings))
    for position in range(got.shape[1]):
        counts = np.bincount(got[:, position], minlength=4)
        assert stats.chisquare(counts, np.array(p) * len(got)).pvalue > 1e-4
    assert len({tuple(row) for row in got}) > 10


def test_b03_min_p_holds_at_every_position_of_a_block():
    got = draws(scripted([0.6, 0.3, 0.06, 0.04], vocab=4), SamplingParams(min_p=0.2), Fixed([2, 3]))
    assert set(np.unique(got)) == {0, 1}
    counts = np.bincount(got.ravel(), minlength=2)
    assert stats.chisquare(counts, np.array([2 / 3, 1 / 3]) * got.size).pvalue > 1e-4


def test_b15_allowed_ids_hold_at_every_position():
    p = [0.2, 0.1, 0.3, 0.1, 0.1, 0.05, 0.05, 0.1]
    params = SamplingParams(allowed_token_ids=[1, 5, 7])
    got = draws(scripted(p), params, Fixed([2, 3]))
    assert set(np.unique(got)) == {1, 5, 7}
    counts = np.bincount(got.ravel(), minlength=8)[[1, 5, 7]]
    assert stats.chisquare(counts, np.array([0.1, 0.05, 0.1]) / 0.25 * got.size).pvalue > 1e-4
    cold = draws(scripted(p), replace(params, temperature=0.0), Fixed([2, 3]), count=2)
    assert set(np.unique(cold)) == {1}
    with pytest.raises(ValueError, match="allowed_token_ids: expected at least one id"):
        SamplingParams(allowed_token_ids=[])


def test_b04_penalties_under_speculation_are_transformers():
    hf = shared_hf()
    prompt = [5, 6, 7, 8]
    reference = hf.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.5, pad_token_id=0
    )[0, 4:].tolist()
    params = greedy(24, repetition_penalty=1.5)
    assert plain_outputs([prompt], params)[0][0] == reference
    for drafter in drafters([prompt], [[reference]]).values():
        assert tokens(tiny_engine(drafter=drafter).generate([prompt], params))[0][0] == reference


def test_b06_a_penalty_sees_its_own_branch_only():
    """Siblings 3 and 4 under the root; presence_penalty 2: each child's row penalises its own parent."""
    params = SamplingParams(temperature=0.0, max_tokens=3, presence_penalty=2.0)
    p = [0.05, 0.05, 0.1, 0.3, 0.3, 0.1, 0.05, 0.05]
    plain = draws(scripted(p), params, count=1, length=6)
    tree = draws(scripted(p), params, Fixed([4, 3]), count=1, length=6)
    assert plain.tolist() == tree.tolist()
    # Greedy over 0.3, 0.3, 0.1, 0.1 ...: each id drops by e^-2 once emitted, so the next best differs each time.
    assert plain[0].tolist()[:4] == [3, 4, 2, 5]


def test_b17_requests_with_and_without_drafts_in_one_step():
    repetitive = [[7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8], [1, 1, 1, 1, 1], [2, 3, 2, 3, 2, 3, 2], [5, 6, 5, 6, 5]]
    distinct = [list(range(10, 20)), list(range(20, 31)), [40, 41], [50]]
    prompts = repetitive + distinct
    random.Random(0).shuffle(prompts)
    params = greedy(16)
    engine = tiny_engine(speculation=MODEL_FREE)
    assert tokens(engine.generate(prompts, params)) == [plain_outputs([p], params)[0] for p in prompts]
    counts = engine.stats()
    assert counts["decode_rows"] == counts["decode_passes"] + counts["drafted_tokens"]
    assert counts["drafted_tokens"] > 0


def test_e05_padding_ids_are_never_emitted(letters):
    hf = shared_hf(vocab_size=72)
    import copy

    model = copy.deepcopy(hf)
    with torch.no_grad():
        model.lm_head.weight[64:] = model.lm_head.weight[:8] * 3  # padding rows that often win
    params = SamplingParams(max_tokens=40, n=4, seed=3)
    raw = RolloutEngine(model, EngineConfig(speculation=OFF)).generate([[1, 2, 3]], params)[0]
    assert max(max(o.token_ids) for o in raw.outputs) >= 64
    engine = RolloutEngine(model, EngineConfig(speculation=OFF), tokenizer=letters)
    masked = engine.generate([[1, 2, 3]], params)[0]
    assert max(max(o.token_ids) for o in masked.outputs) < 64
    out = masked.outputs[0]
    logits = engine.next_logits([1, 2, 3])
    assert out.sampled_logprobs[0] == pytest.approx(
        torch.log_softmax(logits[:64], -1)[out.token_ids[0]].item(), abs=1e-5
    )


def test_e06_ids_outside_the_vocabulary_are_refused():
    engine = tiny_engine()
    for bad in ([1, 64], [-1], [2**31], [1.5], [True]):
        with pytest.raises(ValueError, match=r"prompts\[1\]\["):
            engine.generate([[1], bad], greedy(2))
    assert len(engine.generate([[63]], greedy(2))[0].outputs[0].token_ids) == 2
    assert not engine.has_unfinished()
