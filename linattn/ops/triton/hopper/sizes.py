"""The sizes that the kernels for Hopper are written for."""

from __future__ import annotations

CHUNK = 64  # tokens
SIZES = (64, 128)  # of keys and values
WIDEST = SIZES[-1]  # values that one program has of a state; more in so many columns each
ALIGNED = 16  # bytes: what TMA wants of addresses and strides
