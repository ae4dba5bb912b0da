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
    items = as_list(prompts, "prompts", "a list of text, token ids or chat messages")
    if items and (_is_integer(items[0]) or _is_message(items[0])):
        return [items]
    return items


def as_list(items: Any, name: str, expected: str) -> list[Any]:
    """Any iterable but text, bytes and mappings, arrays and tensors included, whose elements become Python's own."""
    if isinstance(items, (str, bytes, bytearray, Mapping)) or not hasattr(items, "__iter__"):
        raise refuse(name, expected, items, "pass one of these")
    listed = items.tolist() if hasattr(items, "tolist") else list(items)
    if not isinstance(listed, list):  # an array without dimensions
        raise refuse(name, expected, items, "pass one of these")
    return listed


def _is_integer(item: Any) -> bool:
    """Arrays and tensors have __index__ too, whatever their shape."""
    return hasattr(item, "__index__") and not getattr(item, "shape", ())


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item


def tokenize_prompt(
    prompt: Prompt, tokenizer: Any, vocab_size: int, name: str = "prompt"
) -> tuple[str | None, list[int]]:
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
        text = _chat_text(_need(tokenizer, name, prompt), prompt, name)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = prompt
    return text, check_ids(ids, vocab_size, name)


def check_ids(ids: Any, vocab_size: int, name: str, *, allow_empty: bool = False) -> list[int]:
    items = as_list(ids, name, "text, token ids, or chat messages")
    if not items and not allow_empty:
        raise refuse(name, "at least one token", items, "pass some text or ids; a BOS token alone will do")
    for i, t in enumerate(items):
        if isinstance(t, Mapping):
            raise refuse(f"{name}[{i}]", "a chat message with 'role' and 'content'", dict(t), "add the missing keys")
        if isinstance(t, bool) or not _is_integer(t):
            raise refuse(f"{name}[{i}]", "an integer token id", t, "tokenize first, or pass text")
        if not 0 <= t.__index__() < vocab_size:
            raise refuse(f"{name}[{i}]", f"an id in [0, {vocab_size})", t, "do tokenizer and model belong together?")
    return [t.__index__() for t in items]


def _chat_text(tokenizer: Any, messages: Sequence[Any], name: str) -> str:
    if not hasattr(tokenizer, "apply_chat_template") or getattr(tokenizer, "chat_template", "its own") is None:
        raise refuse(name, "text or token ids (this tokenizer has no chat template)", "chat messages",
                     "format the chat yourself, or set tokenizer.chat_template")
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates raise what they like: Jinja's errors, TypeError, KeyError
        raise refuse(name, "messages that the tokenizer's chat template takes", str(error).split("\n")[0],
                     "give each message 'role' and 'content', or format the chat yourself") from error


def _need(tokenizer: Any, name: str, prompt: Any) -> Any:
    if tokenizer is None:
        expected = "token ids (this engine has no tokenizer)"
        raise refuse(name, expected, str(prompt)[:60], "pass tokenizer= to RolloutEngine")
    return tokenizer


def params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    expected = f"one SamplingParams, or one a prompt ({count})"
    listed = [params] * count if isinstance(params, SamplingParams) else as_list(params, "sampling_params", expected)
    if len(listed) != count:
        raise refuse("sampling_params", expected, len(listed), "match the lengths")
    for i, p in enumerate(listed):
        if not isinstance(p, SamplingParams):
            raise refuse(f"sampling_params[{i}]", "a SamplingParams", type(p).__name__, "build one")
    return listed
