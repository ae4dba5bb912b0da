"""DrafterTrainer: budgets, pauses, resumes bit for bit, what it may not touch, what it does with bad data."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.drafters import filled_buffer, random_texts, tiny_drafter, tiny_target
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.transformer import Transformer
from tlt_engine.training import captured, muon
from tlt_engine.training import trainer as trainer_module
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.checkpoint import CheckpointWriter
from tlt_engine.training.loss import LossConfig, Teacher
from tlt_engine.training.packing import PackedRows, pack_pieces
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig

TEXTS = random_texts([30, 12, 7, 25, 18, 40, 5, 16])
SMALL = TrainerConfig(lr=1e-2, clip=10.0, micro_rows=60, accumulate=2, warmup_steps=3, loss=LossConfig(steps=3))


def setup(
    config: TrainerConfig = SMALL, texts: Sequence[Sequence[int]] = TEXTS, **drafter: Any
) -> tuple[Transformer, EagleModel, DrafterTrainer]:
    target = tiny_target(num_hidden_layers=3)
    model = tiny_drafter(target, **drafter)
    return target, model, DrafterTrainer(model, filled_buffer(target, model, texts), config)


def weights(model: EagleModel) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.named_tensors()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_it_learns_what_it_is_shown() -> None:
    _, _, trainer = setup()
    first = trainer.step()
    for _ in range(25):
        last = trainer.step()
    assert last["cross_entropy"][0] - last["entropy"][0] < 0.5 * (first["cross_entropy"][0] - first["entropy"][0])
    assert last["steps"] == 26 and last["micro_steps"] == 2
    assert len(last["agreement"]) == len(last["overlap"]) == 3
    assert last["agreement"][0] > first["agreement"][0] and last["tokens_per_s"] > last["samples_per_s"] > 0
    assert all(isinstance(v, (int, float, bool, list)) for v in last.values())


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not() -> None:
    runs = []
    for seed in (0, 0, 1):
        _, model, trainer = setup(TrainerConfig(lr=1e-2, micro_rows=60, seed=seed, loss=LossConfig(steps=2)))
        for _ in range(4):
            trainer.step()
        runs.append(weights(model))
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2])


@pytest.mark.parametrize("micro_steps_more", [0, 1])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, micro_steps_more: int) -> None:
    """Also from a checkpoint taken within a window of micro-steps."""
    _, straight, trainer = setup()
    for _ in range(3):
        trainer.step()
    for _ in range(micro_steps_more):
        assert trainer._micro_step() is not None
    writer = CheckpointWriter(tmp_path)
    trainer.save(writer)
    for _ in range(3):
        trainer.step()
    writer.wait()
    _, resumed, again = setup(seed=5)  # other weights, which the checkpoint replaces
    again.load(str(tmp_path))
    assert again.steps == 3 and not same(weights(straight), weights(resumed))
    for _ in range(3):
        again.step()
    assert again.steps == trainer.steps == 6
    assert same(weights(straight), weights(resumed))


def test_sabotage_a_resume_without_the_moments_differs(tmp_path: Path) -> None:
    _, straight, trainer = setup()
    for _ in range(3):
        trainer.step()
    tensors, data = trainer.state()
    kept = {n: t.clone() if n.startswith("master") else torch.zeros_like(t) for n, t in tensors.items()}
    trainer.step()
    _, resumed, again = setup()
    again.load_state(kept, data)
    again.step()
    assert not same(weights(straight), weights(resumed))


def test_the_callers_factor_on_the_learning_rate() -> None:
    _, model, trainer = setup()
    trainer.lr_factor = 0.0
    before = weights(model)
    assert trainer.step()["lr"] == 0.0 and same(weights(model), before)
    trainer.lr_factor = 0.5
    assert trainer.step()["lr"] == 0.5 * SMALL.lr_at(1) and not same(weights(model), before)


def padded_gradients(change: Any = None) -> list[tuple[Tensor, Tensor]]:
    """(loss and gradients of a batch, the same of the batch padded), after another batch stood in the padded one."""
    _, model, trainer = setup()
    batches = []
    for rows in (60, 47):
        with trainer.buffer.draw(rows, str(rows)) as pieces:
            batches.append(pack_pieces(trainer.buffer, pieces, model.device)[0])
    static = captured.padded(batches[0], 64)
    captured.fill(static, batches[1])
    if change is not None:
        change(static)
    found = []
    for packed in (batches[1], static):
        loss, sums = trainer.objective(packed)
        found.append([loss.detach(), sums.rows, *torch.autograd.grad(loss, list(trainer._named.values()))])
    return list(zip(*found))


def test_a_padded_batch_has_the_gradients_of_the_batch() -> None:
    for ours, theirs in padded_gradients():
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-7)


def test_sabotage_rows_of_the_batch_before_are_seen() -> None:
    def spoil(static: PackedRows) -> None:
        static.usable.fill_(True)
        static.ends.fill_(63)

    with pytest.raises(AssertionError):
        for ours, theirs in padded_gradients(spoil):
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-7)


def test_stand_ins_are_the_parameters_storages_and_go_again() -> None:
    _, model, _ = setup()
    own = dict(model.named_parameters())
    with captured.stand_ins(model) as aliases:
        inside = dict(model.named_parameters())
        assert all(aliases[id(p)] is inside[n] is not p for n, p in own.items())
        assert all(inside[n].data_ptr() == p.data_ptr() and inside[n].requires_grad for n, p in own.items())
    assert all(p is own[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("shape", [(48, 48), (16, 100), (100, 16)])
def test_muons_update_is_the_momentum_with_singular_values_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(shape, generator=generator) * torch.logspace(0, -1, shape[1])
    master, momentum = torch.zeros(2 * shape[0], shape[1]), torch.zeros(2 * shape[0], shape[1])
    muon.update_matrix(master, torch.cat((grad, -3 * grad)), momentum, (shape[0], shape[0]), 1.0)
    torch.testing.assert_close(momentum[: shape[0]], grad * (1 - muon.MOMENTUM))
    torch.testing.assert_close(master[shape[0] :], -master[: shape[0]])  # each part on its own, whatever its size
    u, s, v = torch.linalg.svd(grad, full_matrices=False)
    scale = muon.RMS * max(shape) ** 0.5
    found = torch.linalg.svdvals(master[: shape[0]]) / scale
    assert found.min() > 0.5 and found.max() < 1.25
    turned = u.T @ (-master[: shape[0]] / scale) @ v.T  # the same singular vectors: diagonal in them
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-3
    assert (torch.linalg.svdvals(grad) / s[0]).min() < 0.4


def test_muon_moves_the_matrices_and_adamw_the_rest() -> None:
    moved = []
    for muon_lr in (None, 1e-9):
        _, model, trainer = setup(replace(SMALL, muon_lr=muon_lr))
        before = weights(model)
        trainer.step()
        moved.append({n for n, t in weights(model).items() if not torch.allclose(t, before[n], atol=1e-6)})
    assert moved[0] == set(before) and moved[1] == {n for n in before if n.endswith("norm.weight")}


def fake_clock(monkeypatch: pytest.MonkeyPatch, trainer: DrafterTrainer, seconds: float) -> None:
    """Each micro-step takes `seconds`, nothing else any time."""
    now = [0.0]
    monkeypatch.setattr(trainer_module, "perf_counter", lambda: now[0])
    real = trainer._micro_step

    def micro_step() -> Any:
        now[0] += seconds
        return real()

    monkeypatch.setattr(trainer, "_micro_step", micro_step)


@pytest.mark.parametrize(("budget_ms", "expected"), [(0, 0), (1, 1), (15.625, 1), (31.25, 2), (60, 3)])
def test_a_step_keeps_its_budget(monkeypatch: pytest.MonkeyPatch, budget_ms: float, expected: int) -> None:
    """At 1/64 s a micro-step: as many as fit, one at least, so never more than one over the budget."""
    _, _, trainer = setup()
    fake_clock(monkeypatch, trainer, 1 / 64)
    report = trainer.step(budget_ms)
    assert report["micro_steps"] == expected
    assert report["elapsed_ms"] <= budget_ms + 15.625


def test_an_accumulated_gradient_is_the_mean_of_its_micro_steps() -> None:
    _, model, trainer = setup()
    single: list[dict[str, Tensor]] = []
    for micro in range(2):
        with trainer.buffer.draw(60, f"0:0:{micro}") as pieces:
            packed, _ = pack_pieces(trainer.buffer, pieces, model.device)
        grads = torch.autograd.grad(trainer.objective(packed)[0], list(trainer._named.values()))
        single.append(dict(zip(trainer._named, grads)))
    seen: dict[str, Tensor] = {}
    trainer._descend = lambda grads, scale: seen.update(  # type: ignore[method-assign]
        {n: g.clone() for n, g in zip(trainer._grads, grads)}
    )
    trainer.step()
    for n, found in seen.items():
        torch.testing.assert_close(found, (single[0][n] + single[1][n]) / 2, rtol=1e-5, atol=1e-7)


def test_windows_of_micro_steps_go_on_over_calls() -> None:
    _, one, trainer = setup()
    for _ in range(8):
        assert trainer._micro_step() is not None
    _, other, again = setup()
    for _ in range(4):
        again.step()
    assert trainer.steps == again.steps == 4 and same(weights(one), weights(other))


def test_pause_from_another_thread_stops_behind_the_micro_step() -> None:
    _, _, trainer = setup()
    entered, reports = threading.Event(), []
    real = trainer._micro_step

    def micro_step() -> Any:
        entered.set()
        return real()

    trainer._micro_step = micro_step  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: reports.append(trainer.step(budget_ms=60_000)))
    thread.start()
    assert entered.wait(30)
    trainer.pause()
    thread.join(30)
    assert not thread.is_alive() and reports[0]["micro_steps"] >= 1 and reports[0]["paused"]
    assert trainer.step()["micro_steps"] == 0
    trainer.resume()
    assert trainer.step()["micro_steps"] >= 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_of_the_callers_is_touched(mode: Any) -> None:
    target, model, trainer = setup(vocabulary=range(0, 64, 2))
    before = {n: t.clone() for n, t in target.named_weights()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with mode():
        flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        trainer.step()
        assert flags == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in target.named_weights())
    assert all(p.grad is None for p in model.parameters())
    assert not any(t.requires_grad or t.grad is not None for _, t in target.named_weights())


@pytest.mark.parametrize("freeze", [True, False])
def test_an_embedding_of_its_own_stays_unless_asked_for(freeze: bool) -> None:
    config = TrainerConfig(lr=1e-2, micro_rows=60, freeze_embedding=freeze, loss=LossConfig(steps=2))
    _, model, trainer = setup(config, hidden_size=24, vocabulary=range(0, 64, 2))
    before = weights(model)
    trainer.step()
    after = weights(model)
    moved = {n for n in after if not torch.equal(before[n], after[n])}
    assert moved == set(before) - {"d2t", "t2d"} - ({"embed_tokens.weight"} if freeze else set())


def low_precision(config: TrainerConfig) -> tuple[EagleModel, DrafterTrainer]:
    target = tiny_target(num_hidden_layers=3, dtype="bfloat16")
    model = EagleModel(EagleConfig.for_target(target.config), dtype=torch.bfloat16).bind(target)
    model.initialise(torch.Generator().manual_seed(0))
    return model, DrafterTrainer(model, filled_buffer(target, model, TEXTS), config)


TINY_STEPS = TrainerConfig(lr=2e-4, clip=1e9, micro_rows=100, warmup_steps=0, loss=LossConfig(steps=2))


def test_fp32_masters_gather_updates_too_small_for_bf16() -> None:
    """An update of 2e-4 is less than half a bf16 step of a norm's weight of 1 (2^-9): only masters can add them up."""
    model, trainer = low_precision(TINY_STEPS)
    before = model.post_norm.clone()
    for _ in range(40):
        trainer.step()
    assert trainer._masters["post_norm"].dtype == torch.float32
    assert (model.post_norm != before).float().mean() > 0.5
    assert torch.equal(model.post_norm, trainer._masters["post_norm"].to(torch.bfloat16))


