"""The buffer, the trainer and its checkpoints on a GPU: copies that run beside kernels arrive whole, the loss is the
CPU's, and low precision trains on fp32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import shared_hf, tiny_engine
from tests.kernels.soft_loss_cases import SHAPES, faults
from tests.training.drafters import random_texts, tiny_drafter
from tests.training.rows import LAST, LAYERS, ScriptedRows, misaligned, one_pass, script_tokens
from tlt_engine import SamplingParams
from tlt_engine.models.eagle import EagleModel
from tlt_engine.models.loader import load_model
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.captured import CapturedGradients
from tlt_engine.training.checkpoint import CheckpointWriter, read_checkpoint
from tlt_engine.training.loss import LossConfig, Objective
from tlt_engine.training.packing import PackedRows, pack_pieces
from tlt_engine.training.records import DrawPolicy
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODEL = {"num_hidden_layers": 7}
EVERYTHING = DrawPolicy(max_age=None)


def on_device(rows: ScriptedRows) -> ScriptedRows:
    return ScriptedRows({layer: t.to(DEVICE, non_blocking=True) for layer, t in rows.hidden.items()}, rows.runs)


@pytest.mark.parametrize("stage_rows", [5, 64])
def test_rows_arrive_whole_while_their_source_is_written_over(stage_rows: int) -> None:
    """The tensors of a pass are overwritten by the next one, as a graph's static buffers are."""
    buffer = HiddenStateBuffer(
        LAYERS, LAST, 4, byte_budget=2**20, page_rows=4, stage_rows=stage_rows, device=DEVICE
    )
    owners = {9: [1] * 6}
    buffer.take(on_device(one_pass([(1, 0, 6)])))
    buffer.fork(1, 9, 6)
    static = {layer: torch.zeros(64, 4, device=DEVICE) for layer in (*LAYERS, LAST)}
    for at in range(6, 66, 3):
        rows = one_pass([(s, at if s in (1, 9) else at - 6, 3) for s in (1, 9, 2, 3)])
        for layer, tensor in rows.hidden.items():
            static[layer][: len(tensor)].copy_(tensor)
        buffer.take(ScriptedRows(static, rows.runs))
        for tensor in static.values():
            tensor.fill_(-1)
    for seq_id in (1, 9, 2, 3):
        buffer.finish(seq_id, script_tokens(seq_id, 67, owners))
    with buffer.draw(10**4, "all", EVERYTHING) as pieces:
        assert sorted((p.record.seq_id, p.rows) for p in pieces) == [(1, 66), (2, 60), (3, 60), (9, 66)]
        assert [c for p in pieces for c in misaligned(buffer, p, owners)] == []
        out = torch.empty(pieces[0].rows, buffer.width, device=DEVICE)
        buffer.load(pieces[0], out)
        host = torch.empty(pieces[0].rows, buffer.width)
        buffer.load(pieces[0], host)
        assert torch.equal(out.cpu(), host)
    buffer.check_integrity()


def drafter_on(device: torch.device, dtype: str = "float32", **drafter: Any) -> tuple[EagleModel, HiddenStateBuffer]:
    """The same weights and texts on either device."""
    target = load_model(shared_hf("llama", 0, **MODEL), dtype=dtype, device=device).model
    reference = tiny_drafter(load_model(shared_hf("llama", 0, **MODEL)).model, **drafter)
    model = EagleModel(reference.config, dtype=target.dtype, device=device)
    model.copy_from(reference)
    model.bind(target)
    buffer = HiddenStateBuffer(
        model.config.aux_layers, 7, 32, byte_budget=2**22, dtype=target.dtype, device=device
    )
    buffer.fill(target, random_texts([150, 3, 40, 77, 12], seed=3))
    return model, buffer


def packed(model: EagleModel, buffer: HiddenStateBuffer) -> PackedRows:
    with buffer.draw(10**4, "all", EVERYTHING) as pieces:
        return pack_pieces(buffer, pieces, model.device)[0]


