"""Drafter folders for SGLang, vLLM and speculators: keys, shapes and settings held to a table of what their loaders
read; loading back bit for bit; loading theirs; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_hf_model, tiny_target
from tests.training.drafters import filled_buffer, packed_texts, random_texts, tiny_drafter
from tlt_engine import EngineConfig, Profile, RolloutEngine, SamplingParams, SpeculationConfig
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.eagle_checkpoint import check_vocabulary_maps, export_drafter, load_drafter
from tlt_engine.models.rope import RopeConfig
from tlt_engine.training.loss import LossConfig, Objective
from tlt_engine.training.trainer import DrafterTrainer, TrainerConfig

SEVEN = {"num_hidden_layers": 7}
SUBSET = [3, 7, 8, 20, 33, 63]

# ------------------------------------------------------------------ the loaders' table
# H draft hidden, Ht target hidden, I feed-forward, q and kv rows of the projections, V and Vd vocabularies.

EAGLE3_TABLE: dict[str, tuple[str, ...]] = {
    "fc.weight": ("H", "3Ht"),
    "midlayer.input_layernorm.weight": ("H",), "midlayer.hidden_norm.weight": ("H",),
    "midlayer.post_attention_layernorm.weight": ("H",),
    "midlayer.self_attn.q_proj.weight": ("q", "2H"), "midlayer.self_attn.k_proj.weight": ("kv", "2H"),
    "midlayer.self_attn.v_proj.weight": ("kv", "2H"), "midlayer.self_attn.o_proj.weight": ("H", "q"),
    "midlayer.mlp.gate_proj.weight": ("I", "H"), "midlayer.mlp.up_proj.weight": ("I", "H"),
    "midlayer.mlp.down_proj.weight": ("H", "I"),
    "norm.weight": ("H",), "lm_head.weight": ("Vd", "H"), "d2t": ("Vd",), "t2d": ("V",),
}
EAGLE1_TABLE: dict[str, tuple[str, ...]] = {
    "fc.weight": ("H", "2H"), "layers.0.post_attention_layernorm.weight": ("H",),
    "layers.0.self_attn.q_proj.weight": ("q", "H"), "layers.0.self_attn.k_proj.weight": ("kv", "H"),
    "layers.0.self_attn.v_proj.weight": ("kv", "H"), "layers.0.self_attn.o_proj.weight": ("H", "q"),
    "layers.0.mlp.gate_proj.weight": ("I", "H"), "layers.0.mlp.up_proj.weight": ("I", "H"),
    "layers.0.mlp.down_proj.weight": ("H", "I"),
}


def complaints(folder: Path, table: dict[str, tuple[str, ...]], c: EagleConfig, dtype: torch.dtype) -> list[str]:
    """Keys, shapes and dtypes that are not the table's, one each."""
    sizes = {
        "H": c.hidden_size, "2H": 2 * c.hidden_size, "3Ht": 3 * c.target_hidden_size, "I": c.intermediate_size,
        "q": c.num_heads * c.head_dim, "kv": c.num_kv_heads * c.head_dim, "V": c.vocab_size,
        "Vd": c.draft_vocab_size or c.vocab_size,
    }
    special = {"d2t": torch.int64, "t2d": torch.bool}
    wanted = {n: (tuple(sizes[d] for d in dims), special.get(n, dtype)) for n, dims in table.items()}
    found = {n: (tuple(t.shape), t.dtype) for n, t in load_file(folder / "model.safetensors").items()}
    return [f"{n}: {found.get(n)} != {wanted.get(n)}" for n in sorted(found.keys() | wanted.keys())
            if found.get(n) != wanted.get(n)]


DRAFTERS: dict[str, dict[str, Any]] = {
    "reduced": {"vocabulary": SUBSET},
    "own width": {"vocabulary": SUBSET, "hidden_size": 24, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "target's head": {"window": None},
    "eagle1": {"kind": "eagle1", "window": 100},
}


def table_for(name: str, to: str) -> dict[str, tuple[str, ...]]:
    if name == "eagle1":
        return {**EAGLE1_TABLE, **({"fc.bias": ("H",)} if to == "sglang" else {})}
    table = {**EAGLE3_TABLE, **({"embed_tokens.weight": ("V", "H")} if name == "own width" else {})}
    if to == "speculators":
        return {n.replace("midlayer.", "layers.0."): dims for n, dims in table.items()}
    return table


TARGETS = ("sglang", "vllm", "speculators")
FOLDERS = [(n, to) for n in DRAFTERS for to in TARGETS if (n, to) != ("eagle1", "speculators")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "to"), FOLDERS)
def test_folders_hold_the_loaders_keys_and_come_back_bit_for_bit(
    name: str, to: str, dtype: str, tmp_path: Path
) -> None:
    target = tiny_target(**SEVEN, dtype=dtype)
    fp32 = tiny_drafter(tiny_target(**SEVEN), **DRAFTERS[name])
    model = EagleModel(fp32.config, dtype=target.dtype).bind(target)
    model.copy_from(fp32)
    folder = export_drafter(model, tmp_path / "out", to=to, verifier="org/model")
    assert complaints(folder, table_for(name, to), model.config, target.dtype) == []
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    back = load_drafter(folder, target)
    assert back.config == model.config and back.dtype == model.dtype
    ours, theirs = dict(model.named_tensors()), dict(back.named_tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert (back.head_weight is target.weights.head) == (model.head is None)


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "extra"])
def test_sabotage_a_missing_or_unknown_key_is_seen(name: str, tmp_path: Path) -> None:
    model = tiny_drafter(tiny_target(**SEVEN), vocabulary=SUBSET)
    export_drafter(model, tmp_path, to="sglang")
    change_tensors(tmp_path, lambda t: t | {name: torch.zeros(3)} if name == "extra" else drop(t, name))
    assert len(complaints(tmp_path, EAGLE3_TABLE, model.config, torch.float32)) == 1


