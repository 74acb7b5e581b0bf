"""Softmax attention and its relatives: what keeps every token."""

FAMILY = "softmax attention"  # of the mixers here that name none themselves
