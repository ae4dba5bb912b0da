"""Random mixes of requests through the engine, against a loop that is too simple to be wrong.

The loop runs one sample at a time: transformers' forward pass over the whole text for each token, the reference ops,
and stop conditions written out here. It has no batch, no KV cache, no speculation and none of the engine's code.
"""

from __future__ import annotations

import pickle
import pkgutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tlt_kernels import NoiseIds, RowParams, gumbel_noise, process_logits, sample

from tests.drafters import AdversarialDrafter, CopyDrafter, ReplayDrafter
from tests.engine.engines import shared_hf
from tests.tiny import hf_logits
from tlt_engine import CompletionOutput, EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.equality import CUT, TIE, cut_distance
from tlt_engine.models import EagleConfig, EagleModel, ModelConfig
from tlt_engine.rng import noise_key

VOCAB, EOS, MAX_LEN = 24, 3, 40
PIECES = ["a", "b", "c", "", "ab", "ba", "d", "cd", "e", "abc", "dd", "f"] * 2
LIMIT = 23  # ids the tokenizer knows; the last row of the head is padding


class Pieces:
    """A tokenizer whose tokens are none to three characters long: stop strings straddle them and fall inside."""

    def __len__(self) -> int:
        return LIMIT

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(PIECES[t] for t in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [PIECES.index(c) for c in text]


def hf() -> Any:
    return shared_hf("qwen3", 0, vocab_size=VOCAB, num_hidden_layers=1, eos_token_id=EOS)


@lru_cache(maxsize=20000)
def next_logits(ids: tuple[int, ...]) -> torch.Tensor:
    return hf_logits(hf(), list(ids))[-1].float()


def bar_one(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the committed output."""
    logits = logits.clone()
    logits[(7 * len(output) + sum(output)) % VOCAB] = float("-inf")
    return logits


# ---------------------------------------------------------------- the naive loop


@dataclass
class Expected:
    """excused: length from which on two runs may differ, because a tie was met there."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    finish: tuple[str, Any] = ("length", None)
    text: str = ""
    excused: int | None = None


def row_params(p: SamplingParams, ids: list[int], prompt_len: int) -> RowParams:
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    bias = dict(p.logit_bias or {})
    if len(ids) - prompt_len < p.min_tokens:
        for t in stop_set(p):
            bias[t] = float("-inf")
    word = -1
    if p.allowed_token_ids is not None:
        word = sum(1 << t for t in set(p.allowed_token_ids))
    return RowParams(
        temperature=one * p.temperature, top_k=zero + p.top_k, top_p=one * p.top_p, min_p=one * p.min_p,
        allowed_row=zero, allowed_bits=torch.tensor([[word]], dtype=torch.int32),
        bias_row=zero, bias_indptr=torch.tensor([0, len(bias)], dtype=torch.int32),
        bias_ids=torch.tensor(list(bias), dtype=torch.int64), bias_values=torch.tensor(list(bias.values())).float(),
        repetition=one * p.repetition_penalty, presence=one * p.presence_penalty, frequency=one * p.frequency_penalty,
        history_row=zero, history_indptr=torch.tensor([0, len(ids)], dtype=torch.int32),
        history_ids=torch.tensor(ids), history_prompt=zero + prompt_len,
    )


def stop_set(p: SamplingParams) -> set[int]:
    return set(p.stop_token_ids or ()) | (set() if p.ignore_eos else {EOS})


def naive(prompt: list[int], prior: list[int], p: SamplingParams, key: int, index: int) -> Expected:
    out = Expected()
    end = MAX_LEN if p.max_tokens is None else min(len(prompt) + p.max_tokens, MAX_LEN)
    floor = 0
    while True:
        ids = prompt + prior + out.token_ids
        plain = next_logits(tuple(ids))
        logits = plain if p.logits_processor is None else p.logits_processor(out.token_ids, plain)
        params = row_params(p, ids, len(prompt))
        noise = NoiseIds(*(torch.tensor([x]) for x in (key, len(ids), index, 0)))
        drawn = sample(logits[None], noise, params, vocab_limit=LIMIT, backend="reference")
        token = int(drawn.tokens)
        if token < 0:
            out.finish = ("error", None)
            return out
        scores = process_logits(logits[None], params, vocab_limit=LIMIT, backend="reference")[0]
        if out.excused is None and near_tie(scores, logits, params, p, noise):
            out.excused = len(out.token_ids)
        out.token_ids.append(token)
        out.logprobs.append(float(drawn.logprobs))
        out.raw.append(float(torch.log_softmax(plain, -1)[token]))
        out.scores.append(torch.log_softmax(scores, -1))
        out.text += PIECES[token]
        generated = len(prior) + len(out.token_ids)
        if generated <= p.min_tokens:
            floor = len(out.text)
        found = [(out.text.find(s, max(floor - len(s) + 1, 0)), order, s) for order, s in enumerate(p.stop or ())]
        stops = [match for match in found if match[0] >= 0]
        if stops:
            at, _, stop = min(stops)
            out.text = out.text[: at + len(stop) if p.include_stop_str_in_output else at]
        if token == EOS and not p.ignore_eos:
            out.finish = ("stop", None)
        elif token in (p.stop_token_ids or ()):
            out.finish = ("stop", token)
        elif stops:
            out.finish = ("stop", stop)
        elif len(ids) + 1 < end:
            continue
        return out


def near_tie(scores: torch.Tensor, logits: torch.Tensor, params: RowParams, p: SamplingParams, noise: NoiseIds) -> bool:
    if p.temperature >= 1e-5:
        scores = scores + gumbel_noise(noise, VOCAB, backend="reference")[0]
        free = replace(params, top_k=None, top_p=None, min_p=None)
        uncut = process_logits(logits[None], free, vocab_limit=LIMIT, backend="reference")[0]
        if cut_distance(uncut, p) <= CUT:
            return True
    best, second = scores.topk(2).values.tolist()
    return best - second <= TIE


# ---------------------------------------------------------------- random mixes


@dataclass
class Ask:
    """arrive: step before which it is added. abort: step before which it is aborted."""

    prompt: list[int]
    prior: list[int]
    params: SamplingParams
    arrive: int = 0
    abort: int | None = None
    quota: int | None = None
    speculate: bool = True


@dataclass
class Mix:
    asks: list[Ask]
    config: dict[str, Any]
    slack: int  # pages beyond what the largest request needs alone
    drafter: str
    profile: Profile
    audit: float
    one_call: bool

    def num_pages(self) -> int:
        longest = max(min(MAX_LEN, len(a.prompt) + (a.params.max_tokens or MAX_LEN)) for a in self.asks)
        return -(-longest // self.config["page_size"]) + self.slack


token = st.integers(0, VOCAB - 1)
STEM = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def often(value: Any, *others: Any) -> st.SearchStrategy:
    return st.one_of(st.just(value), st.sampled_from(others))


@st.composite
def sampling(draw: st.DrawFn, seed: int) -> SamplingParams:
    max_tokens = draw(st.sampled_from([20, 14, 9, 5, 2, 1, None]))
    stops = draw(often(None, ["ab"], ["dd", "d"], ["bab", "ca", "ca"], ["e"]))
    return SamplingParams(
        n=draw(st.sampled_from([1, 2, 4])),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.7])),
        top_k=draw(often(0, 2, 5)), top_p=draw(often(1.0, 0.5, 0.95)), min_p=draw(often(0.0, 0.1)),
        repetition_penalty=draw(often(1.0, 1.4, 0.8)), presence_penalty=draw(often(0.0, 1.5, -1.0)),
        frequency_penalty=draw(often(0.0, 0.7)),
        max_tokens=max_tokens, min_tokens=min(draw(often(0, 3, 6)), max_tokens or 6),
        stop=stops, include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=draw(often(None, [4], [9, 10, EOS])), ignore_eos=draw(often(True, False)),
        seed=draw(st.sampled_from([seed, seed, -seed, None])), sample_index=draw(often(0, 5)),
        logprobs=draw(often(None, 0, 3)), raw_logprobs=draw(st.booleans()), prompt_logprobs=draw(often(None, None, 1)),
        logit_bias=draw(often(None, {EOS: 4.0, 7: -1.0}, {2: float("-inf"), 20: 3.0})),
        allowed_token_ids=draw(often(None, None, [1, 2, EOS, 4, 9, 11])),
        logits_processor=draw(often(None, None, None, bar_one)),
    )