# ------------------------------------------------------------------ settings


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_settings_that_both_engines_read(tmp_path: Path) -> None:
    model = tiny_drafter(tiny_target(**SEVEN), vocabulary=SUBSET)
    sglang = settings(export_drafter(model, tmp_path / "s", to="sglang"))
    assert sglang == settings(export_drafter(model, tmp_path / "v", to="vllm"))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 256,
        "vocab_size": 64, "draft_vocab_size": 6, "tie_word_embeddings": False, "torch_dtype": "float32",
        "target_hidden_size": 32, "attention_bias": False, "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "tlt": {"window": 512},
    }
    assert sglang == expected
    assert not {"norm_before_residual", "norm_output", "fc_norm"} & sglang.keys()


def test_settings_of_eagle1_and_speculators(tmp_path: Path) -> None:
    target = tiny_target(**SEVEN)
    eagle1 = tiny_drafter(target, kind="eagle1")
    assert settings(export_drafter(eagle1, tmp_path / "1", to="sglang"))["architectures"] == ["LlamaForCausalLMEagle"]
    assert settings(export_drafter(eagle1, tmp_path / "2", to="vllm"))["architectures"] == ["EagleLlamaForCausalLM"]
    model = tiny_drafter(target, vocabulary=SUBSET)
    found = settings(export_drafter(model, tmp_path / "3", to="speculators", verifier="org/m", speculative_tokens=3))
    assert found["architectures"] == ["Eagle3Speculator"] and found["speculators_model_type"] == "eagle3"
    assert (found["draft_vocab_size"], found["norm_before_residual"], found["target_hidden_size"]) == (6, False, 32)
    assert found["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and found["speculators_version"]
    layer = found["transformer_layer_config"]
    assert (layer["num_hidden_layers"], layer["rope_theta"], layer["head_dim"]) == (1, 10000.0, 8)
    assert found["speculators_config"] == {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0,
                              "verifier_accept_k": 1}],
        "verifier": {"name_or_path": "org/m", "architectures": ["LlamaForCausalLM"]},
    }


