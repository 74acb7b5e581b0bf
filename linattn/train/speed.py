"""Speed of a training: floating-point operations per token, model FLOPs utilisation and memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from linattn.mixers import cost
from linattn.models import LMConfig

# Peak operations per second of dense bfloat16 matrix products, from the vendor's data sheets; the first matching name counts.
PEAKS = {
    "B300": 2.25e15, "B200": 2.25e15, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
    "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


@dataclass(frozen=True)
class Meter:
    """Cost of one training token and peak speed of all devices of the run.

    Args:
        token_flops: operations of one token, forward and backward, without recomputation for checkpointed activations.
        peak_flops: peak operations per second of all devices; None if unknown, as for a CPU.
        cuda: measure the memory of the current GPU; False: of the process.
    """

    token_flops: float
    peak_flops: float | None
    cuda: bool

    def measured(self, tokens_per_second: float) -> dict[str, float]:
        """Return ``tokens_per_second``, ``memory_gb`` (peak so far) and, if the peak speed is known, ``mfu``: FLOPs utilisation, 0 to 1."""
        found = {"tokens_per_second": tokens_per_second, "memory_gb": self.memory() / 1e9}
        return found if self.peak_flops is None else {**found, "mfu": tokens_per_second * self.token_flops / self.peak_flops}

    def memory(self) -> int:
        """Peak number of bytes in use; 0 if unknown."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        try:
            import resource
        except ImportError:  # Windows
            return 0
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


def meter(config: LMConfig, context: int, device: torch.device, processes: int) -> Meter:
    """Build the meter for training ``config`` on sequences of ``context`` tokens."""
    cuda = device.type == "cuda"
    peak = peak_of(torch.cuda.get_device_name(device)) if cuda else None
    return Meter(token_flops(config, context), None if peak is None else peak * processes, cuda)


def token_flops(config: LMConfig, context: int) -> float:
    """Count the operations of one training token, forward and backward: three times :func:`linattn.cost` plus the head."""
    known: dict[str, float] = {}
    total = 2.0 * config.vocab_size * config.dim
    for layer, names in enumerate(zip(config.mixer_names, config.ffn_names, strict=True)):
        feed = {name: value for name, value in config.ffn_options_of(layer).items() if value is not None}
        for name, options in zip(names, (config.options_of(layer), feed), strict=True):
            key = f"{name} {options!r}"
            if name != "none" and key not in known:
                known[key] = cost(name, dim=config.dim, tokens=context, **options).flops / context
            total += known.get(key, 0.0)
    return 3 * total


def peak_of(name: str) -> float | None:
    """Look up the peak operations per second of the GPU ``name``; None if :data:`PEAKS` does not list it."""
    return next((peak for known, peak in PEAKS.items() if all(word in name for word in known.split())), None)
