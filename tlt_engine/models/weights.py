"""A model's weights: fused tensors, the Hugging Face names that map to views of them, and checked in-place loading.

Knows neither files nor the forward pass. The views of `named` are the only road to the storage, for the first load and
for every later update, so a name can never be loaded into a stale copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from tlt_engine.models.config import ModelConfig
from tlt_engine.models.sources import InMemory, WeightSource, weight_source

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")  # recomputed here
SHOWN = 6  # names listed in an error before "and n more"


@dataclass(frozen=True)
class LayerWeights:
    """qkv [(Hq + 2 Hkv) D, H], o [H, Hq D], gate_up [2 I, H], down [H, I]; norms [H], q_norm and k_norm [D]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class LoadReport:
    """loaded, missing, unexpected: Hugging Face names. notes: what else a reader of the load should know, one line each
    (a head found beside a tied embedding, for one)."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Counts what was loaded, hundreds of names as a rule; names the rest."""
        return (f"LoadReport({len(self.loaded)} loaded, missing={self.missing}, unexpected={self.unexpected}, "
                f"notes={self.notes})")


class Weights:
    """embed [V, H], layers, norm [H] and head [V, H], allocated once and uninitialised until the first load.

    head is the embedding's own storage when tied; in an lm_head_dtype other than dtype it is a copy which every load
    refreshes.
    """

    @torch.inference_mode(False)  # tensors of an inference mode could not be updated outside of it
    @torch.no_grad()
    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, lm_head_dtype: torch.dtype | None,
    ) -> None:
        self._config = config

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.embed = new(config.vocab_size, config.hidden_size)
        self.layers = [_new_layer(config, new) for _ in range(config.num_layers)]
        self.norm = new(config.hidden_size)
        self._head_master = self.embed if config.tie_word_embeddings else new(*self.embed.shape)
        copied = lm_head_dtype is not None and lm_head_dtype != dtype
        self.head = self._head_master.to(lm_head_dtype) if copied else self._head_master
        self._views = dict(self._name_views())
        self._probes = [_probe(view) for view in self._views.values()]
        self._fingerprint = (-1, "")  # behind which load, which
        self.loads = 0  # rises with every change of values, so that whoever computed with them can tell
        self.invalid: str | None = None  # why the values are no policy's: nobody may run a pass on them

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._views.items())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._views)

    def _name_views(self) -> Iterator[tuple[str, Tensor]]:
        yield EMBED, self.embed
        for i, layer in enumerate(self.layers):
            for name, view in _layer_views(self._config, layer):
                yield f"model.layers.{i}.{name}", view
        yield "model.norm.weight", self.norm
        if not self._config.tie_word_embeddings:
            yield HEAD, self._head_master

    @property
    def bytes(self) -> int:
        """Of all storages, a tied head counted once."""
        owned = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in self._views.values()}
        owned[self.head.untyped_storage().data_ptr()] = self.head.untyped_storage().nbytes()
        return sum(owned.values())

    @torch.no_grad()
    def fingerprint(self) -> str:
        """64 hex bits from 16 evenly spaced elements of every weight: tells different policies apart without reading
        them whole. Not a checksum. A few launches, as every update pays for it, and none if nothing was loaded since
        (who writes into the views of `named` raises `loads`); synchronises the current stream."""
        if self._fingerprint[0] != self.loads:
            probed = torch.cat(self._probes).float().cpu()
            self._fingerprint = (self.loads, blake2b(probed.numpy().tobytes(), digest_size=8).hexdigest())
        return self._fingerprint[1]

    @torch.no_grad()
    def checksums(self) -> dict[str, str]:
        """16 hex digits a weight, over all of its bytes as they are stored: a sum of the bit patterns and one weighted
        by place, so that equal digits mean equal values for all practical purposes. Reads everything once."""
        sums = torch.stack([_bit_sums(view) for view in self._views.values()]).cpu().tolist()
        return {name: f"{a & 0xFFFFFFFF:08x}{b & 0xFFFFFFFF:08x}" for name, (a, b) in zip(self._views, sums)}

    def check(
        self, shapes: Mapping[str, Sequence[int]], *, strict: bool = True, allow_unknown: bool = False
    ) -> LoadReport:
        """What loading tensors of these names and shapes would do, before anything changes.

        strict: every weight must come and nothing else, save that allow_unknown only reports unknown names (checkpoint
        files). Not strict: a subset is fine and unknown names are reported. A set that matches no weight is refused.
        lm_head.weight of a tied model is known; buffers of old checkpoints (rotary inv_freq) are passed over.
        ValueError lists every unknown, missing and misshapen name.
        """
        known = dict(self._views)
        if self._config.tie_word_embeddings:
            known[HEAD] = self.embed
        loaded = tuple(n for n in shapes if n in known)
        unexpected = tuple(n for n in shapes if n not in known and not n.endswith(IGNORED_SUFFIXES))
        present = set(shapes) | ({EMBED} if self._config.tie_word_embeddings and HEAD in shapes else set())
        missing = tuple(n for n in self._views if n not in present)
        misshapen = [
            f"{n} expected {list(known[n].shape)}, got {list(shapes[n])}"
            for n in loaded if tuple(shapes[n]) != tuple(known[n].shape)
        ]
        problems = [f"misshapen: {_listed(misshapen)}"] if misshapen else []
        incomplete = (strict and missing) or not loaded
        if unexpected and (incomplete or (strict and not allow_unknown)):
            problems.append(f"unknown: {_listed(unexpected)}")
        if incomplete:
            problems.append(f"missing: {_listed(missing)}")
        if problems:
            raise ValueError(
                f"weights: expected this model's {len(self._views)} names and shapes, got {'; '.join(problems)}; "
                f"{self._remedy(unexpected, missing)} (nothing was changed)"
            )
        return LoadReport(loaded, missing, unexpected)

    def load(self, weights: Any, *, strict: bool = True) -> LoadReport:
        """Validates the whole set with `check`, then copies in place, casting dtypes. If validation fails nothing has
        changed. Values are copied, never aliased. weights: whatever sources.weight_source takes."""
        source = weight_source(weights)
        shapes = source.shapes
        report = self.check(shapes, strict=strict)
        if self._config.tie_word_embeddings and EMBED in shapes and HEAD in shapes:
            pair = dict(source.tensors((EMBED, HEAD)))
            if not _same(pair[EMBED], pair[HEAD]):
                raise ValueError(
                    f"weights: expected {HEAD} equal to {EMBED}, as this model's head is tied to its embedding, got "
                    "other values; send only the embedding, or load with tie_word_embeddings false (nothing was "
                    "changed)"
                )
        return self.install(source, report)

    def install(self, source: WeightSource, report: LoadReport) -> LoadReport:
        """Copies what `check` has passed. If the source breaks off, the weights stay invalid until a full load."""
        before, self.invalid = self.invalid, "an update of the weights broke off"
        casts = self.copy(source.tensors(report.loaded), lasting=isinstance(source, InMemory))
        self.invalid = before if report.missing else None
        self.fingerprint()  # launched while the copies run: 0.4 ms of a 7B model's 8
        self.wait()
        return replace(report, notes=tuple(_cast_notes(casts, self.embed.dtype)))

    @torch.no_grad()
    def copy(self, items: Iterable[tuple[str, Tensor]], *, lasting: bool = False) -> Counter[torch.dtype]:
        """Copies tensors that `check` has passed and refreshes the head's copy; a generator may use the memory of what
        it yielded again, in the order of the current stream, unless lasting. For streams: call check first, and wait at
        the end. Returns how many came in another dtype, by dtype."""
        self.loads += 1
        casts: Counter[torch.dtype] = Counter()
        head_changed = False
        small: list[tuple[Tensor, Tensor]] = []
        for name, value in items:
            view = self._view(name)
            head_changed |= view is self._head_master
            if lasting and view.dim() == 1 and value.device == view.device:
                small.append((view, value))
            else:
                view.copy_(value)  # waits for what comes from the host: a source may fill its buffer anew
            if value.dtype != view.dtype:
                casts[value.dtype] += 1
        if small:  # norms and biases: one launch for 141 of Qwen2.5-7B's 339
            torch._foreach_copy_([view for view, _ in small], [value for _, value in small])
        if head_changed and self.head is not self._head_master:
            self.head.copy_(self._head_master)
        return casts

    def wait(self) -> None:
        """Until all copies are in place: other streams may read the weights, and their sources change."""
        if self.embed.is_cuda:
            torch.cuda.synchronize(self.embed.device)

    def _view(self, name: str) -> Tensor:
        return self.embed if name == HEAD and self._config.tie_word_embeddings else self._views[name]

    def _remedy(self, unexpected: Sequence[str], missing: Sequence[str]) -> str:
        if any(".lora_" in n or ".base_layer." in n for n in unexpected):
            return "merge the adapters on the way with tlt_engine.rl.policy.PolicyWeights(model)"
        for name in unexpected:
            prefix = next((name[: -len(known)] for known in self._views if name.endswith("." + known)), None)
            if prefix:  # of a wrapper: "module." (DDP), "_orig_mod." (compile), a doubled "model."
                return f"remove the prefix {prefix!r} from the names"
        if any(f"model.{n}" in self._views for n in unexpected):
            return "add the prefix 'model.' to the names, which look like a base model's without its head"
        if HEAD in missing:
            return f"{HEAD} is needed as tie_word_embeddings is false; set it true in the config if the head is tied"
        return "send Hugging Face names, as model.named_weights() lists them; strict=False accepts a subset"


