"""The learned drafter's module: names and shapes of its tensors, the layer's arithmetic, what is the target's.

The layer is compared with transformers' own blocks, put together here by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_hf_model, tiny_target
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.rope import RopeConfig, rope_tables


def config(**overrides: object) -> EagleConfig:
    base = EagleConfig(
        hidden_size=32, target_hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=64, rms_norm_eps=1e-6, rope=RopeConfig(rotary_dim=8), max_position_embeddings=256,
        aux_layers=(0, 1, 2),
    )
    return replace(base, **overrides)


def drafter(seed: int = 0, **overrides: object) -> EagleModel:
    """Random weights, norms included."""
    model = EagleModel(config(**overrides))
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


# ---------------------------------------------------------------- names and shapes

MIDLAYER = {
    "midlayer.input_layernorm.weight": (32,), "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,), "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64), "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32), "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32), "midlayer.mlp.down_proj.weight": (32, 48),
}
EAGLE1 = {name.replace("midlayer", "layers.0"): shape for name, shape in MIDLAYER.items()
          if "input_layernorm" not in name and "hidden_norm" not in name}
EAGLE1 |= {f"layers.0.self_attn.{n}_proj.weight": (rows, 32) for n, rows in (("q", 32), ("k", 16), ("v", 16))}


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({}, {"fc.weight": (32, 96), "norm.weight": (32,), **MIDLAYER}),
        ({"draft_vocab_size": 20}, {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (20, 32),
                                    "d2t": (20,), "t2d": (64,), **MIDLAYER}),
        ({"kind": "eagle1", "aux_layers": (2,)}, {"fc.weight": (32, 64), **EAGLE1}),
    ],
)
def test_tensors_have_the_names_and_shapes_that_other_engines_load(overrides: dict, expected: dict) -> None:
    model = EagleModel(config(**overrides))
    assert {name: tuple(t.shape) for name, t in model.named_tensors()} == expected


def test_head_dim_and_width_are_numbers_of_their_own() -> None:
    """F11: 4 heads of 16 on a hidden size of 24, beside a target of 40."""
    model = EagleModel(config(hidden_size=24, target_hidden_size=40, head_dim=16, draft_vocab_size=64,
                              rope=RopeConfig(rotary_dim=16)))
    shapes = {name: tuple(t.shape) for name, t in model.named_tensors()}
    assert shapes["fc.weight"] == (24, 120)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (64, 48)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (24, 64)
    assert shapes["embed_tokens.weight"] == (64, 24)  # the target's does not fit
    with pytest.raises(ValueError, match="draft_vocab_size: expected a number"):
        config(hidden_size=24, target_hidden_size=40)


def test_a_view_writes_to_the_module_and_copy_from_moves_everything() -> None:
    model, other = drafter(0, draft_vocab_size=20), drafter(1, draft_vocab_size=20)
    other.set_vocabulary(torch.arange(20) * 3)
    dict(other.named_tensors())["midlayer.self_attn.k_proj.weight"].detach().fill_(7.0)
    assert (other.qkv[32:48] == 7).all() and not (other.qkv[:32] == 7).any()
    addresses = [t.data_ptr() for _, t in model.named_tensors()]
    model.copy_from({name: t.detach().clone() for name, t in other.named_tensors()})
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(model.named_tensors(), other.named_tensors()))
    assert [t.data_ptr() for _, t in model.named_tensors()] == addresses


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("fc.weight"), "fc.weight missing"),
    (lambda t: t.update(extra=torch.zeros(1)), "extra unknown"),
    (lambda t: t.update({"norm.weight": torch.zeros(31)}), r"norm.weight expected \[32\], got \[31\]"),
    (lambda t: t.update(d2t=torch.zeros(20)), "d2t expected torch.int64, got torch.float32"),
])
def test_copy_from_refuses_whole_and_changes_nothing(change: object, message: str) -> None:
    model = drafter(0, draft_vocab_size=20)
    before = {name: t.detach().clone() for name, t in model.named_tensors()}
    tensors = {name: t.detach() + 1 for name, t in model.named_tensors()}
    tensors["t2d"] = before["t2d"]
    change(tensors)
    with pytest.raises(ValueError, match=message):
        model.copy_from(tensors)
    assert all(torch.equal(t, before[name]) for name, t in model.named_tensors())


def test_d2t_holds_offsets() -> None:
    """E03: target ids 3, 7, 8, 20 are offsets 3, 6, 6, 17 of draft ids 0 to 3."""
    model = EagleModel(config(draft_vocab_size=4))
    model.set_vocabulary(torch.tensor([3, 7, 8, 20]))
    assert model.d2t.tolist() == [3, 6, 6, 17]
    assert model.t2d.nonzero()[:, 0].tolist() == [3, 7, 8, 20] == model.target_ids.tolist()
    for bad in ([3, 8, 7, 20], [3, 7, 7, 20], [3, 7, 8, 64], [3, 7, 8]):
        with pytest.raises(ValueError, match="ascending"):
            model.set_vocabulary(torch.tensor(bad))


@pytest.mark.parametrize("overrides", [
    {"kind": "eagle2"}, {"window": 0}, {"num_kv_heads": 3}, {"aux_layers": (1, 1)}, {"draft_vocab_size": 65},
    {"rope": RopeConfig(kind="dynamic", rotary_dim=8)}, {"kind": "eagle1"}, {"head_dim": 6},
])
def test_configs_that_cannot_be_are_refused(overrides: dict) -> None:
    with pytest.raises(ValueError, match="EagleConfig"):
        config(**overrides)


# ---------------------------------------------------------------- values


def test_fresh_weights_come_from_the_callers_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first, second, third = (EagleModel(config(draft_vocab_size=20)) for _ in range(3))
    for model, seed in ((first, 5), (second, 5), (third, 6)):
        model.initialise(torch.Generator().manual_seed(seed))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), third.parameters()):
        assert torch.equal(a, b)
        if a.dim() == 1:
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c) and a.std() > 0, name


def hf_layer(model: EagleModel, embeds: Tensor, hidden: Tensor, *, swapped: bool = False) -> Tensor:
    """[R, H]: the layer over one causal sequence, of transformers' attention, MLP and norms. swapped: the two halves of
    the attention's input the other way round."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    c = model.config
    hf = LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings, attn_implementation="eager",
    )
    weights = {name.removeprefix("midlayer.").removeprefix("layers.0."): t for name, t in model.named_tensors()}

    def norm(name: str) -> llama.LlamaRMSNorm:
        layer = llama.LlamaRMSNorm(c.hidden_size, c.rms_norm_eps)
        layer.weight = weights[f"{name}.weight"]
        return layer

    attention, mlp = llama.LlamaAttention(hf, 0), llama.LlamaMLP(hf)
    for module, prefix in ((attention, "self_attn"), (mlp, "mlp")):
        for name, _ in list(module.named_parameters()):
            part, kind = name.split(".")
            setattr(getattr(module, part), kind, torch.nn.Parameter(weights[f"{prefix}.{name}"].detach()))
    if c.kind == "eagle3":
        halves = [norm("input_layernorm")(embeds), norm("hidden_norm")(hidden)]
        x, residual = torch.cat(halves[::-1] if swapped else halves, -1), hidden
    else:
        halves = [embeds, hidden]
        x = residual = torch.cat(halves[::-1] if swapped else halves, -1) @ model.fc.T
    rows = len(x)
    mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    rotary = llama.LlamaRotaryEmbedding(hf)(x[None], torch.arange(rows)[None])
    attended = attention(x[None], rotary, mask)[0][0]
    x = residual + attended
    return x + mlp(norm("post_attention_layernorm")(x))


