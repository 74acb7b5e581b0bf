"""Kernels for Hopper's own instructions (TMA, wgmma, warps that specialise), in Gluon. What they do not serve the Triton ones do."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from linattn.ops.triton.launch import KNOWN

CHUNK = 64
SIZES = (64, 128)  # of keys and values
ALIGNED = 16  # bytes: what TMA wants of addresses and strides


def fits(sizes: tuple[int, int], like: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the kernels serve keys and values of these ``sizes``, and take all of the tensors [B, T, H, K or V] by TMA."""
    return all(size in SIZES for size in sizes) and all(t is None or _moves(t) for t in (like, *tensors)) and _hopper(like.device)


def parts(k: Tensor, v: Tensor) -> int:
    """Of how many heads the values of one should be taken, for the kernels to serve them."""
    n, rest = divmod(v.shape[3], SIZES[-1])
    return n if n > 1 and rest == 0 and fits((k.shape[3], SIZES[-1]), k, v) else 1


def _moves(t: Tensor) -> bool:
    strides = (s * t.element_size() for s in t.stride()[1:3])
    return t.dtype == torch.bfloat16 and t.data_ptr() % ALIGNED == 0 and all(s > 0 and s % ALIGNED == 0 for s in strides)


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and KNOWN