@pytest.mark.parametrize("drafter", [{"window": 30}, {"vocabulary": range(0, 64, 3)}, {"kind": "eagle1"}])
def test_loss_and_gradients_are_the_cpus(drafter: dict[str, Any]) -> None:
    found: list[list[Any]] = []
    for device in (torch.device("cpu"), DEVICE):
        model, buffer = drafter_on(device, **drafter)
        loss, sums = Objective(model, LossConfig(steps=4))(packed(model, buffer))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach().cpu(), sums.rows.cpu(), *(g.cpu() for g in grads)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 49152)], ids=str)
def test_the_fused_loss_is_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert faults(*shape, dtype, "cuda", "triton") == []


@pytest.mark.parametrize("drafter", [{"window": 30}, {"vocabulary": range(0, 64, 3), "window": 8}])
def test_a_captured_micro_step_has_the_gradients_of_an_eager_one(drafter: dict[str, Any]) -> None:
    """Over batches of several sizes, and after the drafter's weights have changed in place and moved."""
    model, buffer = drafter_on(DEVICE, **drafter)
    parameters = list(model.parameters())
    objective = Objective(model, LossConfig(steps=4))
    fast = CapturedGradients(objective, parameters, 128)
    graphs = []
    for i, rows in enumerate((128, 120, 128, 117, 128)):
        if i == 2:
            with torch.no_grad():
                parameters[0].mul_(1.5)
        if i == 4:
            parameters[1].data = parameters[1].data.clone()
        with buffer.draw(rows, str(i), EVERYTHING) as pieces:
            batch = pack_pieces(buffer, pieces, DEVICE)[0]
        assert fast.fits(batch)
        loss, sums, grads = fast(batch)
        graphs.append(fast._graph)
        wanted, figures = objective(batch)
        torch.testing.assert_close(loss, wanted.detach())
        assert torch.equal(sums.rows, figures.rows)
        for ours, theirs in zip(grads, torch.autograd.grad(wanted, parameters)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert graphs[0] is graphs[3] is not graphs[4]


def test_bf16_learns_on_fp32_masters_beside_checkpoints(tmp_path: Path) -> None:
    """A checkpoint is what stood there at `save`, though the next update comes before the copy is over."""
    model, buffer = drafter_on(DEVICE, "bfloat16")
    trainer = DrafterTrainer(
        model, buffer, TrainerConfig(lr=5e-3, clip=10.0, micro_rows=200, warmup_steps=0, loss=LossConfig(steps=3))
    )
    first = trainer.step()
    writer = CheckpointWriter(tmp_path)
    for _ in range(5):
        stood = {n: t.clone() for n, t in trainer.state()[0].items()}
        trainer.save(writer)
        trainer.step()
        writer.wait()
        saved, _ = read_checkpoint(tmp_path)
        assert all(torch.equal(saved[n], t.cpu()) for n, t in stood.items())
    for _ in range(30):
        last = trainer.step(budget_ms=50)
    assert last["cross_entropy"][0] < first["cross_entropy"][0] - 0.1
    assert all(torch.equal(p, trainer._masters[n].to(p.dtype)) for n, p in model.named_parameters())


def test_the_engines_rollouts_are_captured_beside_its_graphs() -> None:
    engine = tiny_engine(device="cuda", model=MODEL, enable_prefix_caching=False)
    buffer = HiddenStateBuffer((2, 3, 4), 7, 32, byte_budget=2**22, stage_rows=32, device=DEVICE)
    engine.record_hidden(buffer)
    outputs = engine.generate(random_texts([9, 1, 17]), SamplingParams(n=3, max_tokens=30, seed=1))
    texts = sorted([*o.prompt_token_ids, *c.token_ids][:-1] for o in outputs for c in o.outputs)
    again = HiddenStateBuffer((2, 3, 4), 7, 32, byte_budget=2**22, device=DEVICE)
    again.fill(engine.model, texts)
    kept = []
    for source in (buffer, again):
        with source.draw(10**5, "all", EVERYTHING) as pieces:
            pieces = sorted(pieces, key=lambda p: p.tokens.tolist())
            rows = torch.empty(sum(p.rows for p in pieces), source.width)
            for piece, block in zip(pieces, rows.split([p.rows for p in pieces])):
                source.load(piece, block)
            kept.append(([p.tokens.tolist() for p in pieces], rows))
    assert kept[0][0] == kept[1][0] == texts
    torch.testing.assert_close(kept[0][1], kept[1][1], rtol=1e-3, atol=1e-3)
    buffer.check_integrity()
