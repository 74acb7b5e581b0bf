"""Benchmarks of this library and others, interleaved in one process."""