def _probe(view: Tensor) -> Tensor:
    """Up to 16 evenly spaced elements of a contiguous tensor, from its first on: a view."""
    count = min(16, view.numel())
    stride = (view.numel() - 1) // max(count - 1, 1)
    return view.as_strided((count,), (max(stride, 1),), view.storage_offset())


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHECKED_AT_ONCE = 1 << 24  # elements: 128 MB of int64 at a time


def _bit_sums(view: Tensor) -> Tensor:
    """int64 [2]; sums wrap around, so their order does not matter."""
    bits = view.reshape(-1).view(BITS[view.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=view.device)
    for start in range(0, len(bits), CHECKED_AT_ONCE):
        part = bits[start : start + CHECKED_AT_ONCE].long()
        place = torch.arange(start, start + len(part), device=view.device) * 2654435761 % 2**32 + 1
        total += torch.stack((part.sum(), (part * place).sum()))
    return total


def _cast_notes(casts: Counter[torch.dtype], dtype: torch.dtype) -> Iterator[str]:
    for source, count in casts.items():
        yield f"{count} tensors cast from {source} to {dtype}"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a.to(b.device, b.dtype), b)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _new_layer(c: ModelConfig, new: Callable[..., Tensor]) -> LayerWeights:
    q_rows, qkv_rows = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

    def maybe(wanted: bool, size: int) -> Tensor | None:
        return new(size) if wanted else None

    return LayerWeights(
        input_norm=new(c.hidden_size), qkv=new(qkv_rows, c.hidden_size), qkv_bias=maybe(c.qkv_bias, qkv_rows),
        q_norm=maybe(c.qk_norm, c.head_dim), k_norm=maybe(c.qk_norm, c.head_dim), o=new(c.hidden_size, q_rows),
        o_bias=maybe(c.o_bias, c.hidden_size), post_norm=new(c.hidden_size),
        gate_up=new(2 * c.intermediate_size, c.hidden_size), gate_up_bias=maybe(c.mlp_bias, 2 * c.intermediate_size),
        down=new(c.hidden_size, c.intermediate_size), down_bias=maybe(c.mlp_bias, c.hidden_size),
    )


def _layer_views(c: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    """Names within a layer, in transformers' order, each a view of the fused rows it owns."""
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    fused = (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), layer.qkv, layer.qkv_bias),
        ("self_attn", ("o_proj",), (c.hidden_size,), layer.o, layer.o_bias),
        ("mlp", ("gate_proj", "up_proj"), (inner, inner), layer.gate_up, layer.gate_up_bias),
        ("mlp", ("down_proj",), (c.hidden_size,), layer.down, layer.down_bias),
    )
    for block, names, rows, weight, bias in fused:
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                yield from ((f"{block}.{n}.{kind}", view) for n, view in zip(names, tensor.split(rows)))
    norms = {
        "self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm, "input_layernorm": layer.input_norm,
        "post_attention_layernorm": layer.post_norm,
    }
    yield from ((f"{name}.weight", norm) for name, norm in norms.items() if norm is not None)
