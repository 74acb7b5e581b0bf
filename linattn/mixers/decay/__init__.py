"""Linear attention with decay."""

FAMILY = "linear attention with decay"
