"""HiddenStateBuffer: alignment, budget, what lies behind a stop, capture shares, draws, prefilling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tiny import prefill_logits, tiny_hf_model, tiny_target
from tests.training.rows import (
    HIDDEN,
    LAST,
    LAYERS,
    ScriptedRows,
    loaded,
    misaligned,
    one_pass,
    script_tokens,
    small_buffer,
)
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.records import DrawPolicy, Piece


def everything(buffer: HiddenStateBuffer, rows: int = 10_000, **policy: object) -> list[Piece]:
    with buffer.draw(rows, "all", DrawPolicy(**{"max_age": None, **policy})) as pieces:  # type: ignore[arg-type]
        return sorted(pieces, key=lambda p: p.record.uid)


def decode(buffer: HiddenStateBuffer, seq_id: int, total: int, *, step: int = 3, prompt: int = 5) -> None:
    """A prompt in one chunk, then passes that keep 1 .. step tokens, until `total` rows are taken."""
    buffer.take(one_pass([(seq_id, 0, min(prompt, total))]))
    at, size = min(prompt, total), 1
    while at < total:
        now = min(size, total - at)
        buffer.take(one_pass([(seq_id, at, now)]))
        at, size = at + now, size % step + 1


@pytest.mark.parametrize("stage_rows", [1, 3, 8, 100])
def test_rows_stay_with_their_tokens_and_n_rows_make_n_minus_1_pairs(stage_rows: int) -> None:
    buffer = small_buffer(stage_rows=stage_rows)
    for at in range(0, 30, 2):  # three sequences in turn, so that pages and stage mix them
        buffer.take(one_pass([(1, at, 2), (2, at, 2), (3, at, 2)]))
    for seq_id in (1, 2, 3):
        buffer.finish(seq_id, script_tokens(seq_id, 31))  # the last token was never an input
    pieces = everything(buffer)
    assert [(p.record.seq_id, p.rows, p.record.pairs) for p in pieces] == [(s, 30, 29) for s in (1, 2, 3)]
    assert [c for p in pieces for c in misaligned(buffer, p)] == []
    buffer.check_integrity()


def test_sabotage_a_row_of_another_position_is_seen() -> None:
    buffer = small_buffer()
    rows = one_pass([(1, 0, 6)])
    shifted = ScriptedRows(rows.hidden, [replace(rows.runs[0], rows=[0, 1, 2, 3, 4, 5])])  # one too early
    buffer.take(shifted)
    buffer.finish(1, script_tokens(1, 6))
    assert misaligned(buffer, everything(buffer)[0]) != []


@pytest.mark.parametrize("rows", [0, 1, 2, 33, 34])
def test_any_length_is_taken_and_short_ones_make_no_pair(rows: int) -> None:
    """J02: 34 tokens and 33 hidden rows, running or finished, never raise."""
    buffer = small_buffer()
    decode(buffer, 1, rows)
    buffer.finish(1, script_tokens(1, rows + 1))
    pieces = everything(buffer)
    assert sum(p.rows - 1 for p in pieces) == max(rows - 1, 0) == buffer.stats()["pairs"]
    assert buffer.stats()["unpaired_rows"] == (rows == 1)
    buffer.check_integrity()


@pytest.mark.parametrize("kept", range(3, 9))
def test_nothing_behind_a_stop(kept: int) -> None:
    buffer = small_buffer(stage_rows=4)
    decode(buffer, 1, 9)
    buffer.finish(1, script_tokens(1, kept))
    assert [p.tokens.tolist() for p in everything(buffer)] == [script_tokens(1, kept)]
    assert buffer.stats()["cut_rows"] == 9 - kept
    buffer.check_integrity()


def test_a_running_sequence_can_be_harvested_and_goes_on() -> None:
    buffer = small_buffer()
    decode(buffer, 1, 10)
    buffer.finish(1, script_tokens(1, 11))
    buffer.take(one_pass([(1, 10, 4)]))
    buffer.finish(1, script_tokens(1, 15))
    pieces = everything(buffer)
    assert [(p.first, p.rows) for p in pieces] == [(0, 10), (10, 4)]
    assert [c for p in pieces for c in misaligned(buffer, p)] == []


def test_rows_computed_again_replace_the_old_ones() -> None:
    """Preemption recomputes from a page border, and new weights from the start."""
    buffer = small_buffer(stage_rows=100)
    decode(buffer, 1, 12)
    buffer.take(one_pass([(1, 8, 6)]))
    buffer.new_policy("next")
    buffer.take(one_pass([(1, 0, 15)], policy=1))
    buffer.finish(1, script_tokens(1, 16))
    (piece,) = everything(buffer)
    assert (piece.first, piece.rows, piece.record.policy) == (0, 15, 1)
    assert misaligned(buffer, piece) == []
    assert buffer.stats()["replaced_rows"] == 4 + 14
    buffer.check_integrity()


def test_a_gap_and_a_change_of_policy_split_a_sequence() -> None:
    buffer = small_buffer()
    buffer.take(one_pass([(1, 0, 5)]))
    buffer.take(one_pass([(1, 8, 5)]))  # a prefix hit: three rows nobody computed
    buffer.new_policy(7)
    buffer.take(one_pass([(1, 13, 3)], policy=1))
    buffer.finish(1, script_tokens(1, 17))
    pieces = everything(buffer)
    assert [(p.first, p.rows, p.record.policy) for p in pieces] == [(0, 5, 0), (8, 5, 0), (13, 3, 1)]
    assert [c for p in pieces for c in misaligned(buffer, p)] == []
    buffer.check_integrity()


@pytest.mark.parametrize("stage_rows", [3, 100])
@pytest.mark.parametrize("prompt", [3, 4, 7])
def test_the_samples_of_a_prompt_share_its_rows(prompt: int, stage_rows: int) -> None:
    """The first one prefills; each has the whole prompt to attend to, and its pairs are trained once."""
    buffer = small_buffer(stage_rows=stage_rows)
    owners = {2: [1] * prompt, 3: [1] * prompt}
    buffer.take(one_pass([(1, 0, prompt)]))
    buffer.fork(1, 2, prompt)
    buffer.fork(1, 3, prompt)
    for at in range(prompt, prompt + 9, 3):
        buffer.take(one_pass([(s, at, 3) for s in (1, 2, 3)]))
    buffer.check_integrity()
    for seq_id in (1, 2, 3):
        buffer.finish(seq_id, script_tokens(seq_id, prompt + 10, owners))
    pieces = everything(buffer)
    assert [(p.first, p.rows, p.trained_from, p.record.pairs) for p in pieces] == [
        (0, prompt + 9, 0, prompt + 8), (0, prompt + 9, prompt - 1, 9), (0, prompt + 9, prompt - 1, 9),
    ]
    assert [c for p in pieces for c in misaligned(buffer, p, owners)] == []
    assert buffer.stats()["shared_rows"] == 2 * prompt
    pages = 3 * -(-(prompt + 9) // 4) - 2 * (prompt // 4)  # full pages of the prompt are there once
    assert buffer.stats()["used_bytes"] == pages * buffer._arena.page_bytes
    buffer.check_integrity()


def test_sabotage_a_shared_page_written_to_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiddenStateBuffer, "_own_last_page", lambda self, record: True)
    with pytest.raises(AssertionError):
        test_the_samples_of_a_prompt_share_its_rows(7, 100)


def test_a_fork_of_what_is_not_kept_is_none_and_a_lone_one_makes_no_pair() -> None:
    buffer = small_buffer()
    buffer.fork(1, 2, 5)
    assert buffer.stats()["open_sequences"] == 0
    buffer.take(one_pass([(1, 4, 5)]))
    buffer.fork(1, 2, 12)  # more than it has
    buffer.fork(1, 3, 4)  # nothing of what it has
    assert buffer.stats()["open_sequences"] == 1
    buffer.fork(1, 4, 9)
    buffer.finish(4, script_tokens(4, 9, {4: [1] * 9}))
    assert everything(buffer) == [] and buffer.stats()["unpaired_rows"] == 5
    buffer.check_integrity()


def test_windows_hold_pairs_of_their_own() -> None:
    buffer = small_buffer()
    buffer.take(one_pass([(1, 0, 30)]))
    buffer.fork(1, 2, 30)
    buffer.discard(1)
    buffer.take(one_pass([(2, 30, 3)]))
    buffer.finish(2, script_tokens(2, 34, {2: [1] * 30}))
    for i in range(50):
        with buffer.draw(10, str(i)) as (piece,):
            assert piece.trained_from < piece.rows - 1
            assert misaligned(buffer, piece, {2: [1] * 30}) == []


def test_ten_thousand_tokens_stay_within_a_small_budget() -> None:
    """J05. Pages are the only storage: no kept slice can hold a pass's tensor."""
    buffer = small_buffer(pages=20)
    budget = 20 * 4 * 3 * HIDDEN * 4
    for seq_id in range(250):
        decode(buffer, seq_id, 40)
        buffer.finish(seq_id, script_tokens(seq_id, 41))
        assert buffer._arena.bytes <= budget
    storages = {slab.untyped_storage().data_ptr(): slab.untyped_storage().nbytes() for slab in buffer._arena._slabs}
    assert sum(storages.values()) <= budget
    pieces = everything(buffer)
    assert [p.record.seq_id for p in pieces] == [248, 249]  # the newest
    assert [c for p in pieces for c in misaligned(buffer, p)] == []
    stats = buffer.stats()
    assert (stats["dropped_sequences"], stats["dropped_rows"]) == (248, 248 * 40)
    buffer.check_integrity()


