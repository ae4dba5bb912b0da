"""What the model-free drafter saves on recorded rollouts, without running a model.

    python -m bench.model_free_offline rollouts.jsonl [second_call.jsonl ...]

Each line of a file is one prompt: {"prompt_ids": [...], "key": Philox key, "temperature": 1.0,
"samples": [{"sample": index, "output_ids": [...]}]}, sampled by the law of docs/seeds.md with that key (the demo
model, or RolloutEngine with speculation off). The samples of a prompt advance in lockstep as the engine's would: a pass
verifies one tree each and emits the accepted drafts and one token more. Several files are calls one after the other,
with one drafter throughout; figures are those of the last.

Two savings are printed: `sample passes` counts one for every sample in every pass (the work of the attention and of a
batch that shrinks), `steps` one for each pass of the whole group, up to its longest sample (the makespan of the tail).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlt_engine.config import Profile, SamplingParams, SpeculationConfig
from tlt_engine.speculation.drafter import DraftContext
from tlt_engine.speculation.model_free import ModelFreeDrafter
from tlt_engine.speculation.tree import DraftTree

Rollout = dict[str, Any]


@dataclass
class Stats:
    """tokens: emitted. passes: sample passes. steps, plain_steps: passes of a group, with and without speculation.
    rows: tree nodes verified, roots included. tried, right: drafts at each depth that were reached and had a child
    proposed, and those in which the target's token was among them. forecast: (estimated chance, accepted) of drafts
    whose parent was accepted."""

    tokens: int = 0
    passes: int = 0
    steps: int = 0
    plain_steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    tried: dict[int, int] = field(default_factory=dict)
    right: dict[int, int] = field(default_factory=dict)
    forecast: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def passes_saved(self) -> float:
        return 1 - self.passes / self.tokens

    @property
    def steps_saved(self) -> float:
        return 1 - self.steps / self.plain_steps

    @property
    def rows_per_token(self) -> float:
        return self.rows / self.tokens

    def by_depth(self, levels: int = 4) -> str:
        """Share of reached levels with a proposal in which the target's token was proposed, and how many those are."""
        return " ".join(
            f"{self.right.get(d, 0) / self.tried[d]:.2f}/{self.tried[d]}" for d in range(levels) if self.tried.get(d)
        )


def walk(tree: DraftTree, chances: Sequence[float], future: Sequence[int], stats: Stats) -> int:
    """Accepted drafts: the equality walk against the tokens that the sample emitted."""
    node = 0
    for depth, token in enumerate(future):
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        if not children:
            return depth
        right = next((i for i in children if tree.tokens[i] == token), None)
        stats.tried[depth] = stats.tried.get(depth, 0) + 1
        stats.right[depth] = stats.right.get(depth, 0) + (right is not None)
        stats.forecast += [(chances[i] / chances[node], i == right) for i in children]
        if right is None:
            return depth
        node = right
    return len(future)


def contexts_of(rollout: Rollout, first_id: int, noise: bool, siblings: bool) -> list[DraftContext]:
    """The samples at the start of decoding. Without siblings each prompt gets a first token of its own, so that no text
    is shared while positions, and with them the noise, stay."""
    params = SamplingParams(temperature=rollout["temperature"] if noise else 0.0, max_tokens=None)
    contexts = []
    for i, sample in enumerate(rollout["samples"]):
        prompt = list(rollout["prompt_ids"])
        if not siblings:
            prompt[0] = 2**25 + first_id + i
        contexts.append(
            DraftContext(first_id + i, "", prompt, len(prompt), rollout["key"], sample["sample"], 0, params, 128, 4096)
        )
    return contexts


