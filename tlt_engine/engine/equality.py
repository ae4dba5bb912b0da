"""Are two runs the same tokens? And where they are not: is it an excused tie (docs/guarantees.md)?

Row counts change the rounding of a product, so in fp32 two runs may part where two scores all but tie. A request's
first difference is excused only if its two tokens are the two best of the plain run with scores within TIE, or a
filter's cut lies within CUT of its threshold. After a difference the two outputs have different prefixes; the rest is
not compared.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from tlt_kernels import NoiseIds, RowParams, gumbel_noise, process_logits
from tlt_kernels.params import GREEDY_BELOW
from torch import Tensor

from tlt_engine.config import SamplingParams
from tlt_engine.engine.sample import stop_ids
from tlt_engine.models import Transformer
from tlt_engine.outputs import CompletionOutput, RequestOutput
from tlt_engine.types import StepInputs

if TYPE_CHECKING:
    from tlt_engine.engine.engine import RolloutEngine

TIE = 1e-4  # score difference (nats) of the two best
CUT = 1e-5  # distance of a filter's cut from its threshold


@dataclass(frozen=True)
class Tie:
    """A first difference: output token `position` of sample `index` of `request_id`."""

    request_id: str
    index: int
    position: int
    tokens: tuple[int, int]  # plain, other
    margin: float  # score of the plain token minus the other's
    excused: bool
    reason: str

    def __str__(self) -> str:
        word = "excused" if self.excused else "NOT excused"
        return (
            f"request {self.request_id} sample {self.index} token {self.position}: {self.tokens[0]} | "
            f"{self.tokens[1]}, margin {self.margin:.2e}: {word} ({self.reason})"
        )


@dataclass
class Equality:
    """tokens: compared. tokens_differing: from an unexcused first difference to the end of the longer output.
    max_logprob_error: over the compared tokens (nats)."""

    tokens: int = 0
    samples: int = 0
    tokens_differing: int = 0
    max_logprob_error: float = 0.0
    differences: list[Tie] = field(default_factory=list)

    @property
    def excused_ties(self) -> int:
        return sum(t.excused for t in self.differences)

    @property
    def equal(self) -> bool:
        return self.tokens_differing == 0


def plain_logits(model: Transformer, token_ids: Seq[int]) -> Tensor:
    """fp32 [V] on the CPU: the unmodified logits after token_ids, from one causal pass with KV of its own."""
    return last_logits(model, token_ids, 1)[0]


def last_logits(model: Transformer, token_ids: Seq[int], count: int) -> Tensor:
    """fp32 [count, V] on the CPU: as plain_logits, of the last `count` tokens each."""
    n = len(token_ids)
    kv = model.new_kv(1, n)
    device = model.device
    positions = torch.arange(n, device=device)
    step = StepInputs(
        token_ids=torch.tensor(token_ids, device=device), positions=positions, slots=positions,
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        prefix_lens=torch.zeros(1, dtype=torch.int32, device=device),
        node_indptr=torch.tensor([0, n], dtype=torch.int32, device=device),
        ancestors=torch.zeros(n, 2, dtype=torch.int64, device=device),
        causal=torch.ones(1, dtype=torch.uint8, device=device),
        logit_rows=torch.arange(n - count, n, device=device),
    )
    with torch.inference_mode():
        return model.forward(step, kv).logits.float().cpu()


def compare_runs(
    engine: RolloutEngine, plain: Seq[RequestOutput], other: Seq[RequestOutput],
    params: SamplingParams | Seq[SamplingParams],
) -> Equality:
    """Compare outputs of the same prompts in the same order. plain: the run without speculation. engine: any with the
    weights of both runs; it judges ties, and only its model, eos_ids and vocab_limit are used."""
    result = Equality()
    listed = [params] * len(plain) if isinstance(params, SamplingParams) else params
    for a, b, p in zip(plain, other, listed, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            _compare_sample(result, engine, a, x, y, p)
    return result


def _compare_sample(
    result: Equality, engine: RolloutEngine, request: RequestOutput, plain: CompletionOutput, other: CompletionOutput,
    params: SamplingParams,
) -> None:
    x, y = plain.token_ids, other.token_ids
    same = next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), min(len(x), len(y)))
    result.samples += 1
    result.tokens += same
    for s, t in zip(plain.sampled_logprobs[:same], other.sampled_logprobs[:same]):
        result.max_logprob_error = max(result.max_logprob_error, abs(s - t))
    if same == len(x) == len(y):
        return
    result.tokens += 1
    if same == min(len(x), len(y)):
        reason = "one output goes on, the other has ended"
        tie = Tie(request.request_id, plain.index, same, (-1, -1), float("nan"), False, reason)
    else:
        tie = judge(engine, request, plain, (x[same], y[same]), same, params)
    result.differences.append(tie)
    if not tie.excused:
        result.tokens_differing += max(len(x), len(y)) - same


def judge(
    engine: RolloutEngine, request: RequestOutput, plain: CompletionOutput, tokens: tuple[int, int], position: int,
    params: SamplingParams,
) -> Tie:
    """Whether a first difference at output token `position` is an excused tie: recomputes the plain run's scores."""
    limit = engine.vocab_limit
    ids = [*request.prompt_token_ids, *request.prior_output_ids, *plain.token_ids[:position]]
    logits = plain_logits(engine.model, ids)
    if params.logits_processor is not None:
        logits = params.logits_processor(tuple(plain.token_ids[:position]), logits)
    logits = logits[None]
    row = _row_params(params, ids, len(request.prompt_token_ids), engine)
    scores = process_logits(logits, row, vocab_limit=limit)[0]
    if params.temperature >= GREEDY_BELOW:
        one = torch.ones(1, dtype=torch.int64)
        assert plain.noise is not None
        noise = NoiseIds(one * plain.noise.key, one * len(ids), one * plain.noise.sample, one * plain.noise.segment)
        noisy = scores + gumbel_noise(noise, scores.shape[0])[0]
    else:
        noisy = scores
    noisy = torch.where(scores > float("-inf"), noisy, torch.full_like(noisy, float("-inf")))
    best = torch.topk(noisy, 2).indices.tolist()
    margin = float(noisy[tokens[0]] - noisy[tokens[1]])
    verdict = partial(Tie, request.request_id, plain.index, position, tokens, margin)
    if set(best) == set(tokens) and abs(margin) <= TIE:
        return verdict(True, f"the two best scores lie within {TIE:g}")
    unfiltered = replace(row, top_k=None, top_p=None, min_p=None)
    cut = cut_distance(process_logits(logits, unfiltered, vocab_limit=limit)[0], params)
    if cut <= CUT:
        return verdict(True, f"a filter's cut lies within {CUT:g}: {cut:.1e}")
    return verdict(False, f"two best of the plain run are {best}")


