"""Which Gluon kernel takes the place of a Triton one, and with what options. Each is imported when it is first wanted."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, PLAIN, Family

Chosen = tuple[Any, dict[str, Any]]  # a kernel and the options of its launch
TRITON = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])


def prepare(family: Family, decay: Tensor | None, read: Tensor | None, write: Tensor | None) -> Chosen | None:
    """The kernel that prepares chunks, if there is one."""
    if family.rule == DELTA and family.decay != CHANNEL:
        from linattn.ops.triton.hopper import prepare as module

        return module.prepare, module.options()
    if decay is not None and family.decay == CHANNEL:
        from linattn.ops.triton.hopper import prepare_channel, prepare_channel_delta, prepare_channel_erase

        for by_channel in (prepare_channel, prepare_channel_delta):
            if by_channel.fits(family, decay):
                return by_channel.prepare, by_channel.options()
        if prepare_channel_erase.fits(family, decay, read, write):
            return prepare_channel_erase.prepare, prepare_channel_erase.options()
    return None


def distrusted(rule: int, decay: int) -> str | None:
    """Why the Gluon kernels of such a family's gradients are left out under the installed triton, or None.

    The one thing here that goes by a version, since it was measured and a trial would have to run the whole kernel: on an H100 under
    triton 3.9.0 the decay's gradient was off by 6.7 times its bound for the erase rule with decays per channel (bfloat16, K = V = 128),
    and right under 3.6.0, 3.7.1 and 3.8.0. ``python -m benchmarks.tritons`` measures it on a Hopper, these kernels included: once they
    pass there, this function and its calls can go.
    """
    if TRITON >= (3, 9) and (rule, decay) == (ERASE, CHANNEL):
        return f"that of decays per channel with erase came out wrong under triton 3.9, and this is {triton.__version__}"
    return None


def forward(family: Family, size_k: int, size_v: int, output: bool, keep: bool, transition: bool) -> Chosen:
    """The scan of the states."""
    from linattn.ops.triton.hopper import forward as module

    return module.forward, module.options(family, size_k, size_v, output, keep, transition)


def backward(family: Family, size_k: int, size_v: int, local: bool, keep: bool) -> Chosen:
    """The scan of the states' cotangents."""
    from linattn.ops.triton.hopper import backward as module

    return module.backward, module.options(family, size_k, size_v, local, keep)


def gradients(
    family: Family,
    chunk: int,
    columns: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    read: Tensor | None,
    write: Tensor | None,
    do: Tensor,
    decay: Tensor | None,
) -> Chosen | None:  # fmt: skip
    """The gradients of chunks, from so many ``columns`` of values, if there is a kernel for them; per channel, of those that settle."""
    if decay is not None and family.decay == CHANNEL:
        from linattn.ops.triton.hopper import gradients_channel, gradients_channel_delta, gradients_channel_erase

        for by_channel in (gradients_channel, gradients_channel_delta):
            if by_channel.fits(family, chunk, q, k, v, do, decay):
                return by_channel.gradients, by_channel.options(columns)
        known = distrusted(family.rule, family.decay) is None
        if known and gradients_channel_erase.fits(family, chunk, q, k, v, read, write, do, decay):
            return gradients_channel_erase.gradients, gradients_channel_erase.options(k.shape[3], columns)
        return None
    if family.rule == ERASE:
        return None
    from linattn.ops.triton.hopper import gradients as module

    return (module.gradients, module.options(family, k.shape[3], columns)) if module.fits(family, chunk, q, k, v, do) else None


def unsettled(family: Family, device: torch.device) -> tuple[Any, dict[str, Any], int]:
    """The kernel for what ``gradients`` leaves, blocks of channels that do not settle; its options and how many programs share them."""
    from linattn.ops.triton.hopper import gradients_channel_levels, gradients_channel_levels_delta, gradients_channel_levels_erase

    modules: dict[int, Any] = {
        PLAIN: gradients_channel_levels,
        DELTA: gradients_channel_levels_delta,
        ERASE: gradients_channel_levels_erase,
    }
    module = modules[family.rule]
    return module.gradients, module.options(), module.programs(multiprocessors(device))


def multiprocessors(device: torch.device) -> int:
    return gpu.card(device).multiprocessors
