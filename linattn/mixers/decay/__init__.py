"""Linear attention whose state fades."""

FAMILY = "linear attention with decay"
