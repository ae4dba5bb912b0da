"""Triton backends of the ops. Nothing here is imported unless it is asked for: Triton is an optional extra."""
