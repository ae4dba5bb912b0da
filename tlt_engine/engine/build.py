"""From an EngineConfig to a model, a KV pool and static buffers. Run once, when the engine is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tlt_engine.config import EngineConfig, refuse
from tlt_engine.engine.packing import StepBuffers
from tlt_engine.engine.runner import ModelRunner
from tlt_engine.graphs.buckets import default_buckets
from tlt_engine.kvcache.pages import PagePool
from tlt_engine.kvcache.prefix import PrefixCache
from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models import EagleModel, LoadedModel, Transformer, load_model
from tlt_engine.models.eagle_checkpoint import load_drafter
from tlt_engine.speculation.drafter import Drafter
from tlt_engine.speculation.learned import EagleDrafter
from tlt_engine.speculation.model_free import ModelFreeDrafter
from tlt_engine.types import MAX_NODES

DEFAULT_KV_BYTES = 2 * 2**30


def build_model(source: Any, config: EngineConfig) -> LoadedModel:
    if isinstance(source, LoadedModel):
        _check_loaded(source.model, config)
        return source
    _check_device(config.device)
    return load_model(
        source, dtype=config.dtype, device=config.device, lm_head_dtype=config.lm_head_dtype,
        max_model_len=config.max_model_len,
    )


def _check_device(device: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        remedy = "use 'cpu', or install a torch with CUDA"
        raise refuse("EngineConfig.device", "a CUDA device that torch can use", device, remedy)


def _check_loaded(model: Transformer, config: EngineConfig) -> None:
    """A model that is already loaded brings its own dtypes and device: a config that says otherwise is a mistake."""
    head = str(model.lm_head_dtype).removeprefix("torch.")
    brought = {
        "dtype": (str(model.dtype).removeprefix("torch."), config.dtype),
        "device": (model.device.type, config.device.split(":")[0]),
        "lm_head_dtype": (head, config.lm_head_dtype or head),
    }
    for name, (has, wanted) in brought.items():
        if has != wanted:
            remedy = "set it so, or load the model again"
            raise refuse(f"EngineConfig.{name}", f"{has!r}, as the loaded model has", wanted, remedy)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise refuse("EngineConfig.max_model_len", f"at most {model.max_model_len}, as the model was loaded with",
                     config.max_model_len, "lower it, or load the model with a larger one")


def build_kv(
    config: EngineConfig, model: Transformer, max_model_len: int
) -> tuple[PagePool, PrefixCache | None, KVStorage]:
    """The pool is sized as EngineConfig says."""
    c = model.config
    page_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize * config.page_size
    pages_each = -(-(max_model_len + config.speculation.profile.verify) // config.page_size)
    pages = config.num_pages
    if pages is None:
        wanted = config.max_num_seqs * pages_each
        budget = (config.kv_cache_bytes or DEFAULT_KV_BYTES) // page_bytes
        pages = min(wanted, budget) if config.kv_cache_bytes is None else budget
    if pages < 1:
        expected = f"at least one page of {page_bytes} bytes"
        raise refuse("EngineConfig.kv_cache_bytes", expected, config.kv_cache_bytes, "raise it")
    pool = PagePool(pages)
    prefix = PrefixCache(pool, config.page_size) if config.enable_prefix_caching else None
    dummy = int(model.device.type == "cuda")  # page of the graphs' padding rows (device.Layout); not the pool's
    return pool, prefix, model.new_kv(pages + dummy, config.page_size)


def build_buffers(config: EngineConfig, tokens: int) -> StepBuffers:
    """Rows for the prefill budget, for every sample's tree, and for scoring chains, which take the prefill budget once
    more but never less than one row a sample."""
    trees = config.max_num_seqs * config.speculation.profile.verify
    rows = 2 * config.max_num_batched_tokens + trees + config.max_num_seqs
    pages = -(-(tokens + MAX_NODES) // config.page_size)
    return StepBuffers(rows, 2 * config.max_num_seqs, pages)


def check_drafter(method: str, given: Any) -> None:
    learned = isinstance(given, (EagleModel, str, Path))
    custom = given is not None and not learned
    if (method == "learned") != learned or (method == "custom") != custom:
        expected = (
            "a Drafter exactly when SpeculationConfig.method is 'custom', an EagleModel or its folder exactly when it "
            "is 'learned'"
        )
        fitting = "learned" if learned else "custom" if custom else None
        remedy = f"use SpeculationConfig(method={fitting!r})" if fitting else "pass drafter="
        raise refuse("drafter", expected, type(given).__name__, f"the method is {method!r}; {remedy}")


def build_drafter(
    config: EngineConfig, given: Any, model: Transformer, max_model_len: int, *, eos_ids: list[int],
    vocab_limit: int | None,
) -> Drafter | None:
    """given: RolloutEngine's drafter. A learned one is copied, to the target's dtype and device: what the caller does
    with its own, training for one, changes nothing here."""
    spec = config.speculation
    if spec.method in ("custom", "off"):
        return given
    model_free = ModelFreeDrafter(spec, eos_ids)
    if spec.method == "model_free":
        return model_free
    return EagleDrafter(
        _own_drafter(given, model), spec, lanes=config.max_num_seqs, max_model_len=max_model_len, eos_ids=eos_ids,
        vocab_limit=vocab_limit, page_size=config.page_size, model_free=model_free if spec.merge_model_free else None,
    )


def _own_drafter(given: EagleModel | str | Path, model: Transformer) -> EagleModel:
    if not isinstance(given, EagleModel):
        return load_drafter(given, model)
    own = EagleModel(given.config, dtype=model.dtype, device=model.device)
    own.copy_from(given)
    return own.bind(model)


def build_runner(
    config: EngineConfig, model: Transformer, kv: KVStorage, max_model_len: int, *, vocab_limit: int | None,
    eos_ids: frozenset[int],
) -> ModelRunner:
    buffers = build_buffers(config, max_model_len)
    if model.device.type != "cuda":
        return ModelRunner(model, kv, buffers, vocab_limit=vocab_limit, eos_ids=eos_ids)
    from tlt_engine.engine.device import DeviceRunner

    verify = 1 if config.speculation.method == "off" else config.speculation.profile.verify
    full = config.speculation.method == "learned"
    parameters = model.weights.bytes // model.dtype.itemsize
    buckets = None if config.enforce_eager else default_buckets(config.max_num_seqs, verify, parameters, full=full)
    return DeviceRunner(
        model, kv, buffers, vocab_limit=vocab_limit, eos_ids=eos_ids, buckets=buckets, graph_bytes=config.graph_bytes,
        prefill_backend=config.prefill_backend, invariant=config.batch_invariant,
    )
