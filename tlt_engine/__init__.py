"""tlt_engine: an embeddable rollout engine with exact speculative decoding. Importing it loads no torch."""
