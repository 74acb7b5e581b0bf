"""Benchmarks of this library and others, in turns, in one process."""
