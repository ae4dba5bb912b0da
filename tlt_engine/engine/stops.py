"""Stop conditions, applied to a run of emitted tokens in order. What lies behind the stop leaves no trace anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_engine.config import SamplingParams
from tlt_engine.engine.sample import Sample
from tlt_engine.engine.text import find_stop


@dataclass(frozen=True)
class Stop:
    finish_reason: str
    stop_reason: int | str | None = None


class StopRule:
    """The stop conditions of one request's parameters."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_ids
        self._ids = frozenset(params.stop_token_ids or ())
        self._strings: tuple[str, ...] = tuple(params.stop or ())

    def after(self, sample: Sample, token: int) -> Stop | None:
        """Whether the output ends with `token`, which was just appended. A stop within max_tokens wins over it."""
        matched = self._match_text(sample, token)
        if sample.forced is not None:
            return Stop("length") if len(sample.output.token_ids) == len(sample.forced) else None
        if token in self._eos:
            return Stop("stop")
        if token in self._ids:
            return Stop("stop", token)
        if matched is not None:
            return Stop("stop", matched)
        if sample.seq.room <= 0:
            return Stop("length")
        if sample.quota_end is not None and len(sample.seq.token_ids) >= sample.quota_end:
            return Stop("paused")
        return None

    def _match_text(self, sample: Sample, token: int) -> str | None:
        text = sample.text
        if text is None:
            return None
        before = len(text.text)
        new = text.append(token)
        # As in vLLM a match may start within the first min_tokens tokens, but not end there.
        if not self._strings or not new or sample.seq.output_len <= self._params.min_tokens:
            return None
        found = find_stop(text.text, len(text.text) - before, self._strings)
        if found is None:
            return None
        stop, at = found
        text.text = text.text[: at + len(stop) if self._params.include_stop_str_in_output else at]
        text.closed = True
        return stop
