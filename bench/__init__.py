"""Benchmarks and the records they leave in bench/results. Not part of the installed package."""