def replay(
    rollouts: Iterable[Rollout], drafter: ModelFreeDrafter, *, noise: bool = True, siblings: bool = True,
    first_id: int = 0,
) -> Stats:
    """Decode every prompt's samples in lockstep with the drafter's trees."""
    stats = Stats()
    for rollout in rollouts:
        contexts = contexts_of(rollout, first_id, noise, siblings)
        first_id += len(contexts)
        outputs = [s["output_ids"] for s in rollout["samples"]]
        stats.tokens += sum(map(len, outputs))
        stats.plain_steps += max(map(len, outputs))
        live = [(c, out) for c, out in zip(contexts, outputs) if out]
        while live:
            started = time.perf_counter()
            proposals = drafter.propose_with_chances([c for c, _ in live])
            stats.seconds += time.perf_counter() - started
            stats.steps += 1
            stats.passes += len(live)
            for (context, output), (tree, chances) in zip(live, proposals):
                at = len(context.token_ids) - context.prompt_len
                accepted = walk(tree, chances, output[at:-1], stats)
                stats.rows += len(tree)
                context.token_ids.extend(output[at : at + accepted + 1])  # type: ignore[attr-defined]
                drafter.observe(context, accepted)
                if len(context.token_ids) - context.prompt_len == len(output):
                    drafter.finish(context.seq_id)
            live = [(c, out) for c, out in live if len(c.token_ids) - c.prompt_len < len(out)]
    return stats


def calls(files: Sequence[Sequence[Rollout]], config: SpeculationConfig, **how: Any) -> Stats:
    """Several calls over one drafter; the statistics of the last."""
    tuning = {k: how.pop(k) for k in ("sharpness", "unseen_noise", "across_prompts") if k in how}
    drafter = ModelFreeDrafter(config, **tuning)
    for i, rollouts in enumerate(files):
        stats = replay(rollouts, drafter, first_id=i * 10**6, **how)
    return stats


def load(path: str, part: str = "all") -> list[Rollout]:
    """part: "all", "a" (prompts 0, 2, ...: for tuning) or "b" (the others: for reporting)."""
    rollouts = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {"all": rollouts, "a": rollouts[::2], "b": rollouts[1::2]}[part]


def loops(tokens: int = 16384) -> tuple[float, float]:
    """Microseconds and bytes a token of one looped output."""
    drafter = ModelFreeDrafter(SpeculationConfig())
    ids = [5]
    context = DraftContext(0, "", ids, 1, 1, 0, 0, SamplingParams(), 12, 8)
    drafter.propose([context])
    started = time.perf_counter()
    ids.extend([7] * tokens)
    drafter.propose([context])
    return (time.perf_counter() - started) / tokens * 1e6, drafter.memory_bytes() / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="JSON lines, one file a call")
    parser.add_argument("--part", choices=("all", "a", "b"), default="all", help="prompts to take, see load()")
    args = parser.parse_args()
    us, size = loops()
    print(f"looped output of 16384 tokens: {us:.2f} us and {size:.0f} bytes a token")
    if not args.files:
        return
    files = [load(path, args.part) for path in args.files]
    default = SpeculationConfig()
    rows: list[tuple[str, SpeculationConfig, dict[str, Any]]] = [
        ("defaults", default, {}),
        ("no noise", default, {"noise": False}),
        ("no other prompts", default, {"across_prompts": False}),
        ("own text only", default, {"siblings": False, "across_prompts": False}),
    ]
    rows += [(f"min_chance {c}", replace(default, min_chance=c), {}) for c in (0.05, 0.1, 0.2, 0.3, 0.5)]
    shapes = ((1, 1, 2), (4, 1, 5), (8, 1, 9), (16, 1, 17), (4, 2, 8), (8, 2, 12), (8, 4, 16), (16, 4, 32))
    rows += [(f"profile {Profile(*s)}", replace(default, profile=Profile(*s)), {}) for s in shapes]
    print(f"{'setting':22} {'passes':>7} {'steps':>7} {'rows/token':>10} {'us/sample pass':>14}  right/levels by depth")
    for name, config, how in rows:
        s = calls(files, config, **how)
        print(f"{name:22} {s.passes_saved:7.1%} {s.steps_saved:7.1%} {s.rows_per_token:10.2f} "
              f"{s.seconds / s.passes * 1e6:14.1f}  {s.by_depth()}")


if __name__ == "__main__":
    main()
