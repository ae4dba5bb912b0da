"""Drafters and the trees they propose. Knows neither the target model nor the scheduler."""

from tlt_engine.speculation.drafter import DraftContext, Drafter
from tlt_engine.speculation.model_free import ModelFreeDrafter
from tlt_engine.speculation.tree import DraftTree

__all__ = ["DraftContext", "DraftTree", "Drafter", "ModelFreeDrafter"]
