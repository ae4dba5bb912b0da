"""From a Batch and its draft trees to the tensors of one target pass. Host work only: numpy views of static buffers.

Shape legend: R rows, Rd rows of decode trees (they come first), B requests in the step, D of them decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from tlt_kernels.backend import extension
from tlt_kernels.params import NoiseIds, PackedTrees, RowParams
from torch import Tensor

from tlt_engine.engine.sample import Sample, stop_ids
from tlt_engine.scheduler.sequence import Batch, Chunk, Sequence
from tlt_engine.speculation.tree import DraftTree
from tlt_engine.types import StepInputs


class StepBuffers:
    """Static host buffers, one set an engine, so that tensor addresses do not move between steps of equal shape."""

    def __init__(self, max_rows: int, max_requests: int, max_pages: int) -> None:
        self.max_rows, self.max_requests = max_rows, max_requests
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64)
        self.positions = torch.zeros(max_rows, dtype=torch.int64)
        self.slots = torch.zeros(max_rows, dtype=torch.int64)
        self.ancestors = torch.zeros(max_rows, 2, dtype=torch.int64)
        self.page_table = torch.zeros(max_requests, max_pages, dtype=torch.int32)
        self.prefix_lens = torch.zeros(max_requests, dtype=torch.int32)
        self.node_indptr = torch.zeros(max_requests + 1, dtype=torch.int32)
        self.causal = torch.zeros(max_requests, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


@dataclass(frozen=True)
class PackedStep:
    """inputs: for the target. trees: the D decode trees, packed. nodes[i]: rows of decode i. prompt_rows: for each
    chunk whose logits are wanted, its row range within the logits."""

    inputs: StepInputs
    trees: PackedTrees
    nodes: np.ndarray
    prompt_rows: list[tuple[Chunk, slice]]

    @property
    def decode_rows(self) -> int:
        return int(self.trees.tokens.shape[0])


def pack_step(batch: Batch, trees: Seq[DraftTree], buffers: StepBuffers, page_size: int) -> PackedStep:
    """trees[i] belongs to batch.decodes[i]; batch.chunks follow as causal requests."""
    sequences = [d.seq for d in batch.decodes] + [c.seq for c in batch.chunks]
    nodes = np.fromiter((len(t) for t in trees), np.int64, len(trees))
    counts = np.concatenate([nodes, np.fromiter((c.count for c in batch.chunks), np.int64, len(batch.chunks))])
    requests, rows, decode_rows = len(sequences), int(counts.sum()), int(nodes.sum())
    indptr = np.zeros(requests + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    owner = np.repeat(np.arange(requests), counts)
    local = np.arange(rows) - indptr[owner]

    prefix = np.fromiter((s.kv_len for s in sequences), np.int64, requests)
    pages = buffers.page_table.numpy()[:requests]
    for b, seq in enumerate(sequences):
        pages[b, : len(seq.pages)] = seq.pages

    token_ids = buffers.token_ids.numpy()[:rows]
    token_ids[:decode_rows] = [token for tree in trees for token in tree.tokens]
    for b, chunk in enumerate(batch.chunks, start=len(trees)):
        start = chunk.seq.kv_len
        token_ids[indptr[b] : indptr[b + 1]] = chunk.seq.token_ids[start : start + chunk.count]

    packed = _pack_trees(trees, token_ids[:decode_rows], indptr[: len(trees) + 1])
    depths = local.copy()
    depths[:decode_rows] = packed.depths.numpy()
    logical = prefix[owner] + local
    buffers.positions.numpy()[:rows] = prefix[owner] + depths
    buffers.slots.numpy()[:rows] = pages[owner, logical // page_size].astype(np.int64) * page_size + logical % page_size
    ancestors = buffers.ancestors.numpy()[:rows]
    ancestors[:decode_rows] = packed.ancestors.numpy()
    ancestors[decode_rows:] = 0
    buffers.prefix_lens.numpy()[:requests] = prefix
    buffers.node_indptr.numpy()[: requests + 1] = indptr
    causal = buffers.causal.numpy()[:requests]
    causal[: len(trees)], causal[len(trees) :] = 0, 1

    logit_rows = [np.arange(decode_rows)]
    prompt_rows: list[tuple[Chunk, slice]] = []
    at = decode_rows
    for b, chunk in enumerate(batch.chunks, start=len(trees)):
        if chunk.seq.prompt_logits:
            logit_rows.append(np.arange(indptr[b], indptr[b + 1]))
            prompt_rows.append((chunk, slice(at, at + chunk.count)))
            at += chunk.count
    inputs = StepInputs(
        token_ids=buffers.token_ids[:rows],
        positions=buffers.positions[:rows],
        slots=buffers.slots[:rows],
        page_table=buffers.page_table[:requests],  # entries beyond a request's pages are stale and never read
        prefix_lens=buffers.prefix_lens[:requests],
        node_indptr=buffers.node_indptr[: requests + 1],
        ancestors=buffers.ancestors[:rows],
        causal=buffers.causal[:requests],
        logit_rows=torch.from_numpy(np.concatenate(logit_rows)),
    )
    return PackedStep(inputs, packed, nodes, prompt_rows)


def _pack_trees(trees: Seq[DraftTree], tokens: np.ndarray, indptr: np.ndarray) -> PackedTrees:
    from tlt_kernels import pack_trees

    parents = np.fromiter((p for tree in trees for p in tree.parents), np.int32, len(tokens))
    return pack_trees(
        torch.from_numpy(tokens.copy()), torch.from_numpy(parents), torch.from_numpy(indptr.astype(np.int32))
    )


def noise_ids(sequences: Seq[Sequence], packed: PackedStep) -> NoiseIds:
    """Identity of the draw at each decode row: the token drawn at a row stands one position after the row's own."""

    def spread(values: Seq[int]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.int64), packed.nodes))

    return NoiseIds(
        keys=spread([s.key for s in sequences]),
        positions=packed.inputs.positions[: packed.decode_rows] + 1,
        samples=spread([s.sample for s in sequences]),
        segments=spread([s.segment for s in sequences]),
    )


