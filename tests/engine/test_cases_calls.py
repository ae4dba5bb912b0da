"""Calls that go wrong: odd types, odd values, odd moments. Each is refused by name, or works; nobody else is harmed."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.drafters import NullDrafter
from tests.engine.engines import OFF, greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tlt_engine import EngineConfig, RolloutEngine, SamplingParams, SpeculationConfig, derive_seed
from tlt_engine.models import load_model

PROMPT = [1, 2, 3, 4, 5, 6]
NEW = {"model_seed": 99}


def new_weights() -> dict[str, Any]:
    return dict(shared_hf("llama", 99).state_dict())


def drain(engine: RolloutEngine) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step()}
        engine.check_integrity()
    return done


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "prompts",
    [
        [np.array([1, 2]), np.array([3, 4])], np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), torch.tensor([3, 4])], ([i, i + 1] for i in (1, 3)), [range(1, 3), range(3, 5)],
        [{"prompt_token_ids": np.array([1, 2])}, {"prompt_token_ids": (3, 4)}], [np.array([1, 2], np.uint8), (3, 4)],
        [(i for i in (1, 2)), [3, 4]],
    ],
)
def test_prompts_of_any_container(prompts):
    assert tokens(tiny_engine().generate(prompts, greedy(3))) == plain_outputs([[1, 2], [3, 4]], greedy(3))


@pytest.mark.parametrize("prompt", [np.array([1, 2]), torch.tensor([1, 2]), (1, 2), [torch.tensor(1), np.array(2)]])
def test_a_single_prompt_of_any_container(prompt):
    assert tokens(tiny_engine().generate(prompt, greedy(3))) == plain_outputs([[1, 2]], greedy(3))


@pytest.mark.parametrize(
    "prompts",
    [
        None, 5, b"ab", object(), torch.tensor(3), [None], [[[1, 2]]], [[1.0]], np.array([1.0, 2.0]), [b"ab"], [["1"]],
        [[True]], {"prompt_token_ids": None}, {"prompt": 5}, {"text": "a"}, [[1, [2]]], [[2**70]], [[-1]],
        [torch.zeros(0, dtype=torch.int64)], "text without a tokenizer",
    ],
)
def test_prompts_that_are_none_are_refused(prompts):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"prompts.*: expected .*, got .*; "):
        engine.generate(prompts, greedy(3))
    assert not engine.has_unfinished()


class NoTemplate:
    def __len__(self) -> int:
        return 64

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1]

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


class Template(NoTemplate):
    chat_template: str | None = "given"

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate([[5]], {"max_tokens": 2}), "sampling_params: expected one SamplingParams"),
        (lambda e: e.generate([None]), "prompts.0.: expected text, token ids, or chat messages, got None; pass one"),
        (lambda e: e.generate([[{"rolle": "user"}]]), "prompts.0..0.: expected a chat message with 'role'"),
        (lambda e: e.update_weights(None), r"weights: expected a mapping.*pass model.state_dict\(\)"),
        (lambda e: e.wake_up("weights"), "tags: expected a list .*got 'weights'; wrap it in a list"),
        (lambda e: derive_seed(None, 0, "a"), "run_seed: expected an integer, got NoneType None; pass an int"),
    ],
)
def test_wrong_kinds_are_named_as_what_they_are(call, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert tokens(engine.generate([PROMPT], greedy(3))) == plain_outputs([PROMPT], greedy(3))


def test_chats_need_a_template_and_whole_messages():
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected text or token ids \(this tokenizer has no chat"):
        tiny_engine(tokenizer=NoTemplate()).generate(chat, greedy(2))
    unset = Template()
    unset.chat_template = None  # as transformers' tokenizers of base models
    with pytest.raises(ValueError, match=r"no chat template.*or set tokenizer.chat_template"):
        tiny_engine(tokenizer=unset).generate(chat, greedy(2))
    engine = tiny_engine(tokenizer=Template())
    assert tokens(engine.generate([chat, chat], greedy(2))) == plain_outputs([[1], [1]], greedy(2))
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected messages that the tokenizer's chat template takes"):
        engine.generate([{"role": "user"}], greedy(2))


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e39), ("temperature", None), ("temperature", 10**400), ("top_k", 2**31),
        ("repetition_penalty", 1e39), ("repetition_penalty", 1e-46), ("stop", 5), ("stop_token_ids", 5),
        ("stop_token_ids", "a"), ("logit_bias", [1]), ("logit_bias", {1: None}), ("logit_bias", {1: "x"}),
        ("logit_bias", {1: 1e39}), ("logit_bias", {1: float("inf")}), ("logit_bias", {1: float("nan")}),
        ("logit_bias", {"1": 1.0}), ("allowed_token_ids", 5), ("allowed_token_ids", "12"), ("ignore_eos", "no"),
        ("detokenize", None), ("raw_logprobs", 2), ("n", 1.0), ("max_tokens", "5"), ("seed", "1"),
    ],
)
def test_parameters_that_no_kernel_could_take_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}.*: expected .*, got .*; "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3.4e38}, {"temperature": 1e-50}, {"top_k": 2**31 - 1}, {"top_p": 1e-50}, {"top_p": 1 - 1e-12},
        {"min_p": 1.0}, {"min_p": 1e-60}, {"repetition_penalty": 3.4e38}, {"repetition_penalty": 1.2e-38},
        {"logit_bias": {1: 3.4e38, 2: -3.4e38, 3: float("-inf")}}, {"max_tokens": 10**30}, {"sample_index": 2**32 - 2},
        {"stop_token_ids": np.array([60, 60])}, {"allowed_token_ids": torch.tensor([1, 1, 2])},
        {"ignore_eos": np.bool_(True)}, {"logprobs": 64, "prompt_logprobs": 64},
    ],
)
def test_the_largest_and_smallest_values_run_and_harm_nobody(fields):
    other = SamplingParams(max_tokens=6, seed=2)
    engine = tiny_engine(max_model_len=24)
    odd = SamplingParams(**{"max_tokens": 4, "seed": 1, **fields})
    outs = engine.generate([PROMPT, [7, 8]], [odd, other])
    assert tokens(outs)[1] == plain_outputs([[7, 8]], other)[0]
    assert outs[0].outputs[0].finish_reason in ("length", "error")
    engine.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate([[1]], 5), lambda e: e.generate([[1]], [None]),
        lambda e: e.generate([[1], [2]], [greedy()]),
        lambda e: e.generate([[1]], group_ids=5), lambda e: e.generate([[1]], group_ids=["a", "b"]),
        lambda e: e.generate([[1]], prior_output_ids=[5]), lambda e: e.generate([[1]], token_quota=0),
        lambda e: e.generate([[1]], token_quota="1"), lambda e: e.add_request([1], {"n": 1}),
        lambda e: e.add_request([1], greedy(), request_id=5), lambda e: e.abort(5), lambda e: e.abort(None),
        lambda e: e.resume(5), lambda e: e.resume([5]), lambda e: e.score([1], [2], 5), lambda e: e.score([], [2]),
        lambda e: e.update_weights(5), lambda e: e.update_weights([1, 2]), lambda e: e.update_weights({}),
        lambda e: e.next_logits([1] * 300), lambda e: e.next_logits([]), lambda e: RolloutEngine(5),
        lambda e: RolloutEngine(None), lambda e: RolloutEngine(shared_hf(), {"dtype": "float32"}),
        lambda e: EngineConfig(device=5), lambda e: EngineConfig(device="tpu"),
        lambda e: EngineConfig(enforce_eager="no"), lambda e: EngineConfig(mask_padding_ids="no"),
        lambda e: EngineConfig(dtype=torch.float32),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_queued(call):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"expected .*, got .*; "):
        call(engine)
    assert not engine.has_unfinished()
    assert tokens(engine.generate([PROMPT], greedy(4))) == plain_outputs([PROMPT], greedy(4))


def test_score_ends_at_the_context():
    engine = tiny_engine(max_model_len=32)
    assert len(engine.score([1] * 20, [2] * 12)) == 12
    with pytest.raises(ValueError, match="output_ids: expected at most 12 tokens after this prompt"):
        engine.score([1] * 20, [2] * 13)
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_k01_a_row_without_a_distribution_harms_no_score_beside_it():
    engine = tiny_engine()
    barred = SamplingParams(max_tokens=5, min_tokens=3, allowed_token_ids=[5], stop_token_ids=[5])
    engine.add_request([1, 2], barred, request_id="barred")
    engine.add_request(PROMPT, greedy(5), request_id="good")
    assert len(engine.score([3, 4], [5, 6, 7])) == 3
    done = drain(engine)
    assert done["barred"].outputs[0].finish_reason == "error"
    assert done["good"].outputs[0].token_ids == plain_outputs([PROMPT], greedy(5))[0][0]


def test_the_longest_prompt_gets_one_token_and_a_hundred_samples_run():
    engine = tiny_engine(max_model_len=32)
    out = engine.generate([[1] * 31], SamplingParams(max_tokens=None, seed=1))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (1, "length")
    many = engine.generate([PROMPT], SamplingParams(n=100, max_tokens=5, seed=1))[0]
    assert len({tuple(o.token_ids) for o in many.outputs}) > 90
    assert [o.noise.sample for o in many.outputs] == list(range(100))


# ---------------------------------------------------------------- ids and calls that meet


def test_numbers_given_as_ids_are_never_a_callers_own():
    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(6), request_id="1")
    assert tokens(engine.generate([[7, 8]], greedy(9))) == plain_outputs([[7, 8]], greedy(9))
    assert [len(o.outputs[0].token_ids) for o in drain(engine).values()] == [6]
    ids = [engine.add_request([i + 1], greedy(2), request_id=rid) for i, rid in enumerate(["3", None, None, "x", None])]
    assert len(set(ids)) == 5 and sorted(drain(engine)) == sorted(ids)


def test_a_call_does_not_wait_for_another_request_that_took_its_id():
    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(200), request_id="a")
    engine.step()
    first = engine._requests["a"]
    engine.abort("a")
    engine.add_request([7, 8], greedy(5), request_id="a")
    assert engine._run_to_end([first], use_tqdm=False)[0].outputs[0].finish_reason == "abort"
    assert engine.has_unfinished()
    assert list(drain(engine)) == ["a"]


def test_requests_in_flight_are_returned_by_step_after_a_generate_call():
    engine = tiny_engine()
    ids = [engine.add_request([i + 1, i + 2], greedy(5)) for i in range(3)]
    assert tokens(engine.generate([[40, 41]], greedy(12))) == plain_outputs([[40, 41]], greedy(12))
    done = drain(engine)
    assert sorted(done) == sorted(ids)
    assert [done[i].outputs[0].token_ids for i in ids] == [
        plain_outputs([[i + 1, i + 2]], greedy(5))[0][0] for i in range(3)
    ]


# ---------------------------------------------------------------- callbacks


class Raising(NullDrafter):
    """Raises once, in the first step with at least `count` samples."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def propose(self, contexts):
        if len(contexts) >= self.left:
            self.left = 10**9
            raise RuntimeError("a drafter's own fault")
        return super().propose(contexts)


