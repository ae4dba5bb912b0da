"""The model-free drafter: exact counts, legal trees, the request's own noise, memory, and text that was committed."""

from __future__ import annotations

import time
from array import array
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_kernels import NoiseIds, gumbel_noise, gumbel_noise_at

from bench.model_free_offline import loops, replay
from tlt_engine import _C
from tlt_engine.config import Profile, SamplingParams, SpeculationConfig
from tlt_engine.speculation.drafter import DraftContext
from tlt_engine.speculation.model_free import SHARPNESS, ModelFreeDrafter, _text_key

WIDE = SpeculationConfig(profile=Profile(6, 48, 128), min_chance=0.0)
COUNTED = _C.suffix_context + 1


def context(ids, prompt_len=1, seq_id=0, sample=0, key=99, max_nodes=128, max_depth=64, group="g", segment=0, **params):
    limits = {"max_tokens": None, **params}
    return DraftContext(
        seq_id, group, ids, prompt_len, key, sample, segment, SamplingParams(**limits), max_nodes, max_depth
    )


def address(numbers: array) -> int:
    return numbers.buffer_info()[0]


def count_in(pool, key: bytes, ids) -> int:
    needle = array("q", ids)
    return pool.occurrences(key, address(needle), len(needle))


def open_samples(pool, key: bytes, prompt, n: int) -> list[int]:
    ids, none = array("q", prompt), array("q", [0])
    return [pool.open(key, address(ids), len(ids), address(none), 0, address(none), 0) for _ in range(n)]


def feed(pool, handle: int, ids) -> None:
    handles, indptr, tokens = array("q", [handle]), array("q", [0, len(ids)]), array("q", ids)
    pool.append(address(handles), address(indptr), 1, address(tokens))


def brute_count(prompt, outputs, needle, prompt_times: int = 1) -> int:
    """Occurrences that end in the prompt, once, and those that end in each sample's output."""
    n = len(needle)

    def ends(text, start):
        return sum(text[e - n : e] == needle for e in range(max(start, n), len(text) + 1))

    return prompt_times * ends(prompt, 1) + sum(ends(prompt + out, len(prompt) + 1) for out in outputs)


# ---------------------------------------------------------------- the automaton

texts = st.lists(st.integers(0, 2), max_size=45)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(texts, min_size=1, max_size=4), st.randoms())
@settings(max_examples=120, deadline=None)
def test_counts_equal_brute_force_over_interleaved_strings(prompt, outputs, rng):
    pool = _C.SuffixPool(2**30, 1.0, 0.58, True)
    handles = open_samples(pool, b"p", prompt, len(outputs))
    left = [list(o) for o in outputs]
    while any(left):
        i = rng.choice([i for i, o in enumerate(left) if o])
        take = rng.randint(1, 5)
        feed(pool, handles[i], left[i][:take])
        del left[i][:take]
    for text in [prompt + o for o in outputs]:
        for _ in range(12):
            start = rng.randrange(len(text))
            needle = text[start : start + rng.randint(1, COUNTED)]
            assert count_in(pool, b"p", needle) == brute_count(prompt, outputs, needle)
    assert count_in(pool, b"p", [7]) == 0
    assert count_in(pool, b"q", [0]) == -1


def test_the_count_check_tells_a_prompt_counted_for_every_sample():
    pool = _C.SuffixPool(2**30, 1.0, 0.58, True)
    prompt, outputs = [1, 2, 1], [[2, 1], [2, 2]]
    for handle, out in zip(open_samples(pool, b"p", prompt, 2), outputs):
        feed(pool, handle, out)
    assert count_in(pool, b"p", [1, 2]) == brute_count(prompt, outputs, [1, 2]) == 3
    assert brute_count(prompt, outputs, [1, 2], prompt_times=2) != 3


def test_a_looped_output_is_fast_and_small():
    us, size = min(loops(16384) for _ in range(2))
    assert us < 50
    assert size < 200


# ---------------------------------------------------------------- trees


