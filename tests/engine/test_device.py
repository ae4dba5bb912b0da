"""The GPU's runner, played on the CPU (tests/engine/emulated.py): the tokens of the plain CPU runner, whatever runs
ahead, is padded, captured, evicted or thrown away."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.drafters import AdversarialDrafter, ReplayDrafter
from tests.engine.emulated import BUCKETS, PlayedOps, emulation
from tests.engine.engines import OFF, greedy, shared_hf, tiny_engine, tokens
from tlt_engine import DraftTree, RolloutEngine, SamplingParams
from tlt_engine.engine import build, device, staging
from tlt_engine.engine import engine as engine_module
from tlt_engine.engine.layout import Layout, frame_sections
from tlt_engine.engine.packing import Lanes, StepBuffers, noise_ids, pack_step
from tlt_engine.engine.sample import Request, Sample
from tlt_engine.engine.staging import Staging
from tlt_engine.graphs.buckets import Buckets, GraphKey
from tlt_engine.outputs import CompletionOutput
from tlt_engine.scheduler.sequence import Batch, Decode, Sequence

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 6, list(range(20, 45))]
PLAIN = SamplingParams(temperature=0.9, max_tokens=40, n=2, seed=7, stop_token_ids=[3, 9])


@pytest.fixture(autouse=True)
def gpu():
    with emulation():
        yield


@pytest.fixture
def ahead(monkeypatch) -> list[int]:
    """Requests in each step that was launched ahead, or broke off on the way."""
    seen: list[int] = []
    honest = device.DeviceRunner.launch_ahead

    def counting(self, flight, sequences, keep_hidden):
        try:
            launched = honest(self, flight, sequences, keep_hidden)
        except BaseException:  # a sabotaged step meets what happens to lie in memory
            seen.append(len(sequences))
            raise
        if launched is not None:
            seen.append(len(sequences))
        return launched

    monkeypatch.setattr(device.DeviceRunner, "launch_ahead", counting)
    return seen


@contextmanager
def cpu_runner() -> Iterator[None]:
    """Engines built inside have the plain runner of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "build_kv", build.build_kv)
        patch.setattr(engine_module, "build_runner", build.build_runner)
        yield


def cpu(prompts: Any, params: Any, **config: Any) -> list[list[list[int]]]:
    """The plain runner's tokens."""
    with cpu_runner():
        return tokens(tiny_engine(**config).generate(prompts, params))


@pytest.mark.parametrize("eager", [False, True])
def test_plain_decoding(eager, ahead):
    engine = tiny_engine(enforce_eager=eager)
    outputs = engine.generate(PROMPTS, PLAIN)
    assert tokens(outputs) == cpu(PROMPTS, PLAIN)
    engine.check_integrity()
    report = engine.stats()["graphs"]
    if eager:
        assert not ahead and report is None
    else:  # most steps are launched before the one in front of them is read, and run from graphs
        assert len(ahead) > engine.stats()["steps"] // 2
        assert sum(b["hits"] for b in report["buckets"].values()) > 0.8 * engine.stats()["steps"]
        assert set(report["eager_steps"]) == {"prefill"}


def test_samples_that_end_meanwhile_leave_no_trace():
    lengths = range(2, 60, 7)
    params = [SamplingParams(temperature=1.0, max_tokens=n, seed=n, stop_token_ids=[5, 6, 7, 8]) for n in lengths]
    prompts = [[i, i + 1] for i in range(len(params))]
    engine = tiny_engine(num_pages=60)
    assert tokens(engine.generate(prompts, params)) == cpu(prompts, params)
    engine.check_integrity()
    again = tokens(engine.generate(prompts, params))  # on pages that were given back while a pass was in flight
    assert again == cpu(prompts, params)


