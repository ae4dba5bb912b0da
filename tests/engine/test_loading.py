"""Sources, names and in-place updates of weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import hf_logits, prefill_logits, tiny_config, tiny_hf_model, tiny_target
from tlt_engine.models.loader import load_model
from tlt_engine.models.transformer import Transformer
from tlt_engine.models.weights import EMBED, HEAD

IDS = [int(i) for i in torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(3))]
UPDATE_ARCHS = ("llama", "qwen2", "qwen3")


def logits(model: Transformer) -> Tensor:
    return prefill_logits(model, IDS)[0]


def rewrite(folder: Path, change: Any) -> None:
    """Applies `change(tensors)` to the single safetensors file of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_hf_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


# Sources.


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_folder_gives_the_models_logits(arch: str, shard_size: str, tie: bool, tmp_path: Path) -> None:
    hf = tiny_hf_model(arch, tie_word_embeddings=tie)
    hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_model(tmp_path)
    assert loaded.tokenizer is None and loaded.report.unexpected == ()
    assert len(loaded.report.loaded) == len(dict(loaded.model.named_weights()))
    assert (logits(loaded.model) - hf_logits(hf, IDS)).abs().max() < 1e-4


def test_in_memory_weights_are_copied() -> None:
    hf = tiny_hf_model("llama")
    model = load_model(hf).model
    before = logits(model)
    with torch.no_grad():
        for p in hf.parameters():
            p.zero_()
    assert torch.equal(logits(model), before) and before.abs().max() > 0


def test_every_weight_of_the_source_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage starts as NaN here, so one element left out would show."""
    for arch in ("llama", "mistral", "qwen2", "qwen3"):
        hf = tiny_hf_model(arch, tie_word_embeddings=arch == "qwen2")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda shape, **kw: torch.full(shape, float("nan"), **kw))
            model = load_model(hf).model
        layers = [t for layer in model.weights.layers for t in vars(layer).values() if t is not None]
        for tensor in [model.weights.embed, model.weights.head, model.weights.norm, *layers]:
            assert not tensor.isnan().any()


def test_eos_ids_come_from_generation_config_first(folder: Path) -> None:
    """N06: nothing else of generation_config.json is looked at."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert load_model(folder).eos_ids == (5,)
    for value, expected in (([7, 9, 7], (7, 9)), (11, (11,)), (None, (5,))):
        generation = {"eos_token_id": value, "top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        loaded = load_model(folder)
        assert loaded.eos_ids == loaded.config.eos_token_ids == expected
        assert not any("top_p" in name or "penalty" in name for name in vars(loaded.config))


@pytest.mark.parametrize("source", ["no/such/folder", ""])
def test_missing_folder_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"model: expected a Hugging Face folder with config\.json"):
        load_model(source or Path(__file__).parent)