def fed_drafter(config, outputs, prompt=(0,), **how) -> ModelFreeDrafter:
    """A drafter that has seen finished samples of the prompt."""
    drafter = ModelFreeDrafter(config, **how)
    for i, out in enumerate(outputs):
        drafter.observe(context([*prompt, *out], len(prompt), seq_id=1000 + i), 0)
        drafter.finish(1000 + i)
    return drafter


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=5), st.lists(st.integers(0, 5), max_size=10),
    st.integers(1, 20), st.integers(0, 6), st.integers(1, 4), st.sampled_from([0.0, 0.05, 0.3]), st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_trees_are_legal_within_budgets_and_best_first(outputs, own, nodes, depth, top_k, min_chance, greedy):
    config = SpeculationConfig(profile=Profile(4, top_k, 16), min_chance=min_chance)
    drafter = fed_drafter(config, outputs)
    c = context([0, *own], max_nodes=nodes, max_depth=depth, temperature=0.0 if greedy else 1.0)
    ((tree, chances),) = drafter.propose_with_chances([c])  # DraftTree refuses orphans and equal siblings
    assert tree.tokens[0] == c.token_ids[-1]
    assert len(tree) <= min(nodes, 16)
    assert max(tree.depths) <= min(depth, 4)
    assert max((tree.parents.count(p) for p in range(len(tree))), default=0) <= top_k
    assert chances == sorted(chances, reverse=True)
    assert all(min_chance <= x <= 1 for x in chances[1:])
    assert drafter.propose([c]) == [tree]


def test_greedy_chances_are_the_mixture_and_leave_room_for_the_unseen():
    outputs = [[3, 4], [3, 4], [3, 4], [3, 5]]
    ((tree, chances),) = fed_drafter(WIDE, outputs).propose_with_chances([context([0, 3], temperature=0.0)])
    q = {t: x for t, p, x in zip(tree.tokens, tree.parents, chances) if p == 0}
    assert set(q) == {4, 5}
    assert q[4] > 2 * q[5] > 0
    assert 0.5 < q[4] + q[5] < 1


def noise_error(drafter, ids, truth: dict) -> float:
    """Largest error of log(chance_a / chance_b) = sharpness * (log q_a - log q_b + g_a - g_b) over siblings, the g's
    taken for the identity `truth`. q is read from the greedy proposal, which has no noise."""
    params = {"sample": 5, "key": -123456789, "segment": 2}
    ((tree, chances),) = drafter.propose_with_chances([context(ids, seq_id=1, **params)])
    ((plain, shares),) = drafter.propose_with_chances([context(ids, seq_id=2, **params, temperature=0.0)])

    def paths(t, values):
        out = {(): 1.0}
        names = [()]
        for token, parent, value in zip(t.tokens[1:], t.parents[1:], values[1:]):
            names.append((*names[parent], token))
            out[names[-1]] = value / values[parent]
        return out

    scored, q = paths(tree, chances), paths(plain, shares)
    common = [p for p in scored if p and p in q]
    identity = {**params, "shift": 0, **truth}

    def column(value):
        return torch.full((len(common),), value, dtype=torch.int64)

    positions = torch.tensor([len(ids) + len(p) - 1 + identity["shift"] for p in common])
    noise_ids = NoiseIds(column(identity["key"]), positions, column(identity["sample"]), column(identity["segment"]))
    g = gumbel_noise_at(noise_ids, torch.tensor([p[-1] for p in common]))
    score = {p: SHARPNESS * (torch.tensor(q[p]).log().item() + g[i].item()) for i, p in enumerate(common)}
    pairs = [(a, b) for a in common for b in common if a[:-1] == b[:-1] and a < b]
    assert len({len(a) for a, _ in pairs}) >= 2, "two depths at least"
    log = {p: torch.tensor(scored[p], dtype=torch.float64).log().item() for p in common}
    return max(abs((log[a] - log[b]) - (score[a] - score[b])) for a, b in pairs)


BRANCHING = [[1, 2, 3], [1, 2, 4], [1, 3, 5], [1, 3, 6], [1, 4, 40001], [1, 4, 2]]


def test_ranking_uses_the_noise_the_target_will_use():
    assert noise_error(fed_drafter(WIDE, BRANCHING), [0, 1], {}) < 1e-3


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"shift": -1}, {"sample": 4}, {"segment": 0}, {"key": 123456789}])
def test_the_noise_check_tells_any_other_identity(wrong):
    assert noise_error(fed_drafter(WIDE, BRANCHING), [0, 1], wrong) > 0.1


# ---------------------------------------------------------------- acceptance on a target that samples by the law


