"""Page tables so long that only their part in use is copied each step (staging.WIDE), on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.drafters import AdversarialDrafter
from tests.engine.engines import tiny_engine
from tlt_engine import SamplingParams
from tlt_engine.engine.equality import compare_runs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LONG: dict[str, Any] = {"model": {"max_position_embeddings": 40000}, "page_size": 4, "num_pages": 2000}
PARAMS = SamplingParams(temperature=1.0, max_tokens=50, n=2, seed=7)
PROMPTS = [[1, 2, 3], list(range(20, 60)) * 9, [11] * 60, [4, 5]]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafter", [None, AdversarialDrafter(64)])
def test_tokens_of_the_cpu_engine(drafter: Any, eager: bool) -> None:
    judge = tiny_engine(**LONG)
    expected = judge.generate(PROMPTS, PARAMS)
    engine = tiny_engine(drafter=drafter, device="cuda", enforce_eager=eager, max_num_batched_tokens=100, **LONG)
    runner = engine._core.runner
    assert runner._layout(8, 8, 8).frame.wide  # type: ignore[attr-defined]
    for _ in range(2):
        result = compare_runs(judge, expected, engine.generate(PROMPTS, PARAMS), PARAMS)
        assert result.equal and result.excused_ties <= 1, "\n".join(map(str, result.differences))
    engine.check_integrity()
