"""tlt_engine: an embeddable rollout engine with exact speculative decoding.

Importing it loads neither torch nor CUDA; the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt_engine.config import EngineConfig as EngineConfig
    from tlt_engine.config import Profile as Profile
    from tlt_engine.config import SamplingParams as SamplingParams
    from tlt_engine.config import SpeculationConfig as SpeculationConfig
    from tlt_engine.engine.engine import RolloutEngine as RolloutEngine
    from tlt_engine.engine.resident import EngineHalted as EngineHalted
    from tlt_engine.engine.streaming import AsyncRolloutEngine as AsyncRolloutEngine
    from tlt_engine.models.eagle import EagleConfig as EagleConfig
    from tlt_engine.models.eagle import EagleModel as EagleModel
    from tlt_engine.outputs import CompletionOutput as CompletionOutput
    from tlt_engine.outputs import Logprob as Logprob
    from tlt_engine.outputs import RequestOutput as RequestOutput
    from tlt_engine.outputs import SpecCounts as SpecCounts
    from tlt_engine.rng import derive_seed as derive_seed
    from tlt_engine.speculation.drafter import DraftContext as DraftContext
    from tlt_engine.speculation.drafter import Drafter as Drafter
    from tlt_engine.speculation.tree import DraftTree as DraftTree

__version__ = "0.1.0"

_HOME = {
    "EngineConfig": "tlt_engine.config",
    "Profile": "tlt_engine.config",
    "SamplingParams": "tlt_engine.config",
    "SpeculationConfig": "tlt_engine.config",
    "RolloutEngine": "tlt_engine.engine.engine",
    "EngineHalted": "tlt_engine.engine.resident",
    "AsyncRolloutEngine": "tlt_engine.engine.streaming",
    "EagleConfig": "tlt_engine.models.eagle",
    "EagleModel": "tlt_engine.models.eagle",
    "CompletionOutput": "tlt_engine.outputs",
    "Logprob": "tlt_engine.outputs",
    "RequestOutput": "tlt_engine.outputs",
    "SpecCounts": "tlt_engine.outputs",
    "derive_seed": "tlt_engine.rng",
    "DraftContext": "tlt_engine.speculation.drafter",
    "Drafter": "tlt_engine.speculation.drafter",
    "DraftTree": "tlt_engine.speculation.tree",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tlt_engine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