ROPES = {
    "default": RopeConfig(theta=5e5, rotary_dim=8),
    "llama3": RopeConfig("llama3", 5e5, 8, 8.0, 64, 1.0, 4.0),
    "yarn": RopeConfig("yarn", 1e6, 8, 4.0, 64, beta_fast=16.0, attention_factor=1.2),
    "linear": RopeConfig("linear", 1e4, 8, 2.0),
    "partial": RopeConfig(theta=1e4, rotary_dim=4),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_stands_in_both_places_and_comes_back(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    target = tiny_target(**SEVEN)
    model = EagleModel(EagleConfig.for_target(target.config, rope=ROPES[name])).bind(target)
    model.initialise(torch.Generator().manual_seed(0))
    export_drafter(model, tmp_path, to="sglang")
    assert load_drafter(tmp_path, target).config.rope == ROPES[name]
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters["rope_theta"] == settings(tmp_path)["rope_theta"] == ROPES[name].theta
    assert (read.hidden_size, read.max_position_embeddings) == (32, 256)
    strip(tmp_path, "rope_parameters")  # what an older reader sees
    assert load_drafter(tmp_path, target).config.rope == ROPES[name]


def strip(folder: Path, *names: str, **values: Any) -> None:
    kept = {n: v for n, v in settings(folder).items() if n not in names}
    (folder / "config.json").write_text(json.dumps(kept | values))


# ------------------------------------------------------------------ theirs


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def drop(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n not in names}


def exported(tmp_path: Path, **drafter: Any) -> tuple[Any, EagleModel]:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, **({"vocabulary": SUBSET} | drafter))
    export_drafter(model, tmp_path, to="sglang")
    return target, model


def same_function(a: EagleModel, b: EagleModel) -> bool:
    packed = packed_texts(a.target, a, random_texts([12, 7]))
    with torch.no_grad():
        outs = [Objective(m, LossConfig(steps=3)).unroll(packed) for m in (a, b)]
        return all(torch.equal(a.logits(x), b.logits(y)) for x, y in zip(*outs))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_names_of_all_origins(prefix: str, layer: str, tmp_path: Path) -> None:
    target, model = exported(tmp_path)
    change_tensors(tmp_path, lambda t: {
        n if n in ("lm_head.weight", "d2t", "t2d") else prefix + n.replace("midlayer.", layer): v for n, v in t.items()
    } | {f"{layer}self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert same_function(model, load_drafter(tmp_path, target))


def test_a_pickled_checkpoint_as_eagles_own(tmp_path: Path) -> None:
    target, model = exported(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same_function(model, load_drafter(tmp_path, target))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": None}, (1, 3, 5)),
        ({"eagle_aux_hidden_state_layer_ids": None,
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, (2, 3, 4)),
    ],
)
def test_aux_layers_as_each_engine_reads_them(
    values: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    target, _ = exported(tmp_path)
    strip(tmp_path, **values)
    assert load_drafter(tmp_path, target).config.aux_layers == expected


def test_settings_that_older_files_leave_out(tmp_path: Path) -> None:
    target, model = exported(tmp_path)
    strip(tmp_path, "head_dim", "tlt", "target_hidden_size", "rope_parameters", "attention_bias", "mlp_bias")
    back = load_drafter(tmp_path, target)
    assert back.config == model.config and same_function(model, back)
    assert load_drafter(tmp_path, target, window=None).config.window is None
    assert load_drafter(tmp_path, target, window=7).config.window == 7


def test_a_head_of_its_own_is_used_and_the_targets_is_shared(tmp_path: Path) -> None:
    """F06, F05: an own head is never overwritten; a missing or equal one is the target's storage."""
    target, _ = exported(tmp_path, vocabulary=range(64))
    own = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    back = load_drafter(tmp_path, target)
    assert torch.equal(back.head_weight, own) and not torch.equal(own, target.weights.head)
    change_tensors(tmp_path, lambda t: drop(t, "d2t", "t2d"))
    back = load_drafter(tmp_path, target)
    assert torch.equal(back.head_weight, own) and back.target_ids.tolist() == list(range(64))  # type: ignore[union-attr]
    change_tensors(tmp_path, lambda t: t | {"lm_head.weight": target.weights.head.clone(),
                                            "embed_tokens.weight": target.weights.embed.clone()})
    for change in ((), ("lm_head.weight", "embed_tokens.weight")):
        change_tensors(tmp_path, lambda t, change=change: drop(t, *change))
        back = load_drafter(tmp_path, target)
        assert back.head_weight.data_ptr() == target.weights.head.data_ptr()
        assert back.embedding.data_ptr() == target.weights.embed.data_ptr()


def test_a_tied_target_does_not_reach_into_a_reduced_head(tmp_path: Path) -> None:
    """F04"""
    target = tiny_target("qwen3", tie_word_embeddings=True, vocab_size=128, **SEVEN)
    model = tiny_drafter(target, vocabulary=range(5, 37))
    export_drafter(model, tmp_path, to="vllm")
    back = load_drafter(tmp_path, target)
    assert back.head is not None and back.head.shape == (32, 32)
    assert back.head.data_ptr() != target.weights.embed.data_ptr()
    assert torch.equal(back.head, model.head) and same_function(model, back)  # type: ignore[arg-type]


def test_zeros_on_a_bias_are_none(tmp_path: Path) -> None:
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target, kind="eagle1")
    export_drafter(model, tmp_path, to="sglang")
    assert not load_file(tmp_path / "model.safetensors")["fc.bias"].any()
    assert same_function(model, load_drafter(tmp_path, target))
    change_tensors(tmp_path, lambda t: t | {"fc.bias": torch.full((32,), 0.5)})
    with pytest.raises(ValueError, match=r"fc.bias: expected zeros, got 'up to 0.5'"):
        load_drafter(tmp_path, target)


REFUSED: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = [
    ("no d2t", lambda t: drop(t, "d2t", "t2d"), {}, "draft ids would be taken for target ids"),
    ("d2t too short", lambda t: t | {"d2t": t["d2t"][:5].clone()}, {}, r"d2t: expected int64 \[6\]"),
    ("d2t out of range", lambda t: t | {"d2t": t["d2t"] + 1}, {}, "d2t: expected offsets"),
    ("d2t absolute", lambda t: t | {"d2t": torch.tensor(SUBSET)}, {}, "subtract arange"),
    ("d2t of other ids", lambda t: t | {"d2t": t["d2t"] - 1}, {}, "nonzero"),
    ("t2d too short", lambda t: t | {"t2d": t["t2d"][:60].clone()}, {}, "t2d: expected bool"),
    ("no head", lambda t: drop(t, "lm_head.weight"), {}, "a reduced head cannot be the target's"),
    ("no norm", lambda t: drop(t, "norm.weight"), {}, "norm.weight missing"),
    ("no fc", lambda t: drop(t, "fc.weight"), {}, "fc.weight missing"),
    ("a key nobody uses", lambda t: t | {"fc_norm.weight": torch.ones(32)}, {}, "fc_norm.weight unknown"),
    ("other embedding", lambda t: t | {"embed_tokens.weight": torch.ones(64, 32)}, {}, "the target's embedding"),
    ("misshapen", lambda t: t | {"fc.weight": torch.ones(32, 64)}, {}, "fc.weight expected"),
    ("norm before residual", lambda t: t, {"norm_before_residual": True}, "norm_before_residual"),
    ("normed feedback", lambda t: t, {"norm_output": True}, "norm_output"),
    ("two layers", lambda t: t, {"num_hidden_layers": 2}, "num_hidden_layers"),
    ("other vocabulary", lambda t: t, {"vocab_size": 60}, "vocab_size"),
    ("aux layers disagree", lambda t: t, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "which layers"),
]


@pytest.mark.parametrize(("change", "values", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_would_draft_something_else_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """E03, E04, F05"""
    target, _ = exported(tmp_path)
    change_tensors(tmp_path, change)
    strip(tmp_path, **values)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, target)


def test_an_embedding_of_its_own_must_be_there(tmp_path: Path) -> None:
    target, _ = exported(tmp_path, hidden_size=24)
    change_tensors(tmp_path, lambda t: drop(t, "embed_tokens.weight"))
    with pytest.raises(ValueError, match="it would stay at its initial value"):
        load_drafter(tmp_path, target)


def test_offsets_not_absolute_ids() -> None:
    """E03: draft vocabulary 4 for target ids 3, 7, 8, 20."""
    marked = torch.zeros(24, dtype=torch.bool)
    marked[[3, 7, 8, 20]] = True
    check_vocabulary_maps(torch.tensor([3, 6, 6, 17]), marked, 4, 24)
    check_vocabulary_maps(torch.zeros(4, dtype=torch.int64), None, 4, 24)  # identity
    for wrong in ([3, 7, 8, 20], [0, 1, 2, 3], [3, 6, 6, 18], [3, 6, 5, 17]):
        with pytest.raises(ValueError, match=r"t2d|d2t"):
            check_vocabulary_maps(torch.tensor(wrong), marked, 4, 24)


def test_what_the_loaders_cannot_take_is_not_exported(tmp_path: Path) -> None:
    target = tiny_target(**SEVEN)
    for drafter, to, message in (
        ({"aux_layers": (2, 4)}, "vllm", "three, which is how wide"),
        ({"aux_layers": (2, 4, 7)}, "sglang", "below 7"),
        ({"kind": "eagle1"}, "speculators", "'sglang' or 'vllm'"),
        ({}, "tgi", "to: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            export_drafter(tiny_drafter(target, **drafter), tmp_path / "x", to=to)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"config.json"):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load_drafter(tmp_path, target)


# ------------------------------------------------------------------ trained, published, saved


def test_a_trained_drafter_drafts_the_same_when_reloaded(tmp_path: Path) -> None:
    """J07: trained, published in place, saved, reloaded by another engine: the same accept length."""
    hf = tiny_hf_model(**SEVEN)
    spec = SpeculationConfig(method="learned", profile=Profile(depth=3, top_k=2, verify=6), min_chance=0.0)
    target = tiny_target(**SEVEN)
    model = tiny_drafter(target)
    engine = RolloutEngine(hf, EngineConfig(speculation=spec), drafter=model)
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
    prompts = random_texts([6] * 4, seed=9)

    def accepted(on: RolloutEngine) -> list[int]:
        return [o.outputs[0].spec.accepted for o in on.generate(prompts, params)]

    before = accepted(engine)
    buffer = filled_buffer(target, model, random_texts([60] * 20, seed=4), byte_budget=2**24)
    trainer = DrafterTrainer(model, buffer, TrainerConfig(lr=1e-2, micro_rows=256, loss=LossConfig(steps=2)))
    embedding = target.weights.embed.clone()
    for _ in range(20):
        trainer.step()
    engine.update_drafter(model)
    published = accepted(engine)
    export_drafter(model, tmp_path, to="vllm")
    fresh = RolloutEngine(hf, EngineConfig(speculation=spec), drafter=load_drafter(tmp_path, target))
    assert accepted(fresh) == published != before
    assert sum(published) > sum(before)
    assert torch.equal(target.weights.embed, embedding)