@st.composite
def asks(draw: st.DrawFn, i: int) -> Ask:
    stem = STEM[: draw(st.integers(0, 12))]
    prompt = stem + draw(st.lists(token, min_size=0 if stem else 1, max_size=6))
    params = draw(sampling(1000 + i))
    room = min(params.max_tokens or 4, 4) - 1
    prior = draw(st.lists(token, max_size=room)) if draw(st.booleans()) else []
    return Ask(
        prompt, prior, params, arrive=draw(st.integers(0, 6)), abort=draw(often(None, None, 1, 3, 8)),
        quota=draw(often(None, 1, 3)), speculate=draw(often(True, False)),
    )


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    count = draw(st.integers(1, 5))
    return Mix(
        [draw(asks(i)) for i in range(count)],
        {
            "page_size": draw(st.sampled_from([4, 1, 3, 16])), "max_num_seqs": draw(st.sampled_from([4, 1, 2, 9])),
            "max_num_batched_tokens": draw(st.sampled_from([64, 1, 5])), "enable_prefix_caching": draw(st.booleans()),
        },
        draw(st.sampled_from([0, 2, 5, 40])),
        draw(st.sampled_from(["replay", "replay-tree", "adversarial", "model_free", "copy", "learned", "off"])),
        draw(st.sampled_from([Profile(4, 2, 8), Profile(8, 3, 20), Profile(2, 1, 3)])),
        draw(often(0.0, 0.0, 1.0)),
        draw(st.booleans()),
    )


