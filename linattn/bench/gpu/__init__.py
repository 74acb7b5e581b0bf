"""Benchmarks on a GPU: our kernels and other libraries', each in its own process, one after the other on one card."""
