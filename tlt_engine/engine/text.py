"""Text of a growing list of ids, and stop strings in it. Knows nothing of speculation: tokens come one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoders print for an incomplete UTF-8 sequence


class IncrementalText:
    """Decodes ids one at a time. A token's text may depend on its left neighbours (byte-level BPE, leading spaces), so
    a short window is decoded with and without the newest ids and the difference appended (an idea of vLLM and TGI).
    """

    def __init__(self, tokenizer: Any, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = list(context[-6:])
        self._window = 0  # ids before it no longer influence new text
        self._read = len(self._ids)  # ids before it have been turned into text
        self.text = ""
        self.closed = False  # cut at a stop string: nothing may follow

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))

    def append(self, token: int) -> str:
        """Text that became certain with this token (may be empty)."""
        self._ids.append(token)
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        new = after[len(before) :]
        self.text += new
        return new

    def flush(self) -> None:
        """At the end of the output: what an incomplete last character decodes to belongs to the text after all."""
        if self.closed:
            return
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        self.text += after[len(before) :]
        self._window = self._read = len(self._ids)


def find_stop(text: str, new_chars: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The earliest stop string that ends within the last `new_chars` of `text`, with the index where it starts; of
    several that start together the first listed."""
    best: tuple[str, int] | None = None
    for stop in stops:
        at = text.find(stop, max(len(text) - new_chars - len(stop) + 1, 0))
        if at >= 0 and (best is None or at < best[1]):
            best = (stop, at)
    return best
