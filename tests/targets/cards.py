"""The target cards."""

from __future__ import annotations

from linattn.ops.gpu import Card

KB = 1024
CARDS = {
    "sm_80": Card((8, 0), 163 * KB, 108),  # A100
    "sm_86": Card((8, 6), 99 * KB, 82),  # RTX 3090, A10
    "sm_89": Card((8, 9), 99 * KB, 128),  # RTX 4090, L4, L40S
    "sm_90": Card((9, 0), 227 * KB, 132),  # H100, H200
    "sm_100": Card((10, 0), 227 * KB, 148),  # B200
    "sm_120": Card((12, 0), 99 * KB, 170),  # RTX 5090
}
COLUMNS = 512  # of tensor memory, on cards that have it
