"""The CUDA backend's calls: tensors in, raw addresses to tlt_engine._C, on torch's current stream.

Knows neither requests nor which backend is chosen: sampling.py, tree.py and kv.py check arguments and call this.
Nothing here waits for the device, and after a first call of the same size only results are allocated, so all of it can
be captured in a CUDA graph. Shape legend: R packed rows, B requests, V vocabulary, D columns of a walk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from tlt_kernels.backend import current_stream, extension
from tlt_kernels.params import DraftTop, NoiseIds, PackedTrees, RowParams, SampleResult, Walk

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/sample.h, Dtype
MAX_NODES = 128
MAX_VOCAB = 700_000  # 4 bytes of shared memory for every 16 logits, 46 KB beside; 227 KB a block
PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "allowed_row", "allowed_bits", "bias_row", "bias_indptr", "bias_ids",
    "bias_values", "repetition", "presence", "frequency", "history_row", "history_indptr", "history_ids",
    "history_prompt", "parent_row", "node_tokens", "branch_tokens",
)  # the order of csrc/bindings/cuda_sample.cpp


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass
class _Scratch:
    """Device memory that outlives calls. Outgrown buffers stay alive, since a captured graph may point at them; each
    is at least twice the one before, so they add up to less than the last."""

    zeros: dict[str, Tensor] = field(default_factory=dict)
    outgrown: list[Tensor] = field(default_factory=list)

    def get(self, name: str, size: int, device: torch.device) -> Tensor:
        """uint8 [>= size], zero when new."""
        held = self.zeros.get(name)
        if held is not None and len(held) >= size:
            return held
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: expected {size} bytes of scratch before the capture, got "
                f"{0 if held is None else len(held)}; run the op once with the largest sizes, then capture"
            )
        if held is not None:
            self.outgrown.append(held)
            size = max(size, 2 * len(held))
        self.zeros[name] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self.zeros[name]


_scratch: dict[tuple[torch.device, int], _Scratch] = {}
_processors: dict[torch.device, int] = {}


def _scratch_of(device: torch.device) -> _Scratch:
    """One per stream: ops of one stream run in order, so they may share it."""
    return _scratch.setdefault((device, current_stream(device)), _Scratch())


def _processor_count(device: torch.device) -> int:
    if device not in _processors:
        _processors[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _processors[device]


def refuse_wide_vocab(vocab: int) -> None:
    if vocab > MAX_VOCAB:
        raise ValueError(
            f"logits: expected at most {MAX_VOCAB} columns for backend 'cuda', got {vocab}; pass backend='reference'"
        )


def sample(
    logits: Tensor,
    ids: NoiseIds,
    params: RowParams,
    *,
    vocab_limit: int | None = None,
    forced: Tensor | None = None,
    want_raw: bool = False,
    scratch: _Scratch | None = None,
    out: SampleResult | None = None,
) -> SampleResult:
    """tlt_kernels.sample on the device. logits [R, V] with unit stride within a row, any stride between rows.

    out: where the results go, contiguous; its raw_logprobs decides in place of want_raw. Beside the results:
    8 bytes a row, under 3 KB a row of sums, and with penalties 4 bytes times V a history.
    Raises ValueError for a vocabulary over MAX_VOCAB.
    """
    rows, vocab = logits.shape
    refuse_wide_vocab(vocab)
    device = logits.device
    if out is None:
        logprobs = torch.empty(rows, dtype=torch.float32, device=device)
        raw = torch.empty_like(logprobs) if want_raw else None
        out = SampleResult(torch.empty(rows, dtype=torch.int64, device=device), logprobs, raw)
    held = scratch or _scratch_of(device)
    arrived = held.get("arrived", 8 * rows, device)
    workspace = held.get("sample", extension().cuda_sample_workspace(rows, vocab), device)
    addresses, sizes = _rows(logits, ids, params, vocab, held)
    addresses += [
        _address(forced), out.tokens.data_ptr(), out.logprobs.data_ptr(), _address(out.raw_logprobs),
        arrived.data_ptr(), workspace.data_ptr(),
    ]
    extension().cuda_sample(
        addresses, DTYPES[logits.dtype], logits.stride(0), rows, vocab, vocab if vocab_limit is None else vocab_limit,
        *sizes, _processor_count(device), stream=current_stream(device),
    )
    return out


def _rows(
    logits: Tensor, ids: NoiseIds, params: RowParams, vocab: int, held: _Scratch
) -> tuple[list[int], tuple[int, int, int]]:
    """The 26 addresses that rows of either op have, and their sizes: words of a mask, width of branches, histories.
    vocab: target ids."""
    penalised = any(t is not None for t in (params.repetition, params.presence, params.frequency))
    histories = 0
    if penalised and params.history_indptr is not None:
        histories = len(params.history_indptr) - 1
    counts = held.get("counts", 4 * histories * vocab, logits.device)
    addresses = [
        logits.data_ptr(), *(getattr(ids, f.name).data_ptr() for f in fields(ids)),
        *(_address(getattr(params, name)) for name in PARAMS), counts.data_ptr(),
    ]
    words = 0 if params.allowed_bits is None else params.allowed_bits.shape[1]
    width = 0 if params.branch_tokens is None else params.branch_tokens.shape[1]
    return addresses, (words, width, histories)


def noisy_top_k(
    logits: Tensor, ids: NoiseIds, params: RowParams, k: int, *, d2t: Tensor | None = None,
    target_vocab: int | None = None, vocab_limit: int | None = None, noise: bool = True,
) -> DraftTop:
    """tlt_kernels.noisy_top_k on the device. logits [R, C], unit stride within a row, any stride between rows.
    Beside the results: 8 bytes a row and under half a byte a column of every row.
    Raises ValueError for more than MAX_VOCAB columns."""
    rows, columns = logits.shape
    refuse_wide_vocab(columns)
    vocab, device = target_vocab or columns, logits.device
    tokens, draft_ids = (torch.empty(rows, k, dtype=torch.int64, device=device) for _ in range(2))
    scores, logprobs = (torch.empty(rows, k, dtype=torch.float32, device=device) for _ in range(2))
    held = _scratch_of(device)
    arrived = held.get("arrived", 8 * rows, device)
    workspace = held.get("draft", extension().cuda_draft_workspace(rows, columns), device)
    addresses, sizes = _rows(logits, ids, params, vocab, held)
    addresses += [
        _address(d2t), *(t.data_ptr() for t in (tokens, draft_ids, scores, logprobs, arrived, workspace)),
    ]
    extension().cuda_noisy_top_k(
        addresses, DTYPES[logits.dtype], logits.stride(0), rows, columns, vocab,
        vocab if vocab_limit is None else vocab_limit, *sizes, d2t is not None and d2t.dtype == torch.int64, k, noise,
        _processor_count(device), stream=current_stream(device),
    )
    return DraftTop(tokens, draft_ids, scores, logprobs)


def pack_trees(tokens: Tensor, parents: Tensor, node_indptr: Tensor) -> PackedTrees:
    """tlt_kernels.pack_trees on the device; values are the caller's to keep right (checking them would wait)."""
    depths = torch.empty_like(parents)
    ancestors = torch.empty(len(tokens), 2, dtype=torch.int64, device=tokens.device)
    extension().cuda_pack_trees(
        parents.data_ptr(), node_indptr.data_ptr(), len(node_indptr) - 1, depths.data_ptr(), ancestors.data_ptr(),
        stream=current_stream(tokens.device),
    )
    return PackedTrees(tokens, parents, depths, ancestors, node_indptr)


