"""The checker of the law tests: draws in bulk through the C++ op, chi-square, the test's power. Knows no case.

Expected distributions come from `expected`, float64 numpy written apart from the ops.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from sampling_cases import int32, int64
from scipy import stats
from tlt_kernels import NoiseIds, RowParams, sample

from tlt_engine.rng import noise_key

DRAWS = 2_500_000
CHUNK = 50_000
FAMILY_ALPHA = 1e-4
TESTS = 24  # tests that share FAMILY_ALPHA; test_law.py counts them
ALPHA = FAMILY_ALPHA / TESTS
DETECT_TV = 0.003

Identity = Callable[[int, int], NoiseIds]  # (first draw, count) -> whose noise


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of counts against probs. Cells expecting fewer than 10 are pooled; a count where the probability is 0
    gives 0."""
    counts, probs = counts.ravel().astype(float), probs.ravel() / probs.sum()
    if counts[probs == 0].any():
        return 0.0
    wanted = counts.sum() * probs
    small = wanted < 10
    if 0 < wanted[small].sum() < 10:  # pool with the smallest of the others
        small |= wanted == wanted[~small].min()
    wanted = np.append(wanted[~small], wanted[small].sum())
    got = np.append(counts[~small], counts[small].sum())
    live = wanted > 0
    return float(stats.chisquare(got[live], wanted[live]).pvalue)


def power(cells: int, draws: int, tv: float = DETECT_TV) -> float:
    """Least chance that a law at total variation `tv` fails at ALPHA. Sum (delta^2 / p) >= (sum |delta|)^2 = 4 tv^2, so
    the noncentrality is at least 4 draws tv^2."""
    critical = stats.chi2.isf(ALPHA, cells - 1)
    return float(stats.ncx2.sf(critical, cells - 1, 4 * draws * tv * tv))


def bulk_ids(seed: int, *, sample_index: int = 0, segment: int = 0) -> Identity:
    """Fifty prompts, each at positions 100 .. 100 + CHUNK - 1."""

    def ids(first: int, count: int) -> NoiseIds:
        keys = torch.tensor([noise_key(seed, [p]) for p in range(first // CHUNK, (first + count - 1) // CHUNK + 1)])
        index = torch.arange(first, first + count)
        ones = torch.ones_like(index)
        return NoiseIds(keys[index // CHUNK - first // CHUNK], 100 + index % CHUNK, sample_index * ones, segment * ones)

    return ids


def draw(logits: np.ndarray, ids: Identity, draws: int = DRAWS, **fields: float) -> np.ndarray:
    """`draws` tokens of one row's law. fields: RowParams' scalars (temperature, top_k, ...) and history = (prompt ids,
    output ids)."""
    prompt, output = fields.pop("history", ((), ()))  # type: ignore[misc]
    tokens = np.empty(draws, dtype=np.int64)
    for first in range(0, draws, CHUNK):
        count = min(CHUNK, draws - first)
        params = RowParams(
            **{
                name: torch.full((count,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
                for name, value in ({"temperature": 1.0} | fields).items()
            },
            history_row=torch.zeros(count, dtype=torch.int32), history_indptr=int32(0, len(prompt) + len(output)),
            history_ids=int64(*prompt, *output), history_prompt=int32(len(prompt)),
        )
        rows = torch.from_numpy(logits.astype(np.float32)).expand(count, -1).contiguous()
        tokens[first : first + count] = sample(rows, ids(first, count), params).tokens.numpy()
    return tokens


def expected(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0, history: tuple = ((), ()),
) -> np.ndarray:
    """The processed distribution in float64, in the order of docs/design.md."""
    z = logits.astype(np.float32).astype(np.float64)
    prompt, output = history
    for token in set(prompt) | set(output):
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for token in set(output):
        z[token] -= frequency * output.count(token) + presence
    p = np.exp((z - z.max()) / temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        p[order[int(np.argmax(p[order].cumsum() >= top_p * p.sum())) + 1 :]] = 0
    return p / p.sum()


def joint(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(a * size + b, minlength=size * size).reshape(size, size)
