"""CUDA graphs of the target pass: which sizes exist, which are kept, how one is captured. Knows no requests."""
