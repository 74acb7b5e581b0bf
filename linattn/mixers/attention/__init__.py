"""Softmax attention and its variants, whose state keeps every token."""

FAMILY = "softmax attention"  # default of the mixers of this package