def test_a_sequence_longer_than_the_budget_keeps_its_newest_rows() -> None:
    buffer = small_buffer(pages=5)
    decode(buffer, 1, 50)
    buffer.finish(1, script_tokens(1, 51))
    (piece,) = everything(buffer)
    assert piece.rows >= 16 and piece.first + piece.rows == 50
    assert misaligned(buffer, piece) == []
    assert buffer.stats()["trimmed_rows"] == piece.first
    buffer.check_integrity()


def test_what_a_reader_holds_is_not_overwritten() -> None:
    buffer = small_buffer(pages=5)
    decode(buffer, 1, 12)
    buffer.finish(1, script_tokens(1, 13))
    with buffer.draw(100, "x") as (piece,):
        decode(buffer, 2, 30)
        buffer.finish(2, script_tokens(2, 31))
        assert misaligned(buffer, piece) == []
    decode(buffer, 3, 12)
    buffer.finish(3, script_tokens(3, 13))
    buffer.flush()
    assert buffer.stats()["dropped_sequences"] >= 1
    buffer.check_integrity()


def test_capture_is_a_share_of_sequences_and_the_same_every_time() -> None:
    kept = [s for s in range(2000) if small_buffer(capture=0.3).wants(s)]
    assert 500 < len(kept) < 700
    assert kept == [s for s in range(2000) if small_buffer(capture=0.3).wants(s)]
    assert kept != [s for s in range(2000) if small_buffer(capture=0.3, seed=1).wants(s)]
    assert set(kept) < {s for s in range(2000) if small_buffer(capture=0.6).wants(s)}
    buffer = small_buffer(capture=0.3)
    for seq_id in range(40):
        decode(buffer, seq_id, 6)
        buffer.finish(seq_id, script_tokens(seq_id, 7))
    assert [p.record.seq_id for p in everything(buffer)] == [s for s in kept if s < 40]
    off = small_buffer(capture=0.0)
    decode(off, 1, 6)
    off.finish(1, script_tokens(1, 7))
    assert off.stats()["taken_rows"] == 0 and off.memory_bytes() == 0