def own_layer(model: EagleModel, embeds: Tensor, hidden: Tensor) -> Tensor:
    from tlt_kernels.reference.rope import rotate

    inputs, residual = model.enter(embeds, hidden)
    q, k, v = model.qkv_rows(inputs)
    cos, sin = rope_tables(model.config.rope, len(q), "cpu")
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    return model.finish(attended.transpose(0, 1), residual)


@pytest.mark.parametrize("overrides", [{}, {"kind": "eagle1", "aux_layers": (2,)}, {"head_dim": 16,
                                       "rope": RopeConfig(rotary_dim=16)}])
def test_the_layer_is_transformers_own(overrides: dict) -> None:
    model = drafter(3, **overrides)
    embeds, hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = own_layer(model, embeds, hidden)
        torch.testing.assert_close(out, hf_layer(model, embeds, hidden), atol=2e-5, rtol=1e-5)
        wrong = hf_layer(model, embeds, hidden, swapped=True)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out, wrong, atol=2e-5, rtol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    model = drafter(3, draft_vocab_size=20)
    target = tiny_target()
    model.bind(target)
    aux = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    out = own_layer(model, model.embedding[torch.arange(5)], model.fuse(aux))
    model.logits(out).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert not target.weights.embed.requires_grad


# ---------------------------------------------------------------- the target's tensors


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_the_targets_own_now_and_after_an_update(tied: bool) -> None:
    """H04."""
    target = tiny_target(tie_word_embeddings=tied)
    model = drafter(0).bind(target)
    out = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert model.embedding.data_ptr() == target.weights.embed.data_ptr()
    assert model.head_weight.data_ptr() == target.weights.head.data_ptr()
    with torch.no_grad():
        before = model.logits(out)
        other = tiny_hf_model(seed=9, tie_word_embeddings=tied)
        target.load_weights({name: t for name, t in other.state_dict().items() if name in target.weights.names})
        after = model.logits(out)
        expected = torch.nn.functional.rms_norm(out, (32,), model.norm, 1e-6) @ other.lm_head.weight.T
    assert model.head_weight.data_ptr() == target.weights.head.data_ptr()
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, after)
    assert not any("embed" in name or "head" in name for name, _ in model.named_tensors())


