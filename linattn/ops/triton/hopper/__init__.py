"""Kernels for Hopper's own instructions (TMA, wgmma, warps that specialise), in Gluon. What they do not serve the Triton ones do."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.triton.launch import KNOWN

CHUNK = 64
SIZES = (64, 128)  # of keys and values
WIDEST = SIZES[-1]  # values that one program has of a state; more in so many columns each
ALIGNED = 16  # bytes: what TMA wants of addresses and strides


def fits(sizes: tuple[int, int], like: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the kernels serve keys and values of these ``sizes``, and take all of the tensors [B, T, H, K or V] by TMA."""
    size_k, size_v = sizes
    served = size_k in SIZES and (size_v in SIZES or size_v % WIDEST == 0)
    return served and all(t is None or _moves(t) for t in (like, *tensors)) and _hopper(like.device)


def _moves(t: Tensor) -> bool:
    strides = (s * t.element_size() for s in t.stride()[1:3])
    return t.dtype == torch.bfloat16 and t.data_ptr() % ALIGNED == 0 and all(s > 0 and s % ALIGNED == 0 for s in strides)


def _hopper(device: torch.device) -> bool:
    return gpu.capability(device) == (9, 0) and KNOWN
