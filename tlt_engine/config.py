"""Frozen configuration, validated once when built. Errors name the field, what was expected, what came, the remedy."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tlt_engine.rng import check_seed
from tlt_engine.types import MAX_NODES

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
PREFILL_BACKENDS = ("auto", "flashinfer", "triton")
FLOAT_MAX, FLOAT_TINY = float.fromhex("0x1.fffffep127"), float.fromhex("0x1p-126")  # of fp32: what the kernels take


def refuse(field_name: str, expected: str, got: object, remedy: str) -> ValueError:
    """The one form of a refusal. The caller raises it."""
    return ValueError(f"{field_name}: expected {expected}, got {got!r}; {remedy}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    bounds = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise refuse(name, bounds, value, "pass an int")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise refuse(name, bounds, number, "choose a value in range")
    return number


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    bounds = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise refuse(name, bounds, value, "pass a float") from None
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        raise refuse(name, bounds, value, "choose a value in range")
    return number


def _flag(name: str, value: object) -> bool:
    if value not in (True, False):  # "no" is true, and would go unnoticed
        raise refuse(name, "True or False", value, "pass a bool")
    return bool(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not hasattr(value, "__iter__"):
        raise refuse(name, "a list of token ids", value, "wrap it in a list")
    return tuple(_integer(name, t, 0) for t in value)


def _biases(value: Any) -> dict[int, float]:
    if not hasattr(value, "items"):
        raise refuse("logit_bias", "a dict {token id: added logit}", value, "build one")
    biases: dict[int, float] = {}
    for t, bias in value.items():
        token = _integer("logit_bias", t, 0)
        biases[token] = bias if bias == -math.inf else _real(f"logit_bias[{token}]", bias, -FLOAT_MAX, FLOAT_MAX)
    return biases


@dataclass(frozen=True)
class Profile:
    """A drafting strategy: trees of at most `depth` draft levels, `top_k` children a node, `verify` nodes in all, the
    root included. A chain has top_k 1; plain decoding is verify 1."""

    depth: int
    top_k: int
    verify: int

    def __post_init__(self) -> None:
        _integer("Profile.depth", self.depth, 0)
        _integer("Profile.top_k", self.top_k, 1)
        _integer("Profile.verify", self.verify, 1, MAX_NODES)

    def __str__(self) -> str:
        return f"{self.depth}_{self.top_k}_{self.verify}"


@dataclass(frozen=True)
class SpeculationConfig:
    """How to speculate.

    method: "model_free" (suffix automaton over the request, its siblings and earlier rollouts of the prompt), "learned"
        (an EagleModel passed to RolloutEngine), "custom" (a Drafter passed to RolloutEngine) or "off".
    profile: the shape of the draft trees.
    min_chance: a draft node is kept only if its estimated chance to be accepted is at least this; rows are not free.
    enable_below: speculate only while running and queued samples are at most this many (None: always). It takes
        speculation.elastic.HOLD steps on the other side to switch, either way.
    shared_noise: the learned drafter proposes the best of log q + noise, the noise being the target's own, and not the
        best of q alone. ranking: which of its nodes are kept: "noise", by their estimated chance given that noise, or
        "q". sharpness: of that estimate, softmax(sharpness * (log q + noise)); None: follows what is accepted.
        merge_model_free: the model-free drafter's proposals compete with the learned ones.
    audit: share of requests re-decoded without speculation and compared; differences are counted in stats().
    model_free_bytes: memory budget of the model-free drafter's automata, oldest prompts dropped first.
    """

    method: str = "model_free"
    profile: Profile = field(default_factory=lambda: Profile(depth=8, top_k=4, verify=16))
    min_chance: float = 0.08
    enable_below: int | None = None
    shared_noise: bool = True
    ranking: str = "noise"
    sharpness: float | None = None
    merge_model_free: bool = False
    audit: float = 0.0
    model_free_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        methods = ("model_free", "learned", "custom", "off")
        if self.method not in methods:
            raise refuse("SpeculationConfig.method", f"one of {', '.join(methods)}", self.method, "pick one")
        if not isinstance(self.profile, Profile):
            raise refuse("SpeculationConfig.profile", "a Profile(depth, top_k, verify)", self.profile, "build one")
        _real("SpeculationConfig.min_chance", self.min_chance, 0.0, 1.0)
        if self.enable_below is not None:
            _integer("SpeculationConfig.enable_below", self.enable_below, 0)
        for name in ("shared_noise", "merge_model_free"):
            _flag(f"SpeculationConfig.{name}", getattr(self, name))
        if self.ranking not in ("noise", "q"):
            raise refuse("SpeculationConfig.ranking", "'noise' or 'q'", self.ranking, "pick one")
        if self.sharpness is not None:
            _real("SpeculationConfig.sharpness", self.sharpness, 0.0, 100.0, open_low=True)
        _real("SpeculationConfig.audit", self.audit, 0.0, 1.0)
        _integer("SpeculationConfig.model_free_bytes", self.model_free_bytes, 0)


@dataclass(frozen=True)
class EngineConfig:
    """One engine = one process and one device.

    dtype of weights and KV; lm_head_dtype: dtype of the head's product and of the logits (None: dtype).
    device: 'cpu', 'cuda' or 'cuda:N'; CUDA is experimental.
    max_model_len: prompt + output tokens of one sequence (None: the model's own limit, at most 4096 on the CPU).
    max_num_seqs: samples running at once. max_num_batched_tokens: prompt tokens prefilled a step (chunked prefill).
    page_size: tokens a KV page. num_pages: None takes `kv_cache_bytes`, or what max_num_seqs sequences of
        max_model_len need if that is less than 2 GiB, else 2 GiB.
    seed: root of the keys of requests without a seed; None: OS entropy.
    mask_padding_ids: never emit ids at or beyond the tokenizer's length (None: yes when a tokenizer is known).
    batch_invariant: a token's logits depend, bit for bit, on its own context alone: not on speculation, the batch,
        chunks, preemption or prefix hits. On CUDA; on the CPU fp32 has it anyway and other dtypes are refused.
    enforce_eager: no CUDA graphs, as in vLLM. graph_bytes: device memory for all captured graphs together; the least
        recently used are dropped beyond it. Both matter on CUDA only.
    prefill_backend: what attends to prompt chunks on CUDA: "triton" (ours), "flashinfer" (refused without the package
        flashinfer-python, in fp32, or for heads it lacks) or "auto": FlashInfer where it can, else ours, with one
        warning that says why. FlashInfer compiles at first use, half a minute, and keeps the result on disk.
    stall_seconds: a step that takes longer is reported once in the log, with the scheduler's state and the stacks of
        all threads (None: never). The first steps on a GPU compile kernels: about 15 s.
    """

    dtype: str = "float32"
    device: str = "cpu"
    lm_head_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    seed: int | None = None
    mask_padding_ids: bool | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False
    graph_bytes: int = 2 * 2**30
    prefill_backend: str = "auto"
    stall_seconds: float | None = 300.0
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise refuse("EngineConfig.device", "'cpu', 'cuda' or 'cuda:N'", self.device, "pass str(device)")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise refuse("EngineConfig.device", "'cpu', 'cuda' or 'cuda:N'", self.device, "pick one")
        if self.dtype not in DTYPES:
            raise refuse("EngineConfig.dtype", f"one of {', '.join(DTYPES)}", self.dtype, "pick one")
        if self.lm_head_dtype is not None and self.lm_head_dtype not in DTYPES:
            expected = f"None or one of {', '.join(DTYPES)}"
            raise refuse("EngineConfig.lm_head_dtype", expected, self.lm_head_dtype, "pick one")
        if self.prefill_backend not in PREFILL_BACKENDS:
            expected = f"one of {', '.join(PREFILL_BACKENDS)}"
            raise refuse("EngineConfig.prefill_backend", expected, self.prefill_backend, "pick one")
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "graph_bytes"):
            _integer(f"EngineConfig.{name}", getattr(self, name), 1)
        for name in ("max_model_len", "num_pages", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _integer(f"EngineConfig.{name}", getattr(self, name), 1)
        for name in ("enable_prefix_caching", "batch_invariant", "enforce_eager"):
            _flag(f"EngineConfig.{name}", getattr(self, name))
        exact = self.dtype == (self.lm_head_dtype or self.dtype) == "float32"
        if self.batch_invariant and self.device == "cpu" and not exact:
            got = f"dtype {self.dtype!r}, lm_head_dtype {self.lm_head_dtype!r}"
            raise refuse("EngineConfig.batch_invariant", "float32 throughout on the CPU, or device='cuda'", got,
                         "set both to 'float32': 16-bit products on the CPU round as the number of rows has it")
        if self.batch_invariant and self.prefill_backend == "flashinfer":
            raise refuse("EngineConfig.prefill_backend", "'auto' or 'triton' with batch_invariant",
                         self.prefill_backend, "FlashInfer's sums depend on the batch")
        if self.mask_padding_ids is not None:
            _flag("EngineConfig.mask_padding_ids", self.mask_padding_ids)
        if self.stall_seconds is not None:
            _real("EngineConfig.stall_seconds", self.stall_seconds, 0.0, 1e9, open_low=True)
        if self.seed is not None:
            check_seed(self.seed, "EngineConfig.seed")
        if not isinstance(self.speculation, SpeculationConfig):
            remedy = "use SpeculationConfig(method='off') to turn it off"
            raise refuse("EngineConfig.speculation", "a SpeculationConfig", self.speculation, remedy)


LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]


@dataclass(frozen=True)
class SamplingParams:
    """What to draw, with vLLM's names and the neutral defaults 1 / 0 / 0 (never those of generation_config).

    n samples of the prompt get noise sample indices sample_index .. sample_index + n - 1.
    temperature below 1e-5 is greedy. top_k 0 or -1, top_p 1, min_p 0 are off.
    seed: int64 or None (a key from the engine's stream). stop: strings that end the output; stop_token_ids: ids that
    do. ignore_eos: EOS does not end it. min_tokens: EOS and stop ids are barred before that many output tokens; a stop
    string may start within them, not end there.
    logprobs: None, or how many of the most likely tokens to return a position beside the sampled one (0: only that).
    prompt_logprobs: the same for the prompt's tokens. raw_logprobs: also return log_softmax of the unmodified logits.
    logit_bias: {id: added logit}. allowed_token_ids: only these may be emitted.
    logits_processor(output_ids, logits fp32 [V]) -> logits: called on the host once for each emitted position, with
    committed prefixes only; -inf bars an id. Such a request decodes without speculation; if the callable raises or
    returns something else, it ends with finish_reason "error" and the others go on.
    max_tokens: None means up to the context end.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    sample_index: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processor: LogitsProcessor | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        put: Callable[[str, Any], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("n", _integer("n", self.n, 1))
        put("temperature", _real("temperature", self.temperature, 0.0, FLOAT_MAX))
        put("top_k", max(_integer("top_k", self.top_k, -1, 2**31 - 1), 0))
        put("top_p", _real("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("min_p", _real("min_p", self.min_p, 0.0, 1.0))
        put("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, FLOAT_TINY, FLOAT_MAX))
        put("presence_penalty", _real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", f"at most max_tokens = {self.max_tokens}", self.min_tokens, "lower it")
        put("sample_index", _integer("sample_index", self.sample_index, 0, 2**32 - self.n))
        if self.seed is not None:
            put("seed", check_seed(self.seed))
        if self.stop is not None and not hasattr(self.stop, "__iter__"):
            raise refuse("stop", "a string or a list of strings", self.stop, "pass stop_token_ids for ids")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not isinstance(s, str) or not s for s in stops):
            raise refuse("stop", "non-empty strings", self.stop, "drop the empty or non-string entries")
        put("stop", stops)
        put("stop_token_ids", () if self.stop_token_ids is None else _ids("stop_token_ids", self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                put(name, _integer(name, value, 0))
        if self.logit_bias is not None:
            put("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise refuse("allowed_token_ids", "at least one id", [], "pass None to allow all ids")
            put("allowed_token_ids", allowed)
        for name in ("include_stop_str_in_output", "ignore_eos", "raw_logprobs", "skip_special_tokens", "detokenize"):
            put(name, _flag(name, getattr(self, name)))
        if self.logits_processor is not None and not callable(self.logits_processor):
            expected = "a callable (output_ids, logits) -> logits"
            raise refuse("logits_processor", expected, self.logits_processor, "pass a function")
        if self.stop and not self.detokenize:
            raise refuse("detokenize", "True when stop strings are given", False, "use stop_token_ids instead")

    @cached_property
    def unfiltered(self) -> bool:
        """The distribution is softmax(logits / temperature), but for min_tokens and a logits processor."""
        return (
            self.top_k == 0 and self.top_p == 1 and self.min_p == 0 and not self.logit_bias
            and self.allowed_token_ids is None
            and (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1.0, 0.0, 0.0)
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids outside [0, vocab_size). Called when a request meets its model."""
        groups = {
            "stop_token_ids": self.stop_token_ids, "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self.logit_bias,
        }
        for name, ids in groups.items():
            for t in ids or ():
                if t >= vocab_size:
                    raise refuse(name, f"ids in [0, {vocab_size})", t, "the model has no such token")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                raise refuse(name, f"at most the vocabulary size {vocab_size}", value, "lower it")