def fill_policies(long_now: bool = False) -> HiddenStateBuffer:
    """Policy 0: 30 short, 3 long sequences. Policy 1: 30 short ones, the long ones still running."""
    buffer = small_buffer(pages=2000)
    for policy in (0, 1):
        if policy:
            buffer.new_policy("1")
        for i in range(33 if policy == 0 or long_now else 30):
            seq_id = 100 * policy + i
            buffer.take(one_pass([(seq_id, 0, 40 if i >= 30 else 4)], policy=policy))
            buffer.finish(seq_id, script_tokens(seq_id, 41))
    return buffer


def test_one_step_off_with_a_quota_of_long_sequences() -> None:
    buffer = fill_policies()
    shares, without = [], []
    for i in range(20):
        with buffer.draw(80, f"{i}") as pieces:
            assert sum(p.rows for p in pieces) == 80
            shares.append(sum(p.rows for p in pieces if p.record.rows == 40) / 80)
        with buffer.draw(80, f"{i}", DrawPolicy(long_share=0.0)) as pieces:
            without.append(sum(p.rows for p in pieces if p.record.rows == 40) / 80)
    assert min(shares) >= 0.25
    assert min(without) < 0.1  # sabotage: without the quota the long ones are left to chance
    buffer.new_policy("2")
    assert {p.record.policy for p in everything(buffer, max_age=1)} == {1}
    assert {p.record.policy for p in everything(buffer, max_age=0)} == set()


def test_a_draw_depends_on_its_order_and_content_only() -> None:
    a, b = fill_policies(), fill_policies()

    def picked(buffer: HiddenStateBuffer, order: str) -> list[tuple[int, int, int]]:
        with buffer.draw(60, order) as pieces:
            return [(p.record.seq_id, p.start, p.rows) for p in pieces]

    first = picked(a, "x")
    assert first == picked(a, "x") == picked(b, "x")
    assert first != picked(a, "y")