def test_a_reduced_head_is_its_own_and_may_start_from_the_targets_rows() -> None:
    """F04, F06: never the target's storage, never overwritten by it."""
    target = tiny_target(tie_word_embeddings=True)
    model = drafter(0, draft_vocab_size=20)
    model.set_vocabulary(torch.arange(20) * 3)
    model.bind(target).copy_head()
    assert torch.equal(model.head, target.weights.head[::3][:20])
    before = model.head.detach().clone()
    target.load_weights({name: torch.zeros_like(t) for name, t in target.named_weights()})
    assert torch.equal(model.head, before)


@pytest.mark.parametrize("overrides, message", [
    ({"vocab_size": 65}, "vocab_size"), ({"target_hidden_size": 40, "draft_vocab_size": 64}, "target_hidden_size"),
    ({"aux_layers": (0, 1, 3)}, "capture"),
])
def test_another_models_drafter_is_refused(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter(0, **overrides).bind(tiny_target())


def test_defaults_follow_the_target() -> None:
    target = tiny_target("qwen3", num_hidden_layers=8, head_dim=16)
    c = EagleConfig.for_target(target.config, draft_vocab_size=16)
    assert (c.hidden_size, c.head_dim, c.aux_layers, c.draft_vocab_size) == (32, 16, (2, 4, 5), 16)
    assert c.rope.theta == target.config.rope.theta and c.max_position_embeddings == target.config.context_limit
    assert EagleConfig.for_target(target.config, kind="eagle1").aux_layers == (8,)
    assert EagleConfig.for_target(target.config, aux_layers=[1, 2]).aux_layers == (1, 2)
    EagleModel(c).bind(target)
