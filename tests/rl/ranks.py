"""A program for test_ranks.py: TRL trains on the tiny task, an engine in each process; writes what was rolled out.

    [python -m torch.distributed.run --nproc-per-node N] tests/rl/ranks.py FOLDER BATCH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: str, batch: str) -> None:
    from tests.rl.common import policy
    from tests.rl.test_trl import logged, make_trainer, rollouts_of

    model = policy()
    rollouts = rollouts_of(model)
    trainer = make_trainer(Path(folder), model, steps=2, per_device_train_batch_size=int(batch),
                           vllm_importance_sampling_correction=True)
    rollouts.attach(trainer)
    calls, generate = [], rollouts.generate

    def recorded(prompts, images, num_generations, profiler=None):
        out = generate(prompts, images, num_generations)
        calls.append([list(pair) for pair in zip(prompts, out[1])])
        return out

    rollouts.generate = recorded
    trainer.train()
    result = {
        "calls": calls, "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "checksums": rollouts.engine.weight_checksums(), "processes": trainer.accelerator.num_processes,
    }
    Path(folder, f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
