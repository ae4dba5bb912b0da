"""Rollouts for TRL's GRPOTrainer (1.16), from an engine in the same process. docs/trl.md says which way to take.

    rollouts = TRLRollouts(engine, run_seed=0)
    trainer = GRPOTrainer(..., rollout_func=rollouts)      # official; TRL ignores the log-probabilities
    rollouts.attach(trainer)                               # instead of, or besides: TRL uses them

Knows TRL's shapes. The policy's weights reach the engine when the trainer's global_step has changed, or when its
training has begun anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tlt_engine.config import SamplingParams, refuse
from tlt_engine.engine.engine import RolloutEngine
from tlt_engine.outputs import CompletionOutput
from tlt_engine.rl.adapters import sampling_params
from tlt_engine.rl.policy import PolicyWeights
from tlt_engine.rng import derive_seed


@dataclass(frozen=True)
class _Group:
    """Adjacent entries of a batch that are samples of one prompt. first: sample index of the first of them."""

    prompt_ids: list[int]
    count: int
    index: int
    first: int


class TRLRollouts:
    """engine: on the policy's architecture. run_seed: root of all seeds; the noise of a sample is a function of
    (run_seed, global step, call within the step, group, place in the group), not of rank or number of processes.
    overrides: fields of SamplingParams that TRL does not know, such as stop or min_tokens.

    Needs a trainer whose batch repeats each prompt num_generations times in a row, as TRL's sampler does."""

    def __init__(self, engine: RolloutEngine, *, run_seed: int, **overrides: Any) -> None:
        self.engine, self.run_seed, self.overrides = engine, run_seed, overrides
        self.last: list[CompletionOutput] = []  # of the latest call, for metrics
        self._trainer: Any = None
        self._synced: tuple[Any, int] = (None, -1)  # the trainer's state and global_step that the weights are of
        self._calls: tuple[Any, int] = (None, 0)

    # ---------------------------------------------------------------- rollout_func

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's rollout_func. Besides the required keys the reward functions get, a sample: accept_length (tokens a
        target pass, bonus included) and finish_reason."""
        self._sync(trainer)
        prompt_ids = [_token_ids(prompt, trainer) for prompt in prompts]
        training = trainer.model.training
        each = trainer.num_generations if training else trainer.num_generations_eval
        samples = self._roll_out(prompt_ids, each, trainer)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [s.token_ids for s in samples],
            "logprobs": [s.sampled_logprobs for s in samples],
            "accept_length": [s.spec.accept_length for s in samples],
            "finish_reason": [s.finish_reason for s in samples],
        }

    # ---------------------------------------------------------------- in the place of TRL's vLLM client

    def attach(self, trainer: Any) -> None:
        """Make TRL take this engine for its generation backend, so that it reads our log-probabilities: the importance
        ratio and the sampling/* metrics. The config must have use_vllm=False (TRL would look for vLLM when it is
        built) and, for the ratio, vllm_importance_sampling_correction=True. Uses private attributes of TRL 1.16."""
        for name in ("use_vllm", "vllm_mode", "_generate_single_turn", "vllm_importance_sampling_correction"):
            if not hasattr(trainer, name):
                import trl

                raise refuse("trainer", "a GRPOTrainer of TRL 1.16", f"TRL {trl.__version__} without {name}",
                             "use rollout_func alone, or TRL 1.16")
        self._trainer = trainer
        trainer.vllm_generation = self
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1

    def sync_weights(self) -> None:
        """TRL calls it when its global step has changed."""
        self._sync(self._trainer)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """As TRL's own client: token ids in, each prompt repeated num_generations times already (1: the next turns of
        samples that called a tool); ids and log-probabilities out."""
        if images is not None and any(images):
            raise refuse("images", "none", "images", "this engine serves text models")
        self._sync(self._trainer)  # TRL knows steps only: of a second train() it would not notice the first ones
        samples = self._roll_out(prompts, num_generations, self._trainer)
        logprobs = [[[logprob] for logprob in s.sampled_logprobs] for s in samples]
        return prompts, [s.token_ids for s in samples], logprobs, None

    # ---------------------------------------------------------------- inside

    def _sync(self, trainer: Any) -> None:
        state, step = trainer.state, trainer.state.global_step
        if state is not self._synced[0] or step != self._synced[1]:  # each train() has a state of its own
            model = trainer.accelerator.unwrap_model(trainer.model)
            self.engine.update_weights(PolicyWeights(model), weight_version=step)
            self._synced = state, step

    def _roll_out(self, prompt_ids: Sequence[list[int]], each: int, trainer: Any) -> list[CompletionOutput]:
        offset = trainer.accelerator.process_index * len(prompt_ids)
        groups = list(_groups(prompt_ids, each, offset))
        seed_of = self._seeds(trainer, trainer.model.training)
        params = [self._params(trainer, g, seed_of(g.index)) for g in groups]
        outputs = self.engine.generate([g.prompt_ids for g in groups], params)
        self.last = [sample for output in outputs for sample in output.outputs]
        for sample in self.last:
            if sample.finish_reason == "error" or not sample.token_ids:  # TRL has no place for either
                raise RuntimeError(
                    f"rollout: expected whole completions, got one that ended after {len(sample.token_ids)} tokens "
                    f"({sample.finish_reason}: {sample.stop_reason}); look at the policy's weights first"
                )
        return self.last

    def _seeds(self, trainer: Any, training: bool) -> Any:
        """Several batches may be rolled out at one global step (evaluation, steps_per_generation)."""
        at = (trainer.state.global_step, training)
        count = self._calls[1] + 1 if self._calls[0] == at else 0
        self._calls = (at, count)
        phase = "train" if training else "eval"
        return lambda group: derive_seed(self.run_seed, trainer.state.global_step, f"{phase}:{count}:{group}")

    def _params(self, trainer: Any, group: _Group, seed: int) -> SamplingParams:
        fields: dict[str, Any] = {
            "temperature": trainer.temperature, "top_p": trainer.top_p, "top_k": trainer.top_k or 0,
            "min_p": trainer.min_p or 0.0, "repetition_penalty": trainer.repetition_penalty,
            "max_tokens": trainer.max_completion_length, "stop_token_ids": list(trainer.eos_token_ids),
        }
        own = {"n": group.count, "seed": seed, "sample_index": group.first}
        return sampling_params(fields | (trainer.args.generation_kwargs or {}), **(self.overrides | own))


def _groups(prompt_ids: Sequence[list[int]], each: int, offset: int) -> Iterator[_Group]:
    """The part of the global batch that begins at `offset`, cut into groups of `each`; a group may be shared with
    another process. ValueError if entries of one group are not the same prompt."""
    places = range(offset, offset + len(prompt_ids))
    for index, members in groupby(zip(places, prompt_ids), key=lambda pair: pair[0] // each):
        entries = list(members)
        ids = entries[0][1]
        if any(other != ids for _, other in entries):
            raise refuse("prompts", f"each one {each} times in a row (num_generations)", f"group {index} mixed",
                         "keep TRL's RepeatSampler, or call the engine yourself")
        yield _Group(ids, len(entries), index, entries[0][0] % each)


def _token_ids(prompt: Any, trainer: Any) -> list[int]:
    """Text, or messages through the chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    ids = tokenizer.apply_chat_template(
        prompt, tools=trainer.tools or None, chat_template=trainer.chat_template, add_generation_prompt=True,
        tokenize=True, return_dict=True, **trainer.chat_template_kwargs,
    )
    return list(ids["input_ids"])
