"""Policies as weights: names, LoRA merged module by module, nothing of the trainer's model changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.rl.common import lora_config, policy
from tlt_engine import EngineConfig, RolloutEngine, SpeculationConfig
from tlt_engine.rl.policy import PolicyWeights, unwrapped

CONFIG = EngineConfig(page_size=4, speculation=SpeculationConfig(method="off"))


def with_lora(config=None, seed: int = 3):
    from peft import get_peft_model

    model = get_peft_model(policy(), config or lora_config())
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data.normal_(0.0, 0.3, generator=generator)
    return model


def everything(model) -> dict[str, torch.Tensor]:
    source = PolicyWeights(model)
    return dict(source.tensors(source.shapes))


def test_a_plain_model_comes_as_its_state_dict():
    model = policy()
    assert {n: t.data_ptr() for n, t in everything(model).items()} == {
        n: t.data_ptr() for n, t in model.state_dict().items()
    }


def test_wrappers_are_taken_off():
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = policy()
    assert unwrapped(Wrapped(model)) is model
    assert set(everything(Wrapped(with_lora()))) == set(model.state_dict())


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_lora_equals_pefts_own_merge_and_changes_nothing(modules_to_save):
    config = lora_config()
    config.modules_to_save = modules_to_save
    model = with_lora(config)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    merged = everything(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    expected = model.merge_and_unload().state_dict()
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=0)


def test_disabled_adapters_are_left_out():
    model = with_lora()
    base = policy().state_dict()
    with model.disable_adapter():
        assert all(torch.equal(t, base[n]) for n, t in everything(model).items())
    assert not all(torch.equal(t, base[n]) for n, t in everything(model).items())


def test_merged_adapters_are_not_added_twice():
    model = with_lora()
    expected = everything(model)
    model.merge_adapter()
    for name, value in everything(model).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


def test_dora_is_refused():
    config = lora_config()
    config.use_dora = True
    with pytest.raises(ValueError, match="plain LoRA"):
        PolicyWeights(with_lora(config))


def test_an_engine_takes_it_and_gives_the_policys_logits():
    model = with_lora()
    engine = RolloutEngine(policy(seed=8), CONFIG)
    engine.update_weights(PolicyWeights(model))
    ids = [3, 4, 5, 6]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(engine.next_logits(ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [
    {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}, {"use_rslora": True},
    {"target_modules": ["embed_tokens", "q_proj"]}, {"target_modules": ["lm_head", "q_proj"]}, {"bias": "all"},
])
def test_every_kind_of_plain_lora_equals_pefts_merge(changes):
    config = lora_config()
    for name, value in changes.items():
        setattr(config, name, value)
    model = with_lora(config)
    merged = everything(model)
    expected = model.merge_and_unload().state_dict()
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=0)


def test_several_active_adapters_are_summed():
    model = with_lora()
    model.add_adapter("second", lora_config())
    for name, p in model.named_parameters():
        if ".second." in name:
            p.data.fill_(0.05)
    model.base_model.set_adapter(["default", "second"])
    ids = torch.tensor([[3, 4, 5, 6]])
    engine = RolloutEngine(policy(seed=8), CONFIG)
    engine.update_weights(PolicyWeights(model))
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
    torch.testing.assert_close(engine.next_logits(ids[0].tolist()), expected, atol=1e-4, rtol=1e-4)
    model.base_model.set_adapter("default")
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits[0, -1], expected, atol=1e-2), "the second one counts"


def test_a_trained_lora_bias_is_refused():
    """Its matrices alone would be another policy: PEFT adds lora_B's bias to the layer's own."""
    config = lora_config()
    config.lora_bias = True
    with pytest.raises(ValueError, match="lora_bias"):
        PolicyWeights(with_lora(config))


def test_layers_wrapped_one_by_one_have_their_public_names():
    """torch.compile a layer, activation checkpointing: the wrapper's name stands in the middle of the path."""
    class OptimizedModule(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

        def forward(self, *args, **kwargs):
            return self._orig_mod(*args, **kwargs)

    model = policy()
    names = set(model.state_dict())
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = OptimizedModule(layer)
    assert set(everything(model)) == names


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_lora_on_one_side_of_a_tied_embedding_is_refused_by_a_tied_engine(module):
    from peft import get_peft_model

    from tests.tiny import tiny_hf_model

    config = lora_config()
    config.target_modules = [module]
    model = get_peft_model(tiny_hf_model(tie_word_embeddings=True), config)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    engine = RolloutEngine(tiny_hf_model(tie_word_embeddings=True), CONFIG)
    before = engine.weight_checksums()
    with pytest.raises(ValueError, match="tied"):
        engine.update_weights(PolicyWeights(model))
    assert engine.weight_checksums() == before


def test_an_adapted_model_passed_as_it_is_names_the_way():
    engine = RolloutEngine(policy(seed=8), CONFIG)
    with pytest.raises(ValueError, match=r"PolicyWeights\(model\)"):
        engine.update_weights(with_lora())


def test_scaled_8_bit_floats_are_not_taken_for_weights():
    engine = RolloutEngine(policy(seed=8), CONFIG)
    state = {n: t.to(torch.float8_e4m3fn) for n, t in policy().state_dict().items()}
    with pytest.raises(ValueError, match=r"float8.*dequantize"):
        engine.update_weights(state)
