"""One step of an RL loop: groups of samples with log-probabilities, reproducible seeds, and what speculation saved.

    python examples/embed.py                      # the demo model, SmolLM2-135M-Instruct (needs `make demo` once)
    python examples/embed.py path/to/model --prompt "What is 7 * 8?" --n 8 --max-tokens 64

Training is left out: `advantages` is where a trainer would take over.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from tlt_engine import EngineConfig, RequestOutput, RolloutEngine, SamplingParams, derive_seed

QUESTIONS = ("What is 7 * 8? Answer with a number.", "What is 12 * 31? Answer with a number.")


def rollouts(
    engine: RolloutEngine, prompts: Sequence[str], *, n: int, max_tokens: int, run_seed: int, step: int
) -> list[RequestOutput]:
    """n samples of each prompt. Seeds are a function of (run, step, prompt): no two steps share their noise."""
    params = [
        SamplingParams(n=n, max_tokens=max_tokens, logprobs=0, seed=derive_seed(run_seed, step, prompt))
        for prompt in prompts
    ]
    has_chat = getattr(engine.tokenizer, "chat_template", None) is not None
    asked = [[{"role": "user", "content": p}] if has_chat else p for p in prompts]
    return engine.generate(asked, params)


def advantages(output: RequestOutput) -> list[float]:
    """A stand-in for a reward, short answers first, centred on the group as GRPO does."""
    rewards = [-float(len(sample.token_ids)) for sample in output.outputs]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread or 1.0) for reward in rewards]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One step of an RL loop with tlt_engine.")
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face folder, or 'demo'")
    parser.add_argument("--prompt", action="append", help="may be repeated; default: two questions")
    parser.add_argument("--n", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1234, help="run seed")
    options = parser.parse_args(argv)

    engine = RolloutEngine(options.model, EngineConfig(dtype="float32"))
    outputs = rollouts(
        engine, options.prompt or QUESTIONS, n=options.n, max_tokens=options.max_tokens, run_seed=options.seed, step=0
    )
    for output in outputs:
        print(f"\n{output.prompt!r}")
        for sample, advantage in zip(output.outputs, advantages(output)):
            print(
                f"  #{sample.index} advantage {advantage:+.2f}, {len(sample.token_ids)} tokens, "
                f"log-prob {sample.cumulative_logprob:.2f}, {sample.finish_reason}: {sample.text[:60]!r}"
            )
    stats = engine.stats()
    print(
        f"\n{stats['emitted_tokens']} tokens in {stats['decode_passes']} decode passes, accept length "
        f"{stats['accept_length']:.2f} (bonus token included), {stats['forks']} forks of a prompt; "
        f"bytes by owner: {stats['memory']}"
    )


if __name__ == "__main__":
    main()
