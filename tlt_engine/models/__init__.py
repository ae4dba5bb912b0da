"""The target model and the learned drafter's module: configuration, weights, forward pass and loading.

Knows neither requests nor sampling.
"""

from tlt_engine.models.config import ModelConfig, default_aux_layers
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.loader import LoadedModel, load_model
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import LoadReport

__all__ = [
    "EagleConfig",
    "EagleModel",
    "LoadReport",
    "LoadedModel",
    "ModelConfig",
    "Transformer",
    "default_aux_layers",
    "load_model",
]