def test_every_drafter():
    expected = cpu(PROMPTS, PLAIN)
    known = {tuple(p): dict(enumerate(samples)) for p, samples in zip(PROMPTS, expected)}
    for drafter in (
        ReplayDrafter(known, error_rate=0.2, depth=6), AdversarialDrafter(64, eos_ids=(3,)),
        ReplayDrafter(known, error_rate=0.3, depth=5, shape="tree", width=3),
    ):
        engine = tiny_engine(drafter=drafter)
        assert tokens(engine.generate(PROMPTS, PLAIN)) == expected
        assert tokens(engine.generate(PROMPTS, PLAIN, speculate=False)) == expected
        engine.check_integrity()
    assert sum(b["hits"] for k, b in engine.stats()["graphs"]["buckets"].items() if not k.endswith("x1")) > 0


def test_all_kinds_of_requests():
    kinds: list[dict[str, Any]] = [
        {"top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {4: 5.0, 5: float("-inf")}}, {"min_tokens": 20, "stop_token_ids": [1, 2, 3, 4, 5]},
        {"allowed_token_ids": [1, 2, 3, 40, 41]}, {"logprobs": 3}, {"logprobs": 0, "raw_logprobs": True},
        {"temperature": 0.0}, {"logits_processor": lambda ids, logits: logits.roll(len(ids))}, {"prompt_logprobs": 2},
    ]
    params = [SamplingParams(**{"seed": i, "max_tokens": 25, **kind}) for i, kind in enumerate(kinds)]
    prompts = [[i, i + 1, i + 2] for i in range(len(kinds))]
    engine = tiny_engine()
    outputs = engine.generate(prompts, params)
    alone = [tiny_engine().generate(prompt, p)[0] for prompt, p in zip(prompts, params)]
    assert tokens(outputs) == cpu(prompts, params) == tokens(alone)
    first = outputs[6].outputs[0]
    assert len(first.raw_logprobs) == len(first.logprobs) == 25 and list(first.logprobs[0]) == first.token_ids[:1]
    assert len(outputs[5].outputs[0].logprobs[4]) >= 3 and len(outputs[9].prompt_logprobs) == 3
    for output, p in zip(outputs, params):
        if p.logits_processor is None:
            scored = engine.score(output.prompt_token_ids, output.outputs[0].token_ids, p)
            if p.min_tokens == 0:
                assert scored == pytest.approx(output.outputs[0].sampled_logprobs, abs=1e-4)


def test_preemption_chunks_and_prefix_hits():
    prompts = [list(range(i, i + 25)) for i in range(8)]
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    expected = cpu(prompts, params)
    engine = tiny_engine(num_pages=40, max_num_batched_tokens=7)
    assert tokens(engine.generate(prompts, params)) == expected
    assert engine.stats()["preemptions"] > 0
    assert tokens(engine.generate(prompts, params)) == expected
    assert engine.stats()["prefix_hit_tokens"] > 0
    engine.check_integrity()


def test_padding_writes_to_the_dummy_page_alone():
    engine = tiny_engine()
    engine.generate(PROMPTS, PLAIN)
    data = engine._core.runner.kv.data
    assert data[:, :, -1].isnan().any() and not data[:, :, :-1].isnan().any()


def test_sabotage_padding_elsewhere_is_seen(monkeypatch):
    honest = device.Layout.__init__
    monkeypatch.setattr(device.Layout, "__init__", lambda self, frame, size, dummy: honest(self, frame, size, 0))
    engine = tiny_engine()
    engine.generate(PROMPTS[:3], greedy(5))
    assert engine._core.runner.kv.data[:, :, 0].isnan().any()


def test_sabotage_a_step_ahead_of_stale_tokens_is_seen(monkeypatch, ahead):
    monkeypatch.setattr(PlayedOps, "advance", staticmethod(lambda walk, lens, roots: lens.add_(walk.accept_lens)))
    assert tokens(tiny_engine().generate(PROMPTS, PLAIN)) != cpu(PROMPTS, PLAIN)
    assert ahead


def test_sabotage_pages_not_refreshed_are_seen(monkeypatch, ahead):
    monkeypatch.setattr(device.DeviceRunner, "_refresh_pages", lambda *args: None)
    assert other_tokens_or_a_slot_of_nobody()
    assert ahead


def other_tokens_or_a_slot_of_nobody(**config: Any) -> bool:
    """What an entry of the page table that did not arrive comes to."""
    expected = cpu(PROMPTS, PLAIN)
    try:
        return tokens(tiny_engine(**config).generate(PROMPTS, PLAIN)) != expected
    except (ValueError, IndexError) as error:
        return "slots" in str(error) or "index" in str(error)


@pytest.fixture
def table_bytes(monkeypatch) -> list[int]:
    """Every frame's page table is copied in part; bytes of each such copy."""
    copied: list[int] = []
    honest = staging.copy_block

    def counting(to, source, start, pitch, width, rows, where):
        copied.append(width * rows)
        honest(to, source, start, pitch, width, rows, where)

    monkeypatch.setattr(staging, "WIDE", 0)
    monkeypatch.setattr(staging, "copy_block", counting)
    return copied


@pytest.mark.parametrize("drafter", [None, AdversarialDrafter(64)])
def test_of_a_long_page_table_only_the_part_in_use_is_copied(drafter, ahead, table_bytes):
    engine = tiny_engine(drafter=drafter, max_num_seqs=8)
    assert tokens(engine.generate(PROMPTS, PLAIN)) == cpu(PROMPTS, PLAIN)
    engine.check_integrity()
    pages = -(-(max(map(len, PROMPTS)) + PLAIN.max_tokens + 16) // 4)
    assert 0 < max(table_bytes) <= 8 * pages * 4  # of 8 rows of 96 pages
    assert drafter is not None or ahead


@pytest.mark.parametrize("short", ["rows", "columns", "behind"])
def test_sabotage_a_part_too_small_is_seen(short, monkeypatch, table_bytes):
    honest = staging.Staging.flush_block

    def smaller(self, frame, rows, columns):
        if short == "rows":
            rows = (rows[0], max(rows[1] - 1, rows[0]))
        if short == "columns":
            columns = (columns[0], max(columns[1] - 1, columns[0]))
        if short == "behind":
            columns = (columns[0] + 1, columns[1] + 1)
        frame.device[frame.table].fill_(60)
        honest(self, frame, rows, columns)

    monkeypatch.setattr(staging.Staging, "flush_block", smaller)
    assert other_tokens_or_a_slot_of_nobody(max_num_seqs=8)


def test_requests_that_come_and_go_between_steps(ahead):
    expected = cpu([[7, 8], [9, 10], [11, 12], [13]], greedy(30))
    engine = tiny_engine()
    ids = [engine.add_request(p, greedy(30)) for p in ([7, 8], [9, 10])]
    outputs = {}
    for step in range(60):
        if step == 6:
            ids.append(engine.add_request([11, 12], greedy(30)))
        if step == 11:
            engine.abort(ids[1])
        if step == 12:
            ids.append(engine.add_request([13], greedy(30)))
        for out in engine.step():
            outputs[out.request_id] = out.outputs[0].token_ids
    assert outputs == {ids[0]: expected[0][0], ids[2]: expected[2][0], ids[3]: expected[3][0]}
    assert len(ahead) > 20 and not engine.has_unfinished()
    engine.check_integrity()


def test_pause_and_resume(ahead):
    engine = tiny_engine()
    outputs = engine.generate(PROMPTS, PLAIN, token_quota=9)
    while any(not o.finished for o in outputs):
        outputs = engine.resume(outputs, token_quota=9)
    assert tokens(outputs) == cpu(PROMPTS, PLAIN) and ahead


def test_weights_that_change_under_a_step_in_flight(ahead):
    """H01, H07: tokens after the change are those of an engine that has had the new weights all along."""
    new = {name: t.clone() for name, t in shared_hf(seed=5).state_dict().items()}
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=1)

    def run(engine: RolloutEngine) -> list[int]:
        engine.add_request([1, 2, 3], params)
        for _ in range(10):
            engine.step()
        engine.update_weights(new)
        while True:
            if outputs := engine.step():
                return outputs[0].outputs[0].token_ids

    got = run(tiny_engine())
    with cpu_runner():
        want = run(tiny_engine())
    assert got[:8] == want[:8] and len(got) == 30 and ahead
    # One step of the ten was a prefill on both runners; the GPU's had launched one more, which the change undid.
    assert got == want


def test_released_graphs_return_at_first_use(ahead):
    engine = tiny_engine()
    engine.add_request([1, 2, 3], greedy(40))
    out: list[Any] = []
    for step in range(60):
        if step in (5, 6, 20):
            engine.release_graphs()
            assert engine.stats()["graphs"]["graphs"] == 0
        if step == 30:
            engine.capture_graphs()
            assert engine.stats()["graphs"]["graphs"] == len(BUCKETS.keys)
        out += engine.step()
    assert tokens(out) == cpu([[1, 2, 3]], greedy(40))
    assert engine.stats()["graphs"]["buckets"]["1x1"]["captures"] >= 3


@pytest.mark.parametrize("fits", [0, 1])
def test_no_memory_for_graphs(fits, caplog):
    """G11: eager steps instead, one warning, the same tokens."""
    with emulation(memory=fits):
        engine = tiny_engine()
        prompts = [[i] for i in range(5)]
        params = [greedy(5 + 4 * i) for i in range(5)]
        assert tokens(engine.generate(prompts, params)) == cpu(prompts, params)
        assert engine.stats()["graphs"]["eager_steps"]["no memory for the graph"] > 0
    assert sum("run without a graph" in r.getMessage() for r in caplog.records) == 1


def test_a_graph_budget_evicts_the_least_recently_used():
    with emulation(graph_bytes=2000):
        engine = tiny_engine()
        prompts = [[i] for i in range(7)]
        params = [greedy(5 + 4 * i) for i in range(7)]
        for _ in range(2):
            assert tokens(engine.generate(prompts, params)) == cpu(prompts, params)
        report = engine.stats()["graphs"]
    assert report["graphs"] == 2 and report["bytes"] == 2000
    assert sum(b["evictions"] for b in report["buckets"].values()) >= 4


def test_steps_beyond_every_graph_run_eagerly():
    """G09: sizes 1..9 with graphs up to 8, shrinking from 9 to 1."""
    prompts = [[i, i + 1] for i in range(9)]
    params = [greedy(4 + 3 * i) for i in range(9)]
    with emulation(buckets=Buckets(GraphKey(b, 1) for b in (1, 2, 4, 8))):
        engine = tiny_engine()
        assert tokens(engine.generate(prompts, params)) == cpu(prompts, params)
        report = engine.stats()["graphs"]
    assert report["eager_steps"]["larger than every graph"] > 0
    assert set(report["buckets"]) == {"1x1", "2x1", "4x1", "8x1"}
    assert report["buckets"]["8x1"]["padding_waste"] > 0


def test_a_broken_row_fails_its_request_alone(monkeypatch, ahead):
    engine = tiny_engine()
    honest = PlayedOps.sample
    poisoned = {"step": 0}

    def sample(logits, ids, params, **more):
        poisoned["step"] += 1
        if poisoned["step"] == 8:
            logits[1] = float("nan")
        return honest(logits, ids, params, **more)

    monkeypatch.setattr(PlayedOps, "sample", staticmethod(sample))
    outputs = engine.generate([[1], [2], [3]], greedy(20))
    expected = cpu([[1], [2], [3]], greedy(20))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert tokens(outputs)[0] == expected[0] and tokens(outputs)[2] == expected[2]
    assert tokens(outputs)[1][0] == expected[1][0][: len(tokens(outputs)[1][0])] and ahead
    engine.check_integrity()


def test_the_engine_says_what_it_holds():
    engine = tiny_engine(speculation=OFF)
    engine.generate([[1, 2]], greedy(3))
    memory = engine.stats()["memory"]
    assert memory["kv"] == engine._core.runner.kv.data.nbytes
    assert memory["buffers"] > engine._core.runner._logits.nbytes
    assert torch.is_tensor(engine._core.runner._logits)


def lanes_of(sequences: list[Sequence]) -> Lanes:
    samples = []
    for seq in sequences:
        request = Request("", "", None, [0], 0, seq.params)
        samples.append(Sample(request, seq, CompletionOutput(0, "", [], [])))
    return Lanes(samples, frozenset())


def test_one_call_packs_what_the_steps_do():
    """fill_decodes (C++) against pack_step and fill (numpy), every array, padding included."""
    rng = random.Random(0)
    for trial in range(40):
        batch, page = rng.randint(1, 6), rng.choice([1, 4, 16])
        trees, sequences = [], []
        for b in range(batch):
            nodes = rng.choice([1, 2, 17, 64, 65, 128])
            tokens = rng.sample(range(1000), nodes)
            trees.append(DraftTree(tuple(tokens), (-1, *(rng.randint(max(0, i - 9), i - 1) for i in range(1, nodes)))))
            kv_len = rng.randint(0, 60)
            params = SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]))
            seq = Sequence(b, "", params, [0], 1, 999, rng.randint(-(2**63), 2**63 - 1), rng.randint(0, 9), 3)
            seq.kv_len, seq.pages = kv_len, rng.sample(range(500), -(-(kv_len + nodes) // page))
            sequences.append(seq)
        temperatures = [s.params.temperature for s in sequences]
        rows, pages = sum(map(len, trees)), max(len(s.pages) for s in sequences) + 2
        layouts = []
        for _ in range(2):
            where = Staging(1 << 20, torch.device("cpu"))
            frame = where.frame(frame_sections(batch + 2, rows + 5, rows + 5, pages))
            for array in frame.host.values():
                array[...] = 7
            layouts.append(Layout(frame, page, 511))
        step = Batch([Decode(s, len(t)) for s, t in zip(sequences, trees)], [], [], [])
        packed = pack_step(step, trees, StepBuffers(rows, batch, pages), page)
        layouts[0].fill(packed, noise_ids(sequences, packed), np.repeat(temperatures, packed.nodes))
        assert layouts[1].fill_decodes(trees, lanes_of(sequences)) == (rows, max(max(t.depths) for t in trees))
        given = layouts[1].packed(trees, rows)
        assert given.nodes.tolist() == packed.nodes.tolist() and given.decode_rows == rows
        assert torch.equal(given.trees.depths, packed.trees.depths)
        for name, array in layouts[0].frame.host.items():
            if name == "page_table":  # entries behind a sequence's pages are never read
                for b, seq in enumerate(sequences):
                    assert layouts[1].frame.host[name][b, : len(seq.pages)].tolist() == seq.pages, name
            else:
                assert np.array_equal(array, layouts[1].frame.host[name]), (trial, name)


def test_packing_refuses_what_would_write_elsewhere():
    where = Staging(1 << 16, torch.device("cpu"))
    layout = Layout(where.frame(frame_sections(2, 4, 4, 3)), 4, 9)
    seq = Sequence(0, "", SamplingParams(), [0], 1, 99, 1, 0)
    seq.kv_len, seq.pages = 7, [1, 2]
    with pytest.raises(ValueError, match="sequence 0: expected pages for 9 slots"):
        layout.fill_decodes([DraftTree((1, 2), (-1, 0))], lanes_of([seq]))
    seq.pages = [1, 2, 3, 4]
    with pytest.raises(ValueError, match="at most 3, got 4"):
        layout.fill_decodes([DraftTree((1, 2), (-1, 0))], lanes_of([seq]))
    seq.pages = [1, 2, 3]
    with pytest.raises(ValueError, match="within 4 rows"):
        layout.fill_decodes([DraftTree.chain(1, [2, 3, 4, 5])], lanes_of([seq]))


def test_what_does_not_fit_behind_a_frame_goes_on_its_own():
    where = Staging(96, torch.device("cpu"))
    frame = where.frame({"a": ((5,), torch.int64), "b": ((3,), torch.int32)})
    for _ in range(2):
        where.begin(frame)
        frame.host["a"][:], frame.host["b"][:] = range(5), [7, 8, 9]
        small, large = where.put(torch.tensor([1.5, 2.5])), where.put(torch.arange(100))
        where.flush(frame, 0, 0)
        assert frame.device["a"].tolist() == [0, 1, 2, 3, 4] and frame.device["b"].tolist() == [7, 8, 9]
        assert small.tolist() == [1.5, 2.5] and torch.equal(large, torch.arange(100))
    assert small.data_ptr() - frame.device["a"].data_ptr() == frame.end == 64  # equal steps, equal addresses
