"""What training the drafter costs, and what it costs the rollout beside it.

    python -m bench.training [--geometry 7b|small] [--device cuda] [--only packing,checkpoint,capture,swap] [--out DIR]

Random weights and hidden states: nothing here depends on what is learned. packing: samples trained a second, packed
rows against batches of 8 padded to their longest, over one set of sequences with the lengths of SmolLM2's rollouts on
`products` (a long tail). checkpoint: what `save` keeps the trainer, against writing the trained tensors, the moments
and the frozen embedding and head at once. capture: engine steps with a recorder against those without, both with the
learned drafter. swap: `update_drafter` between two steps, from device memory and from pinned host memory, to the end of
its copies.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.decode import NEW, QWEN_7B, start
from bench.results import record
from tlt_engine import EngineConfig, Profile, RolloutEngine, SpeculationConfig
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import LoadedModel
from tlt_engine.models.rope import RopeConfig
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import LoadReport
from tlt_engine.training.buffer import HiddenStateBuffer
from tlt_engine.training.checkpoint import CheckpointWriter
from tlt_engine.training.loss import LossConfig, Objective
from tlt_engine.training.packing import PackedRows, pack
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig

QUARTILES = (2, 13, 30, 69, 150, 512, 512)  # lengths: least, quartiles, 90 %, 95 %, most
AT = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ROWS, PADDED = 4096, 8  # rows of a packed micro-step, sequences of a padded batch
GEOMETRIES = {
    "7b": (QWEN_7B, 32000),
    "small": (replace(QWEN_7B, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2,
                      head_dim=64, rope=RopeConfig(theta=1e6, rotary_dim=64), windows=(0,) * 4), 1024),
}


class Bench:
    """One target, one drafter, and where the results go."""

    def __init__(self, geometry: str, device: str, layers: int | None, out: Path | None) -> None:
        config, draft_vocab = GEOMETRIES[geometry]
        if layers is not None:
            config = replace(config, num_layers=layers, windows=(0,) * layers)
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        target = Transformer(config, dtype=self.dtype, device=device, max_model_len=4096)
        for name, weight in target.named_weights():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0.0, weight.shape[-1] ** -0.5)
        self.loaded = LoadedModel(target, config, None, (), LoadReport(()))
        aux = (0, 1, 2) if config.num_layers < 7 else (2, config.num_layers // 2, config.num_layers - 3)
        shape = EagleConfig.for_target(config, draft_vocab_size=draft_vocab, aux_layers=aux)
        self.drafter = EagleModel(shape, dtype=self.dtype, device=device).bind(target)
        self.drafter.initialise(torch.Generator().manual_seed(0))
        self.where = {"geometry": geometry, "layers": config.num_layers, "dtype": str(self.dtype).split(".")[1],
                      "draft_vocab": draft_vocab}
        self.out = out

    def keep(self, metric: str, values: Sequence[float], unit: str, **params: Any) -> float:
        value = statistics.median(values)
        print(f"{metric} {params}: {value:.4g} {unit} [{min(values):.4g}, {max(values):.4g}]", flush=True)
        record("drafter", metric, value, unit, self.where | params, command="python -m bench.training",
               spread=[min(values), max(values)], runs=len(values), folder=self.out)
        return value

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ms(self, call: Callable[[], object]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - begin) * 1e3

    # ---------------------------------------------------------------- packing

    def rows(self, lengths: Sequence[int], trained: Sequence[int]) -> PackedRows:
        """Random sequences; of each only the first trained[i] rows are trained, the others are padding."""
        c = self.drafter.config
        states = torch.randn(sum(lengths), c.target_hidden_size, dtype=self.dtype, device=self.device)
        tokens = [torch.randint(0, c.vocab_size, (n,)) for n in lengths]
        made = pack(tokens, torch.cat([states] * len(c.aux_layers), -1), states, [0] * len(lengths))
        at = torch.arange(len(made), device=self.device) - made.starts
        limits = torch.repeat_interleave(torch.tensor(trained), torch.tensor(lengths)).to(self.device)
        return replace(made, usable=at < limits)

    def step_ms(self, batches: Iterator[PackedRows], objective: Objective) -> float:
        """Forward and backward over all of them."""
        parameters = list(self.drafter.parameters())
        total = 0.0
        for i, packed in enumerate(batches):
            if i == 0:
                torch.autograd.grad(objective(packed)[0], parameters)  # warm
            total += self.ms(lambda packed=packed: torch.autograd.grad(objective(packed)[0], parameters))  # type: ignore[misc]
        return total

    def packing(self, count: int) -> None:
        rng = random.Random(0)
        lengths = [max(2, round(quantile(rng.random()))) for _ in range(count)]
        objective = Objective(self.drafter, LossConfig(steps=3))
        packs = in_rows(lengths, ROWS)
        pads = [lengths[i : i + PADDED] for i in range(0, count, PADDED)]
        speedups = []
        for _ in range(3):
            packed = self.step_ms((self.rows(p, p) for p in packs), objective)
            padded = self.step_ms((self.rows([max(p)] * len(p), p) for p in pads), objective)
            speedups.append(padded / packed)
        waste = 1 - sum(lengths) / sum(max(p) * len(p) for p in pads)
        print(f"{count / packed * 1e3:.1f} samples/s packed, {count / padded * 1e3:.1f} padded, {waste:.0%} padding")
        self.keep("packing.speedup", speedups, "", samples=count, rows=ROWS, padded_batch=PADDED)

    # ---------------------------------------------------------------- checkpoints

    def checkpoint(self) -> None:
        buffer = self.buffer(2**26)
        trainer = DrafterTrainer(self.drafter, buffer, TrainerConfig(warmup_steps=0))
        weights = self.drafter.target.weights
        with tempfile.TemporaryDirectory() as folder:
            writer, whole = CheckpointWriter(Path(folder) / "own"), CheckpointWriter(Path(folder) / "whole", keep=1)
            trainer.save(writer)  # allocates the snapshot
            writer.wait()
            stalls, writes = [], []
            for i in range(2):
                stalls.append(trainer.save(writer) * 1e3)
                writer.wait()
                begin = time.perf_counter()
                tensors, data = trainer.state()
                whole.save(i, {**tensors, "embed": weights.embed, "head": weights.head}, data)
                whole.wait()
                writes.append((time.perf_counter() - begin) * 1e3)
        self.keep("checkpoint.stall_ms", stalls, "ms")
        self.keep("checkpoint.stall_ratio", [s / w for s, w in zip(stalls, writes)], "")

    # ---------------------------------------------------------------- beside a rollout

    def buffer(self, size: int) -> HiddenStateBuffer:
        c = self.drafter.config
        return HiddenStateBuffer(
            c.aux_layers, self.loaded.config.num_layers, c.target_hidden_size, byte_budget=size, dtype=self.dtype,
            device=self.device,
        )

    def engine(self, batch: int) -> RolloutEngine:
        spec = SpeculationConfig(method="learned", profile=Profile(5, 1, 6), min_chance=0.0)
        return RolloutEngine(
            self.loaded, EngineConfig(dtype=str(self.dtype).split(".")[1], device=str(self.device),
                                      max_num_seqs=batch, max_model_len=1024, seed=0, speculation=spec),
            drafter=self.drafter,
        )

    def steps_ms(self, engine: RolloutEngine, batch: int, recorder: HiddenStateBuffer | None) -> float:
        start(engine, batch, 1.0)
        if recorder is not None:
            engine.record_hidden(recorder)
        times = []
        while engine.num_running == batch:
            times.append(self.ms(engine.step))
        while engine.has_unfinished():
            engine.step()
        if recorder is not None:
            engine.stop_recording(recorder)
        return statistics.median(times[2:-2])

    def capture(self, batches: Sequence[int]) -> None:
        for batch in batches:
            engine, buffer = self.engine(batch), self.buffer(2**30)
            self.steps_ms(engine, batch, buffer)  # warm, and allocates
            pairs = [(self.steps_ms(engine, batch, None), self.steps_ms(engine, batch, buffer)) for _ in range(3)]
            print(f"batch {batch}: {pairs[-1][0]:.3f} ms a step without, {pairs[-1][1]:.3f} with a recorder")
            added = [on / off - 1 for off, on in pairs]
            self.keep("capture.overhead", added, "", batch=batch, new=NEW, profile="5_1_6")

    def swap(self) -> None:
        engine = self.engine(8)
        start(engine, 8, 1.0)
        pinned = self.device.type == "cuda"
        host = {n: t.detach().cpu() for n, t in self.drafter.named_tensors()}
        host = {n: t.pin_memory() if pinned else t for n, t in host.items()}
        sources: dict[str, EagleModel | dict[str, Tensor]] = {"device": self.drafter, "pinned host": host}
        for name, source in sources.items():
            engine.update_drafter(source)
            values = []
            for _ in range(5):
                engine.step()
                values.append(self.ms(lambda source=source: engine.update_drafter(source)))  # type: ignore[misc]
            self.keep("swap.stall_ms", values, "ms", source=name)


def quantile(u: float) -> float:
    """Length at the share u of the sequences, linear between the known ones."""
    i = max(k for k in range(len(AT) - 1) if AT[k] <= u)
    return QUARTILES[i] + (u - AT[i]) / (AT[i + 1] - AT[i]) * (QUARTILES[i + 1] - QUARTILES[i])


def in_rows(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Sequences in order, as many a row as fit."""
    out: list[list[int]] = [[]]
    for n in lengths:
        if sum(out[-1]) + n > rows:
            out.append([])
        out[-1].append(n)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="7b")
    parser.add_argument("--layers", type=int, help="of the target; packing and checkpoint need few")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="packing,checkpoint,capture,swap")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    bench = Bench(args.geometry, args.device, args.layers, args.out)
    for name in args.only.split(","):
        if name == "packing":
            bench.packing(args.samples)
        elif name == "capture":
            bench.capture([int(b) for b in args.batches.split(",")])
        else:
            getattr(bench, name)()


if __name__ == "__main__":
    main()