@pytest.mark.parametrize("recovers", [True, False])
def test_k04_a_step_that_broke_off_spoils_nobodys_keys(recovers, monkeypatch):
    """The step that admits the siblings plans a copy of their prompt's last page, and then a drafter raises. Sabotage:
    without the recomputation they go on from a page that was never written."""
    params = SamplingParams(n=3, max_tokens=8, seed=1)
    engine = tiny_engine(drafter=Raising(2))
    if not recovers:
        monkeypatch.setattr(engine._core.scheduler, "recompute_all", lambda: None)
    engine.add_request(PROMPT, params, request_id="a")
    raised = 0
    done = {}
    while engine.has_unfinished():
        try:
            done |= {out.request_id: out for out in engine.step()}
        except RuntimeError as error:
            assert "own fault" in str(error)
            raised += 1
    assert raised == 1
    got = [o.token_ids for o in done["a"].outputs]
    assert (got == plain_outputs([PROMPT], params)[0]) is recovers
    engine.check_integrity()


def test_k04_an_interrupted_call_leaves_the_requests_of_others_alone():
    other = SamplingParams(n=3, max_tokens=12, seed=1)
    calls = []

    def interrupts(output, logits):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return logits

    engine = tiny_engine()
    engine.add_request(PROMPT, other, request_id="a")
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[7, 8]], greedy(9, logits_processor=interrupts))
    done = drain(engine)
    assert list(done) == ["a"] and [o.token_ids for o in done["a"].outputs] == plain_outputs([PROMPT], other)[0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("generate", lambda e: e.generate([[5]], greedy(2))), ("step", lambda e: e.step()),
        ("abort", lambda e: e.abort("a")), ("score", lambda e: e.score([1], [2])),
        ("update_weights", lambda e: e.update_weights(new_weights())),
        ("resume", lambda e: e.resume([])),
        ("capture_graphs", lambda e: e.capture_graphs()), ("release_graphs", lambda e: e.release_graphs()),
    ],
)
def test_calls_from_inside_a_step_are_refused(name, call):
    engine = tiny_engine()
    new_weights()  # built and cached here: a step runs in inference mode, whose tensors would spoil other tests

    def processor(output, logits):
        if len(output) == 2:
            call(engine)
        return logits

    engine.add_request([7, 8], greedy(6), request_id="a")
    with pytest.raises(RuntimeError, match=f"^{name}: expected a call between steps"):
        engine.generate([PROMPT], greedy(9, logits_processor=processor))
    assert drain(engine)["a"].outputs[0].token_ids == plain_outputs([[7, 8]], greedy(6))[0][0]
    assert tokens(engine.generate([PROMPT], greedy(4))) == plain_outputs([PROMPT], greedy(4))


