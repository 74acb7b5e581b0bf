"""Softmax attention to something smaller than the sequence: a memory, a low rank, or fewer tokens."""

FAMILY = "neural memory"
