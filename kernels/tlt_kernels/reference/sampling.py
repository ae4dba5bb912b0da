"""Processing of logits and the perturbed argmax in torch: the specification, in the order of docs/design.md.

The noise is an argument, so that tests can inject words and a draw can be recomputed from stored noise. Slow: Python
loops over rows where a row has its own history or lists.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tlt_kernels.params import GREEDY_BELOW, RowParams, SampleResult

NEG_INF = -math.inf


def _value(tensor: Tensor | None, row: int, off: float) -> float:
    return off if tensor is None else float(tensor[row])


def allow(z_V: Tensor, params: RowParams, row: int) -> None:
    if params.allowed_row is None or params.allowed_bits is None or (mask := int(params.allowed_row[row])) < 0:
        return
    bits = params.allowed_bits[mask].long()[:, None] >> torch.arange(32, device=z_V.device)
    z_V[(bits & 1).flatten()[: len(z_V)] == 0] = NEG_INF


def add_bias(z_V: Tensor, params: RowParams, row: int) -> None:
    if params.bias_row is None or (index := int(params.bias_row[row])) < 0:
        return
    assert params.bias_indptr is not None and params.bias_ids is not None and params.bias_values is not None
    begin, end = params.bias_indptr[index : index + 2].tolist()
    for token, value in zip(params.bias_ids[begin:end].tolist(), params.bias_values[begin:end]):
        if token < len(z_V):
            z_V[token] += value


def history(params: RowParams, row: int) -> tuple[list[int], list[int]]:
    """The prompt's ids and the output's ids of a row, its own branch of the draft tree included."""
    prompt: list[int] = []
    output: list[int] = []
    if params.history_row is not None and (index := int(params.history_row[row])) >= 0:
        assert params.history_indptr is not None and params.history_ids is not None
        assert params.history_prompt is not None
        begin, end = params.history_indptr[index : index + 2].tolist()
        cut = begin + int(params.history_prompt[index])
        prompt, output = params.history_ids[begin:cut].tolist(), params.history_ids[cut:end].tolist()
    if params.parent_row is not None:
        assert params.node_tokens is not None
        while (parent := int(params.parent_row[row])) >= 0:
            output.append(int(params.node_tokens[row]))
            row = parent
    elif params.branch_tokens is not None:
        output += params.branch_tokens[row].tolist()
    return prompt, output


def penalise(z_V: Tensor, params: RowParams, row: int) -> None:
    """Repetition over prompt and output: positive logits are divided, others multiplied. Then frequency times the count
    in the output, then presence."""
    repetition = _value(params.repetition, row, 1.0)
    presence, frequency = _value(params.presence, row, 0.0), _value(params.frequency, row, 0.0)
    if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
        return
    prompt, output = history(params, row)
    counts = torch.zeros(len(z_V), device=z_V.device)
    for token in output:
        if 0 <= token < len(z_V):
            counts[token] += 1
    seen = counts > 0
    seen[[token for token in prompt if 0 <= token < len(z_V)]] = True
    z_V[seen] = torch.where(z_V[seen] > 0, z_V[seen] / repetition, z_V[seen] * repetition)
    out = counts > 0
    z_V[out] = z_V[out] - frequency * counts[out] - presence


def filter_row(z_V: Tensor, params: RowParams, row: int) -> None:
    """min-p, top-k, top-p, each on what the one before has left; ties at a cut keep the lower ids."""
    min_p, top_p = _value(params.min_p, row, 0.0), _value(params.top_p, row, 1.0)
    top_k = int(_value(params.top_k, row, 0))
    if min_p > 0:  # p >= min_p * pmax, in log space with one rounding
        z_V[z_V < (z_V.max().double() + math.log(min_p)).float()] = NEG_INF
    order = z_V.sort(descending=True, stable=True).indices  # stable: equal z stand in id order
    if 0 < top_k < len(z_V):
        z_V[order[top_k:]] = NEG_INF
    if top_p < 1:
        mass = torch.softmax(z_V.double(), 0)[order].cumsum(0)
        reached = int((mass >= top_p).int().argmax())  # the first id with which the set reaches p
        z_V[order[reached + 1 :]] = NEG_INF


def process_logits(logits: Tensor, params: RowParams, *, vocab_limit: int | None = None) -> Tensor:
    """fp32 [R, V]: the processed logits over the temperature, -inf where an id is filtered; greedy rows are at
    temperature 1 and unfiltered but for masks, bans and penalties. NaN throughout where the row holds NaN or +inf."""
    out = logits.float().clone()
    for row, z_V in enumerate(out):
        if z_V.isnan().any() or (z_V == math.inf).any():
            z_V.fill_(math.nan)
            continue
        z_V[vocab_limit:] = NEG_INF
        live_V = z_V[:vocab_limit]
        allow(live_V, params, row)
        add_bias(live_V, params, row)
        penalise(live_V, params, row)
        greedy = float(params.temperature[row]) < GREEDY_BELOW
        if not greedy:
            live_V /= params.temperature[row]
        if live_V.max() == math.inf:
            z_V.fill_(math.nan)
        elif not greedy and live_V.max() > NEG_INF:
            filter_row(live_V, params, row)
    return out


def sample(
    logits: Tensor,
    noise: Tensor,
    params: RowParams,
    *,
    vocab_limit: int | None = None,
    forced: Tensor | None = None,
    want_raw: bool = False,
) -> SampleResult:
    """As tlt_kernels.sample, with the noise fp32 [R, V] given."""
    z = process_logits(logits, params, vocab_limit=vocab_limit)
    scores = torch.where(params.temperature[:, None] < GREEDY_BELOW, z, z + noise)
    scores = torch.where(z == NEG_INF, NEG_INF, scores)  # filtered ids are skipped, never -inf + g
    valid = z.max(1).values > NEG_INF  # False for NaN rows too
    lowest_best = (scores == scores.max(1, keepdim=True).values).int().argmax(1)  # torch.max may give any tied id
    tokens = lowest_best if forced is None else forced
    at = tokens[:, None]
    logprobs = torch.log_softmax(z.double(), 1).gather(1, at)[:, 0].float()
    raw = torch.log_softmax(logits.double(), 1).gather(1, at)[:, 0].float() if want_raw else None
    return SampleResult(
        tokens=torch.where(valid, tokens, -1),
        logprobs=logprobs.masked_fill(~valid, math.nan),
        raw_logprobs=None if raw is None else raw.masked_fill(~valid, math.nan),
    )