def test_a_callback_may_queue_a_request():
    engine = tiny_engine()

    def processor(output, logits):
        if len(output) == 2:
            engine.add_request([7, 8], greedy(6), request_id="a")
        return logits

    out = engine.generate([PROMPT], greedy(5, logits_processor=processor))
    assert tokens(out) == plain_outputs([PROMPT], greedy(5))
    assert drain(engine)["a"].outputs[0].token_ids == plain_outputs([[7, 8]], greedy(6))[0][0]


# ---------------------------------------------------------------- resumption


PAUSED = SamplingParams(n=2, max_tokens=20, seed=3, prompt_logprobs=1)


def test_n03_outputs_can_be_resumed_twice_and_finished_ones_come_back():
    engine = tiny_engine()
    cut = engine.generate([PROMPT], PAUSED, token_quota=5)
    before = pickle.dumps(cut)
    whole = engine.resume(cut)
    assert tokens(whole) == plain_outputs([PROMPT], PAUSED)
    assert tokens(engine.resume(cut[0])) == tokens(whole) == tokens(engine.resume(whole))
    assert tokens(engine.resume([cut[0], cut[0]])) == tokens(whole) * 2
    assert pickle.dumps(cut) == before, "resuming changes nothing in what it was given"


def test_n03_a_resumed_request_keeps_its_id_and_its_prompt_logprobs():
    engine = tiny_engine()
    cut = engine.generate([PROMPT], PAUSED, token_quota=5)[0]
    whole = engine.resume(cut)[0]
    assert whole.request_id == cut.request_id and whole.group_id == cut.group_id
    assert whole.prompt_logprobs == cut.prompt_logprobs and len(whole.prompt_logprobs) == len(PROMPT)
    engine.add_request([1], greedy(50), request_id=cut.request_id)
    assert engine.resume(cut)[0].request_id != cut.request_id, "another request has it now"


def test_n03_what_an_engine_cannot_go_on_with_is_refused_whole(letters):
    source = tiny_engine(tokenizer=letters)
    cut = source.generate([PROMPT, [9]], replace(PAUSED, stop="nowhere"), token_quota=12)
    refusals = [
        (tiny_engine(tokenizer=letters, max_model_len=18), "state.token_ids: expected fewer than 18 tokens"),
        (tiny_engine(tokenizer=letters, num_pages=4), "state.prompt_token_ids: expected a sequence that fits the KV"),
        (tiny_engine(tokenizer=letters, model={"vocab_size": 16}), r"state.token_ids\[\d+\]: expected an id in \[0,"),
        (tiny_engine(), r"stop: expected stop_token_ids \(this engine has no tokenizer\)"),
    ]
    for engine, message in refusals:
        with pytest.raises(ValueError, match=message):
            engine.resume(cut[::-1])
        assert not engine.has_unfinished()
        engine.check_integrity()
    shorter = tiny_engine(tokenizer=letters, max_model_len=20).resume(cut[0])[0]
    assert [(len(o.token_ids), o.finish_reason) for o in shorter.outputs] == [(14, "length")] * 2


def test_outputs_are_picklable_whatever_was_asked_for():
    params = SamplingParams(n=2, max_tokens=8, logprobs=2, prompt_logprobs=1, raw_logprobs=True, logit_bias={3: 1.0})
    for quota in (3, None):
        out = tiny_engine().generate([PROMPT], params, token_quota=quota)
        assert pickle.loads(pickle.dumps(out)) == out


