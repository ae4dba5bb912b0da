"""The ops of tlt_engine: torch reference (the specification), C++ / CUDA and Triton backends, argument checks."""

from tlt_kernels.attention import tree_attention
from tlt_kernels.draft import noisy_top_k
from tlt_kernels.kv import commit_kv, copy_pages, write_kv
from tlt_kernels.noise import gumbel_noise, gumbel_noise_at
from tlt_kernels.params import DraftTop, NoiseIds, PackedTrees, RowParams, SampleResult, Walk
from tlt_kernels.sampling import process_logits, sample
from tlt_kernels.tree import pack_trees, tree_from_candidates, verify_tree

__all__ = [
    "DraftTop",
    "NoiseIds",
    "PackedTrees",
    "RowParams",
    "SampleResult",
    "Walk",
    "commit_kv",
    "copy_pages",
    "gumbel_noise",
    "gumbel_noise_at",
    "noisy_top_k",
    "pack_trees",
    "process_logits",
    "sample",
    "tree_attention",
    "tree_from_candidates",
    "verify_tree",
    "write_kv",
]