def cut_distance(scores: Tensor, params: SamplingParams) -> float:
    """How near the nearest filter cut is to deciding otherwise. scores [V]: processed logits over the temperature,
    before min-p, top-k and top-p. min-p and top-p in probability, top-k in logits over temperature; inf without
    filters."""
    values = np.sort(scores.double().numpy())[::-1]
    values = values[np.isfinite(values)]
    distance = float("inf")
    if params.temperature < GREEDY_BELOW or len(values) == 0:
        return distance
    p = np.exp(values - values[0])
    p /= p.sum()
    if params.min_p > 0:
        distance = min(distance, float(np.abs(p - params.min_p * p[0]).min()))
        values = values[p >= params.min_p * p[0]]
    if 0 < params.top_k < len(values):
        distance = min(distance, float(values[params.top_k - 1] - values[params.top_k]))
        values = values[: params.top_k]
    if params.top_p < 1:
        q = np.exp(values - values[0])
        distance = min(distance, float(np.abs(np.cumsum(q / q.sum()) - params.top_p).min()))
    return distance


def _row_params(params: SamplingParams, ids: Seq[int], prompt_len: int, engine: RolloutEngine) -> RowParams:
    """RowParams of a single row whose history is `ids`."""
    fields: dict[str, Tensor] = {}
    one = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int32)
    if params.allowed_token_ids is not None:
        bits = np.zeros((engine.model.config.vocab_size + 31) // 32 * 32, np.uint8)
        bits[list(params.allowed_token_ids)] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        fields |= {"allowed_row": zero, "allowed_bits": torch.from_numpy(words)[None]}
    bias = dict(params.logit_bias or {})
    if len(ids) - prompt_len < params.min_tokens:
        bias |= dict.fromkeys(stop_ids(params, engine.eos_ids), float("-inf"))
    if bias:
        fields |= {
            "bias_row": zero, "bias_indptr": torch.tensor([0, len(bias)], dtype=torch.int32),
            "bias_ids": torch.tensor(list(bias), dtype=torch.int64),
            "bias_values": torch.tensor(list(bias.values()), dtype=torch.float32),
        }
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
        fields |= {
            "repetition": one * params.repetition_penalty, "presence": one * params.presence_penalty,
            "frequency": one * params.frequency_penalty, "history_row": zero,
            "history_indptr": torch.tensor([0, len(ids)], dtype=torch.int32),
            "history_ids": torch.tensor(list(ids)), "history_prompt": zero + prompt_len,
            "parent_row": zero - 1, "node_tokens": torch.tensor([ids[-1]]),
        }
    return RowParams(
        temperature=one * params.temperature, top_k=zero + params.top_k, top_p=one * params.top_p,
        min_p=one * params.min_p, **fields,
    )