# ---------------------------------------------------------------- weights


def test_h01_engines_on_one_loaded_model_follow_each_others_updates():
    loaded = load_model(shared_hf())
    one, two = (RolloutEngine(loaded, EngineConfig(page_size=4, speculation=OFF)) for _ in range(2))
    prompt = list(range(1, 20))
    two.generate([prompt], greedy(8))  # its pages are in the prefix cache
    two.add_request([7, 8, 9], SamplingParams(max_tokens=10, seed=1), request_id="a")
    for _ in range(4):
        two.step()
    one.update_weights(new_weights())
    want = plain_outputs([prompt], greedy(8), **NEW)
    assert tokens(one.generate([prompt], greedy(8))) == want == tokens(two.generate([prompt], greedy(8)))
    out = drain(two)["a"].outputs[0]
    assert out.noise.segment == 1 and [s.version for s in out.weight_versions] == ["0", "1"]
    cut = out.weight_versions[0].end
    after = two.score([7, 8, 9, *out.token_ids[:cut]], out.token_ids[cut:])
    assert out.sampled_logprobs[cut:] == pytest.approx(after, abs=1e-4)


def test_h01_weights_loaded_behind_the_engines_back_are_noticed():
    engine = tiny_engine()
    prompt = list(range(1, 20))
    engine.generate([prompt], greedy(8))
    engine.model.load_weights(new_weights())
    assert tokens(engine.generate([prompt], greedy(8))) == plain_outputs([prompt], greedy(8), **NEW)


@pytest.mark.parametrize("speculation", [OFF, SpeculationConfig(min_chance=0.0)])
def test_k07_h07_updates_from_another_thread_meet_rollouts(speculation):
    """Four threads roll out while a fifth swaps the weights: no token comes from a mixture, and each span's
    log-probabilities are those of its version's weights."""
    weights = {"old": dict(shared_hf().state_dict()), "new": new_weights()}
    engine = tiny_engine(speculation=speculation)
    engine.update_weights(weights["old"], weight_version="old")
    results: dict[tuple[int, int], Any] = {}
    errors: list[BaseException] = []
    rolling = threading.Event()
    rolling.set()

    def roll(thread: int) -> None:
        try:
            for i in range(5):
                params = SamplingParams(max_tokens=16, seed=10 * thread + i)
                results[thread, i] = engine.generate([[thread + 1, i + 1]], params)[0]
        except BaseException as error:
            errors.append(error)

    def swap() -> None:
        turn = 0
        while rolling.is_set():
            name = ("new", "old")[turn % 2]
            engine.update_weights(weights[name], weight_version=name)
            turn += 1

    threads = [threading.Thread(target=roll, args=(t,), daemon=True) for t in range(4)]
    swapper = threading.Thread(target=swap, daemon=True)
    for thread in (*threads, swapper):
        thread.start()
    for thread in threads:
        thread.join(60)
    rolling.clear()
    swapper.join(60)
    assert not errors and not any(t.is_alive() for t in (*threads, swapper)) and len(results) == 20
    engine.check_integrity()
    judges = {"old": tiny_engine(), "new": tiny_engine(**NEW)}
    for out in results.values():
        sample = out.outputs[0]
        for span in sample.weight_versions:
            prefix = [*out.prompt_token_ids, *sample.token_ids[: span.start]]
            scored = judges[span.version].score(prefix, sample.token_ids[span.start : span.end])
            assert sample.sampled_logprobs[span.start : span.end] == pytest.approx(scored, abs=1e-4)
    assert {s.version for out in results.values() for s in out.outputs[0].weight_versions} == {"old", "new"}
