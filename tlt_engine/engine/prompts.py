"""What callers pass as prompts, turned into token ids and checked. Nothing here touches the engine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt_engine.config import SamplingParams, refuse

Prompt = Any  # str | token ids | chat messages | {"prompt": str} | {"prompt_token_ids": ids}


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """A single prompt (text, one list of ids, one list of chat messages, one dict) becomes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and (hasattr(items[0], "__index__") or _is_message(items[0])):
        return [items]
    return items


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item


def tokenize_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int, name: str = "prompt") -> tuple[str | None, list[int]]:
    """(text or None, ids). Raises ValueError naming what is wrong; ids lie in [0, vocab_size)."""
    text: str | None = None
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            text, ids = prompt.get("prompt"), prompt["prompt_token_ids"]
        elif "prompt" in prompt:
            return tokenize_prompt(prompt["prompt"], tokenizer, vocab_size, name)
        else:
            raise refuse(name, "a dict with 'prompt_token_ids' or 'prompt'", sorted(prompt), "name one of them")
    elif isinstance(prompt, str):
        text, ids = prompt, _need(tokenizer, name, prompt).encode(prompt)
    elif isinstance(prompt, Sequence) and prompt and _is_message(prompt[0]):
        needed = _need(tokenizer, name, prompt)
        text = needed.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = needed.encode(text, add_special_tokens=False)
    else:
        ids = prompt
    return text, check_ids(ids, vocab_size, name)


def check_ids(ids: Any, vocab_size: int, name: str, *, allow_empty: bool = False) -> list[int]:
    try:
        items = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    except TypeError:
        raise refuse(name, "text, token ids, or chat messages", type(ids).__name__, "see RolloutEngine.generate") from None
    if not items and not allow_empty:
        raise refuse(name, "at least one token", items, "pass some text or ids; a model with a BOS token can start from it")
    for i, t in enumerate(items):
        if isinstance(t, bool) or not hasattr(t, "__index__"):
            raise refuse(f"{name}[{i}]", "an integer token id", t, "tokenize first, or pass text")
        if not 0 <= t.__index__() < vocab_size:
            raise refuse(f"{name}[{i}]", f"an id in [0, {vocab_size})", t, "check that tokenizer and model belong together")
    return [t.__index__() for t in items]


def _need(tokenizer: Any, name: str, prompt: Any) -> Any:
    if tokenizer is None:
        raise refuse(name, "token ids (this engine has no tokenizer)", str(prompt)[:60], "pass tokenizer= to RolloutEngine")
    return tokenizer


def params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    listed = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(listed) != count:
        raise refuse("sampling_params", f"one, or one a prompt ({count})", len(listed), "match the lengths")
    for i, p in enumerate(listed):
        if not isinstance(p, SamplingParams):
            raise refuse(f"sampling_params[{i}]", "a SamplingParams", type(p).__name__, "build one")
    return listed