def test_sabotage_without_masters_they_are_lost() -> None:
    model, trainer = low_precision(TINY_STEPS)
    before = model.post_norm.clone()
    for _ in range(40):
        for name, parameter in trainer._named.items():
            trainer._masters[name].copy_(parameter.detach())  # as if the weights themselves were the only copy
        trainer.step()
    assert (model.post_norm != before).float().mean() < 0.05


def test_an_empty_buffer_and_lone_tokens_train_nothing() -> None:
    """J04"""
    for texts in ([], [[1], [2], [3]]):
        _, model, trainer = setup(texts=texts)
        before = weights(model)
        report = trainer.step(budget_ms=1000)
        assert report["micro_steps"] == 0 and report["starved"] == 1 and same(before, weights(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_is_dropped_and_the_others_train(bad: float) -> None:
    target, model, _ = setup()
    buffer = filled_buffer(target, model, TEXTS)
    record = next(iter(buffer._closed.values()))
    buffer.flush()
    buffer._arena.page(record.pages[0])[3, 5] = bad
    trainer = DrafterTrainer(model, buffer, TrainerConfig(lr=1e-2, micro_rows=1000, loss=LossConfig(steps=2)))
    before = weights(model)
    report = trainer.step()
    assert report["dropped_samples"] == 1 and report["rows"][0] == sum(len(t) - 1 for t in TEXTS[1:])
    after = weights(model)
    assert all(t.isfinite().all() for t in after.values() if t.is_floating_point()) and not same(before, after)
    assert trainer.step()["dropped_samples"] == 1  # it is gone
    buffer.check_integrity()


def test_only_bad_samples_skip_the_step() -> None:
    target, model, _ = setup()
    buffer = filled_buffer(target, model, TEXTS[:2])
    buffer.flush()
    for record in buffer._closed.values():
        buffer._arena.page(record.pages[0])[0] = float("nan")
    trainer = DrafterTrainer(model, buffer, TrainerConfig(micro_rows=1000))
    before = weights(model)
    report = trainer.step()
    assert (report["empty_steps"], report["loss"], report["dropped_samples"]) == (1, 0.0, 2)
    assert same(before, weights(model))


def test_gradients_that_are_not_finite_change_nothing() -> None:
    _, model, trainer = setup()
    before = weights(model)
    trainer._grads["o"][0, 0] = float("inf")
    report = trainer.step()
    assert report["not_finite_steps"] == 1 and same(before, weights(model))
    assert trainer.step()["not_finite_steps"] == 1 and not same(before, weights(model))


def test_the_teacher_never_sees_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft target over the whole vocabulary is made for chunk_elements / V rows at a time, whatever the batch."""
    seen: list[int] = []
    real = Teacher.__call__
    monkeypatch.setattr(Teacher, "__call__", lambda self, last: seen.append(len(last)) or real(self, last))
    config = TrainerConfig(micro_rows=150, loss=LossConfig(steps=3, chunk_elements=64 * 16))
    _, _, trainer = setup(config)
    trainer.step()
    assert max(seen) == 16 and sum(seen) == 149


def test_learning_rates_warm_up_and_fall() -> None:
    config = TrainerConfig(lr=1.0, warmup_steps=4, decay_steps=14)
    rates = [config.lr_at(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    assert rates[14] == rates[19] == pytest.approx(0.1) and rates[9] == pytest.approx(0.55)


def test_updates_are_adamws() -> None:
    config = TrainerConfig(lr=3e-3, weight_decay=0.1, clip=1e9, micro_rows=100, warmup_steps=0,
                           loss=LossConfig(steps=2))
    _, model, trainer = setup(config)
    names = dict(model.named_parameters())
    copies = {n: p.detach().clone().requires_grad_() for n, p in names.items()}
    optimiser = torch.optim.AdamW(copies.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        grads: dict[str, Tensor] = {}
        real = trainer._descend

        def watch(g: list[Tensor], scale: float, real: Any = real, grads: dict[str, Tensor] = grads) -> None:
            grads.update({n: t.clone() for n, t in zip(trainer._grads, g)})
            real(g, scale)

        trainer._descend = watch  # type: ignore[method-assign]
        trainer.step()
        trainer._descend = real  # type: ignore[method-assign]
        for n, copy in copies.items():
            copy.grad = grads[n]
        optimiser.step()
        for n, p in names.items():
            torch.testing.assert_close(p.detach(), copies[n].detach(), rtol=1e-5, atol=1e-6)


def test_refusals_teach() -> None:
    target = tiny_target(num_hidden_layers=3)
    model = tiny_drafter(target)
    other = HiddenStateBuffer((1, 2), 3, 32, byte_budget=2**20)
    with pytest.raises(ValueError, match="buffer: expected aux layers"):
        DrafterTrainer(model, other)
    with pytest.raises(ValueError, match="micro_rows"):
        TrainerConfig(micro_rows=1)
    with pytest.raises(ValueError, match="checkpoint: expected the tensors of this trainer"):
        DrafterTrainer(model, filled_buffer(target, model, [])).load_state({}, {"steps": 1})
    with pytest.raises(ValueError, match="features"):
        LossConfig(features="l3")
