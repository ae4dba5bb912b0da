"""Sampling by perturbed argmax: process the logits, add the noise of the row's identity, take the best id.

Knows rows, not requests: whoever draws, verifies or scores calls the same op, so that equal identities give equal
tokens. The reference in reference/sampling.py is the specification.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from tlt_kernels import cuda
from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check, check_range
from tlt_kernels.noise import addresses, check_ids, check_vocab
from tlt_kernels.params import NoiseIds, RowParams, SampleResult
from tlt_kernels.reference import noise as reference_noise
from tlt_kernels.reference import sampling as reference

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cpu/row_kernels.h, Dtype
FLOAT_MAX = torch.finfo(torch.float32).max
INT32_MAX = 2**31 - 1
Range = tuple[float, float]
ROW_FIELDS: dict[str, tuple[torch.dtype, Range]] = {
    "temperature": (torch.float32, (0.0, FLOAT_MAX)),
    "top_k": (torch.int32, (0, INT32_MAX)),
    "top_p": (torch.float32, (0.0, 1.0)),
    "min_p": (torch.float32, (0.0, 1.0)),
    "repetition": (torch.float32, (torch.finfo(torch.float32).tiny, FLOAT_MAX)),
    "presence": (torch.float32, (-FLOAT_MAX, FLOAT_MAX)),
    "frequency": (torch.float32, (-FLOAT_MAX, FLOAT_MAX)),
}


def _together(params: RowParams, *names: str) -> bool:
    """True when all of the fields are given, False when none; ValueError otherwise."""
    missing = [name for name in names if getattr(params, name) is None]
    if missing and len(missing) < len(names):
        given = [name for name in names if name not in missing]
        raise ValueError(
            f"params.{missing[0]}: expected a tensor beside {given}, got None; give all of {list(names)} or none"
        )
    return not missing


def _check_index(params: RowParams, name: str, rows: int, device: torch.device, count: int) -> None:
    """params.<name> int32 [R] in [-1, count)."""
    tensor = check(f"params.{name}", getattr(params, name), torch.int32, {"R": rows}, device)
    if device.type == "cpu":
        check_range(f"params.{name}", tensor, -1, count - 1)


def _check_ragged(name: str, indptr: Tensor, items: Tensor, device: torch.device) -> int:
    """Number of lists of an int32 indptr over `items`."""
    check(f"params.{name}", indptr, torch.int32, {"lists + 1": None}, device)
    if device.type == "cpu":
        bounds = indptr.tolist()
        if not bounds or bounds[0] != 0 or bounds[-1] != len(items) or bounds != sorted(bounds):
            raise ValueError(
                f"params.{name}: expected ascending bounds from 0 to {len(items)}, got {bounds[:8]}; "
                "entry i is where list i begins"
            )
    return len(indptr) - 1


def check_params(params: RowParams, rows: int, vocab: int, device: torch.device) -> None:
    """Raises ValueError for a field of the wrong dtype, shape or device, and on the CPU for values out of range (on
    CUDA looking at them would wait for the device)."""
    for name, (dtype, (low, high)) in ROW_FIELDS.items():
        if (tensor := getattr(params, name)) is not None:
            check(f"params.{name}", tensor, dtype, {"R": rows}, device)
            if device.type == "cpu":
                check_range(f"params.{name}", tensor, low, high)
    if _together(params, "allowed_row", "allowed_bits"):
        assert params.allowed_bits is not None
        check("params.allowed_bits", params.allowed_bits, torch.int32, {"A": None, "V/32": -(-vocab // 32)}, device)
        _check_index(params, "allowed_row", rows, device, len(params.allowed_bits))
    if _together(params, "bias_row", "bias_indptr", "bias_ids", "bias_values"):
        assert params.bias_indptr is not None and params.bias_ids is not None and params.bias_values is not None
        check("params.bias_ids", params.bias_ids, torch.int64, {"N": None}, device)
        check("params.bias_values", params.bias_values, torch.float32, {"N": len(params.bias_ids)}, device)
        lists = _check_ragged("bias_indptr", params.bias_indptr, params.bias_ids, device)
        _check_index(params, "bias_row", rows, device, lists)
        if device.type == "cpu":
            check_range("params.bias_ids", params.bias_ids, 0, vocab - 1)
            check_range("params.bias_values", params.bias_values, float("-inf"), FLOAT_MAX)
    if _together(params, "history_row", "history_indptr", "history_ids", "history_prompt"):
        assert params.history_indptr is not None and params.history_ids is not None
        assert params.history_prompt is not None
        check("params.history_ids", params.history_ids, torch.int64, {"N": None}, device)
        lists = _check_ragged("history_indptr", params.history_indptr, params.history_ids, device)
        check("params.history_prompt", params.history_prompt, torch.int32, {"lists": lists}, device)
        _check_index(params, "history_row", rows, device, lists)
        if device.type == "cpu":
            over = params.history_prompt - params.history_indptr.diff()
            check_range("params.history_prompt", params.history_prompt, 0, INT32_MAX)
            check_range("params.history_prompt - history length", over, -INT32_MAX, 0)
    if _together(params, "parent_row", "node_tokens"):
        assert params.parent_row is not None and params.node_tokens is not None
        check("params.node_tokens", params.node_tokens, torch.int64, {"R": rows}, device)
        _check_index(params, "parent_row", rows, device, rows)
        if device.type == "cpu":
            # A parent stands before its child, so the walk to the root ends.
            check_range("params.parent_row - row", params.parent_row - torch.arange(rows), -rows - 1, -1)
    if params.branch_tokens is not None:
        check("params.branch_tokens", params.branch_tokens, torch.int64, {"R": rows, "D": None}, device)
        if params.parent_row is not None:
            raise ValueError(
                "params.branch_tokens: expected None beside parent_row, got both; say once what a row's branch holds"
            )


def _check(
    op: str, logits: Tensor, params: RowParams, vocab_limit: int | None, backend: BackendName | None
) -> tuple[BackendName, int]:
    """The backend and the number of ids that exist."""
    check("logits", logits, tuple(DTYPES), {"R": None, "V": None})
    rows, vocab = logits.shape
    check_vocab(vocab)
    limit = vocab if vocab_limit is None else vocab_limit
    if not 1 <= limit <= vocab:
        raise ValueError(
            f"vocab_limit: expected None or an int in [1, V={vocab}], got {vocab_limit!r}; ids at or above it do not "
            "exist for the sampler"
        )
    check_params(params, rows, vocab, logits.device)
    on_gpu: tuple[BackendName, ...] = ("cuda", "reference") if op == "sample" else ("reference",)
    return choose(op, backend, logits.device, cuda=on_gpu), limit


def param_addresses(params: RowParams) -> tuple[dict[str, int], int]:
    """Addresses by name, and the words in a row of allowed_bits."""
    tensors = {f.name: getattr(params, f.name) for f in fields(params)}
    words = 0 if params.allowed_bits is None else params.allowed_bits.shape[1]
    live = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    if params.branch_tokens is not None:
        live["branch_width"] = params.branch_tokens.shape[1]
    return live, words


def sample(
    logits: Tensor,
    ids: NoiseIds,
    params: RowParams,
    *,
    vocab_limit: int | None = None,
    forced: Tensor | None = None,
    want_raw: bool = False,
    backend: BackendName | None = None,
) -> SampleResult:
    """Draws one token a row: argmax over the surviving ids of z + g, ties to the lowest id (docs/guarantees.md).

    logits fp32 / bf16 / fp16 [R, V]. vocab_limit: ids at or above it do not exist. forced int64 [R] in [0, V): the
    tokens to score instead of drawing; logprob -inf where one is filtered. want_raw: raw_logprobs too. A row's result
    depends on nothing but the row: not on the batch, its place in it, or the number of threads.
    Raises ValueError for wrong shapes, dtypes or ranges. A row with NaN or +inf, or without survivors, is no error:
    token -1, logprob NaN.
    """
    picked, limit = _check("sample", logits, params, vocab_limit, backend)
    rows, vocab = logits.shape
    check_ids(ids, rows)
    check("ids.keys", ids.keys, device=logits.device)
    if forced is not None:
        check("forced", forced, torch.int64, {"R": rows}, logits.device)
        if logits.device.type == "cpu":
            check_range("forced", forced, 0, vocab - 1)
    if picked == "reference":
        noise = reference_noise.gumbel_noise(ids, vocab)
        return reference.sample(logits, noise, params, vocab_limit=limit, forced=forced, want_raw=want_raw)
    if picked == "cuda":
        return cuda.sample(logits, ids, params, vocab_limit=limit, forced=forced, want_raw=want_raw)
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows)
    raw = torch.empty(rows) if want_raw else None
    extension().sample(
        logits.data_ptr(), DTYPES[logits.dtype], rows, vocab, limit, *addresses(ids), *param_addresses(params),
        0 if forced is None else forced.data_ptr(), True, threads(), tokens.data_ptr(), logprobs.data_ptr(),
        0 if raw is None else raw.data_ptr(),
    )
    return SampleResult(tokens, logprobs, raw)


def process_logits(
    logits: Tensor, params: RowParams, *, vocab_limit: int | None = None, backend: BackendName | None = None
) -> Tensor:
    """z over the temperature, fp32 [R, V], -inf where an id is filtered: log_softmax of a row is its processed
    distribution. Greedy rows: temperature 1, no min-p, top-k, top-p. A row with NaN or +inf comes back as NaN.
    Arguments and errors as `sample`."""
    picked, limit = _check("process_logits", logits, params, vocab_limit, backend)
    if picked == "reference":
        return reference.process_logits(logits, params, vocab_limit=limit)
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab)
    extension().process_logits(
        logits.data_ptr(), DTYPES[logits.dtype], rows, vocab, limit, *param_addresses(params), threads(), out.data_ptr()
    )
    return out
