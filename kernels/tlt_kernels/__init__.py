"""The ops of tlt_engine: torch reference (the specification), C++ / CUDA and Triton backends, argument checks."""

from tlt_kernels.attention import tree_attention
from tlt_kernels.kv import commit_kv, copy_pages, write_kv
from tlt_kernels.tree import pack_trees, tree_from_candidates, verify_tree

__all__ = [
    "commit_kv",
    "copy_pages",
    "pack_trees",
    "tree_attention",
    "tree_from_candidates",
    "verify_tree",
    "write_kv",
]
