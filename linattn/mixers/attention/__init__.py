"""Softmax attention and its relatives, which keep every token."""

FAMILY = "softmax attention"  # of the mixers here that name none themselves