def _zero_trees(rows: int, batch: int, device: torch.device) -> PackedTrees:
    """Views of one tensor: one launch fills it."""
    words = torch.zeros(4 * rows + batch // 2 + 1, dtype=torch.int64, device=device)
    halves = words[3 * rows :].view(torch.int32)
    return PackedTrees(
        words[:rows], halves[:rows], halves[rows : 2 * rows], words[rows : 3 * rows].view(rows, 2),
        halves[2 * rows : 2 * rows + batch + 1],
    )


def tree_from_candidates(
    tokens: Tensor, parents: Tensor, scores: Tensor, cand_indptr: Tensor, budgets: Tensor, *, rows: int, widest: int,
    out: PackedTrees | None = None,
) -> PackedTrees:
    """tlt_kernels.tree_from_candidates on the device. rows: the sum of the budgets, which sizes the result; rows
    beyond node_indptr[B] are zero. widest: the most candidates of one tree (8,000 at most). A request without
    candidates gets no tree. out: where the result goes, contiguous, with room for `rows`; rows beyond node_indptr[B]
    then stay as they were."""
    batch, device = len(budgets), tokens.device
    if not 1 <= widest <= 8000:
        raise ValueError(f"widest: expected 1 to 8000 candidates in a tree, got {widest}; propose fewer")
    out = out or _zero_trees(rows, batch, device)
    workspace = _scratch_of(device).get("tree", extension().cuda_tree_workspace(batch), device)
    extension().cuda_tree_from_candidates(
        tokens.data_ptr(), parents.data_ptr(), scores.data_ptr(), cand_indptr.data_ptr(), budgets.data_ptr(), batch,
        widest, workspace.data_ptr(), out.tokens.data_ptr(), out.parents.data_ptr(), out.depths.data_ptr(),
        out.ancestors.data_ptr(), out.node_indptr.data_ptr(), stream=current_stream(device),
    )
    return out


def verify_tree(sampled: Tensor, trees: PackedTrees, *, steps: int, out: Walk | None = None) -> Walk:
    """The equality walk. steps: columns of the result, at least the deepest node's depth + 1; a walk is cut there.
    out: where the result goes, contiguous. A tree without nodes gets accept_lens 0."""
    batch, device = len(trees.node_indptr) - 1, sampled.device
    walk = out or Walk(
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, steps, dtype=torch.int32, device=device),
        torch.empty(batch, steps, dtype=torch.int64, device=device),
    )
    extension().cuda_verify_tree(
        sampled.data_ptr(), trees.tokens.data_ptr(), trees.parents.data_ptr(), trees.node_indptr.data_ptr(), batch,
        steps, walk.accept_lens.data_ptr(), walk.paths.data_ptr(), walk.tokens.data_ptr(),
        stream=current_stream(device),
    )
    return walk


