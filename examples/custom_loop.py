"""GRPO on the bare API: roll out, score, update the policy, send its weights back; a drafter learns in between. No
trainer library.

    python examples/custom_loop.py --steps 150

The task: count from one digit to another ("3 7 =" -> "3 4 5 6 7"), learned from zero by a transformer of 60,000
weights; the reward is the share of the answer that is right. A third of the questions is held out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlt_engine import (
    EngineConfig,
    Profile,
    RequestOutput,
    RolloutEngine,
    SamplingParams,
    SpeculationConfig,
    derive_seed,
)
from tlt_engine.models import load_model
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.rl.adaptive import AdaptiveConfig, AdaptiveDrafter
from tlt_engine.training.loss import LossConfig
from tlt_engine.training.trainer import TrainerConfig

EQUALS, EOS, VOCAB = 10, 11, 12
GROUP, PROMPTS = 8, 16
Question = tuple[int, int]


def questions(seed: int) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions; no question is in both."""
    every = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(seed).shuffle(every)
    return every[: len(every) * 2 // 3], every[len(every) * 2 // 3 :]


def prompt(question: Question) -> list[int]:
    return [*question, EQUALS]


def reward(question: Question, answer: Sequence[int]) -> float:
    """Share of the right answer, its end included, that the answer begins with."""
    right = [*range(question[0], question[1] + 1), EOS]
    matched = next((i for i, t in enumerate(right) if i >= len(answer) or answer[i] != t), len(right))
    return matched / len(right)


def new_policy(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, eos_token_id=EOS, bos_token_id=None, pad_token_id=EOS,
    ))


def new_engine(policy: LlamaForCausalLM, seed: int) -> tuple[RolloutEngine, AdaptiveDrafter]:
    """An engine on a copy of the policy's weights, with a drafter that knows nothing yet, and who trains it."""
    target = load_model(policy)
    drafter = EagleModel(EagleConfig.for_target(target.config))
    drafter.initialise(torch.Generator().manual_seed(seed))
    speculation = SpeculationConfig(method="learned", profile=Profile(depth=4, top_k=2, verify=8))
    engine = RolloutEngine(
        target, EngineConfig(page_size=4, max_num_seqs=PROMPTS * GROUP, speculation=speculation), drafter=drafter
    )
    training = TrainerConfig(lr=3e-3, micro_rows=512, loss=LossConfig(steps=3))
    return engine, AdaptiveDrafter(engine, AdaptiveConfig(trainer=training, buffer_bytes=2**24))


def log_probs(policy: LlamaForCausalLM, outputs: Sequence[RequestOutput]) -> tuple[torch.Tensor, torch.Tensor]:
    """[samples, longest] log-probabilities of the sampled tokens under the policy, and a mask of where they are."""
    rows = [(o.prompt_token_ids, s.token_ids) for o in outputs for s in o.outputs]
    start = len(rows[0][0])  # all prompts of this task are equally long
    width = max(len(answer) for _, answer in rows)
    ids = torch.tensor([p + a + [EOS] * (width - len(a)) for p, a in rows])
    mask = torch.tensor([[1.0] * len(a) + [0.0] * (width - len(a)) for _, a in rows])
    logits = policy(ids).logits[:, start - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    return chosen, mask


def train_step(
    policy: LlamaForCausalLM, optimizer: torch.optim.Optimizer, outputs: Sequence[RequestOutput],
    rewards: torch.Tensor,
) -> float:
    """One clipped policy-gradient update. rewards [prompts, GROUP]. Returns the largest |ratio - 1| before it: the
    engine's log-probabilities are of the very policy that is trained, so it is rounding."""
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
    new, mask = log_probs(policy, outputs)
    old = torch.zeros_like(new)
    for row, sample in enumerate(s for o in outputs for s in o.outputs):
        old[row, : len(sample.token_ids)] = torch.tensor(sample.sampled_logprobs)
    ratio = ((new - old) * mask).exp()
    loss = -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float((ratio.detach() - 1).abs().max())


def evaluate(engine: RolloutEngine, held_out: Sequence[Question]) -> float:
    """Mean reward of greedy answers."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = engine.generate([prompt(q) for q in held_out], params)
    return sum(reward(q, o.outputs[0].token_ids) for q, o in zip(held_out, outputs)) / len(held_out)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="GRPO on the bare API of tlt_engine.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--drafter-budget", type=float, default=0.03, help="seconds of its training a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    train, held_out = questions(options.seed)
    policy = new_policy(options.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    engine, adaptive = new_engine(policy, options.seed)
    before, worst = evaluate(engine, held_out), 0.0
    print(f"held-out reward before training: {before:.2f}")
    for step in range(options.steps):
        asked = random.Random(derive_seed(options.seed, step, "questions")).sample(train, PROMPTS)
        params = [SamplingParams(n=GROUP, max_tokens=12, seed=derive_seed(options.seed, step, i))
                  for i in range(PROMPTS)]
        outputs = engine.generate([prompt(q) for q in asked], params)
        rewards = torch.tensor([[reward(q, s.token_ids) for s in o.outputs] for q, o in zip(asked, outputs)])
        worst = max(worst, train_step(policy, optimizer, outputs, rewards))
        engine.update_weights(policy, weight_version=step + 1)
        drafting = adaptive.train_drafter(budget_s=options.drafter_budget)
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}: reward {rewards.mean():.2f}, held out {evaluate(engine, held_out):.2f}, "
                  f"accept length {drafting['accept_length']:.2f}, largest |ratio - 1| {worst:.1e}")
    return {
        "before": before, "after": evaluate(engine, held_out), "ratio_error": worst,
        "accept_length": drafting["accept_length"],
    }


if __name__ == "__main__":
    main()
