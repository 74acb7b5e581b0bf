"""Kernels for Hopper's own instructions (TMA, wgmma, warps that specialise), in Gluon. What they do not serve the Triton ones do."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.ops.triton.launch import KNOWN, capability

CHUNK = 64
SIZES = (64, 128)  # of keys and values
ALIGNED = 16  # bytes: what TMA wants of addresses and strides


def fits(sizes: tuple[int, int], like: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the kernels serve keys and values of these ``sizes``, and take all of the tensors [B, T, H, K or V] by TMA."""
    return all(size in SIZES for size in sizes) and all(t is None or _moves(t) for t in (like, *tensors)) and _hopper(like.device)


def parts(k: Tensor, v: Tensor) -> int:
    """Of how many heads the values of one should be taken, for the kernels to serve them.

    A compiler asks too, to which sizes are symbols and no tensor has an address.
    """
    size_k, size_v = k.shape[3], v.shape[3]
    whole = size_v > SIZES[-1] and size_v % SIZES[-1] == 0
    return size_v // SIZES[-1] if whole and size_k in SIZES and _spaced(k) and _spaced(v) and _hopper(v.device) else 1


def _moves(t: Tensor) -> bool:
    return _spaced(t) and t.data_ptr() % ALIGNED == 0


def _spaced(t: Tensor) -> bool:
    strides = (s * t.element_size() for s in t.stride()[1:3])
    return t.dtype == torch.bfloat16 and all(s > 0 and s % ALIGNED == 0 for s in strides)


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) == (9, 0) and KNOWN