def markov_rollouts(prompts: int, samples: int, length: int, vocab: int = 24) -> list[dict]:
    """Rollouts of a random first-order chain (entropy about 1.5 nats), each token the argmax of log p + noise."""
    p = torch.distributions.Dirichlet(torch.full((vocab, vocab), 0.25)).sample().clamp(min=1e-9).log()
    rollouts = []
    for prompt in range(prompts):
        rows = torch.zeros(samples, dtype=torch.int64)
        indices = torch.arange(samples)
        outputs = []
        for t in range(length):
            same = torch.zeros_like(rows)
            ids = NoiseIds(same + 7 + prompt, same + 1 + t, indices, same)
            rows = (p[rows] + gumbel_noise(ids, vocab)).argmax(-1)
            outputs.append(rows)
        per_sample = torch.stack(outputs, 1).tolist()
        rollouts.append({
            "prompt_ids": [0], "key": 7 + prompt, "temperature": 1.0,
            "samples": [{"sample": i, "output_ids": out} for i, out in enumerate(per_sample)],
        })
    return rollouts


class _Wrong(ModelFreeDrafter):
    """Looks at the noise of another position or sample: words 2 and 3 of a request."""

    off: ClassVar[dict[int, int]] = {}

    def _request(self, context, handle):
        row = list(super()._request(context, handle))
        for word, delta in self.off.items():
            row[word] += delta
        return tuple(row)


@pytest.fixture(scope="module")
def rollouts() -> list[dict]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return markov_rollouts(prompts=2, samples=8, length=150)


CHAINS = SpeculationConfig(profile=Profile(4, 1, 5), min_chance=0.1)


def test_shared_noise_saves_passes_and_wrong_noise_is_noticed(rollouts):
    right = replay(rollouts, ModelFreeDrafter(CHAINS)).passes_saved
    none = replay(rollouts, ModelFreeDrafter(CHAINS), noise=False).passes_saved
    assert right > 0.3
    assert right > 1.25 * none
    for off in ({2: 1}, {3: 1}):
        wrong = type("_Off", (_Wrong,), {"off": off})
        assert replay(rollouts, wrong(CHAINS)).passes_saved < 0.75 * right


def test_siblings_help(rollouts):
    together = replay(rollouts, ModelFreeDrafter(CHAINS, across_prompts=False)).passes_saved
    alone = replay(rollouts, ModelFreeDrafter(CHAINS, across_prompts=False), siblings=False).passes_saved
    assert together > 1.1 * alone


def forecast_error(forecast: list[tuple[float, bool]]) -> float:
    """Largest gap between the mean chance and the share that came true, over bands of chance."""
    gaps = []
    for low, high in ((0.05, 0.3), (0.3, 0.6), (0.6, 1.01)):
        band = [(chance, hit) for chance, hit in forecast if low <= chance < high]
        assert len(band) > 100
        gaps.append(abs(sum(chance - hit for chance, hit in band)) / len(band))
    return max(gaps)


def test_chances_come_true(rollouts):
    forecast = replay(rollouts, ModelFreeDrafter(replace(CHAINS, profile=Profile(4, 4, 24), min_chance=0.02))).forecast
    assert forecast_error(forecast) < 0.2  # q sharpens all the time while the text grows
    assert forecast_error([(chance**0.4, hit) for chance, hit in forecast]) > 0.25, "the check can fail"


# ---------------------------------------------------------------- what the request forbids


def test_barred_ids_are_not_proposed():
    drafter = fed_drafter(WIDE, [[1, 2, 9, 4], [1, 3, 9, 4]] * 3, eos_ids=[9])
    ids = [0, 1]

    def seen(seq_id: int, **params) -> set[tuple[int, int]]:
        tree = drafter.propose([context(ids, seq_id=seq_id, **params)])[0]
        return set(zip(tree.depths[1:], tree.tokens[1:]))

    free = seen(1)
    assert {(1, 2), (1, 3), (2, 9)} <= free
    assert not any(d > 2 for d, _ in free if d > 2), "nothing stands behind EOS"
    assert (3, 4) in seen(2, ignore_eos=True)
    assert not any(t == 9 for _, t in seen(3, min_tokens=3))  # one token is out, level 2 draws the third
    assert (2, 9) in seen(4, min_tokens=2)
    assert {t for _, t in seen(5, allowed_token_ids=[3, 9])} == {3, 9}
    assert not any(d > 1 for d, _ in seen(6, stop_token_ids=[2, 3]))


# ---------------------------------------------------------------- odd inputs


@pytest.mark.parametrize("ids", [[5], [5, 6], [1, 2, 3, 4], [2**31], [0]])
def test_no_match_gives_the_root_alone(ids):
    drafter = ModelFreeDrafter(WIDE)
    assert len(drafter.propose([context(ids, len(ids))])[0]) == 1


