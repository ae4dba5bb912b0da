"""batch_invariant on the CPU: fp32 has it, other dtypes are refused. tests/gpu/test_invariant_engine.py: the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drafters import ReplayDrafter
from tests.engine.engines import tiny_engine
from tlt_engine import EngineConfig, SamplingParams

PROMPTS = [[1, 2, 3], list(range(40)), list(range(5, 60))]
PARAMS = SamplingParams(temperature=1.0, max_tokens=60, n=2, seed=3)


def bits_of(outputs: Any) -> Any:
    return [[(o.token_ids, o.sampled_logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("config", [
    {"dtype": "bfloat16"}, {"dtype": "float16", "lm_head_dtype": "float32"}, {"lm_head_dtype": "bfloat16"},
])
def test_half_types_on_the_cpu_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="batch_invariant: expected float32 throughout on the CPU"):
        EngineConfig(batch_invariant=True, **config)
    EngineConfig(batch_invariant=True, device="cuda", **config)
    with pytest.raises(ValueError, match="batch_invariant: expected True or False"):
        EngineConfig(batch_invariant="yes")  # type: ignore[arg-type]


def test_fp32_on_the_cpu_has_the_same_bits_with_speculation_and_in_chunks() -> None:
    expected = bits_of(tiny_engine(batch_invariant=True).generate(PROMPTS, PARAMS))
    known = {tuple(p): {i: ids for i, (ids, _) in enumerate(samples)} for p, samples in zip(PROMPTS, expected)}
    drafter = ReplayDrafter(known, error_rate=0.2, depth=6)
    for engine in (
        tiny_engine(drafter=drafter, batch_invariant=True),
        tiny_engine(batch_invariant=True, max_num_batched_tokens=7),
    ):
        assert bits_of(engine.generate(PROMPTS, PARAMS)) == expected
    assert drafter.mean_accepted > 2


def test_sibling_logits_that_feel_the_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hair more on every logit but the first of a pass of many rows, as another order of sums has it."""
    from tlt_engine.models import transformer

    honest = transformer.linear

    def rounded(x: Any, weight: Any, *rest: Any, **more: Any) -> Any:
        out = honest(x, weight, *rest, **more)
        return out * (1 + 1e-7 * (len(x) > 3)) if len(weight) == 64 else out

    monkeypatch.setattr(transformer, "linear", rounded)
    expected = bits_of(tiny_engine().generate(PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=60, seed=3)))
    known = {tuple(PROMPTS[0]): {0: expected[0][0][0]}}
    outputs = tiny_engine(drafter=ReplayDrafter(known, depth=6)).generate(
        PROMPTS[:1], SamplingParams(temperature=1.0, max_tokens=60, seed=3)
    )
    assert bits_of(outputs) != expected
