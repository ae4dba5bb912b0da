"""TRL's GRPOTrainer with rollouts by tlt_engine: SmolLM2 learns to multiply.

    python examples/grpo_trl.py --steps 60                  # the demo model (needs `make demo` once)
    python examples/grpo_trl.py --lora --path official      # LoRA; TRL's rollout_func alone
    python examples/grpo_trl.py path/to/model --device cuda --dtype bfloat16

Questions: reasoning-gym `products` of one or two digits, training and test questions disjoint by their text; reward 1
when the last number of the answer is right.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from typing import Any

from tlt_engine import EngineConfig, RolloutEngine
from tlt_engine.cli.tasks import chat, last_number
from tlt_engine.rl.trl import TRLRollouts

GROUP = 8


def split_questions(train: int, test: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Distinct questions with their answers. Item i of a reasoning-gym dataset is drawn from Random(seed + i): one
    dataset, cut in two, cannot share questions as two of neighbouring seeds would."""
    from reasoning_gym import create_dataset

    wanted = train + test
    dataset = create_dataset(
        "products", size=4 * wanted, seed=seed * 100_000, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    distinct = {entry["question"]: entry["answer"] for entry in dataset}
    rows = [{"prompt": chat(question), "answer": answer} for question, answer in distinct.items()]
    if len(rows) < wanted:
        raise ValueError(f"train + test: expected at most {len(rows)} distinct questions, got {wanted}; ask for fewer")
    random.Random(seed).shuffle(rows)
    return rows[:train], rows[train:wanted]


def correct(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """TRL's reward function: 1 when the last number of the completion is the answer."""
    return [float(last_number(c[-1]["content"]) == a) for c, a in zip(completions, answer)]


def main(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description="GRPO with TRL and tlt_engine.")
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face folder, or 'demo'")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="a step; each is sampled 8 times")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--path", choices=("official", "backend"), default="backend",
                        help="backend: TRL uses our log-probabilities; official: rollout_func, it ignores them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the engine; the policy is trained in float32")
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--train", type=int, default=1024, help="training questions")
    parser.add_argument("--test", type=int, default=128, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="grpo-output")
    options = parser.parse_args(argv)

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    if options.model == "demo":
        from tlt_engine.models.gguf import demo_model

        options.model = str(demo_model())
    train, test = split_questions(options.train, options.test, options.seed)
    print(f"{len(train)} training and {len(test)} test questions, none in both")
    engine = RolloutEngine(options.model, EngineConfig(device=options.device, dtype=options.dtype))
    rollouts = TRLRollouts(engine, run_seed=options.seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=correct, train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(test),
        rollout_func=rollouts if options.path == "official" else None,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        if options.lora else None,
        args=GRPOConfig(
            output_dir=options.output, max_steps=options.steps, num_generations=GROUP, seed=options.seed,
            per_device_train_batch_size=options.prompts * GROUP // 8, gradient_accumulation_steps=8,
            per_device_eval_batch_size=GROUP, max_completion_length=options.max_tokens, temperature=1.0, beta=0.0,
            learning_rate=options.learning_rate, vllm_importance_sampling_correction=True, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=options.device == "cpu", bf16=False,
        ),
    )
    if options.path == "backend":
        rollouts.attach(trainer)
    trainer.train()
    stats = engine.stats()
    print(f"accept length {stats['accept_length']:.2f} (bonus token included) over {stats['emitted_tokens']} tokens, "
          f"{stats['forks']} forks of a prompt")
    return trainer


if __name__ == "__main__":
    main()
