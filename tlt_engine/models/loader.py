"""From a source to a model: a Hugging Face folder, an in-memory transformers model, or the demo model.

Knows neither engines nor sampling. Only EOS ids are taken from generation_config.json.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tlt_engine.config import DTYPES, refuse
from tlt_engine.models.config import ModelConfig
from tlt_engine.models.sources import InMemory, Safetensors, WeightSource
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import EMBED, HEAD, LoadReport

CPU_MAX_MODEL_LEN = 4096  # the default there: EngineConfig.max_model_len


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. tokenizer: None when the source has none. report: what was loaded and what was not."""

    model: Transformer
    config: ModelConfig
    tokenizer: Any | None
    eos_ids: tuple[int, ...]
    report: LoadReport


def load_model(
    source: str | Path | Any, *, dtype: str | torch.dtype = "float32", device: torch.device | str = "cpu",
    lm_head_dtype: str | torch.dtype | None = None, max_model_len: int | None = None,
) -> LoadedModel:
    """source: a folder with config.json and safetensors (single or sharded), "demo" for the demo model, or an in-memory
    transformers model, whose weights are copied: training it further changes nothing here.

    max_model_len None: the model's context, at most 4096 on the CPU. ValueError when weights are missing or misshapen,
    or the architecture is not served; weights that the model does not use are named in one warning.
    """
    if hasattr(source, "state_dict") and hasattr(source, "config"):
        return _load(_Model(source), dtype, device, lm_head_dtype, max_model_len)
    if source == "demo":
        from tlt_engine.models.gguf import demo_model

        source = demo_model()
    if not isinstance(source, (str, Path)):
        raise refuse("model", "a Hugging Face folder, 'demo', a transformers model or a LoadedModel",
                     type(source).__name__, "pass one of these")
    return _load(_Folder(Path(source)), dtype, device, lm_head_dtype, max_model_len)


class _Model:
    """A transformers model. Its state_dict aliases its weights; Weights.copy copies out of it."""

    def __init__(self, model: Any) -> None:
        self.config = ModelConfig.from_hf(model.config, getattr(model, "generation_config", None))
        self.weights: WeightSource = InMemory(model.state_dict())
        self.tokenizer = None


class _Folder:
    """config.json, generation_config.json, safetensors and tokenizer files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not (path / "config.json").is_file():
            raise refuse("model", "a Hugging Face folder with config.json, or a transformers model", str(path),
                         "give a local folder (download a hub model first) or 'demo'")
        from transformers import AutoConfig

        config = json.loads((path / "config.json").read_text())
        ModelConfig.from_hf(config)  # refuses what we do not serve before transformers warns about it
        generation = path / "generation_config.json"
        self.config = ModelConfig.from_hf(
            AutoConfig.from_pretrained(path), json.loads(generation.read_text()) if generation.is_file() else None
        )
        self.weights: WeightSource = Safetensors(path)

    @property
    def tokenizer(self) -> Any | None:
        if not any((self._path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)


def _load(
    source: _Model | _Folder, dtype: str | torch.dtype, device: torch.device | str,
    lm_head_dtype: str | torch.dtype | None, max_model_len: int | None,
) -> LoadedModel:
    shapes = dict(source.weights.shapes)
    config, notes = _settle_head(source, shapes)
    if max_model_len is None:
        on_cpu = torch.device(device).type == "cpu"
        max_model_len = min(config.context_limit, CPU_MAX_MODEL_LEN) if on_cpu else config.context_limit
    model = Transformer(
        config, dtype=_torch_dtype("dtype", dtype), device=device, max_model_len=max_model_len,
        lm_head_dtype=None if lm_head_dtype is None else _torch_dtype("lm_head_dtype", lm_head_dtype),
    )
    report = model.weights.check(shapes, strict=True, allow_unknown=True)
    report = model.weights.install(source.weights, report)
    if report.unexpected:
        warnings.warn(f"weights not used by this model: {', '.join(report.unexpected)}", stacklevel=3)
    report = replace(report, notes=(*notes, *report.notes))
    return LoadedModel(model, config, source.tokenizer, config.eos_token_ids, report)


def _settle_head(
    source: _Model | _Folder, shapes: dict[str, tuple[int, ...]]
) -> tuple[ModelConfig, tuple[str, ...]]:
    """What a lm_head.weight beside a tied embedding means. Equal: one tensor. Different: the config is wrong, and the
    head is kept apart, as transformers 5 does."""
    config = source.config
    if not (config.tie_word_embeddings and HEAD in shapes and EMBED in shapes):
        return config, ()
    pair = dict(source.weights.tensors((EMBED, HEAD)))
    if torch.equal(pair[EMBED], pair[HEAD]):
        del shapes[HEAD]
        return config, (f"{HEAD} equals the embedding it is tied to: one tensor serves both",)
    note = f"{HEAD} differs from the embedding although tie_word_embeddings is true: not tied, as in transformers 5"
    warnings.warn(note, stacklevel=4)
    return replace(config, tie_word_embeddings=False), (note,)


def _torch_dtype(name: str, dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise refuse(name, f"one of {', '.join(DTYPES)}", dtype, "pick one")
    return getattr(torch, dtype)
