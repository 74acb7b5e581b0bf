"""Cross attention: softmax, and three linear forms."""

FAMILY = "kernels"
