"""The learned drafter on a GPU: drafts that the device makes by itself, in CUDA graphs, against the CPU engine.

fp32 on both sides unless said otherwise; a difference of tokens is excused only as engine/equality.py says. Equal
tokens hide a drafter's faults, so what it drafts is compared as well: with drafters that know the target exactly
(tests/copies.py), by counts, and by the logits of every level.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tlt_kernels.reference.rope import rotate
from torch import Tensor

from tests.copies import bigram, reduced
from tests.eagle import random_drafter
from tests.engine.engines import shared_hf, tiny_engine
from tests.engine.test_learned import MODEL, SHAPES, learned
from tests.engine.test_learned_copy import PROMPTS as COPY_PROMPTS
from tests.engine.test_learned_copy import SOME, refused
from tests.engine.test_learned_hidden import PROMPTS as UNSHARED
from tests.engine.test_learned_hidden import Recorder
from tests.engine.test_learned_hidden import expected as hidden_states
from tests.engine.test_static_draft import later
from tests.gpu.test_engine import PROMPTS, same_tokens
from tests.kernels.children_interpreted import CASES, compare
from tests.kernels.level_cases import compare_levels
from tests.tiny import tiny_target
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.engine.device import DeviceRunner
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import load_model
from tlt_engine.speculation.lanes import Lanes
from tlt_engine.speculation.learned_pass import EaglePass
from tlt_engine.speculation.static_draft import Seats, StaticDraft, Verified

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROFILES = {"tree": Profile(3, 3, 9), "chain": Profile(5, 1, 6), "wide": Profile(2, 8, 20)}
PARAMS = SamplingParams(temperature=1.0, max_tokens=60, n=2, seed=7, stop_token_ids=[3])


@pytest.fixture(scope="module")
def model() -> EagleModel:
    return random_drafter(tiny_target(**MODEL), window=9)


def engine_with(model: EagleModel, profile: Profile, **config: Any) -> RolloutEngine:
    spec = config.pop("speculation", None) or learned(profile=profile, sharpness=1.5)
    return tiny_engine(model=MODEL, drafter=model, speculation=spec, **config)


def drafting(engine: RolloutEngine) -> dict[str, Any]:
    return engine.stats()["graphs"]["drafting"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_counts_of_the_cpu_engine(model: EagleModel, profile: str, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature)
    judge = tiny_engine(model=MODEL)
    plain = judge.generate(PROMPTS, params)
    on_host = engine_with(model, PROFILES[profile])
    on_host.generate(PROMPTS, params)
    engine = engine_with(model, PROFILES[profile], device="cuda")
    same_tokens(plain, engine.generate(PROMPTS, params), params, judge)
    engine.check_integrity()
    stats, expected = engine.stats(), on_host.stats()
    assert drafting(engine)["steps"] > stats["steps"] // 3, drafting(engine)
    # A draft is another one only where fp32 sums of another order decide: a few in a hundred.
    assert stats["drafted_tokens"] == pytest.approx(expected["drafted_tokens"], rel=0.03)
    assert stats["accept_length"] == pytest.approx(expected["accept_length"], abs=0.05)
    names = set(stats["graphs"]["buckets"])
    assert {name.split()[0] for name in names if " " in name} == {"extend", "draft"}, names


@pytest.mark.parametrize("shape", SHAPES)
def test_drafters_of_all_shapes(shape: str) -> None:
    drafter = random_drafter(tiny_target(**MODEL), **SHAPES[shape])
    judge = tiny_engine(model=MODEL)
    plain = judge.generate(PROMPTS, PARAMS)
    on_host = engine_with(drafter, PROFILES["tree"])
    on_host.generate(PROMPTS, PARAMS)
    engine = engine_with(drafter, PROFILES["tree"], device="cuda")
    same_tokens(plain, engine.generate(PROMPTS, PARAMS), PARAMS, judge)
    stats, expected = engine.stats(), on_host.stats()
    assert drafting(engine)["steps"] > stats["steps"] // 3, drafting(engine)
    assert stats["accept_length"] == pytest.approx(expected["accept_length"], abs=0.05)


@pytest.mark.parametrize("vocabulary", ["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_copy_of_the_target_is_never_refused(vocabulary: str, temperature: float) -> None:
    target, drafter = bigram()
    known = None
    if vocabulary == "reduced":
        drafter, known = reduced(drafter, target, SOME), set(SOME.tolist())
    depth = 4
    spec = SpeculationConfig(method="learned", profile=Profile(depth, 1, depth + 1), min_chance=0.0)
    config = EngineConfig(device="cuda", page_size=4, max_num_seqs=8, speculation=spec)
    engine = RolloutEngine(target, config, drafter=drafter)
    params = SamplingParams(max_tokens=40, seed=2, ignore_eos=True, temperature=temperature)
    outputs = engine.generate(COPY_PROMPTS, params)
    missed, accepted = refused(outputs, depth, known)
    assert missed <= 1 and accepted > 60, f"{missed} refused, {accepted} accepted"
    assert drafting(engine)["steps"] > engine.stats()["steps"] // 2


def test_the_copy_is_refused_when_the_noise_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StaticDraft._top
    monkeypatch.setattr(StaticDraft, "_top", lambda self, rows, logits: honest(self, later(rows), logits))
    with pytest.raises(AssertionError, match="refused"):
        test_a_copy_of_the_target_is_never_refused("whole", 1.0)


def test_graphs_that_come_and_go_and_drafters_that_change(model: EagleModel) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=50 + 9 * i, seed=i, ignore_eos=True) for i in range(6)]
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    judge = tiny_engine(model=MODEL)
    expected = judge.generate(prompts, params)
    engine = engine_with(model, PROFILES["tree"], device="cuda", max_num_seqs=4)
    other = random_drafter(tiny_target(**MODEL), seed=1, window=9)
    names = {engine.add_request(p, q): i for i, (p, q) in enumerate(zip(prompts, params))}
    done: dict[int, Any] = {}
    step = 0
    while engine.has_unfinished():
        step += 1
        if step % 9 == 0:
            engine.release_graphs()
        elif step % 9 == 4:
            engine.capture_graphs()
        elif step % 9 == 7:
            engine.update_drafter(other if step % 2 else model)
        for output in engine.step():
            done[names[output.request_id]] = output
        engine.check_integrity()
    for i, output in done.items():
        same_tokens([expected[i]], [output], params[i], judge)
    assert drafting(engine)["steps"] > 5 and drafting(engine)["refused"].get("catch-up")


def test_switched_off_and_on_by_load(model: EagleModel) -> None:
    """Plain steps ahead while off, the rings kept by the device; then one catch-up."""
    params = [SamplingParams(temperature=1.0, max_tokens=n, seed=3, ignore_eos=True) for n in (80, 12, 60, 30, 70)]
    prompts = [*PROMPTS, [11]]
    judge = tiny_engine(model=MODEL)
    expected = judge.generate(prompts, params)
    spec = learned(profile=PROFILES["tree"], sharpness=1.5, enable_below=3)
    engine = engine_with(model, PROFILES["tree"], speculation=spec, device="cuda")
    outputs = engine.generate(prompts, params)
    for plain, mine, one in zip(expected, outputs, params):
        same_tokens([plain], [mine], one, judge)
    assert engine.stats()["speculation_switches"] == 1 and drafting(engine)["steps"] > 10
    assert engine.stats()["drafter"]["proposals"] < 12


class OnHost(Recorder):
    """What a recorder has taken, fetched when its sample has ended: nothing waits in between."""

    def finish(self, seq_id: int, token_ids: list[int]) -> None:
        super().finish(seq_id, token_ids)
        ids, rows = self.done[-1]
        self.done[-1] = ids, {position: states.cpu() for position, states in rows.items()}


@pytest.mark.parametrize("speculate", [True, False])
def test_a_recorder_beside_steps_ahead(model: EagleModel, speculate: bool) -> None:
    """Plain ones or drafted on the device: hidden states are copied before the next pass overwrites them."""
    engine = engine_with(model, PROFILES["tree"], device="cuda", **({} if speculate else {
        "speculation": learned(profile=PROFILES["tree"], enable_below=0)
    }))
    recorder = OnHost()
    engine.record_hidden(recorder)
    engine.generate(UNSHARED, replace(PARAMS, n=1))
    assert len(recorder.done) == len(UNSHARED)
    assert drafting(engine)["steps"] > (engine.stats()["steps"] // 3 if speculate else -1)
    for ids, rows in recorder.done:
        assert sorted(rows) == list(range(len(ids) - 1))
        ours = torch.stack([rows[p] for p in sorted(rows)])
        torch.testing.assert_close(ours, hidden_states(ids)[: len(ids) - 1], atol=2e-3, rtol=2e-3)


def test_the_host_never_waits_for_a_token_before_a_launch(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No synchronisation between the read of a pass and the one behind it but the read itself."""
    engine = engine_with(model, PROFILES["tree"], device="cuda")
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=1, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)  # all graphs are there
    engine.add_request([1, 2, 3], params)
    for _ in range(4):
        engine.step()
    before = drafting(engine)["steps"]
    honest = DeviceRunner.launch_drafted

    def watched(self: Any, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return honest(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DeviceRunner, "launch_drafted", watched)
    for _ in range(5):
        engine.step()
    assert drafting(engine)["steps"] == before + 5


# ---------------------------------------------------------------- levels, by their logits


@pytest.mark.parametrize("case", CASES, ids=str)
def test_children_are_ranked_as_by_candidates(case: dict[str, Any]) -> None:
    compare(case, "cuda")


@pytest.mark.parametrize("profile", ["tree", "chain", "wide"])
def test_levels_as_by_torch(wide: EagleModel, profile: str) -> None:
    """fp32: sums in another order. bf16: values of size 4, 8 bits, a handful of roundings in a row."""
    compare_levels(wide, PROFILES[profile], 3e-4 if wide.dtype == torch.float32 else 8e-2)


@pytest.fixture(params=["fp32", "bf16", "bf16 without a window"])
def wide(request: pytest.FixtureRequest) -> EagleModel:
    """Heads of 128, as real models have: other kernels than those of tiny heads."""
    dtype = "float32" if request.param == "fp32" else "bfloat16"
    return wide_drafter(dtype, None if "without" in request.param else 24)


def wide_drafter(dtype: str, window: int | None) -> EagleModel:
    sizes = {**MODEL, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 768}
    loaded = load_model(shared_hf(**sizes), dtype=dtype, device="cuda")
    config = EagleConfig.for_target(loaded.model.config, window=window, draft_vocab_size=48)
    drafter = EagleModel(config, dtype=loaded.model.dtype, device="cuda")
    drafter.initialise(torch.Generator().manual_seed(3))
    return drafter.bind(loaded.model)


def test_static_levels_by_graph_and_one_by_one(wide: EagleModel) -> None:
    """Replays of captured graphs give, bit for bit, what the same kernels give one by one; and the logits of the last
    entries are those of EagleModel's plain torch over the same hidden states, within its dtype."""
    drafter, device = wide, torch.device("cuda")
    c, dtype = drafter.config, drafter.dtype
    batch, profile = 4, Profile(4, 3, 12)
    lanes = Lanes(batch, window=c.window, max_len=256, tree_slots=9, width=3 * c.target_hidden_size,
                  kv_heads=c.num_kv_heads, head_dim=c.head_dim, page_size=16, dtype=dtype, device=device)
    passes = EaglePass(drafter, lanes, 256)
    spec = SpeculationConfig(method="learned", profile=profile, min_chance=0.0)
    static = StaticDraft(drafter, lanes, passes, spec, batch=batch, width=3, vocab_limit=None)
    generator = torch.Generator(device).manual_seed(0)

    def ints(values: list[Any], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    live = batch - 1
    seats = Seats(
        ints([*range(live), lanes.nobody]), ints([0] * batch), ints([250] * batch), ints([11, 12, 13, 0]),
        ints([0] * batch), ints([0] * batch), torch.ones(batch, device=device),
        torch.full((batch,), 1.5, device=device), ints([[-2] * 4] * batch), ints([live], torch.int32),
    )
    accepts = [5, 1, 3]
    paths = [[d if d < n else -1 for d in range(5)] for n in accepts] + [[-1] * 5]
    nodes, tokens = 6, torch.randint(0, 64, (batch, 5), generator=generator, device=device)
    hidden = [torch.randn(nodes * live, c.target_hidden_size, generator=generator, device=device).to(dtype)
              for _ in range(3)]
    walked = Verified(
        ints([*accepts, 0], torch.int32), ints(paths, torch.int32), tokens,
        ints([nodes * min(b, live) for b in range(batch + 1)], torch.int32), ints([*accepts, 0], torch.int32), hidden,
    )
    roots = ints([1, 2, 3, 0])

    def both() -> None:
        static.extend(seats, walked)
        static.draft(seats, walked.committed, roots)

    with torch.inference_mode():
        both()
        torch.cuda.synchronize()
        expected = [t.clone() for t in (static.logits, static.tokens, static.parents, static.scores, static.budgets)]
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            both()
            side.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            both()
            graph.capture_end()
        for tensor in (static.logits, static.tokens, static.parents, static.scores, static.budgets):
            tensor.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        got = (static.logits, static.tokens, static.parents, static.scores, static.budgets)
        rows = (live, *(live * static.candidates,) * 3, live)  # padding is anything
        for mine, theirs, count in zip(got, expected, rows):
            assert torch.equal(mine[:count], theirs[:count])
        check_last_entries(static, drafter, accepts, tokens, hidden, nodes)


def check_last_entries(
    static: StaticDraft, drafter: EagleModel, accepts: list[int], tokens: Tensor, hidden: list[Tensor], nodes: int
) -> None:
    """Against attention in plain torch, in fp32."""
    c = drafter.config
    cos, sin = static._pass.cos, static._pass.sin
    group = c.num_heads // c.num_kv_heads
    for b, count in enumerate(accepts):
        aux = torch.cat([h[nodes * b : nodes * b + count] for h in hidden], -1)
        inputs, residual = drafter.enter(drafter.embedding[tokens[b, :count]], drafter.fuse(aux))
        q, k, v = drafter.qkv_rows(inputs)
        q, k = rotate(q, cos[:count], sin[:count]).float(), rotate(k, cos[:count], sin[:count]).float()
        k, v = k.repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
        weights = (torch.einsum("hd,thd->ht", q[-1], k) * c.head_dim**-0.5).softmax(-1)
        attended = torch.einsum("ht,thd->hd", weights, v)[None].to(drafter.dtype)
        logits = drafter.logits(drafter.finish(attended, residual[-1:]))[0]
        # fp32: sums in another order. bf16: logits of size 1, 8 bits, a handful of roundings in a row.
        bound = 2e-4 if drafter.dtype == torch.float32 else 6e-2
        torch.testing.assert_close(static.logits[b].float(), logits.float(), atol=bound, rtol=bound)
