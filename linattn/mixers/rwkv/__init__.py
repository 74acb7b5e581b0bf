"""RWKV, version by version."""

FAMILY = "RWKV"
