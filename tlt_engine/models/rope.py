"""Rotary position embedding: inverse frequencies, attention scaling and the cos/sin tables.

Knows neither layers nor requests. Every table is a function of the configuration alone, never of the lengths in a
batch: a cached key keeps the rotation it was written with, so a rotation that depended on the batch or on how far a
request has got would make results depend on scheduling.

Formulas: RoPE (arXiv 2104.09864), YaRN and NTK-by-parts (arXiv 2309.00071), Llama 3.1's piecewise rule; numerics follow
transformers' modeling_rope_utils, whose output the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """How positions are rotated. rotary_dim: the leading dimensions of a head that are rotated; the rest pass through.

    original_max: positions the model was trained on before scaling (llama3, yarn). attention_factor: multiplies cos and
    sin (yarn), None: from factor, mscale and mscale_all_dim.

    `dynamic` equals `default` up to max_position_embeddings. transformers stretches the base with the length of the
    longest row once a pass goes beyond, keys cached under the old base included, so the result depends on batch and
    schedule; this engine serves it within the limit (ModelConfig.context_limit) only, where both agree exactly.
    """

    kind: str = "default"
    theta: float = DEFAULT_THETA
    rotary_dim: int = 0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rope_config(get: Any, head_dim: int, max_position: int) -> RopeConfig:
    """Reads the settings through `get(name, default)`: rope_parameters (transformers 5) first, then rope_scaling and
    the top-level rope_theta and partial_rotary_factor of older configs, then theta 10000."""
    settings = _settings(get)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        why = "it switches frequencies with the length of the batch; " if kind == "longrope" else ""
        raise refuse("rope_type", f"one of {', '.join(ROPE_KINDS)}", kind, why + "use a model with one of these")

    def pick(name: str, default: Any) -> Any:
        value = settings.get(name)
        return default if value is None else value

    share = float(pick("partial_rotary_factor", get("partial_rotary_factor", None) or 1.0))
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise refuse(
            "partial_rotary_factor", f"an even number of rotated dimensions in (0, {head_dim}]", rotary_dim,
            f"head_dim {head_dim} times {share:g} must be even; correct the config",
        )
    trained = "original_max_position_embeddings"  # transformers prefers the top-level one, as Phi-3 has it
    original_max = int(get(trained, None) or pick(trained, max_position))
    factor = settings.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise refuse("rope_parameters.factor", f"a number, as rope_type is {kind}", None, "add it to the config")
        factor = max_position / original_max
    return RopeConfig(
        kind=kind, theta=float(pick("rope_theta", get("rope_theta", None) or DEFAULT_THETA)), rotary_dim=rotary_dim,
        factor=float(factor), original_max=original_max, low_freq_factor=float(pick("low_freq_factor", 1.0)),
        high_freq_factor=float(pick("high_freq_factor", 4.0)), beta_fast=float(pick("beta_fast", 0) or 32.0),
        beta_slow=float(pick("beta_slow", 0) or 1.0), attention_factor=settings.get("attention_factor"),
        mscale=settings.get("mscale"), mscale_all_dim=settings.get("mscale_all_dim"),
        truncate=bool(pick("truncate", True)),
    )


def _settings(get: Any) -> Mapping[str, Any]:
    """rope_scaling below rope_parameters. A per-layer-type nesting (two ropes in one model) is refused."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        merged.update({k: v for k, v in (get(name, None) or {}).items() if v is not None})
    nested = [k for k, v in merged.items() if isinstance(v, Mapping)]
    if nested:
        raise refuse("rope_parameters", "one set of settings for all layers", nested, "use a model with one rope")
    return merged


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """(inv_freq fp32 [rotary_dim / 2], attention scaling). Computed in fp32 like transformers, on the CPU."""
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    powers = rope.theta**steps
    inv_freq = 1.0 / powers
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(powers, rope), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by factor, short ones kept, those between blended linearly in 1 / wavelength."""
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    long = wavelength > rope.original_max / low
    short = wavelength < rope.original_max / high
    return torch.where(long, inv_freq / rope.factor, torch.where(short, inv_freq, blended))


def _yarn(powers: Tensor, rope: RopeConfig) -> Tensor:
    """Dimensions with many rotations over the original context are kept, those with few interpolated (arXiv 2309.00071,
    section 3.2)."""
    dim = rope.rotary_dim

    def correction_dim(rotations: float) -> float:
        return dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0 / 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_tables(rope: RopeConfig, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and signed sin, fp32 [length, rotary_dim], row p for position p.

    With h = rotary_dim / 2 the rotation of x is x * cos + roll(x, h) * sin: the first half of sin carries the sign of
    rotate_half, and (-a) * s and a * (-s) are the same float.
    """
    inv_freq, scaling = inverse_frequencies(rope)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)
