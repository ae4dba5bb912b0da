"""Prompts: reasoning-gym tasks with their rewards, and the user's own files. Knows no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_engine.config import refuse

TASKS = ("products", "chain_sum")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FULL_SCORE = 0.99  # reasoning-gym gives partial credit for a number inside other text


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def last_number(text: str) -> str | None:
    """The last number of an answer, thousands separators removed: SmolLM2 never writes <answer> tags."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


@dataclass(frozen=True)
class Tasks:
    """Distinct questions of one reasoning-gym task, in order. `dataset` scores answers to its `entries`."""

    name: str
    entries: tuple[dict[str, Any], ...]
    dataset: Any

    @property
    def questions(self) -> list[str]:
        return [entry["question"] for entry in self.entries]

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        return [chat(question) for question in self.questions]

    def reward(self, index: int, text: str) -> float:
        """1 when the last number of `text` answers question `index`, else 0."""
        answer = last_number(text)
        return float(answer is not None and self.dataset.score_answer(answer, self.entries[index]) >= FULL_SCORE)


def load_tasks(name: str, count: int, seed: int) -> Tasks:
    """`count` distinct questions with two terms of one or two digits.

    reasoning-gym draws item i from Random(seed + i), so neighbouring seeds share items: seeds are spread 10,000
    apart here, and repeated questions are skipped. ValueError for an unknown task, ImportError without the package.
    """
    if name not in TASKS:
        raise refuse("task", f"one of {', '.join(TASKS)}", name, "pick one")
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ImportError(f"reasoning_gym: {error}; pip install reasoning-gym") from error
    size = 4 * count + 16
    dataset = create_dataset(
        name, size=size, seed=seed * 10_000, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    distinct = {entry["question"]: entry for entry in (dataset[i] for i in range(size))}
    if len(distinct) < count:
        raise refuse("prompts", f"at most {len(distinct)} distinct questions", count, "ask for fewer")
    return Tasks(name, tuple(distinct.values())[:count], dataset)


PLAIN_PROMPTS = (
    "The three primary colours are",
    "Question: a train leaves at 9:40 and arrives at 11:05. How long does it take? Answer:",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
)


def read_prompts(path: Path) -> list[Any]:
    """Prompts of a .txt file (one a line, empty lines skipped) or a .jsonl file, whose lines are a string or an object
    with one of "prompt", "messages", "prompt_token_ids". ValueError names file and line."""
    if path.suffix not in (".txt", ".jsonl"):
        raise refuse("--prompts", "a .txt or .jsonl file", str(path), "rename or convert it")
    if not path.is_file():
        raise refuse("--prompts", "a file that exists", str(path), "check the path")
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise refuse("--prompts", "at least one prompt", f"{path.name}, empty", "add a line")
    if path.suffix == ".txt":
        return [line for _, line in numbered]
    return [_json_prompt(f"{path.name}:{i}", line) for i, line in numbered]


def _json_prompt(where: str, line: str) -> Any:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(where, "one JSON value a line", line[:60], str(error)) from None
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        if "messages" in item:
            return item["messages"]
        if "prompt_token_ids" in item or "prompt" in item:
            return item
    expected = "a string or an object with prompt, messages or prompt_token_ids"
    raise refuse(where, expected, line[:60], "see `tlt generate --help`")


def as_chat(prompts: Sequence[Any]) -> list[Any]:
    """Text prompts as chat messages; others unchanged."""
    return [chat(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def suited(prompts: Sequence[Any], tokenizer: Any | None) -> list[Any]:
    """Text prompts as chat messages where the tokenizer has a chat template; as they are where it has none, which is
    what a base model continues."""
    return as_chat(prompts) if getattr(tokenizer, "chat_template", None) else list(prompts)


def identity(prompt: Any) -> str:
    """What a prompt's seed is derived from: its content, so that its place in the list does not matter."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
