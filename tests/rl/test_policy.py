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
