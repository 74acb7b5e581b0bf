"""Measuring on a GPU: our kernels and other libraries', each in a process of its own, one after the other on one card."""
