"""Rotary embeddings: settings from both config layouts, and every kind against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tlt_kernels.rope import rope_write_kv
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.nemotron import modeling_nemotron

from tests.tiny import hf_logits, prefill_logits, tiny_config, tiny_hf_model
from tlt_engine.models.config import ModelConfig
from tlt_engine.models.loader import load_model
from tlt_engine.models.rope import RopeConfig, inverse_frequencies, rope_tables
from tlt_engine.models.transformer import Transformer

IDS = [int(i) for i in torch.randint(0, 64, (220,), generator=torch.Generator().manual_seed(2))]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn, attention": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_transformers_at_position_200(arch: str, kind: str) -> None:
    hf = tiny_hf_model(arch, rope_parameters=dict(KINDS[kind]), head_dim=16)
    model = load_model(hf).model
    assert (prefill_logits(model, IDS)[0] - hf_logits(hf, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "default"])
def test_frequencies_equal_transformers(kind: str) -> None:
    for head_dim in (8, 64, 80, 128):
        config = tiny_config("llama", rope_parameters=dict(KINDS[kind]), head_dim=head_dim)
        expected, scaling = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](config)
        ours, our_scaling = inverse_frequencies(ModelConfig.from_hf(config).rope)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        assert our_scaling == pytest.approx(scaling)


# F07: where the settings stand.

OLD = {k: v for k, v in tiny_config("llama").to_dict().items() if k != "rope_parameters"}


@pytest.mark.parametrize(
    "fields,theta,kind",
    [
        ({"rope_theta": 1e6}, 1e6, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, "default"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e6, "linear"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1e6, "linear"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, "default"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}}, 1e6, "default"),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, "default"),
        ({}, 1e4, "default"),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_settings_in_either_layout(arch: str, fields: dict[str, Any], theta: float, kind: str) -> None:
    """From a plain mapping as older transformers wrote it, and after transformers 5 has normalised the same fields."""
    raw = {**OLD, "model_type": arch, "architectures": None, **fields}
    assert (ModelConfig.from_hf(raw).rope.theta, ModelConfig.from_hf(raw).rope.kind) == (theta, kind)
    hf = tiny_hf_model(arch, **fields)
    model = load_model(hf).model
    assert (model.config.rope.theta, model.config.rope.kind) == (theta, kind)
    assert (prefill_logits(model, IDS)[0] - hf_logits(hf, IDS)).abs().max() < 1e-4


def test_parity_at_position_200_sees_a_wrong_theta() -> None:
    hf = tiny_hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    fallen_back = tiny_hf_model("llama")
    assert (hf_logits(hf, IDS) - hf_logits(fallen_back, IDS)).abs().max() > 1e-2


# F10: part of a head is rotated.

PARTIAL = [
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4}},
]


@pytest.mark.parametrize("fields", PARTIAL, ids=["top level", "inside", "scaled"])
def test_partial_rotation(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Llama ignores the factor for the default rope, so the reference takes the two functions of its
    Nemotron model, which is a Llama with a partial rope."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_nemotron.apply_rotary_pos_emb)
    frequencies = modeling_nemotron.NemotronRotaryEmbedding.compute_default_rope_parameters
    rotary = modeling_llama.LlamaRotaryEmbedding
    monkeypatch.setattr(rotary, "compute_default_rope_parameters", staticmethod(frequencies))
    hf = tiny_hf_model("llama", head_dim=8, **{k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()})
    assert len(hf.model.rotary_emb.inv_freq) == 2, "the reference must rotate 4 of 8 dimensions"
    model = load_model(hf).model
    assert model.config.rope.rotary_dim == 4
    torch.testing.assert_close(inverse_frequencies(model.config.rope)[0], torch.tensor([1.0, 0.01]))
    assert (prefill_logits(model, IDS)[0] - hf_logits(hf, IDS)).abs().max() < 1e-4


def test_unrotated_dimensions_pass_through() -> None:
    model = load_model(tiny_hf_model("llama", head_dim=8, partial_rotary_factor=0.5)).model
    x, kv = torch.randn(3, 4, 8), model.new_kv(1, 4)
    qkv = torch.cat((x, torch.randn(3, 4, 8)), 1).view(3, -1)
    positions, slots = torch.tensor([1, 5, 9]), torch.arange(3)
    turned = rope_write_kv(qkv, model.cos, model.sin, positions, slots, *kv.layer(0))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert (turned[..., :4] - x[..., :4]).abs().min() > 0


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rope_tables(RopeConfig(rotary_dim=16), 64, "cpu")
    x, y = torch.randn(16), torch.randn(16)
    turn = lambda v, p: v * cos[p] + v.roll(8) * sin[p]  # noqa: E731
    assert torch.allclose(turn(x, 37).norm(), x.norm(), atol=1e-5)
    assert torch.allclose(turn(x, 10) @ turn(y, 3), turn(x, 50) @ turn(y, 43), atol=1e-4)
    assert not torch.allclose(turn(x, 10) @ turn(y, 3), turn(x, 50) @ turn(y, 42), atol=1e-4)


# What is refused, and the context that a rope allows.


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}, "rope_type: .*longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"full_attention": {"rope_type": "default"}}, "one set of settings"),
        ({"partial_rotary_factor": 0.4}, "even number of rotated dimensions"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**OLD, "head_dim": 8, "rope_parameters": settings})


LIMITS = {"default": 256, "dynamic": 256, "linear": 1024, "llama3": 256, "yarn": 256}


@pytest.mark.parametrize("kind,limit", LIMITS.items())
def test_context_limit(kind: str, limit: int) -> None:
    config = ModelConfig.from_hf(tiny_config("llama", rope_parameters=dict(KINDS[kind])))
    assert config.context_limit == limit
    with pytest.raises(ValueError, match="max_model_len"):
        config.check_length(limit + 1)


def test_a_rope_wider_than_a_head_is_refused() -> None:
    """The ops of a pass are called unchecked and would write past the head."""
    config = ModelConfig.from_hf(tiny_config())
    with pytest.raises(ValueError, match=r"rope.rotary_dim: expected at most head_dim = 8, got 16"):
        Transformer(replace(config, rope=RopeConfig(rotary_dim=16)))
