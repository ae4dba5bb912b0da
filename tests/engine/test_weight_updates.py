"""Weight updates: sources, streams, requests in flight, versions, checksums (case H07 and DESIGN section 9)."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.drafters import ReplayDrafter
from tests.engine.engines import greedy, plain_outputs, shared_hf, tiny_engine, tokens
from tests.tiny import tiny_hf_model
from tlt_engine import EngineHalted, SamplingParams
from tlt_engine.models import weights as weights_module

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6]
SAMPLED = SamplingParams(max_tokens=20, seed=5)


def new_model(seed: int = 9):
    return shared_hf(seed=seed)


def fresh_outputs(seed: int = 9, params=SAMPLED):
    return plain_outputs(PROMPTS, params, model_seed=seed)


class Sharded(torch.Tensor):
    """Stands for a DTensor: shape of the whole, values only through full_tensor()."""

    gathered = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> Sharded:
        sharded = torch.zeros_like(tensor).as_subclass(Sharded)
        sharded.whole = tensor
        return sharded

    def full_tensor(self) -> torch.Tensor:
        Sharded.gathered += 1
        return self.whole


@pytest.mark.parametrize("source", ["mapping", "pairs", "iterator", "model", "folder", "sharded"])
def test_every_source_gives_a_fresh_engines_tokens(source, tmp_path):
    hf = new_model()
    state = hf.state_dict()
    if source == "folder":
        hf.save_pretrained(tmp_path / "policy")
    weights = {
        "mapping": lambda: state, "pairs": lambda: list(state.items()), "iterator": hf.named_parameters,
        "model": lambda: hf, "folder": lambda: tmp_path / "policy",
        "sharded": lambda: {n: Sharded.of(t) for n, t in state.items()},
    }[source]()
    engine = tiny_engine()
    engine.generate(PROMPTS, SAMPLED)
    report = engine.update_weights(weights, weight_version="new")
    assert not report.missing and not report.unexpected
    outputs = engine.generate(PROMPTS, SAMPLED)
    assert tokens(outputs) == fresh_outputs()
    assert [s.version for o in outputs for s in o.outputs[0].weight_versions] == ["new"] * 3
    if source == "sharded":
        assert Sharded.gathered >= len(state)


@pytest.mark.parametrize("kept", [False, True])
def test_a_source_may_yield_the_same_memory_again(kept, monkeypatch):
    """Norms and biases of tensors that stay are copied together; taken to stay, those of such a source go wrong."""
    state = {n: t.detach() for n, t in new_model().state_dict().items()}
    buffer = torch.empty(max(t.numel() for t in state.values()))

    class Reusing:
        @property
        def shapes(self):
            return {name: tuple(t.shape) for name, t in state.items()}

        def tensors(self, names):
            return ((name, buffer[: state[name].numel()].view_as(state[name]).copy_(state[name])) for name in names)

    if kept:
        monkeypatch.setattr(weights_module, "InMemory", Reusing)
    engine = tiny_engine()
    engine.update_weights(Reusing())
    assert (tokens(engine.generate(PROMPTS, SAMPLED)) == fresh_outputs()) != kept


@pytest.mark.parametrize("given", ["no/such/folder", 5, [1, 2]])
def test_what_is_no_source_is_refused(given):
    engine = tiny_engine()
    with pytest.raises(ValueError, match="weights: expected"):
        engine.update_weights(given)


def test_casts_are_reported():
    engine = tiny_engine()
    report = engine.update_weights({n: t.double() for n, t in new_model().state_dict().items()})
    assert any("cast from torch.float64 to torch.float32" in note for note in report.notes)


def announced(engine, state, **more):
    return engine.start_weight_update(list(state), [t.shape for t in state.values()], **more)


def test_a_stream_in_pieces_equals_one_update():
    engine, state = tiny_engine(), new_model().state_dict()
    report = announced(engine, state, dtypes=["float32"] * len(state))
    assert set(report.loaded) == set(state)
    items = list(state.items())
    engine.update_weights(items[:5])
    with pytest.raises(EngineHalted, match="under way"):
        engine.generate(PROMPTS, SAMPLED)
    engine.update_weights(dict(items[5:6]))
    engine.update_weights(iter(items[6:]))
    engine.finish_weight_update("new")
    assert tokens(engine.generate(PROMPTS, SAMPLED)) == fresh_outputs()
    assert engine.weight_version == "new"


def test_announcing_alone_changes_nothing():
    engine, state = tiny_engine(), new_model().state_dict()
    expected = tokens(engine.generate(PROMPTS, SAMPLED))
    announced(engine, state)
    assert engine.model.weights.invalid is None
    assert tokens(engine.generate(PROMPTS, SAMPLED)) == expected


NORM = "model.norm.weight"


@pytest.mark.parametrize("bad, message", [
    ({"never.announced": torch.zeros(1)}, "the names announced"),
    ({NORM: torch.zeros(31)}, r"model\.norm\.weight \[32\], got \[31\]"),
    ({NORM: torch.zeros(32, dtype=torch.int32)}, "dequantize"),
    ([(NORM, torch.zeros(32)), (NORM, torch.zeros(32))], "each tensor once"),
])
def test_a_stream_that_deviates_makes_the_weights_invalid_until_a_full_update(bad, message):
    engine, state = tiny_engine(), new_model().state_dict()
    announced(engine, state)
    engine.update_weights({n: t for n, t in state.items() if n != NORM})
    with pytest.raises(ValueError, match=message):
        engine.update_weights(bad)
    with pytest.raises(ValueError, match="no more pieces"):
        engine.update_weights({NORM: state[NORM]})
    with pytest.raises(ValueError):
        engine.finish_weight_update()
    for call in (lambda: engine.generate(PROMPTS, SAMPLED), engine.step, lambda: engine.score([1], [2])):
        with pytest.raises(EngineHalted, match="invalid"):
            call()
    with pytest.raises(ValueError, match="missing"):
        engine.update_weights({NORM: state[NORM]})
    engine.update_weights({NORM: state[NORM]}, strict=False)  # a subset does not make a mixture whole
    with pytest.raises(EngineHalted):
        engine.generate(PROMPTS, SAMPLED)
    engine.update_weights(state)
    assert tokens(engine.generate(PROMPTS, SAMPLED)) == fresh_outputs()


def test_finishing_too_early_names_what_is_missing():
    engine, state = tiny_engine(), new_model().state_dict()
    announced(engine, state)
    engine.update_weights({n: t for n, t in state.items() if n != NORM})
    with pytest.raises(ValueError, match=r"1 missing: \['model\.norm\.weight'\]"):
        engine.finish_weight_update()
    assert engine.model.weights.invalid


def test_announcements_are_checked_before_anything_changes():
    engine, state = tiny_engine(), new_model().state_dict()
    names, shapes = list(state), [tuple(t.shape) for t in state.values()]
    for args, message in [
        ((names[1:], shapes[1:]), "missing"), ((names, shapes[1:]), "one a name"),
        ((names + names[:1], shapes + shapes[:1]), "each name once"),
        ((names, shapes, ["int8"] * len(names)), "floating-point"), ((names, shapes, ["float32"]), "one a name"),
        ((["module." + n for n in names], shapes), "remove the prefix 'module.'"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.start_weight_update(*args)
    with pytest.raises(ValueError, match="start one"):
        engine.finish_weight_update()
    assert engine.model.weights.invalid is None


def test_a_source_that_breaks_off_leaves_no_silent_half():
    class Broken(Sharded):
        def full_tensor(self):
            raise RuntimeError("a rank died")

    state = dict(new_model().state_dict())
    last = list(state)[-1]
    broken = torch.zeros_like(state[last]).as_subclass(Broken)
    engine = tiny_engine()
    with pytest.raises(RuntimeError, match="a rank died"):
        engine.update_weights({**state, last: broken})
    with pytest.raises(EngineHalted, match="broke off"):
        engine.generate(PROMPTS, SAMPLED)
    engine.update_weights(state)
    assert tokens(engine.generate(PROMPTS, SAMPLED)) == fresh_outputs()


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("in_flight", ["recompute", "keep", "abort"])
def test_requests_in_flight(in_flight, drafting):
    old = plain_outputs(PROMPTS, SAMPLED)
    drafter = None
    if drafting:
        known = {tuple(p): {0: out[0]} for p, out in zip(PROMPTS, old)}
        drafter = ReplayDrafter(known, error_rate=0.3, depth=3)
    engine = tiny_engine(drafter=drafter)
    for i, p in enumerate(PROMPTS):
        engine.add_request(p, SAMPLED, request_id=str(i))
    done = {}
    for _ in range(4):
        done |= {o.request_id: o for o in engine.step()}
    begun = {int(i): len(r.samples[0].output.token_ids) for i, r in engine._requests.items()}
    recomputed = engine._core.scheduler.stats.recomputed
    engine.update_weights(new_model(), weight_version="new", in_flight=in_flight)
    assert engine._core.scheduler.stats.recomputed - recomputed == (0 if in_flight == "keep" else 3)
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step()}
        engine.check_integrity()
    for i, count in begun.items():
        out = done[str(i)].outputs[0]
        assert out.token_ids[:count] == old[i][0][:count]
        if in_flight == "abort":
            assert out.finish_reason == "abort" and len(out.token_ids) == count
        else:
            assert [(s.version, s.start) for s in out.weight_versions] == [("0", 0), ("new", count)]
            assert out.noise.segment == 1
            lps = tiny_engine(model_seed=9).score(PROMPTS[i], out.token_ids)[count:]
            close = torch.allclose(torch.tensor(lps), torch.tensor(out.sampled_logprobs[count:]), atol=1e-4)
            assert close == (in_flight == "recompute")


def test_an_update_waits_for_the_border_of_a_step_and_calls_wait_for_a_stream():
    """A stream from another thread while a call runs: the call waits, is not aborted, and ends under new weights."""
    engine, state = tiny_engine(), dict(new_model().state_dict())
    params = SamplingParams(max_tokens=200, seed=1)
    done: list = []
    thread = threading.Thread(target=lambda: done.extend(engine.generate(PROMPTS, params)))
    thread.start()
    while not engine.stats()["emitted_tokens"]:
        pass
    announced(engine, state)
    items = list(state.items())
    for start in range(0, len(items), 6):
        engine.update_weights(items[start : start + 6])
        steps = engine.stats()["steps"]
    assert engine.stats()["steps"] == steps
    engine.finish_weight_update("new")
    thread.join(60)
    assert not thread.is_alive() and len(done) == 3
    for out in done:
        assert [s.version for s in out.outputs[0].weight_versions] == ["0", "new"]
        assert out.outputs[0].finish_reason == "length"


def test_checksums_tell_what_changed():
    engine, state = tiny_engine(), dict(new_model().state_dict())
    before = engine.weight_checksums()
    assert before == tiny_engine().weight_checksums()
    name = "model.layers.0.mlp.down_proj.weight"
    swapped = dict(engine.model.named_weights())[name].clone()
    swapped[0, :2] = swapped[0, [1, 0]]  # the same values in other places
    engine.update_weights({name: swapped}, strict=False)
    after = engine.weight_checksums()
    assert {n for n in after if after[n] != before[n]} == {name}
    engine.update_weights(state)
    assert engine.weight_checksums() == tiny_engine(model_seed=9).weight_checksums()


def test_the_next_token_after_an_update_is_not_the_step_ahead_under_old_weights():
    """Sabotage: an engine that goes on from what it had launched before the update emits another token."""
    hf = tiny_hf_model(seed=9)
    engine = tiny_engine()
    engine.add_request(PROMPTS[0], greedy(8))
    engine.step()
    engine.step()
    sample = next(iter(engine._core.samples.values()))
    count = len(sample.output.token_ids)
    engine.update_weights(hf, in_flight="recompute")
    while engine.has_unfinished():
        engine.step()
    expected = tokens(tiny_engine(model_seed=9).generate([PROMPTS[0] + sample.output.token_ids[:count]], greedy(8)))
    assert sample.output.token_ids[count:] == expected[0][0][: 8 - count]
    assert sample.output.token_ids != plain_outputs([PROMPTS[0]], greedy(8))[0][0]


def test_an_update_whose_aftermath_fails_is_taken_up_at_the_next_step(monkeypatch):
    """The new weights are in place, and the error came before the old KV was dropped: no token may come from the two
    together."""
    engine = tiny_engine()
    engine.generate(PROMPTS, greedy(4))  # cached prefixes of the old weights
    engine.add_request(PROMPTS[0], greedy(12), request_id="x")
    for _ in range(4):
        engine.step()
    sample = next(iter(engine._core.samples.values()))
    count = len(sample.output.token_ids)

    def failing():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.weights, "fingerprint", failing)
        with pytest.raises(torch.OutOfMemoryError):
            engine.update_weights(new_model(), weight_version="new")
    while engine.has_unfinished():
        engine.step()
    then = tiny_engine(model_seed=9).generate([PROMPTS[0] + sample.output.token_ids[:count]], greedy(12))
    assert sample.output.token_ids[count:] == tokens(then)[0][0][: 12 - count]
    assert sample.output.noise.segment == 1
    assert tokens(engine.generate(PROMPTS, greedy(12))) == fresh_outputs(params=greedy(12))


def test_a_heads_copy_in_another_dtype_is_made_once_a_stream_and_is_the_new_one():
    state = {n: t.detach() for n, t in new_model().state_dict().items()}
    engine = tiny_engine(lm_head_dtype="bfloat16")
    copies = []

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_:
                copies.append(1)
            return super().__torch_function__(func, types, args, kwargs or {})

    weights = engine.model.weights
    assert weights.head is not weights._head_master
    head, weights.head = weights.head, weights.head.as_subclass(Counting)
    announced(engine, state)
    for item in state.items():
        engine.update_weights([item])
    engine.finish_weight_update()
    weights.head = head
    assert len(copies) == 1
    assert torch.equal(head, state["lm_head.weight"].to(head.dtype))
