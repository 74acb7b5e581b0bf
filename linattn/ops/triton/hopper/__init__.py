"""Gluon kernels with Hopper's own instructions (TMA, wgmma, warp specialisation). Triton kernels run all other calls."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.triton.hopper.sizes import ALIGNED, SIZES
from linattn.ops.triton.hopper.sizes import CHUNK as CHUNK
from linattn.ops.triton.hopper.sizes import WIDEST as WIDEST
from linattn.ops.triton.launch import capturing

_gluon_refusals: dict[torch.device, str | None] = {}


def fits(sizes: tuple[int, int], like: Tensor, *tensors: Tensor | None) -> bool:
    """True if the kernels support keys and values of these ``sizes``, and TMA can load all of the tensors [B, T, H, K or V]."""
    return unsuited(sizes, like, *tensors) is None and _hopper(like.device)


def unsuited(sizes: tuple[int, int], *tensors: Tensor | None) -> str | None:
    """Reason, on any device, why the kernels do not support keys and values of these ``sizes`` or the tensors, or None."""
    size_k, size_v = sizes
    if size_k not in SIZES or not (size_v in SIZES or size_v % WIDEST == 0):
        return f"they take K of 64 or 128 and V of 64 or a multiple of 128, but K is {size_k} and V {size_v}"
    given = [t for t in tensors if t is not None]
    if any(t.dtype != torch.bfloat16 for t in given):
        return "they take bfloat16 only"
    return None if all(map(_moves, given)) else f"they need addresses and strides that are multiples of {ALIGNED} bytes"


def _moves(t: Tensor) -> bool:
    strides = (s * t.element_size() for s in t.stride()[1:3])
    return t.data_ptr() % ALIGNED == 0 and all(s > 0 and s % ALIGNED == 0 for s in strides)


def _hopper(device: torch.device) -> bool:
    return gpu.capability(device) == (9, 0) and gluon_refusal(device) is None


def gluon_refusal(device: torch.device) -> str | None:
    """Reason why the kernels do not run on ``device``, a Hopper, or None if they do; tested once per process and device, see trial.py."""
    if device not in _gluon_refusals:
        if capturing():
            return "a CUDA graph is being captured, and whether they run was not tested before it"
        _gluon_refusals[device] = _tried(device)
    return _gluon_refusals[device]


def _tried(device: torch.device) -> str | None:
    try:
        from linattn.ops.triton.hopper import names, tma  # noqa: F401  its names count too

        if names.missing:
            return f"triton {triton.__version__} has no {', '.join(names.missing)}, which they are written with"
        from linattn.ops.triton.hopper import trial
    except Exception as error:
        return f"they cannot be imported under triton {triton.__version__}: {error}"
    return trial.refusal(device)