def row_params(samples: Seq[Sample], packed: PackedStep, eos_ids: frozenset[int], vocab_size: int) -> RowParams:
    """Processing parameters of the decode rows; a step that no sample uses is left out."""
    params = [s.request.params for s in samples]
    if all(p.unfiltered for p in params) and not any(p.min_tokens and _owes_tokens(s) for s, p in zip(samples, params)):
        temperature = np.repeat(np.array([p.temperature for p in params], np.float32), packed.nodes)
        return RowParams(temperature=torch.from_numpy(temperature))

    def spread(values: list, dtype: type) -> Tensor:  # numpy: torch would wake its threads for this
        return torch.from_numpy(np.repeat(np.array(values, dtype), packed.nodes))

    fields: dict[str, Tensor] = {}
    for name, off, dtype in (
        ("top_k", 0, np.int32), ("top_p", 1.0, np.float32), ("min_p", 0.0, np.float32),
    ):
        if any(getattr(p, name) != off for p in params):
            fields[name] = spread([getattr(p, name) for p in params], dtype)
    if any(p.allowed_token_ids is not None for p in params):
        fields |= _allowed(samples, packed, vocab_size)
    if any(p.logit_bias or _owes_tokens(s) for s, p in zip(samples, params)):
        fields |= _biases(samples, packed, eos_ids)
    if any((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0) for p in params):
        fields |= _penalties(samples, packed)
    return RowParams(temperature=spread([p.temperature for p in params], np.float32), **fields)


class Lanes:
    """The samples that decode together, from one pass to the next while none of them comes or goes, and what all these
    passes share. by_ids: ids and lengths alone decide where they end. plain: their rows need no parameters but the
    temperature. native: their lengths, pages and noise in the extension (csrc/cpu/step.h), which applies stops and
    packs."""

    def __init__(self, samples: Seq[Sample], eos_ids: frozenset[int]) -> None:
        self.samples = samples
        self.sequences = [s.seq for s in samples]
        params = [s.request.params for s in samples]
        self.by_ids = all(s.text is None for s in samples)
        self.plain = all(p.unfiltered for p in params) and not any(map(_owes_tokens, samples))
        self.needs_host = any(map(needs_host, samples))
        self.wants_raw = any(p.raw_logprobs for p in params)
        self.native = extension().Lanes()
        for s, p in zip(samples, params):
            seq = s.seq
            self.native.add(
                seq.pages, kv_len=seq.kv_len, key=seq.key, sample=seq.sample, segment=seq.segment,
                temperature=p.temperature, length=len(seq.token_ids), end=s.end, stops=sorted(stop_ids(p, eos_ids)),
            )


