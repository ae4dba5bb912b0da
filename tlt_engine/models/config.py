"""What the forward pass needs to know of a model, read once from a transformers configuration.

Knows neither weights nor tokenizers, and takes no sampling defaults from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt_engine.config import refuse
from tlt_engine.models.rope import RopeConfig, rope_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama family.

    head_dim is its own number, not hidden_size / num_heads. windows: one entry a layer, 0 = full attention, w = the
    row's own key and the w - 1 before it. eos_token_ids: in the order given, generation_config.json before config.json.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def context_limit(self) -> int:
        """The longest sequence the rotary embedding is meant for: max_position_embeddings, times the factor of `linear`
        scaling, or the factor times the original context of `yarn` (as vLLM derives it)."""
        if self.rope.kind == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max * self.rope.factor))
        return self.max_position_embeddings

    def check_length(self, max_model_len: int) -> None:
        """Refuses a length beyond context_limit: rotary angles out there were never trained (and for `dynamic` they
        would depend on the batch)."""
        if not 1 <= max_model_len <= self.context_limit:
            raise refuse(
                "max_model_len", f"an integer in [1, {self.context_limit}], the model's context", max_model_len,
                "lower it, or extend the model with a yarn or linear rope in its config",
            )

    @staticmethod
    def from_hf(config: Any, generation_config: Any = None) -> ModelConfig:
        """From a transformers PretrainedConfig or a plain mapping (config.json); `generation_config` likewise, used for
        its eos_token_id only. ValueError names what is not supported."""
        get = _getter(config)
        architecture = _architecture(get)
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for name in sizes:
            if not get(name, None):
                raise refuse(name, "a positive integer in the model's config", get(name, None), "complete the config")
        hidden, inner, layers, heads, vocab = (get(name, None) for name in sizes)
        kv_heads = get("num_key_value_heads", None) or heads
        if heads % kv_heads:
            raise refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}", kv_heads, "correct it")
        act = get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise refuse("hidden_act", "'silu'", act, "only SwiGLU feed-forward layers are supported")
        head_dim = get("head_dim", None) or hidden // heads
        max_position = get("max_position_embeddings", 2048)
        biased = bool(get("attention_bias", False)) and architecture in ("llama", "qwen3")
        return ModelConfig(
            architecture=architecture, hidden_size=hidden, intermediate_size=inner,
            num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            vocab_size=vocab, rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(get("tie_word_embeddings", False)), qkv_bias=biased or architecture == "qwen2",
            o_bias=biased, mlp_bias=bool(get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture == "qwen3", rope=rope_config(get, head_dim, max_position),
            windows=_windows(get, architecture, layers), max_position_embeddings=max_position,
            eos_token_ids=_eos_ids(generation_config) or _eos_ids(config),
        )


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states (numbered as StepOutputs.hidden) that a learned drafter reads by default: EAGLE-3's low,
    middle and high [2, n // 2, n - 3]. That rule repeats itself or turns negative below 7 layers; small models get
    three distinct valid ones instead. One layer has only two hidden states: refused."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    if num_layers >= 2:
        return (0, 1, 2)
    raise refuse("aux layers", "a model of at least 2 layers", num_layers, "name the hidden states yourself")


def _getter(config: Any) -> Any:
    """get(name, default) over an object or a mapping. An attribute set to None counts as absent only to callers that
    test for it."""
    if isinstance(config, Mapping):
        return lambda name, default: config.get(name, default)
    return lambda name, default: getattr(config, name, default)


def _architecture(get: Any) -> str:
    supported = ", ".join(ARCHITECTURES.values())
    names = get("architectures", None) or ()
    model_type = get("model_type", None)
    by_name = {v: k for k, v in ARCHITECTURES.items()}
    for name in names:
        if name in by_name:
            return by_name[name]
    if names or model_type not in ARCHITECTURES:
        got = list(names) or model_type
        raise refuse("architecture", f"one of {supported}", got, "this engine serves these dense decoders only")
    return model_type


def _windows(get: Any, architecture: str, layers: int) -> tuple[int, ...]:
    """Per-layer window. Mistral: sliding_window on all layers. Qwen: only with use_sliding_window, on the layers that
    layer_types names, else those from max_window_layers on. Llama: never."""
    window = get("sliding_window", None) or 0
    if architecture == "llama" or not window:
        return (0,) * layers
    if architecture == "mistral":
        return (window,) * layers
    if not get("use_sliding_window", False):
        return (0,) * layers
    kinds = get("layer_types", None)
    if kinds is None:
        first = get("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise refuse("layer_types", f"{layers} of 'full_attention' or 'sliding_attention'", kinds, "correct the config")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _eos_ids(config: Any) -> tuple[int, ...]:
    """eos_token_id as a tuple without repeats; it may be absent, one id or a list."""
    value = None if config is None else _getter(config)("eos_token_id", None)
    if value is None:
        return ()
    ids = [value] if isinstance(value, int) else list(value)
    return tuple(dict.fromkeys(int(i) for i in ids))
