"""Tiny random models for tests: transformers' and ours, of every supported architecture.

Every weight is randomised, norms, biases and q/k norms included: a part that is wrongly skipped changes the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tlt_engine.kvcache.storage import KVStorage
from tlt_engine.models.loader import load_model
from tlt_engine.models.transformer import Transformer
from tlt_engine.types import StepInputs

ARCHS = ("llama", "mistral", "qwen2", "qwen3")


def tiny_config(arch: str = "llama", **overrides: Any) -> Any:
    """A transformers config: hidden 32, 2 layers, 4 query and 2 KV heads of 8, vocabulary 64, context 256, no window,
    no EOS. `overrides` are config fields."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }
    if arch == "mistral":
        fields["sliding_window"] = None
    if arch == "qwen3":
        fields["head_dim"] = 8
    config = getattr(transformers, f"{arch.capitalize()}Config")
    return config(**{**fields, **overrides})


def tiny_hf_model(arch: str = "llama", seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers model in eval mode with eager attention and random weights. The caller's RNG is left alone."""
    from transformers import AutoModelForCausalLM

    config = overrides.pop("config", None) or tiny_config(arch, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            if "norm" in name:
                p.data = 1 + 0.3 * noise
            elif name.endswith("bias"):
                p.data = 0.3 * noise
            else:  # products keep the size of their input, so that logits spread over a few units at any width
                p.data = noise / p.shape[-1] ** 0.5
        if config.tie_word_embeddings:
            model.tie_weights()
    return model.to(dtype)


def tiny_target(
    arch: str = "llama", seed: int = 0, *, dtype: str = "float32", lm_head_dtype: str | None = None,
    max_model_len: int | None = None, **overrides: Any,
) -> Transformer:
    """Our model with the weights of tiny_hf_model(arch, seed, **overrides)."""
    hf = tiny_hf_model(arch, seed, **overrides)
    return load_model(hf, dtype=dtype, device="cpu", lm_head_dtype=lm_head_dtype, max_model_len=max_model_len).model


def tree_bits(parents: list[int]) -> list[tuple[int, int]]:
    """Ancestor words of a tree given by parents (-1 for the root), as signed 64-bit patterns."""
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((1 << i) | (masks[parent] if parent >= 0 else 0))
    signed = lambda w: w - 2**64 if w >= 2**63 else w  # noqa: E731
    return [(signed(m & (2**64 - 1)), signed(m >> 64)) for m in masks]


class Runner:
    """Drives a Transformer over one KV storage, by hand: request b owns pages [b * per, (b + 1) * per)."""

    def __init__(self, model: Transformer, requests: int = 1, page_size: int = 4, length: int = 256) -> None:
        self.model = model
        self.page_size = page_size
        self.per = -(-length // page_size)
        self.kv: KVStorage = model.new_kv(requests * self.per, page_size)
        self.kv_len = [0] * requests

    def step(
        self, tokens: dict[int, list[int]], parents: dict[int, list[int]] | None = None,
        capture: tuple[int, ...] = (), keep: bool = True,
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """One pass: `tokens[b]` are request b's rows, a causal chunk unless parents[b] makes them a tree. Returns
        logits [rows, V] by request, and the hidden states asked for over all rows. keep: commit the rows (chunks
        only)."""
        parents = parents or {}
        names = ("ids", "pos", "slots", "bits", "indptr", "table", "prefix", "causal")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        rows["indptr"].append(0)
        for b, ids in tokens.items():
            n, prefix, pages = len(ids), self.kv_len[b], range(b * self.per, (b + 1) * self.per)
            depth: list[int] = []
            for i in range(n):
                parent = parents[b][i] if b in parents else i - 1
                depth.append(0 if parent < 0 else depth[parent] + 1)
            rows["ids"] += ids
            rows["pos"] += [prefix + d for d in depth]
            rows["slots"] += [pages[0] * self.page_size + prefix + i for i in range(n)]
            rows["bits"] += tree_bits(parents[b]) if b in parents else [(0, 0)] * n
            rows["indptr"].append(rows["indptr"][-1] + n)
            rows["table"].append(list(pages))
            rows["prefix"].append(prefix)
            rows["causal"].append(0 if b in parents else 1)
            if keep and b not in parents:
                self.kv_len[b] += n
        out = self.model(_step_inputs(rows), self.kv, capture=capture)
        splits = out.logits.split([len(ids) for ids in tokens.values()])
        return dict(zip(tokens, splits)), out.hidden


def _step_inputs(rows: dict[str, list[Any]]) -> StepInputs:
    return StepInputs(
        token_ids=torch.tensor(rows["ids"]), positions=torch.tensor(rows["pos"]), slots=torch.tensor(rows["slots"]),
        page_table=torch.tensor(rows["table"], dtype=torch.int32),
        prefix_lens=torch.tensor(rows["prefix"], dtype=torch.int32),
        node_indptr=torch.tensor(rows["indptr"], dtype=torch.int32), ancestors=torch.tensor(rows["bits"]),
        causal=torch.tensor(rows["causal"], dtype=torch.uint8), logit_rows=torch.arange(len(rows["ids"])),
    )


def prefill_logits(
    model: Transformer, ids: list[int], capture: tuple[int, ...] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [n, V] and hidden states of one causal pass over `ids`."""
    logits, hidden = Runner(model, length=len(ids)).step({0: ids}, capture=capture)
    return logits[0], hidden


@torch.no_grad()
def hf_logits(hf: Any, ids: list[int]) -> Tensor:
    """[n, V] of transformers' forward pass without a cache."""
    return hf(torch.tensor([ids]), use_cache=False).logits[0]
