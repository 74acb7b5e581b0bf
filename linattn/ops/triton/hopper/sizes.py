"""Sizes that the kernels for Hopper support."""

from __future__ import annotations

CHUNK = 64  # tokens
SIZES = (64, 128)  # of keys and values
WIDEST = SIZES[-1]  # values of a state per program; more are split
ALIGNED = 16  # bytes, TMA's alignment of addresses and strides
