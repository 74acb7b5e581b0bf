"""The delta rule, and states trained at test time."""

FAMILY = "delta rule"