def _planes(kv: Tensor) -> tuple[int, int, int, int, int]:
    """Address, planes, pages, page size and bytes a row of kv [L, 2, P, page, Hkv, D]."""
    layers, two, pages, page, heads, dim = kv.shape
    return kv.data_ptr(), layers * two, pages, page, heads * dim * kv.element_size()


def commit_kv(kv: Tensor, page_table: Tensor, prefix_lens: Tensor, walk: Walk) -> None:
    """tlt_kernels.commit_kv on the device, all layers in one launch. Slots outside the table or cache are skipped."""
    extension().cuda_commit_kv(
        *_planes(kv), page_table.data_ptr(), page_table.shape[1], prefix_lens.data_ptr(), walk.accept_lens.data_ptr(),
        walk.paths.data_ptr(), walk.paths.shape[1], len(prefix_lens), stream=current_stream(kv.device),
    )


def copy_pages(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """tlt_kernels.copy_pages on the device. Pages outside the cache are skipped."""
    extension().cuda_copy_pages(
        *_planes(kv), src.data_ptr(), dst.data_ptr(), len(src), stream=current_stream(kv.device)
    )


def gather_accepted(rows: Tensor, node_indptr: Tensor, walk: Walk, out: Tensor) -> None:
    """out [B, D, hidden]: out[b, d] = rows[node_indptr[b] + paths[b, d]] for d < accept_lens[b]; the rest stays as it
    was. rows [R, hidden] and out contiguous, of one dtype of at least 2 bytes."""
    extension().cuda_gather_accepted(
        rows.data_ptr(), rows.shape[1] * rows.element_size(), node_indptr.data_ptr(), walk.accept_lens.data_ptr(),
        walk.paths.data_ptr(), walk.paths.shape[1], len(walk.accept_lens), out.data_ptr(),
        stream=current_stream(rows.device),
    )


def advance(walk: Walk, prefix_lens: Tensor, roots: Tensor) -> None:
    """In place after the commit: prefix_lens int32 [B] grows by accept_lens, roots int64 [B] becomes the last emitted
    token (0 where it is -1: that request fails, its row must still index the embedding)."""
    extension().cuda_advance(
        walk.accept_lens.data_ptr(), walk.tokens.data_ptr(), walk.tokens.shape[1], len(prefix_lens),
        prefix_lens.data_ptr(), roots.data_ptr(), stream=current_stream(prefix_lens.device),
    )


def step_inputs(
    node_indptr: Tensor, depths: Tensor, prefix_lens: Tensor, page_table: Tensor, *, page: int, pad_slot: int,
    positions: Tensor, draws: Tensor, slots: Tensor,
) -> None:
    """Writes the next pass's positions, draw positions and KV slots, int64 [R] each (types.StepInputs). Rows beyond
    node_indptr[B] get position 0, draw 1 and slot pad_slot."""
    extension().cuda_step_inputs(
        node_indptr.data_ptr(), depths.data_ptr(), prefix_lens.data_ptr(), page_table.data_ptr(), page_table.shape[1],
        page, pad_slot, len(prefix_lens), len(positions), positions.data_ptr(), draws.data_ptr(), slots.data_ptr(),
        stream=current_stream(positions.device),
    )


def copy_bytes(to: Tensor, source: Tensor, start: int, end: int, device: torch.device) -> None:
    """Bytes [start, end) of `source` to the same place in `to`, uint8 each, one pinned and one on `device`, on its
    current stream. 4 us of host time, where Tensor.copy_ of two slices takes 35."""
    extension().cuda_copy(
        to.data_ptr() + start, source.data_ptr() + start, end - start, stream=current_stream(device)
    )


def copy_block(
    to: Tensor, source: Tensor, start: int, pitch: int, width: int, rows: int, device: torch.device
) -> None:
    """As copy_bytes, for `rows` runs of `width` bytes, the first at `start`, each `pitch` bytes behind the last."""
    extension().cuda_copy_block(
        to.data_ptr() + start, source.data_ptr() + start, pitch, width, rows, stream=current_stream(device)
    )