def test_long_sequences_give_windows() -> None:
    buffer = fill_policies()
    with buffer.draw(400, "w", DrawPolicy(max_rows=10)) as pieces:
        assert max(p.rows for p in pieces) == 10
        assert [c for p in pieces for c in misaligned(buffer, p)] == []
        assert any(p.start > 0 for p in pieces)


def test_rejected_and_discarded_sequences_are_gone() -> None:
    buffer = small_buffer()
    decode(buffer, 1, 10)
    decode(buffer, 2, 10)
    buffer.finish(1, script_tokens(1, 11))
    buffer.discard(2)
    with buffer.draw(100, "x") as (piece,):
        buffer.reject(piece)
    assert everything(buffer) == []
    assert buffer.stats()["used_bytes"] == 0 and buffer.stats()["dropped_rows"] == 20
    buffer.check_integrity()


@pytest.mark.parametrize("max_rows", [7, 1000])
def test_filling_from_texts_equals_the_targets_hidden_states(max_rows: int) -> None:
    model = tiny_target(num_hidden_layers=3)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [], [1], list(range(20, 41))]
    buffer = HiddenStateBuffer((1, 2), 3, 32, byte_budget=2**20)
    assert buffer.fill(model, texts, max_rows=max_rows) == sum(map(len, texts))
    pieces = everything(buffer)
    assert [p.tokens.tolist() for p in pieces] == [t for t in texts if len(t) > 1]
    for piece in pieces:
        _, hidden = prefill_logits(model, piece.tokens.tolist(), capture=(1, 2, 3))
        aux, last = loaded(buffer, piece)
        torch.testing.assert_close(aux, torch.cat((hidden[1], hidden[2]), -1), rtol=0, atol=0)
        torch.testing.assert_close(last, hidden[3], rtol=0, atol=0)
    buffer.check_integrity()


def test_filled_rows_are_transformers_hidden_states() -> None:
    hf = tiny_hf_model(num_hidden_layers=3)
    buffer = HiddenStateBuffer((1, 2), 3, 32, byte_budget=2**20)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    buffer.fill(tiny_target(num_hidden_layers=3), [ids])
    with torch.no_grad():
        states = hf.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    aux, last = loaded(buffer, everything(buffer)[0])
    torch.testing.assert_close(aux, torch.cat([states.hidden_states[i][0] for i in (1, 2)], -1), rtol=1e-5, atol=1e-5)
    # transformers' last entry is behind the final norm
    normed = hf.model.norm(last)
    torch.testing.assert_close(normed, states.hidden_states[3][0], rtol=1e-5, atol=1e-5)


def test_the_last_state_is_kept_once_when_the_drafter_reads_it_too() -> None:
    buffer = HiddenStateBuffer((3,), 3, 8, byte_budget=2**20)
    assert buffer.hidden_layers == (3,) and buffer.width == 8
    assert buffer.aux_columns == buffer.last_columns == slice(0, 8)


def test_refusals_teach() -> None:
    with pytest.raises(ValueError, match="byte_budget: expected room for a page of 32 rows"):
        HiddenStateBuffer(LAYERS, LAST, HIDDEN, byte_budget=100, page_rows=32)
    with pytest.raises(ValueError, match="capture: expected a share"):
        HiddenStateBuffer(LAYERS, LAST, HIDDEN, byte_budget=2**20, capture=1.5)
    rows = one_pass([(1, 0, 3)])
    with pytest.raises(ValueError, match=r"hidden\[3\]: expected torch.float32 \[R, 4\], got 'nothing'"):
        small_buffer().take(ScriptedRows({k: v for k, v in rows.hidden.items() if k != 3}, rows.runs))
    with pytest.raises(ValueError, match="one run a sequence"):
        small_buffer().take(one_pass([(1, 0, 2), (1, 2, 2)]))
    with pytest.raises(ValueError, match="at most max_model_len"):
        HiddenStateBuffer((1,), 2, 32, byte_budget=2**20).fill(tiny_target(), [[1] * 257])


def test_buffers_made_in_inference_mode_can_be_trained_on() -> None:
    buffer = small_buffer()
    with torch.inference_mode():
        decode(buffer, 1, 10)
        buffer.finish(1, script_tokens(1, 11))
    aux, _ = loaded(buffer, everything(buffer)[0])
    weight = torch.ones(aux.shape[1], requires_grad=True)
    (aux @ weight).sum().backward()
    assert weight.grad is not None
