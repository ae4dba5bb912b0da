"""Stops and lengths (cases A): whatever a block holds, the output ends where plain decoding ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.drafters import AdversarialDrafter, RecordingDrafter, ReplayDrafter
from tests.engine.engines import greedy, plain_outputs, tiny_engine, tokens
from tlt_engine import DraftContext, DraftTree, Profile, SamplingParams, SpeculationConfig

PROMPT = [5, 6, 7, 8, 9]
SHAPES = [("chain", 4, 1), ("chain", 8, 1), ("tree", 8, 3)]


def plain(max_tokens: int = 32, **params):
    return plain_outputs([PROMPT], greedy(max_tokens, **params))[0][0]


def replay(output, shape="chain", depth=4, width=1, **more):
    return ReplayDrafter({tuple(PROMPT): {0: output}}, depth=depth, shape=shape, width=width, **more)


def run(drafter, params, **engine):
    engine_ = tiny_engine(drafter=drafter, **engine)
    result = engine_.generate([PROMPT], params)[0].outputs[0]
    engine_.check_integrity()
    return result


@pytest.mark.parametrize(("shape", "depth", "width"), SHAPES)
def test_a01_eos_inside_a_block_ends_the_output(shape, depth, width):
    whole = plain()
    for index in range(10):
        token = whole[index]
        end = whole.index(token) + 1
        drafter = replay(whole, shape, depth, width)
        out = run(drafter, greedy(32, stop_token_ids=[token]))
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole[:end], "stop", token)
        assert len(out.sampled_logprobs) == end
        assert drafter.mean_accepted > 0 or end <= 2, "the drafter was never believed: the case tests nothing"


def test_a01_eos_from_the_model_has_no_stop_reason():
    whole = plain()
    engine = tiny_engine(drafter=replay(whole, depth=8))
    engine._core.runner.eos_ids = frozenset([whole[5]])
    out = engine.generate([PROMPT], greedy())[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole[: whole.index(whole[5]) + 1], "stop", None)
    ignored = engine.generate([PROMPT], greedy(ignore_eos=True))[0].outputs[0]
    assert ignored.token_ids == whole


def test_a02_drafted_eos_that_the_target_rejects_ends_nothing():
    whole = plain()
    eos = next(t for t in range(64) if t not in whole)

    class DraftsEos(RecordingDrafter):
        def tree(self, context: DraftContext) -> DraftTree:
            return DraftTree.chain(context.token_ids[-1], [eos, eos][: context.max_depth])

    drafter = DraftsEos()
    out = run(drafter, greedy(stop_token_ids=[eos]))
    assert (out.token_ids, out.finish_reason) == (whole, "length")
    assert drafter.mean_accepted == 0


def test_a03_accept_counts_leave_out_what_lies_behind_the_stop():
    whole = plain()
    stop = next(i for i in range(2, 20) if whole[i] not in whole[:i])
    drafter = replay(whole[:stop] + whole[stop:], depth=5)
    # Blocks of 6: find a stop in the middle of one by offering the drafter only from token stop - 2 on.
    offered = {tuple(PROMPT): {0: whole}}

    class Late(ReplayDrafter):
        def tree(self, context: DraftContext) -> DraftTree:
            done = len(context.token_ids) - context.prompt_len
            return super().tree(context) if done == stop - 2 else DraftTree.root(context.token_ids[-1])

    drafter = Late(offered, depth=5)
    out = run(drafter, greedy(stop_token_ids=[whole[stop]]))
    assert out.token_ids == whole[: stop + 1]
    # The block [d1, d2, STOP, d4, d5, bonus] committed 3 drafts and no bonus token.
    assert out.spec.accepted == 3
    assert out.spec.emitted == stop + 1
    assert out.spec.passes == stop - 1
    assert out.spec.accepted_per_position == [1, 1, 1, 0, 0]
    assert out.spec.drafted_per_position == [1, 1, 1, 1, 1]


def test_a05_a_stop_inside_the_budget_wins_over_the_budget():
    whole = plain()
    index = next(i for i in range(2, 20) if whole[i] not in whole[:i])
    cases = ((index + 3, index + 1, "stop"), (index + 1, index + 1, "stop"), (index, index, "length"))
    for limit, length, reason in cases:
        out = run(replay(whole, depth=8), greedy(limit, stop_token_ids=[whole[index]]))
        assert (len(out.token_ids), out.finish_reason) == (length, reason)


@pytest.mark.parametrize("limit", range(1, 10))
def test_a06_exactly_max_tokens_whatever_the_block(limit):
    whole = plain()
    out = run(replay(whole, depth=4), greedy(limit))
    assert out.token_ids == whole[:limit]
    assert len(out.sampled_logprobs) == out.spec.emitted == limit
    assert out.finish_reason == "length"


def test_a11_no_eos_and_the_model_free_drafter():
    prompt = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    config = SpeculationConfig(profile=Profile(depth=3, top_k=1, verify=4), min_chance=0.0)
    out = tiny_engine(speculation=config).generate([prompt], greedy(15))[0].outputs[0]
    assert [[out.token_ids]] == plain_outputs([prompt], greedy(15))
    assert len(out.token_ids) == 15


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a12_min_tokens_counts_tokens_not_steps(depth):
    eos = 3
    params = greedy(20, min_tokens=4, stop_token_ids=[eos], logit_bias={eos: 100.0})
    expected = plain_outputs([PROMPT], params)[0][0]
    assert len(expected) == 5 and expected[4] == eos and eos not in expected[:4]
    drafter = ReplayDrafter({tuple(PROMPT): {0: expected}}, depth=depth)
    assert run(drafter, params).token_ids == expected
    wrong = ReplayDrafter({tuple(PROMPT): {0: [eos] * 20}}, depth=depth)
    assert run(wrong, params).token_ids == expected
    assert drafter.mean_accepted > 0


def test_a13_look_ahead_stops_at_the_context_end():
    prompt = list(range(1, 21))
    whole = plain_outputs([prompt], greedy(100), max_model_len=200)[0][0]
    for drafter in (
        ReplayDrafter({tuple(prompt): {0: whole}}, depth=8, shape="tree", width=2),
        AdversarialDrafter(64),
    ):
        engine = tiny_engine(drafter=drafter, max_model_len=32, num_pages=8)
        out = engine.generate([prompt], greedy(100))[0].outputs[0]
        assert (out.token_ids, out.finish_reason) == (whole[:12], "length")
        engine.check_integrity()


def test_a15_a_drafter_with_a_short_window_drafts_nothing_beyond_it():
    prompts = [list(range(1, 21)), list(range(1, 61))]
    params = greedy(8)
    expected = plain_outputs(prompts, params)

    class Windowed(ReplayDrafter):
        def tree(self, context: DraftContext) -> DraftTree:
            if len(context.token_ids) > 32:
                return DraftTree.root(context.token_ids[-1])
            return super().tree(context)

    known = {tuple(p): {0: out[0]} for p, out in zip(prompts, expected)}
    alone, together = Windowed(known), Windowed(known)
    short = tiny_engine(drafter=alone).generate([prompts[0]], params)[0].outputs[0]
    outs = tiny_engine(drafter=together).generate(prompts, params)
    assert tokens(outs) == expected
    assert outs[0].outputs[0].spec == short.spec and short.spec.accepted > 0
    assert outs[1].outputs[0].spec.drafted == 0


def test_a16_an_empty_prompt_is_refused_and_harms_nobody():
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at least one token"):
        engine.generate([[], [1, 2, 3]], greedy(5))
    assert not engine.has_unfinished()
    assert tokens(engine.generate([[1, 2, 3]], greedy(5))) == plain_outputs([[1, 2, 3]], greedy(5))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a17_short_prompts(length):
    prompts = [[7] * length, list(range(1, 41))]
    expected = plain_outputs(prompts, greedy(10))
    config = SpeculationConfig(profile=Profile(4, 2, 8), min_chance=0.0)
    assert tokens(tiny_engine(speculation=config).generate(prompts, greedy(10))) == expected
    known = {tuple(p): {0: out[0]} for p, out in zip(prompts, expected)}
    drafter = ReplayDrafter(known, depth=4)
    assert tokens(tiny_engine(drafter=drafter).generate(prompts, greedy(10))) == expected
    assert drafter.mean_accepted > 2, "the first draft must already be used"


def test_a18_tokens_behind_the_stop_are_not_in_the_prefix_cache():
    whole = plain()
    stop = next(i for i in range(4, 20) if whole[i] not in whole[:i])
    engine = tiny_engine(drafter=replay(whole, depth=8), page_size=1)
    first = engine.generate([PROMPT], greedy(stop_token_ids=[whole[stop]]))[0].outputs[0]
    follow_up = PROMPT + first.token_ids + [9, 9]
    hits = engine.stats()["prefix_hit_tokens"]
    out = engine.generate([follow_up], greedy(8))
    assert tokens(out) == plain_outputs([follow_up], greedy(8))
    assert 0 < engine.stats()["prefix_hit_tokens"] - hits <= len(PROMPT) + len(first.token_ids)
    longer = PROMPT + whole[: stop + 4]  # what the block computed beyond the stop
    hits = engine.stats()["prefix_hit_tokens"]
    engine.generate([longer], greedy(1))
    assert engine.stats()["prefix_hit_tokens"] - hits <= len(PROMPT) + len(first.token_ids)


def test_a19_a_stateful_processor_sees_committed_prefixes_only():
    allowed = {0: [1, 2], 1: [3, 4], 2: [5, 6], 3: [7, 8], 4: [9]}
    calls: list[tuple[int, ...]] = []

    def processor(output, logits):
        assert len(output) < 5, "called after its end"
        assert all(t in allowed[i] for i, t in enumerate(output)), "called with a draft that was never accepted"
        calls.append(tuple(output))
        barred = logits.clone()
        barred[:] = float("-inf")
        barred[allowed[len(output)]] = logits[allowed[len(output)]]
        return barred

    params = greedy(20, stop_token_ids=[9], logits_processor=processor)
    expected = plain_outputs([PROMPT], params)[0][0]
    assert len(expected) == 5 and len(calls) == 5
    for known in ([expected[0], 63, *expected[2:]], expected, [60] * 5):
        calls.clear()
        assert run(ReplayDrafter({tuple(PROMPT): {0: known}}, depth=4), params).token_ids == expected
        assert calls == [tuple(expected[:i]) for i in range(5)]


def test_a04_stop_strings_inside_and_across_blocks(letters):
    whole = plain(24)
    text = "".join(letters.letter(t) for t in whole)
    for start, size in ((0, 2), (1, 3), (3, 4), (6, 2)):
        stop = text[start : start + size]
        params = replace(greedy(24), stop=stop)
        expected_end = text.find(stop) + size
        results = []
        for drafter in (None, replay(whole, depth=8), replay(whole, depth=2), replay(whole, "tree", 6, 2)):
            engine = tiny_engine(drafter=drafter, tokenizer=letters)
            out = engine.generate([PROMPT], params)[0].outputs[0]
            engine.check_integrity()
            assert out.token_ids == whole[:expected_end]
            assert (out.finish_reason, out.stop_reason) == ("stop", stop)
            assert out.text == text[: expected_end - size]
            assert len(out.sampled_logprobs) == expected_end
            results.append(out.token_ids)
        kept = tiny_engine(tokenizer=letters).generate([PROMPT], replace(params, include_stop_str_in_output=True))
        assert kept[0].outputs[0].text == text[:expected_end]


def test_a04_a_token_that_holds_the_stop_and_more(letters):
    whole = plain(12)
    letters.names[whole[4]] = "xSTOPy"
    at = whole.index(whole[4])
    out = tiny_engine(drafter=replay(whole, depth=8), tokenizer=letters).generate([PROMPT], greedy(12, stop="STOP"))
    first = out[0].outputs[0]
    assert first.token_ids == whole[: at + 1]
    assert first.text == "".join(letters.letter(t) for t in whole[:at]) + "x"


def test_a02_sabotage_stopping_at_a_drafted_eos_is_noticed(monkeypatch):
    """An engine that looked at drafts instead of emitted tokens would fail test_a02."""
    from tlt_engine.engine import core as core_module

    whole = plain()
    eos = next(t for t in range(64) if t not in whole)
    honest = core_module.StopRule.after

    def at_drafts(self, sample, token):
        return core_module.Stop("stop") if sample.output.spec.drafted else honest(self, sample, token)

    monkeypatch.setattr(core_module.StopRule, "after", at_drafts)
    out = run(ReplayDrafter({tuple(PROMPT): {0: [eos] * 32}}, depth=2), greedy(stop_token_ids=[eos]))
    assert out.token_ids != whole


def test_bad_stop_settings_are_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"stop: expected stop_token_ids \(this engine has no tokenizer\)"):
        engine.generate([PROMPT], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match=r"stop_token_ids: expected ids in \[0, 64\), got 69"):
        engine.generate([PROMPT], SamplingParams(stop_token_ids=[69]))
