"""State spaces."""

FAMILY = "state spaces"
