"""A drafter's proposals: the best k of log q + g under the request's own parameters, with g the target's own noise.

The emitted token never depends on a proposal (docs/guarantees.md), so a drafter may look at the noise that the target
will draw with. It must then process its logits as the target will, or the coupling is lost without a sign. Knows rows,
not requests or trees. The reference in reference/draft.py is the specification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_kernels import cuda
from tlt_kernels.backend import BackendName, choose, extension, threads
from tlt_kernels.checks import check, check_range
from tlt_kernels.noise import addresses, check_ids, check_vocab
from tlt_kernels.params import DraftTop, NoiseIds, RowParams
from tlt_kernels.reference import draft as reference
from tlt_kernels.reference import noise as reference_noise
from tlt_kernels.sampling import DTYPES, check_params, param_addresses

MAX_K = 1024


def _check_d2t(d2t: Tensor | None, columns: int, target_vocab: int | None, device: torch.device) -> int:
    """Number of target ids."""
    if d2t is None:
        if target_vocab not in (None, columns):
            raise ValueError(
                f"target_vocab: expected None or C={columns} without d2t, got {target_vocab}; pass the d2t that maps "
                "the draft's columns to target ids"
            )
        return columns
    if target_vocab is None:
        raise ValueError("target_vocab: expected the target's number of ids beside d2t, got None; pass it")
    check("d2t", d2t, (torch.int64, torch.int32), {"C": columns}, device)
    if device.type == "cpu":
        targets = torch.arange(columns) + d2t
        check_range("d2t + draft id", targets, 0, target_vocab - 1)
        if columns > 1 and int(targets.diff().min()) < 1:
            raise ValueError(
                "d2t: expected target ids (draft id + d2t) that rise with the draft id, got some that do not; sort the "
                "draft vocabulary, and the rows of the draft head with it"
            )
    return target_vocab


def noisy_top_k(
    logits: Tensor,
    ids: NoiseIds,
    params: RowParams,
    k: int,
    *,
    d2t: Tensor | None = None,
    target_vocab: int | None = None,
    vocab_limit: int | None = None,
    noise: bool = True,
    backend: BackendName | None = None,
) -> DraftTop:
    """The k best drafts of each row by log q + g, ties to the lower id.

    logits fp32 / bf16 / fp16 [R, C] of a drafter, one row a tree node whose children are wanted. ids: the identity of
    the child: its key, sample, segment and the position it would be drawn at. params: the request's own, in target
    ids, as the sampler takes them: masks, bias and bans, penalties (branch_tokens holds the node's branch), temperature
    (below 1e-5: plain top-k of q, no noise, no filters), min-p, top-k and top-p over the draft's distribution.
    d2t int64 / int32 [C]: column i stands for target id i + d2t[i], ascending; None = the target's own ids. Noise is
    read at target ids. target_vocab: how many target ids there are, required beside d2t. vocab_limit: target ids at or
    above it do not exist. noise=False: the best k of log q. 1 <= k <= 1024.

    Raises ValueError for wrong shapes, dtypes or ranges (values are looked at on the CPU only). A row with NaN or +inf
    is no error: tokens -1.
    """
    check("logits", logits, tuple(DTYPES), {"R": None, "C": None})
    rows, columns = logits.shape
    vocab = check_vocab(_check_d2t(d2t, columns, target_vocab, logits.device))
    limit = vocab if vocab_limit is None else vocab_limit
    if not 1 <= limit <= vocab:
        raise ValueError(f"vocab_limit: expected None or an int in [1, {vocab}], got {vocab_limit!r}; lower it")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: expected an int in [1, {MAX_K}], got {k!r}; a draft tree has at most 128 nodes")
    check_params(params, rows, vocab, logits.device)
    check_ids(ids, rows)
    check("ids.keys", ids.keys, device=logits.device)
    picked = choose("noisy_top_k", backend, logits.device, cuda=("cuda", "reference"))
    if picked == "reference":
        targets = torch.arange(columns, device=logits.device) + (0 if d2t is None else d2t)
        g = reference_noise.gumbel_noise(ids, vocab) if noise else None
        return reference.noisy_top_k(logits, g, params, k, targets, vocab, limit)
    if picked == "cuda":
        return cuda.noisy_top_k(
            logits, ids, params, k, d2t=d2t, target_vocab=vocab, vocab_limit=limit, noise=noise
        )
    tokens, draft_ids = (torch.empty(rows, k, dtype=torch.int64) for _ in range(2))
    scores, logprobs = (torch.empty(rows, k) for _ in range(2))
    extension().noisy_top_k(
        logits.data_ptr(), DTYPES[logits.dtype], rows, vocab, limit, *addresses(ids), *param_addresses(params),
        0 if d2t is None else d2t.data_ptr(), d2t is not None and d2t.dtype == torch.int64, columns, k, noise,
        threads(), tokens.data_ptr(), draft_ids.data_ptr(), scores.data_ptr(), logprobs.data_ptr(),
    )
    return DraftTop(tokens, draft_ids, scores, logprobs)