# ---------------------------------------------------------------- through the engine


@lru_cache(maxsize=1)
def eagle() -> EagleModel:
    """Random, with a window and a vocabulary smaller than what happens here."""
    config = ModelConfig.from_hf(hf().config)
    model = EagleModel(EagleConfig.for_target(config, window=7, draft_vocab_size=VOCAB // 2, aux_layers=(0, 1)))
    model.initialise(torch.Generator().manual_seed(0))
    model.set_vocabulary(torch.arange(VOCAB // 2) * 2)
    return model


def build(mix: Mix, known: dict) -> RolloutEngine:
    depth = mix.profile.depth
    drafter = {
        "replay": lambda: ReplayDrafter(known, error_rate=0.2, depth=depth),
        "replay-tree": lambda: ReplayDrafter(known, error_rate=0.3, depth=depth, shape="tree", width=2),
        "adversarial": lambda: AdversarialDrafter(VOCAB, eos_ids=(EOS,)),
        "copy": lambda: CopyDrafter(lambda ids, _: int(next_logits(tuple(ids)).argmax()), depth=min(depth, 3)),
        "learned": eagle,
    }.get(mix.drafter, lambda: None)()
    method = mix.drafter if drafter is None else "learned" if isinstance(drafter, EagleModel) else "custom"
    config = EngineConfig(
        max_model_len=MAX_LEN, num_pages=mix.num_pages(), seed=5,
        speculation=SpeculationConfig(
            method=method, profile=mix.profile, min_chance=0.0, audit=mix.audit, merge_model_free=depth == 2,
            enable_below=2 if mix.slack == 2 else None,
        ),
        **mix.config,
    )
    return RolloutEngine(hf(), config, tokenizer=Pieces(), drafter=drafter)


def run_loop(engine: RolloutEngine, mix: Mix) -> dict[int, Any]:
    """The caller's own loop: arrivals, aborts, and the engine's invariants after every step."""
    done: dict[int, Any] = {}
    for step in range(2000):
        for i, a in enumerate(mix.asks):
            if a.arrive == step:
                engine.add_request(
                    a.prompt, a.params, request_id=f"r{i}", prior_output_ids=a.prior, token_quota=a.quota,
                    speculate=a.speculate,
                )
            if a.abort == step:
                for out in engine.abort(f"r{i}"):
                    done[i] = out
        for out in engine.step():
            done[int(out.request_id[1:])] = out
        engine.check_integrity()
        if step >= 8 and not engine.has_unfinished():
            return done
    raise AssertionError("the engine does not come to an end")


def run_call(engine: RolloutEngine, mix: Mix) -> dict[int, Any]:
    quota = mix.asks[0].quota
    outs = engine.generate(
        [a.prompt for a in mix.asks], [a.params for a in mix.asks], prior_output_ids=[a.prior for a in mix.asks],
        token_quota=quota,
    )
    for a in mix.asks:
        a.quota, a.abort = quota, None
    return dict(enumerate(outs))


def compare(out: CompletionOutput, want: Expected, p: SamplingParams, seen: Counter) -> None:
    cut = out.finish_reason in ("abort", "paused")
    upto = len(want.token_ids) if want.excused is None else want.excused
    upto = min(upto, len(out.token_ids)) if cut or want.excused is not None else upto
    assert out.token_ids[:upto] == want.token_ids[:upto]
    assert out.sampled_logprobs[:upto] == pytest.approx(want.logprobs[:upto], abs=1e-4)
    assert len(out.sampled_logprobs) == len(out.token_ids)
    if p.raw_logprobs:
        assert out.raw_logprobs[:upto] == pytest.approx(want.raw[:upto], abs=1e-4)
        assert len(out.raw_logprobs) == len(out.token_ids)
    if p.logprobs is not None:
        assert len(out.logprobs) == len(out.token_ids)
        for entry, scores in zip(out.logprobs[:upto], want.scores):
            for t, given_ in entry.items():
                assert given_.logprob == pytest.approx(float(scores[t]), abs=1e-4)
            best = scores.sort(descending=True).values[: p.logprobs]
            listed = sorted((e.logprob for e in entry.values()), reverse=True)[: p.logprobs]
            assert listed == pytest.approx([x for x in best.tolist() if x > float("-inf")], abs=1e-4)
    if want.excused is not None:
        seen["excused"] += 1
    elif not cut:
        assert out.token_ids == want.token_ids
        assert (out.finish_reason, None if out.finish_reason == "error" else out.stop_reason) == want.finish
        assert out.text == want.text
        seen[f"{out.finish_reason} {type(out.stop_reason).__name__}"] += 1
    else:
        seen[out.finish_reason] += 1


def check_mix(mix: Mix, seen: Counter) -> None:
    known: dict = {}
    for a in mix.asks:
        if a.params.seed is not None:
            key = noise_key(a.params.seed, a.prompt + a.prior)
            for s in range(a.params.sample_index, a.params.sample_index + a.params.n):
                output = naive(a.prompt, a.prior, a.params, key, s).token_ids
                known.setdefault(tuple(a.prompt), {})[s] = a.prior + output
    engine = build(mix, known)
    outs = run_call(engine, mix) if mix.one_call else run_loop(engine, mix)
    assert sorted(outs) == list(range(len(mix.asks)))
    for i, a in enumerate(mix.asks):
        out, cuts = outs[i], 0
        keys = {o.noise.key for o in out.outputs}
        assert len(keys) == 1 and len(out.outputs) == a.params.n
        if a.params.seed is not None:
            assert keys == {noise_key(a.params.seed, a.prompt + a.prior)}
        indices = [o.noise.sample for o in out.outputs]
        first = a.params.sample_index
        assert indices == list(range(first, first + a.params.n))
        want = [naive(a.prompt, a.prior, a.params, next(iter(keys)), s) for s in indices]
        while any(o.finish_reason == "paused" for o in out.outputs):
            cuts += 1
            for o, w in zip(out.outputs, want):
                compare(o, w, a.params, seen)
                if w.excused is None and o.finish_reason != "abort":
                    assert len(o.token_ids) == min(len(w.token_ids), cuts * a.quota), "the cut is by tokens alone"
            out = engine.resume(pickle.loads(pickle.dumps(out)), token_quota=a.quota if cuts < 3 else None)[0]
        for o, w in zip(out.outputs, want):
            compare(o, w, a.params, seen)
        check_prompt_logprobs(out, a)
    engine.check_integrity()
    counts = engine.stats()
    assert counts["pages"]["used"] == 0
    assert not counts["audit"]["differing"] or seen["excused"]
    seen["audited"] += counts["audit"]["checked"]
    seen["preemptions"] += counts["preemptions"]
    seen["accepted"] += counts["accepted_tokens"]
    seen["prefix hits"] += counts["prefix_hit_tokens"]
    seen["forks"] += counts["forks"]
    seen["tokens"] += counts["emitted_tokens"]


def check_prompt_logprobs(out: Any, a: Ask) -> None:
    if a.params.prompt_logprobs is None or not any(o.token_ids for o in out.outputs):
        return
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(a.prompt)
    for i, entry in enumerate(out.prompt_logprobs[1:], start=1):
        normal = torch.log_softmax(next_logits(tuple(a.prompt[:i])), -1)
        assert entry[a.prompt[i]].logprob == pytest.approx(float(normal[a.prompt[i]]), abs=1e-4)


def run_mixes(examples: int, phases: Sequence[Phase] = (Phase.generate, Phase.shrink)) -> Counter:
    seen: Counter = Counter()

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )
    @given(mixes())
    def run(mix: Mix) -> None:
        check_mix(mix, seen)

    run()
    return seen


def test_random_mixes_equal_a_naive_loop():
    seen = run_mixes(60)
    for kind in (
        "stop NoneType", "stop int", "stop str", "length NoneType", "paused", "abort", "preemptions", "accepted",
        "prefix hits", "forks", "audited",
    ):
        assert seen[kind] > 0, f"no mix reached {kind!r}: {dict(seen)}"
    assert seen["excused"] <= 3


def without_branches(honest):
    """Penalties that do not see a tree node's own branch."""
    return lambda logits, ids, params, **more: honest(
        logits, ids, replace(params, parent_row=None, node_tokens=None), **more
    )


def at_the_roots_place(honest):
    """Noise of every row of the step taken one position too far."""
    return lambda logits, ids, params, **more: honest(logits, replace(ids, positions=ids.positions + 1), params, **more)


def one_sample_for_all(honest):
    return lambda logits, ids, params, **more: honest(logits, replace(ids, samples=ids.samples * 0), params, **more)


def without_top_p(honest):
    return lambda logits, ids, params, **more: honest(logits, ids, replace(params, top_p=None), **more)


def at_the_very_end(honest):
    """Stop strings that are only looked for where the newest token ends."""
    return lambda text, new, stops: honest(text, min(new, 1), stops)


def without_the_partial_page(honest):
    """Siblings that do not copy the page on which their prompt ends."""
    return lambda self, seq, donor: replace(honest(self, seq, donor), tail=None)


def without_the_end_of_a_path(honest):
    """KV of an accepted path that stays where the tree was."""
    return lambda data, table, lens, walk: None


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        ("tlt_engine.engine.runner", "sample", without_branches),
        ("tlt_engine.engine.runner", "sample", at_the_roots_place),
        ("tlt_engine.engine.runner", "sample", one_sample_for_all),
        ("tlt_engine.engine.runner", "sample", without_top_p),
        ("tlt_engine.engine.runner", "commit_kv", without_the_end_of_a_path),
        ("tlt_engine.engine.stops", "find_stop", at_the_very_end),
        ("tlt_engine.scheduler.scheduler.Scheduler", "_fork", without_the_partial_page),
    ],
)
def test_sabotage_a_broken_engine_differs_from_the_naive_loop(monkeypatch, where, name, broken):
    owner = pkgutil.resolve_name(where)
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    with pytest.raises(AssertionError):
        run_mixes(60, phases=[Phase.generate])
