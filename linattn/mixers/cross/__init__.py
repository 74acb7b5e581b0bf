"""Attention from one sequence to another: softmax, and three of its linear forms."""

FAMILY = "kernels"
