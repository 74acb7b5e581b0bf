"""Support of the GPU kernels on a device, and the limits of the device.

The kernels require NVIDIA GPUs of compute capability 8.0 (Ampere) or later. Devices are queried by index, so that different GPUs in
one machine get suitable configurations.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch

from linattn.ops.compilers import constant_result

OLDEST = (8, 0)
_CURRENT = torch.device("cuda")  # without an index
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Card(NamedTuple):
    """Compute capability, bytes of shared memory per program, and multiprocessors of a device."""

    capability: tuple[int, int]
    shared: int
    multiprocessors: int

    @property
    def generation(self) -> int:
        """The capability as one number: 80 is an A100, 90 an H100, 120 an RTX 5090."""
        return 10 * self.capability[0] + self.capability[1]


INTERPRETER = Card((0, 0), 1 << 40, 1)  # limits of Triton's interpreter


@constant_result
def refusal(device: torch.device, asked: bool = False) -> str | None:
    """Reason why no GPU kernel runs on ``device``, or None. ``asked``: the caller named the backend, as Triton's interpreter requires."""
    found = _found(device, asked)
    return found if isinstance(found, str) else None


def on_gpu(t: torch.Tensor) -> bool:
    """True if ``t`` is on a GPU that the kernels support."""
    return t.is_cuda and refusal(t.device) is None


@constant_result
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a supported GPU; (0, 0) for all other devices."""
    return card(device).capability


def card(device: torch.device) -> Card:
    """Limits of a device; those of the interpreter if the kernels do not run on a GPU."""
    found = _found(device, True)
    return INTERPRETER if isinstance(found, str) else found


def _found(device: torch.device, asked: bool) -> Card | str:
    """The card, or the reason why the kernels do not run on it."""
    if device == _CURRENT:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return _known(device, asked)


@cache
def _known(device: torch.device, asked: bool) -> Card | str:
    if device.type == "xpu":
        return "it needs an NVIDIA GPU, and this is an Intel GPU (XPU)"
    if device.type != "cuda" and not (device.type == "cpu" and asked and INTERPRETED):
        return "it needs an NVIDIA GPU"
    hip: str | None = getattr(torch.version, "hip", None)
    if hip is not None and device.type == "cuda":
        return "it needs an NVIDIA GPU, and this is an AMD GPU (ROCm), which its kernels do not support"
    if (reason := _triton_refusal()) is not None:
        return reason
    if device.type == "cpu":
        return INTERPRETER
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is set, so kernels run on a CPU only"
    return _nvidia(device)


def _triton_refusal() -> str | None:
    """Reason why there is no Triton, or None. It is imported rather than searched for: an installed one may fail to load its library."""
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("triton", None):
            return "the package triton is not installed"
        return f"the package triton cannot be imported: {error}"
    return None


def _nvidia(device: torch.device) -> Card | str:
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here"
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < OLDEST:
        return (
            f"it needs a GPU of compute capability 8.0 (Ampere) or later, and {device} ({properties.name}) has "
            f"{properties.major}.{properties.minor}"
        )
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Card((properties.major, properties.minor), shared, properties.multi_processor_count)