def test_repeated_token_huge_ids_and_empty_batches():
    drafter = ModelFreeDrafter(SpeculationConfig())
    assert drafter.propose([]) == []
    big = 2**31 - 1
    trees = drafter.propose([context([big] * 9, 9, 1), context([7, 8, 7, 8, 7], 5, 2), context([3], 1, 3)])
    assert set(trees[0].tokens) == {big}
    assert len(trees[0]) > 1
    assert trees[1].tokens[:2] == (7, 8)
    assert len(trees[2]) == 1


def test_finish_of_unknown_ids_is_harmless():
    drafter = ModelFreeDrafter(SpeculationConfig())
    drafter.finish(12345)
    assert drafter._pool.samples() == 0


# ---------------------------------------------------------------- what is kept


def test_only_committed_tokens_are_kept_and_late_drafters_catch_up():
    prompt, output = [4, 4, 1], [2, 3, 2, 3, 5]
    early, late = ModelFreeDrafter(WIDE), ModelFreeDrafter(WIDE)
    ids = list(prompt)
    for token in output:  # with drafts proposed all along, none of them taken
        early.propose([context(ids, 3)])
        ids.append(token)
        early.observe(context(ids, 3), 0)
    late.observe(context(ids, 3), 0)
    assert early.propose([context(ids, 3, 7)]) == late.propose([context(ids, 3, 7)])
    early.finish(0)
    late.finish(0)
    assert early.memory_bytes() == late.memory_bytes()
    probe = [context(prompt, 3, 8, sample=s) for s in range(1)]
    assert {t for tree in early.propose(probe) for t in tree.tokens[1:]} <= set(prompt + output)


def test_text_that_shrinks_is_refused():
    drafter = ModelFreeDrafter(WIDE)
    drafter.propose([context([1, 2, 3])])
    with pytest.raises(ValueError, match=r"token_ids.*never shrink"):
        drafter.propose([context([1, 2])])
    drafter.finish(0)
    drafter.propose([context([1, 2])])


def test_equal_prompts_share_text_across_groups_and_calls_and_others_do_not():
    drafter = fed_drafter(WIDE, [[6, 7]], prompt=(5, 1), across_prompts=False)
    same, other = context([5, 1], 2, 1, group="another"), context([5, 2], 2, 2)
    trees = drafter.propose([same, other])
    assert 6 in trees[0].tokens
    assert len(trees[1]) == 1
    shared = fed_drafter(WIDE, [[6, 7]], prompt=(5, 1))
    assert 7 in shared.propose([context([5, 2, 6], 2, 3)])[0].tokens, "outputs are shared across prompts"


def budgeted(budget: int, **how) -> ModelFreeDrafter:
    return ModelFreeDrafter(SpeculationConfig(model_free_bytes=budget), **how)


def test_over_budget_the_oldest_idle_prompt_goes_first():
    drafter = budgeted(60_000, across_prompts=False)
    live = context([1], 1, 1)
    drafter.observe(live, 0)
    for i in range(2, 30):
        ids = [i, *((i * 7 + j * j) % 50 for j in range(100))]
        drafter.observe(context(ids, 1, i), 0)
        drafter.finish(i)
        assert drafter.memory_bytes() <= 60_000
    held = [i for i in range(1, 30) if count_in(drafter._pool, _text_key([i]), [i]) >= 0]
    assert held == [1, *range(held[1], 30)], "the running one and the latest"
    assert 3 < len(held) < 25


@pytest.mark.parametrize("budget", [0, 5_000, 50_000])
def test_running_samples_alone_never_exceed_the_budget(budget):
    drafter = budgeted(budget)
    floor = budgeted(0).memory_bytes() + 3 * 2000  # empty texts, which cannot be given up
    ids = [[i] for i in range(3)]
    for step in range(60):
        for i in range(3):
            ids[i] += [(step * (i + 3) + j * j) % 40 for j in range(20)]
        drafter.propose([context(ids[i], 1, i) for i in range(3)])
        assert drafter.memory_bytes() <= max(budget, floor)
    roomy = budgeted(2**28)
    roomy.propose([context(ids[i], 1, i) for i in range(3)])
    assert roomy.memory_bytes() > max(budget, floor), "the check can fail"


def test_a_batch_costs_microseconds():
    drafter = fed_drafter(SpeculationConfig(), [[(i * j) % 17 for j in range(200)] for i in range(1, 9)])
    contexts = [context([0, *((i * j) % 17 for j in range(100))], seq_id=i) for i in range(1, 65)]
    drafter.propose(contexts)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        drafter.propose(contexts)
        best = min(best, time.perf_counter() - started)
    assert best / len(contexts) < 1e-3
