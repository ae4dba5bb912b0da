"""A process of test_sharded_weights.py: an FSDP2 policy over all ranks, and an engine in each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.engines import tiny_engine, tokens
from tests.tiny import tiny_hf_model
from tlt_engine import SamplingParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = tiny_hf_model(seed=9)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    sharded = [p for p in policy.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    params = SamplingParams(max_tokens=16, seed=5)
    told = {"sharded": len(sharded)}
    for name, source in (("state_dict", policy.state_dict()), ("model", policy), ("pairs", policy.named_parameters())):
        engine = tiny_engine(model_seed=3)
        told["before"] = tokens(engine.generate(PROMPTS, params))
        engine.update_weights(source)
        told[name] = tokens(engine.generate(PROMPTS, params))
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