def test_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"\*\.safetensors.*save_pretrained"):
        load_model(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        load_model(tmp_path)


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16, got 'int8'"):
        load_model(tiny_hf_model(), dtype="int8")


# F01, F02: the head, and keys that nobody asked for.


def test_tied_model_with_a_head_and_strange_keys_loads(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBED].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.0.strange.weight"] = torch.ones(3)
        tensors["another"] = torch.ones(1)

    expected = hf_logits(tiny_hf_model("qwen2", tie_word_embeddings=True), IDS)
    rewrite(folder, change)
    with pytest.warns(UserWarning, match="strange") as caught:
        loaded = load_model(folder)
    assert len([w for w in caught if "weights" in str(w.message)]) == 1
    assert set(loaded.report.unexpected) == {"model.layers.0.strange.weight", "another"}
    assert any(HEAD in note for note in loaded.report.notes)
    assert loaded.model.weights.head.data_ptr() == loaded.model.weights.embed.data_ptr()
    assert (logits(loaded.model) - expected).abs().max() < 1e-4


def test_head_that_differs_from_its_tied_embedding_is_kept(folder: Path) -> None:
    """As transformers 5 does, which is the reference here."""
    from transformers import AutoModelForCausalLM

    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors[EMBED].flip(0).contiguous()}))
    with pytest.warns(UserWarning, match="not tied"):
        loaded = load_model(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (logits(loaded.model) - hf_logits(hf, IDS)).abs().max() < 1e-4
    assert not loaded.config.tie_word_embeddings


def test_tied_model_with_the_head_only(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBED)}))
    expected = hf_logits(tiny_hf_model("qwen2", tie_word_embeddings=True), IDS)
    assert (logits(load_model(folder).model) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_untied_model_without_a_head_is_refused(shard_size: str, tmp_path: Path) -> None:
    hf = tiny_hf_model("llama", tie_word_embeddings=True)
    hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight; lm_head\.weight is needed"):
        load_model(tmp_path)


def test_missing_and_misshapen_weights_are_listed_together(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.norm.weight"] = torch.ones(5)

    rewrite(folder, change)
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    for part in ("0.mlp.up_proj.weight", "1.self_attn.k_proj.bias", "model.norm.weight expected [32], got [5]"):
        assert part in str(caught.value)


# H01, H08: updates in place.


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("arch", UPDATE_ARCHS)
def test_update_equals_a_fresh_model_at_the_same_addresses(arch: str, tie: bool) -> None:
    model = tiny_target(arch, tie_word_embeddings=tie, lm_head_dtype="bfloat16")
    new = tiny_hf_model(arch, seed=7, tie_word_embeddings=tie)
    w = model.weights
    held = [w.embed, w.head, w.norm, *(t for layer in w.layers for t in vars(layer).values() if t is not None)]
    before, old = [t.data_ptr() for t in held], logits(model)
    report = model.load_weights(new.state_dict())
    assert [t.data_ptr() for t in held] == before and report.missing == report.unexpected == ()
    assert torch.equal(logits(model), logits(load_model(new, lm_head_dtype="bfloat16").model))
    assert not torch.allclose(logits(model), old, atol=0.1)


@pytest.mark.parametrize("arch", UPDATE_ARCHS)
def test_named_weights_are_views_with_the_hugging_face_names_and_values(arch: str) -> None:
    hf = tiny_hf_model(arch)
    ours = dict(load_model(hf).model.named_weights())
    theirs = hf.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_embedding_update_reaches_a_tied_head() -> None:
    model = tiny_target(tie_word_embeddings=True)
    embed = dict(model.named_weights())[EMBED].clone() * 2
    assert HEAD not in dict(model.named_weights())
    model.load_weights({EMBED: embed}, strict=False)
    assert torch.equal(model.weights.head, embed)
    model.load_weights({HEAD: embed * 2}, strict=False)
    assert torch.equal(model.weights.embed, embed * 2)
    with pytest.raises(ValueError, match="tied to its embedding"):
        model.load_weights({EMBED: embed, HEAD: embed * 3}, strict=False)
    assert torch.equal(model.weights.embed, embed * 2)


WRAPPERS = ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model.", "_fsdp_wrapped_module."]


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrong_prefix_is_named(prefix: str) -> None:
    model, state = tiny_target(), tiny_hf_model(seed=1).state_dict()
    before = logits(model)
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"remove the prefix '{prefix}' from the names"):
            model.load_weights({prefix + n: t for n, t in state.items()}, strict=strict)
    assert torch.equal(logits(model), before)


def test_doubled_and_lost_prefixes_are_named() -> None:
    model, state = tiny_target(), tiny_hf_model(seed=1).state_dict()
    doubled = {n.replace("model.", "model.model.", 1): t for n, t in state.items()}
    with pytest.raises(ValueError, match=r"remove the prefix 'model\.' from the names"):
        model.load_weights(doubled)
    with pytest.raises(ValueError, match=r"add the prefix 'model\.'"):
        model.load_weights({n.removeprefix("model."): t for n, t in state.items()})


def test_invalid_set_changes_nothing() -> None:
    model, state = tiny_target(), tiny_hf_model(seed=1).state_dict()
    before = {n: t.clone() for n, t in model.named_weights()}
    last = "model.norm.weight"
    broken: list[tuple[dict[str, Any], str]] = [
        ({**state, last: torch.ones(31)}, r"misshapen: model\.norm\.weight expected \[32\], got \[31\]"),
        ({**state, "extra": torch.ones(1)}, "unknown: extra"),
        ({n: t for n, t in state.items() if n != last}, r"missing: model\.norm\.weight"),
        ({**state, last: [1.0] * 32}, "expected torch tensors, got list"),
        ({}, "missing"),
    ]
    for mapping, message in broken:
        with pytest.raises(ValueError, match=message):
            model.load_weights(mapping)
        assert all(torch.equal(t, before[n]) for n, t in model.named_weights())
    mixed = {"a": torch.ones(1), **{n: t for n, t in state.items() if n != HEAD}, last: torch.ones(2)}
    with pytest.raises(ValueError, match=r"misshapen: .*unknown: a; missing: lm_head\.weight"):
        model.load_weights(mixed)


def test_fp32_master_weights_are_cast() -> None:
    model = tiny_target(dtype="bfloat16")
    new = tiny_hf_model(seed=4)
    model.load_weights(new.state_dict())
    assert all(torch.equal(t, new.state_dict()[n].bfloat16()) for n, t in model.named_weights())


def test_subset_is_loaded_and_reported() -> None:
    model, state = tiny_target(), tiny_hf_model(seed=1).state_dict()
    names = ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight"]
    before = {n: t.clone() for n, t in model.named_weights()}
    report = model.load_weights({**{n: state[n] for n in names}, "unheard.of": torch.ones(1)}, strict=False)
    assert set(report.loaded) == set(names) and report.unexpected == ("unheard.of",)
    assert len(report.missing) == len(before) - 2
    for name, tensor in model.named_weights():
        assert torch.equal(tensor, state[name] if name in names else before[name])


def test_update_check_sees_a_stale_fused_copy() -> None:
    """A forward pass that kept its own concatenation of q, k and v, as other engines had it, would fail H01's test."""
    model = tiny_target("qwen2")
    stale = {i: layer.qkv.clone() for i, layer in enumerate(model.weights.layers)}
    new = tiny_hf_model("qwen2", seed=7)
    model.load_weights(new.state_dict())
    for i, layer in enumerate(model.weights.layers):
        object.__setattr__(layer, "qkv", stale[i])
    assert not torch.allclose(logits(model), logits(load_model(new).model), atol=0.1)


# Max length.


def test_default_length_is_capped_on_the_cpu() -> None:
    assert tiny_target().max_model_len == 256
    assert load_model(tiny_hf_model(config=tiny_config(max_position_embeddings=8192))).model.max_model_len == 4096
