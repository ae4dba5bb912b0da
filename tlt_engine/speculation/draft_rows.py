"""Whose noise and which parameters the rows of a draft level have: those that the target's own rows will have there.

Shape legend: B requests, M rows a request, D levels. Knows no logits. The verification builds the same for its rows
(engine/packing.py); a difference here costs acceptance and shows in no output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tlt_kernels.params import GREEDY_BELOW, NoiseIds, RowParams
from torch import Tensor

from tlt_engine.config import SamplingParams
from tlt_engine.speculation.drafter import DraftContext

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NO_PENALTIES = (1.0, 0.0, 0.0)


class DraftRows:
    """The requests of one call of propose. A row at depth d draws children of a node at depth d: the root has 0."""

    def __init__(
        self, contexts: Sequence[DraftContext], eos_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._contexts, self._eos_ids, self._vocab, self._device = contexts, tuple(eos_ids), vocab_size, device
        params = [c.params for c in contexts]
        self.greedy = self._put([p.temperature < GREEDY_BELOW for p in params], np.bool_)
        self.stops = self._stop_table()
        self._ids = NoiseIds(*(
            self._put(values, np.int64)
            for values in (
                [c.key for c in contexts], [len(c.token_ids) for c in contexts], [c.sample for c in contexts],
                [c.segment for c in contexts],
            )
        ))
        self._fixed = {"temperature": self._put([p.temperature for p in params], np.float32)}
        for name, off in OFF.items():
            if any(getattr(p, name) != off for p in params):
                dtype = np.int32 if name == "top_k" else np.float32
                self._fixed[name] = self._put([getattr(p, name) for p in params], dtype)
        self._shared: dict[str, Tensor] = {}
        if any(p.allowed_token_ids is not None for p in params):
            self._allow()
        if any(_penalties(p) != NO_PENALTIES for p in params):
            self._penalise()

    def _put(self, values: Sequence, dtype: type) -> Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(self._device)

    def noise(self, depth: int, width: int) -> NoiseIds:
        """Of the tokens drawn at `width` rows a request."""
        ids = self._ids
        rows = [ids.keys, ids.positions + depth, ids.samples, ids.segments]
        return NoiseIds(*(row.repeat_interleave(width) for row in rows))

    def params(self, depth: int, branches: Tensor) -> RowParams:
        """branches int64 [B, M, depth]: the tokens between the root and each row's node, the node's own last."""
        width = branches.shape[1]
        fields = {name: values.repeat_interleave(width) for name, values in self._fixed.items()}
        fields |= self._shared | self._biases(depth, width)
        if "history_row" in self._fixed:
            fields["branch_tokens"] = branches.flatten(0, 1).contiguous()
        return RowParams(**fields)

    def stop_ids(self, context: DraftContext) -> tuple[int, ...]:
        params = context.params
        return (*(() if params.ignore_eos else self._eos_ids), *(params.stop_token_ids or ()))

    def _stop_table(self) -> Tensor:
        """int64 [B, S], padded with -2, which no token is."""
        stops = [self.stop_ids(c) for c in self._contexts]
        most = max(map(len, stops))
        return self._put([[*s, *[-2] * (most - len(s))] for s in stops], np.int64).view(len(stops), most)

    def _allow(self) -> None:
        index: list[int] = []
        masks: list[np.ndarray] = []
        for context in self._contexts:
            ids = context.params.allowed_token_ids
            index.append(-1 if ids is None else len(masks))
            if ids is not None:
                bits = np.zeros((self._vocab + 31) // 32 * 32, np.uint8)
                bits[list(ids)] = 1
                masks.append(np.packbits(bits, bitorder="little").view(np.int32))
        self._fixed["allowed_row"] = self._put(index, np.int32)
        self._shared["allowed_bits"] = torch.from_numpy(np.stack(masks)).to(self._device)

    def _penalise(self) -> None:
        index: list[int] = []
        history: list[int] = []
        indptr: list[int] = [0]
        prompts: list[int] = []
        for context in self._contexts:
            index.append(-1)
            if _penalties(context.params) != NO_PENALTIES:
                index[-1] = len(prompts)
                history.extend(context.token_ids)
                indptr.append(len(history))
                prompts.append(context.prompt_len)
        for name, values in zip(
            ("repetition", "presence", "frequency"), zip(*(_penalties(c.params) for c in self._contexts))
        ):
            self._fixed[name] = self._put(values, np.float32)
        self._fixed["history_row"] = self._put(index, np.int32)
        self._shared |= {
            "history_indptr": self._put(indptr, np.int32), "history_ids": self._put(history, np.int64),
            "history_prompt": self._put(prompts, np.int32),
        }

    def _biases(self, depth: int, width: int) -> dict[str, Tensor]:
        """logit_bias, and while a row's branch is short of min_tokens a ban of what would end it."""
        ids: list[int] = []
        values: list[float] = []
        indptr, rows = [0], []
        for context in self._contexts:
            params = context.params
            bias = dict(params.logit_bias or {})
            if len(context.token_ids) - context.prompt_len + depth < params.min_tokens:
                bias |= dict.fromkeys(self.stop_ids(context), float("-inf"))
            rows.append(len(indptr) - 1 if bias else -1)
            if bias:
                ids.extend(bias)
                values.extend(bias.values())
                indptr.append(len(ids))
        if not ids:
            return {}
        return {
            "bias_row": self._put(rows, np.int32).repeat_interleave(width), "bias_indptr": self._put(indptr, np.int32),
            "bias_ids": self._put(ids, np.int64), "bias_values": self._put(values, np.float32),
        }


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty
