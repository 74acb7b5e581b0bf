"""Softmax attention in which not everybody sees everybody: by a pattern that is fixed, or by one that is learned."""

FAMILY = "fixed patterns"
