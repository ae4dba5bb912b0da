from __future__ import annotations

import pytest


class Letters:
    """A tokenizer for vocabulary 64: one character an id, or what `names` says."""

    ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-+"

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ALPHABET)

    def letter(self, token: int) -> str:
        return self.names.get(token, self.ALPHABET[token])

    def decode(self, ids, **_) -> str:
        return "".join(self.letter(t) for t in ids)

    def encode(self, text: str, **_) -> list[int]:
        return [self.ALPHABET.index(c) for c in text]


@pytest.fixture
def letters() -> Letters:
    return Letters()
