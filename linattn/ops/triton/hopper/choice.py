"""Choice of the Gluon kernel that replaces a Triton one, and of its options. Each is imported on first use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.triton import hopper
from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, HEAD, PLAIN, Family

Chosen = tuple[Any, dict[str, Any]]  # a kernel and the options of its launch


def prepare(family: Family, decay: Tensor | None, read: Tensor | None, write: Tensor | None) -> Chosen | None:
    """The kernel that prepares chunks, if there is one."""
    from linattn.ops.triton.hopper import prepare, prepare_delta, prepare_erase, prepare_head, prepare_plain

    if decay is None or family.decay != CHANNEL:
        return (prepare.prepare, prepare_head.options()) if family.rule == DELTA else None
    if not _suits(family, decay) or (family.rule == ERASE and not (_copies(read) and _copies(write))):
        return None
    module: Any = {PLAIN: prepare_plain, DELTA: prepare_delta, ERASE: prepare_erase}[family.rule]
    return prepare.prepare, module.options()


def _suits(family: Family, decay: Tensor) -> bool:
    """True if the kernels take ``decay`` per channel, whose strides may be 0. Rules that erase read after the token's decay."""
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    return even and decay.dtype in (torch.bfloat16, torch.float32) and (family.rule == PLAIN or not family.before)


def _copies(t: Tensor | None) -> bool:
    """True if 16 bytes of a row can be copied at a time."""
    if t is None or t.dtype != torch.bfloat16:
        return False
    return t.data_ptr() % 16 == 0 and t.stride(1) % 8 == t.stride(2) % 8 == 0 and t.stride(3) == 1


def forward(family: Family, size_k: int, size_v: int, output: bool, keep: bool, transition: bool) -> Chosen:
    """The scan of the states."""
    from linattn.ops.triton.hopper import forward as module
    from linattn.ops.triton.hopper import scans

    return module.forward, scans.forward(family, size_k, size_v, output, keep, transition)


def backward(family: Family, size_k: int, size_v: int, local: bool, keep: bool) -> Chosen:
    """The scan of the states' cotangents."""
    from linattn.ops.triton.hopper import backward as module
    from linattn.ops.triton.hopper import scans

    return module.backward, scans.backward(family, size_k, size_v, local, keep)


def fused() -> Chosen:
    """The scan of the states' cotangents that computes the gradients."""
    from linattn.ops.triton.hopper import fused as module

    return module.fused, module.options()


def fused_channel() -> Chosen:
    """The same with a decay per channel, for chunks that settle."""
    from linattn.ops.triton.hopper import fused_channel as module

    return module.fused_channel, module.options()


def idle(device: torch.device, programs: int) -> str | None:
    """Reason why ``programs``, one per multiprocessor, leave too many of them idle for :func:`fused`, or None."""
    many = multiprocessors(device)
    spare = -programs % many
    return None if 7 * spare <= programs else f"its {programs} programs would leave {spare} of {many} multiprocessors idle"


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
    """The gradients of chunks for ``columns`` values, if there is a kernel; with a decay per channel, of blocks that settle (within the
    range of one product).
    """
    from linattn.ops.triton.hopper import gradients, settled_delta, settled_erase, settled_plain, whole, whole_delta

    if not family.half or chunk != hopper.CHUNK or not hopper.fits((k.shape[3], v.shape[3]), q, k, v, read, write, do):
        return None
    if decay is None or family.decay != CHANNEL:
        if family.rule == DELTA and family.decay == HEAD and k.shape[3] == hopper.WIDEST:  # measured with 128 keys alone
            return gradients.gradients, {"HALVES": True, **whole_delta.options()}
        known = family.rule != ERASE and not family.before
        return (gradients.gradients, whole.options(family, k.shape[3], columns)) if known else None
    if not _suits(family, decay):
        return None
    module: Any = {PLAIN: settled_plain, DELTA: settled_delta, ERASE: settled_erase}[family.rule]
    return gradients.gradients, {"SETTLED": hopper.CHUNK, **module.options(columns)}


def unsettled(family: Family, device: torch.device) -> list[tuple[Any, dict[str, Any], int]]:
    """The kernels for blocks of channels that do not settle as a whole, those whose halves do and others, with their options and the number
    of programs that share them.
    """
    from linattn.ops.triton.hopper import gradients, levels_delta, levels_erase, levels_plain

    if family.decay != CHANNEL:
        return []
    module: Any = {PLAIN: levels_plain, DELTA: levels_delta, ERASE: levels_erase}[family.rule]
    programs = module.programs(multiprocessors(device))
    sizes = (0,) if family.before else (hopper.CHUNK // 2, 0)
    return [(gradients.gradients, {"SETTLED": tokens, **module.options()}, programs) for tokens in sizes]


def multiprocessors(device: torch.device) -> int:
    return gpu.card(device).multiprocessors
