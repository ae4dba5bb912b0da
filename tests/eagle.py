"""The learned drafter as it is defined, in plain torch over EagleModel's own pieces.

Shape legend: n tokens, entries t = 0 .. n - 2, H drafter hidden. Slow on purpose; shares no code with serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tlt_kernels.reference.rope import rotate
from torch import Tensor

from tests.tiny import prefill_logits
from tlt_engine import RolloutEngine
from tlt_engine.models.eagle import EagleConfig, EagleModel
from tlt_engine.models.rope import rope_tables
from tlt_engine.models.transformer import Transformer


def random_drafter(target: Transformer, seed: int = 0, **overrides: Any) -> EagleModel:
    """Random weights, norms included, bound to the target."""
    model = EagleModel(EagleConfig.for_target(target.config, **overrides))
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        if model.head is not None:
            ids = torch.randperm(target.config.vocab_size, generator=generator)[: len(model.head)]
            model.set_vocabulary(ids.sort().values)
    return model.bind(target)


@torch.no_grad()
def draft_logits(
    model: EagleModel, target: Transformer, ids: list[int], branch: tuple[int, ...] = (), origin: int = 0
) -> Tensor:
    """[Vd or V]: what the drafter says comes behind the tokens `ids` and the drafts `branch`. Entries before `origin`
    are unknown to it."""
    c = model.config
    _, hidden = prefill_logits(target, ids[:-1], capture=c.aux_layers)
    aux = torch.cat([hidden[i] for i in c.aux_layers], -1)[origin:]
    cos, sin = rope_tables(c.rope, len(ids) + len(branch), "cpu")
    group = c.num_heads // c.num_kv_heads

    def entries(first: int, tokens: list[int], taken: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated q and k, v, and the residual stream of entries from position `first` on."""
        inputs, residual = model.enter(model.embedding[tokens], taken)
        q, k, v = model.qkv_rows(inputs)
        at = slice(first, first + len(tokens))
        return rotate(q, cos[at], sin[at]), rotate(k, cos[at], sin[at]), v, residual

    def attend(q: Tensor, residual: Tensor) -> Tensor:
        seen = slice(-c.window if c.window else None, None)
        k, v = keys[seen].repeat_interleave(group, 1), values[seen].repeat_interleave(group, 1)
        weights = (torch.einsum("hd,thd->ht", q[-1], k) * c.head_dim**-0.5).softmax(-1)
        return model.finish(torch.einsum("ht,thd->hd", weights, v)[None], residual[-1:])

    q, keys, values, residual = entries(origin, ids[origin + 1 :], model.fuse(aux))
    out = attend(q, residual)  # of the last entry: earlier ones' go nowhere
    for depth, token in enumerate(branch, start=1):
        q, k, v, residual = entries(len(ids) - 2 + depth, [token], out)
        keys, values = torch.cat((keys, k)), torch.cat((values, v))
        out = attend(q, residual)
    return model.logits(out)[0]


@dataclass(frozen=True)
class Seen:
    """One row of draft logits as it was served: behind which tokens and drafts, and from which entry on."""

    ids: list[int]
    branch: tuple[int, ...]
    origin: int
    logits: Tensor


class Spy:
    """Records the draft logits that an engine's learned drafter computes, and how many entries it computed for them."""

    def __init__(self, engine: RolloutEngine, patch: pytest.MonkeyPatch) -> None:
        self.drafter: Any = engine._core.drafter
        self.rows: list[Seen] = []
        self.entries: list[int] = []  # of each request and step
        self._requests: list[tuple[list[int], int]] = []
        self._paths: list[list[tuple[int, ...]]] = []  # by request, of the beam's nodes
        for owner, name in ((self.drafter, "_entries"), (self.drafter._pass, "extend"), (self.drafter._pass, "level")):
            patch.setattr(owner, name, self._wrapped(getattr(owner, name), getattr(self, f"see_{name.strip('_')}")))

    @staticmethod
    def _wrapped(original: Any, see: Any) -> Any:
        def call(*args: Any) -> Any:
            result = original(*args)
            see(result, *args)
            return result

        return call

    def see_entries(self, result: Any, contexts: Any, spans: Any) -> None:
        self._requests = [(list(c.token_ids), s.lane.origin) for c, s in zip(contexts, spans)]
        self.entries += [s.stop - s.start for s in spans]

    def _note(self, request: int, branch: tuple[int, ...], logits: Tensor) -> None:
        ids, origin = self._requests[request]
        self.rows.append(Seen(ids, branch, origin, logits.clone()))

    def see_extend(self, out: Any, entries: Any) -> None:
        self._paths = [[] for _ in self._requests]
        for b, logits in enumerate(out.logits):
            self._note(b, (), logits)

    def see_level(self, out: Any, beam: Any, tokens: Tensor, hidden: Tensor, parents: Tensor) -> None:
        logits = out.logits.unflatten(0, tuple(tokens.shape))
        for b, (row, ups) in enumerate(zip(tokens.tolist(), parents.tolist())):
            known = self._paths[b]
            new = [(*(known[up] if up >= 0 else ()), token) for token, up in zip(row, ups)]
            for m, path in enumerate(new):
                self._note(b, path, logits[b, m])
            self._paths[b] = known + new

