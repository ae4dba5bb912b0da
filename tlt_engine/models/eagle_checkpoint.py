"""Drafter folders that SGLang, vLLM and speculators load unchanged, and loading theirs.

Knows neither training nor serving. Names of tensors are SpecForge's (EagleModel.named_tensors); which keys each loader
reads, and where they disagree, is said beside the code that writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_engine.config import refuse
from tlt_engine.models.config import default_aux_layers
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.rope import RopeConfig, rope_config
from tlt_engine.models.sources import Safetensors
from tlt_engine.models.transformer import Transformer

TARGETS = ("sglang", "vllm", "speculators")
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE3_ONLY = {"midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight", "d2t"}
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export_drafter(
    model: EagleModel, folder: str | Path, *, to: str, verifier: str = "", speculative_tokens: int = 5
) -> Path:
    """Writes model.safetensors and config.json, in the drafter's own dtype. model: bound to its target.

    to: "sglang", "vllm" or "speculators". For EAGLE-3 the first two get the same folder (serve with --speculative-
    algorithm EAGLE3 in SGLang: "EAGLE" loads it and accepts nothing, sglang#21272); an EAGLE-1 folder differs in a bias
    of zeros that SGLang expects and vLLM does not have. verifier: the target's name, and speculative_tokens the default
    depth, as speculators records them.

    A drafter with the target's head writes that head and an identity map: loaders that miss a head keep random weights
    in its place (sglang#27908). Other engines know no window: they attend to all entries, so train with window=None
    what is to serve long contexts there. ValueError for what the loader cannot take."""
    if to not in TARGETS:
        raise refuse("to", f"one of {', '.join(TARGETS)}", to, "pick one")
    _check_exportable(model, to)
    tensors = _tensors(model, to)
    config = _speculators_config(model, verifier, speculative_tokens) if to == "speculators" else _config(model, to)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save_file

    save_file(tensors, path / f".{WEIGHTS}.part", metadata={"format": "pt"})
    (path / f".{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
    for name in (WEIGHTS, CONFIG):
        os.replace(path / f".{name}.part", path / name)
    return path


def load_drafter(folder: str | Path, target: Transformer, *, window: int | str | None = "auto") -> EagleModel:
    """A drafter from such a folder, or from one of SpecForge, EAGLE or speculators, bound to `target`, in its dtype.

    window: "auto" takes what the folder says (512 where it says nothing, as in all that were not exported here). A head
    of its own is kept; one that equals the target's, or that is missing without a reduced vocabulary, is the target's
    by reference, and so is the embedding. Nothing is left at its initial value: a missing tensor is refused, as is
    every one that would not be used, and every setting that would change the result and is not served."""
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise refuse("drafter", "a folder with config.json", str(path), "give a local folder")
    settings = json.loads((path / CONFIG).read_text())
    tensors = _plain_names(_read(path))
    flat = {**settings, **settings.get("transformer_layer_config", {})}
    _check_settings(flat, target)
    kind = "eagle3" if tensors.keys() & EAGLE3_ONLY else "eagle1"
    tensors = _settle_head(_settle_embedding(_settle_biases(tensors), flat, target), flat, target)
    if kind == "eagle1":
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    config = _eagle_config(flat, settings, tensors, target, kind)
    if not isinstance(window, str):
        config = replace(config, window=window)
    model = EagleModel(config, dtype=target.dtype, device=target.device)
    model.copy_from(tensors)
    return model.bind(target)


def check_vocabulary_maps(d2t: Tensor, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> None:
    """d2t [Vd] must hold offsets (target id = draft id + d2t[draft id]) that give ascending target ids, those that t2d
    [V] marks. ValueError otherwise: read the other way round, a drafter proposes other words than it means."""
    if d2t.shape != (draft_vocab_size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise refuse("d2t", f"int64 [{draft_vocab_size}], one a draft id", f"{d2t.dtype} {list(d2t.shape)}",
                     "the file and draft_vocab_size in config.json do not belong together")
    ids = d2t.long().cpu() + torch.arange(draft_vocab_size)
    fine = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    if not fine:
        raise refuse("d2t", f"offsets: d2t[i] + i ascending target ids in [0, {vocab_size})", d2t[:6].tolist(),
                     "subtract arange from absolute ids")
    if t2d is None:
        return
    if t2d.shape != (vocab_size,):
        raise refuse("t2d", f"bool [{vocab_size}]", list(t2d.shape), "the drafter is another target's")
    marked = t2d.cpu().bool().nonzero()[:, 0]
    if not torch.equal(marked, ids):
        hint = "d2t holds absolute ids; subtract arange" if torch.equal(marked, d2t.long().cpu()) else "mend the maps"
        raise refuse("t2d", "nonzero(t2d) == d2t + arange", f"{marked[:6].tolist()} and {ids[:6].tolist()}", hint)


# -------------------------------------------------------------------- writing


def _check_exportable(model: EagleModel, to: str) -> None:
    c, layers = model.config, model.target.config.num_layers
    if c.kind == "eagle1":
        if to == "speculators":
            raise refuse("to", "'sglang' or 'vllm' for an EAGLE-1 drafter", to, "speculators' format here is EAGLE-3's")
        return
    if len(c.aux_layers) != 3:
        raise refuse("aux_layers", "three, which is how wide both loaders build fc", c.aux_layers, "train with three")
    if max(c.aux_layers) >= layers:
        raise refuse("aux_layers", f"inputs of layers, below {layers}", c.aux_layers,
                     "both engines capture a layer's input and have none behind the last layer; train with others")


def _tensors(model: EagleModel, to: str) -> dict[str, Tensor]:
    """Copies on the host: safetensors refuses views that share a storage."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.named_tensors()}
    c = model.config
    if c.kind == "eagle1":
        if to == "sglang":
            tensors["fc.bias"] = torch.zeros(c.hidden_size, dtype=model.dtype)
        return tensors
    if model.head is None:
        tensors["lm_head.weight"] = model.head_weight.detach().to("cpu", model.dtype).clone()
        tensors["d2t"] = torch.zeros(c.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(c.vocab_size, dtype=torch.bool)
    if to == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    return tensors


def _sizes(model: EagleModel) -> dict[str, Any]:
    c = model.config
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": False, **_rope(c),
    }


def _config(model: EagleModel, to: str) -> dict[str, Any]:
    c = model.config
    names = {"eagle3": "LlamaForCausalLMEagle3",
             "eagle1": "LlamaForCausalLMEagle" if to == "sglang" else "EagleLlamaForCausalLM"}
    config = {
        "architectures": [names[c.kind]], **_sizes(model), "torch_dtype": str(model.dtype).removeprefix("torch."),
        "tlt": {"window": c.window},
    }
    if c.kind == "eagle3":
        # vLLM takes the top-level key as it is, SGLang the nested one and adds 1.
        config |= {
            "draft_vocab_size": c.draft_vocab_size or c.vocab_size, "target_hidden_size": c.target_hidden_size,
            AUX_KEY: list(c.aux_layers),
            "eagle_config": {"use_aux_hidden_state": True, AUX_KEY: [i - 1 for i in c.aux_layers]},
        }
    return config


def _speculators_config(model: EagleModel, verifier: str, speculative_tokens: int) -> dict[str, Any]:
    c, dtype = model.config, str(model.dtype).removeprefix("torch.")
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
             "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size, "norm_before_residual": False,
        "target_hidden_size": c.target_hidden_size, AUX_KEY: list(c.aux_layers), "tie_word_embeddings": False,
        "torch_dtype": dtype, "transformer_layer_config": _sizes(model), "tlt": {"window": c.window},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens,
                                  "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier, "architectures": [names[model.target.config.architecture]]},
        },
    }


def _rope(c: EagleConfig) -> dict[str, Any]:
    """In both places: transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling on top."""
    rope = c.rope
    settings: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        settings["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = rope.original_max
    if rope.kind == "llama3":
        settings |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        settings |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        given = ("attention_factor", "mscale", "mscale_all_dim")
        settings |= {name: value for name in given if (value := getattr(rope, name)) is not None}
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_parameters": settings}
    if rope.kind != "default":
        written["rope_scaling"] = {n: v for n, v in settings.items() if n != "rope_theta"}
    if rope.rotary_dim not in (0, c.head_dim):
        written["partial_rotary_factor"] = settings["partial_rotary_factor"] = rope.rotary_dim / c.head_dim
    return written


# -------------------------------------------------------------------- reading


def _read(path: Path) -> dict[str, Tensor]:
    if any(path.glob("*.safetensors")):
        source = Safetensors(path)
        return dict(source.tensors(source.shapes))
    file = path / "pytorch_model.bin"  # EAGLE's own checkpoints
    if not file.is_file():
        raise refuse("drafter", f"{WEIGHTS} or {file.name}", sorted(p.name for p in path.iterdir()), "download it")
    return torch.load(file, map_location="cpu", weights_only=True)


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SpecForge's names: without a leading "model.", and midlayer for layers.0, as speculators and EAGLE-1 have it."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith("layers.0."):
            short = "midlayer." + short.removeprefix("layers.0.")
        if not short.endswith("rotary_emb.inv_freq"):
            plain[short] = tensor
    return plain


def _check_settings(flat: Mapping[str, Any], target: Transformer) -> None:
    """Settings under which the same tensors mean another function."""
    vocab = target.config.vocab_size
    expected: dict[str, tuple[Any, ...]] = {
        "vocab_size": (vocab, None), "target_hidden_size": (target.config.hidden_size, None),
        "norm_before_residual": (False, None), "norm_output": (False, None), "fc_norm": (False, None),
        "num_hidden_layers": (1, None), "hidden_act": ("silu", "swish", None), "tie_word_embeddings": (False, None),
    }
    for name, values in expected.items():
        if flat.get(name) not in values:
            raise refuse(f"drafter's {name}", repr(values[0]), flat[name], "this drafter computes something else")


def _settle_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A bias of zeros (SGLang's EAGLE-1 has one on fc) is none."""
    kept = {}
    for name, tensor in tensors.items():
        if not name.endswith(".bias"):
            kept[name] = tensor
        elif tensor.any():
            raise refuse(f"drafter's {name}", "zeros", f"up to {tensor.abs().max().item():g}", "biases are not served")
    return kept


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.to(b.device, b.dtype), b)


def _settle_embedding(
    tensors: dict[str, Tensor], flat: Mapping[str, Any], target: Transformer
) -> dict[str, Tensor]:
    embed = tensors.get("embed_tokens.weight")
    if flat["hidden_size"] != target.config.hidden_size:
        if embed is None:
            raise refuse("drafter", f"embed_tokens.weight, as its width {flat['hidden_size']} is not the target's",
                         "no such tensor", "it would stay at its initial value; export it with the embedding")
        return tensors
    if embed is not None and not _same(embed, target.weights.embed):
        raise refuse("drafter's embed_tokens.weight", "the target's embedding", "other values",
                     "a drafter of the target's width uses the target's; is it another target's drafter?")
    return {n: t for n, t in tensors.items() if n != "embed_tokens.weight"}


def _settle_head(tensors: dict[str, Tensor], flat: Mapping[str, Any], target: Transformer) -> dict[str, Tensor]:
    """With a head of its own: lm_head.weight, d2t and t2d, all checked. With the target's: none of them."""
    vocab = target.config.vocab_size
    size = flat.get("draft_vocab_size") or vocab
    head, d2t, t2d = (tensors.get(n) for n in ("lm_head.weight", "d2t", "t2d"))
    if d2t is None and size < vocab:
        raise refuse("drafter", f"d2t, as its draft_vocab_size {size} is less than the vocabulary {vocab}",
                     "no such tensor", "without it draft ids would be taken for target ids; export it with its maps")
    if d2t is not None:
        check_vocabulary_maps(d2t, t2d, size, vocab)
    if head is None and (size < vocab or flat["hidden_size"] != target.config.hidden_size):
        raise refuse("drafter", "lm_head.weight", "no such tensor",
                     "a reduced head cannot be the target's, and would stay at its initial value; export it with it")
    rest = {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}
    identity = d2t is None or not d2t.any()
    if head is None or (size == vocab and identity and _same(head, target.weights.head)):
        return rest
    d2t = torch.zeros(size, dtype=torch.int64) if d2t is None else d2t.long()
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[d2t.cpu() + torch.arange(size)] = True
    return {**rest, "lm_head.weight": head, "d2t": d2t, "t2d": marked}


def _aux_layers(flat: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbered as StepOutputs.hidden: the top-level key as it is, the nested one plus 1."""
    top, nested = flat.get(AUX_KEY), (flat.get("eagle_config") or {}).get(AUX_KEY)
    found = [tuple(top)] if top else []
    found += [tuple(i + 1 for i in nested)] if nested else []
    if len(set(found)) > 1:
        raise refuse(AUX_KEY, "the nested list one below the top-level one", f"{list(top or ())} and {nested}",
                     "vLLM reads the first, SGLang the second plus 1; which layers was it trained on?")
    return found[0] if found else default_aux_layers(layers)


def _eagle_config(
    flat: Mapping[str, Any], settings: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Transformer, kind: str
) -> EagleConfig:
    get = lambda name, default: default if flat.get(name) is None else flat[name]  # noqa: E731
    hidden, heads = flat["hidden_size"], flat["num_attention_heads"]
    head_dim = get("head_dim", hidden // heads)
    longest = get("max_position_embeddings", target.config.max_position_embeddings)
    rope = rope_config(get, head_dim, longest)
    if rope.kind not in ("llama3", "yarn"):  # the others do not read it
        rope = replace(rope, original_max=RopeConfig.original_max)
    layers = target.config.num_layers
    return EagleConfig(
        kind=kind, hidden_size=hidden, target_hidden_size=target.config.hidden_size,
        intermediate_size=flat["intermediate_size"], num_heads=heads, num_kv_heads=get("num_key_value_heads", heads),
        head_dim=head_dim, vocab_size=get("vocab_size", target.config.vocab_size),
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)), rope=rope, max_position_embeddings=longest,
        aux_layers=(layers,) if kind == "eagle1" else _aux_layers(flat, layers),
        draft_vocab_size=len(tensors["d2t"]) if "d2t" in tensors else None,
        window=(settings.get("tlt") or {"window": 512})["window"],
    )