def needs_host(sample: Sample) -> bool:
    """In the middle of a pass, between the logits and the walk."""
    params = sample.request.params
    wants_top = params.logprobs is not None and params.logprobs > 0
    return sample.forced is not None or params.logits_processor is not None or wants_top


def _owes_tokens(sample: Sample) -> bool:
    return sample.seq.output_len < sample.request.params.min_tokens


def _allowed(samples: Seq[Sample], packed: PackedStep, vocab_size: int) -> dict[str, Tensor]:
    index: list[int] = []
    masks: list[np.ndarray] = []
    for sample in samples:
        ids = sample.request.params.allowed_token_ids
        index.append(-1 if ids is None else len(masks))
        if ids is not None:
            bits = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
            bits[list(ids)] = 1
            masks.append(np.packbits(bits, bitorder="little").view(np.int32))
    return {
        "allowed_row": torch.from_numpy(np.repeat(np.array(index, np.int32), packed.nodes)),
        "allowed_bits": torch.from_numpy(np.stack(masks)),
    }


def _biases(samples: Seq[Sample], packed: PackedStep, eos_ids: frozenset[int]) -> dict[str, Tensor]:
    """Each sample may have two lists: its logit_bias, and that plus the bans of min_tokens, which hold for the rows
    whose branch has not yet reached min_tokens."""
    ids: list[int] = []
    values: list[float] = []
    indptr = [0]

    def add(bias: dict[int, float]) -> int:
        if not bias:
            return -1
        ids.extend(bias)
        values.extend(bias.values())
        indptr.append(len(ids))
        return len(indptr) - 2

    rows = np.empty(packed.decode_rows, np.int32)
    depths = packed.trees.depths.numpy()
    end = 0
    for sample, count in zip(samples, packed.nodes):
        start, end = end, end + int(count)
        params = sample.request.params
        bias = dict(params.logit_bias or {})
        rows[start:end] = add(bias)
        if _owes_tokens(sample):
            banned = add(bias | dict.fromkeys(stop_ids(params, eos_ids), float("-inf")))
            owing = sample.seq.output_len + depths[start:end] < params.min_tokens
            rows[start:end][owing] = banned
    return {
        "bias_row": torch.from_numpy(rows),
        "bias_indptr": torch.tensor(indptr, dtype=torch.int32),
        "bias_ids": torch.tensor(ids, dtype=torch.int64),
        "bias_values": torch.tensor(values, dtype=torch.float32),
    }


def _penalties(samples: Seq[Sample], packed: PackedStep) -> dict[str, Tensor]:
    index: list[int] = []
    history: list[int] = []
    indptr: list[int] = [0]
    prompt: list[int] = []
    for sample in samples:
        p = sample.request.params
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0):
            index.append(-1)
            continue
        index.append(len(prompt))
        history.extend(sample.seq.token_ids)
        indptr.append(len(history))
        prompt.append(sample.seq.prompt_len)

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), packed.nodes))

    params = [s.request.params for s in samples]
    parents = packed.trees.parents.numpy()
    starts = np.repeat(np.cumsum(packed.nodes) - packed.nodes, packed.nodes)
    return {
        "repetition": spread([p.repetition_penalty for p in params]),
        "presence": spread([p.presence_penalty for p in params]),
        "frequency": spread([p.frequency_penalty for p in params]),
        "history_row": torch.from_numpy(np.repeat(np.array(index, np.int32), packed.nodes)),
        "history_indptr": torch.tensor(indptr, dtype=torch.int32),
        "history_ids": torch.tensor(history, dtype=torch.int64),
        "history_prompt": torch.tensor(prompt, dtype=torch.int32),
        "parent_row": torch.from_numpy(np.where(parents < 0, -1, parents + starts).astype(np.int32)),
        "node_tokens": packed.trees.tokens,
    }
