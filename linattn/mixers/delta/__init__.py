"""The delta rule, and states that are trained as they read."""

FAMILY = "delta rule"
