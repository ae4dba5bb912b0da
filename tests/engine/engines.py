"""Engines on tiny models for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tests.tiny import tiny_hf_model
from tlt_engine import EngineConfig, Profile, RequestOutput, RolloutEngine, SamplingParams, SpeculationConfig

OFF = SpeculationConfig(method="off")
CUSTOM = SpeculationConfig(method="custom", profile=Profile(depth=8, top_k=4, verify=16))


@lru_cache(maxsize=32)
def shared_hf(arch: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model, built once; engines copy its weights."""
    return tiny_hf_model(arch, seed, **overrides)


def tiny_engine(
    *, drafter: Any = None, arch: str = "llama", model_seed: int = 0, model: dict[str, Any] | None = None,
    tokenizer: Any = None, **config: Any,
) -> RolloutEngine:
    """An engine on a tiny fp32 model: a scripted drafter if given, else no speculation unless `config` says so."""
    config.setdefault("speculation", CUSTOM if drafter is not None else OFF)
    config.setdefault("max_num_seqs", 16)
    config.setdefault("page_size", 4)
    return RolloutEngine(
        shared_hf(arch, model_seed, **(model or {})), EngineConfig(**config), tokenizer=tokenizer, drafter=drafter
    )


def greedy(max_tokens: int = 32, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[o.token_ids for o in output.outputs] for output in outputs]


def plain_outputs(prompts: Any, params: Any, **engine: Any) -> list[list[list[int]]]:
    """What plain decoding emits, from a fresh engine."""
    return tokens(tiny_engine(**engine).generate(prompts, params))
