"""Sparse softmax attention, by a fixed or a learned pattern."""

FAMILY = "fixed patterns"
