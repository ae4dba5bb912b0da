"""The ops of tlt_engine: torch reference (the specification), C++ / CUDA and Triton backends, argument checks."""
