"""Lower bound of a model's memory, checked before allocation, so that impossible sizes give a one-line error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch import nn

from linattn.models import pattern
from linattn.models.block import Block
from linattn.models.config import LMConfig

TRAINED = 16  # bytes of a parameter in training: the weight, its gradient and AdamW's two moments, in float32
FLOAT, HALF = 4, 2


def language_parameters(config: LMConfig) -> int:
    """Estimate the number of parameters of a language model of ``config``, from one block of each kind on the meta device.

    Raises:
        ValueError: for invalid options and sizes, as the model itself, and for a tensor larger than any memory.
    """
    one = one_period(config)
    period, makes = one.layers, dict[str, int]()
    total = (2 - config.tie_embeddings) * config.vocab_size * config.dim
    for layer, make in enumerate(zip(one.mixer_names, one.ffn_names, one.layer_options or [{}] * period, strict=True)):
        if (key := repr(make)) not in makes:
            makes[key] = built_parameters(partial(Block, one, layer))
        total += makes[key] * (config.layers // period + (layer < config.layers % period))
    return total


def one_period(config: LMConfig) -> LMConfig:
    """Return ``config`` with the layers of one period of its patterns, or with all of them if it has options of single layers."""
    mixer_names, ffn_names = pattern.parse(config.mixer, "mixer"), pattern.parse(config.ffn, "ffn")
    period = config.layers if config.layer_options else min(config.layers, math.lcm(len(mixer_names), len(ffn_names)))
    return config if period == config.layers else _shortened(config, period)


def stack_parameters(build: Callable[[int], nn.Module], layers: int) -> int:
    """Count the parameters of ``build(layers)``, a stack of equal layers, from stacks of one and two layers."""
    one, two = built_parameters(lambda: build(1)), built_parameters(lambda: build(2))
    return one + (layers - 1) * (two - one)


def built_parameters(build: Callable[[], nn.Module]) -> int:
    """Count the parameters of ``build()`` on the meta device."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in build().parameters())
    except RuntimeError as error:  # torch: a byte count beyond 64 bits
        raise ValueError(f"one of its tensors would be larger than any memory: {' '.join(str(error).split())}") from None


def require_training(config: LMConfig, *, tokens: int, chunk: int, shards: int = 1) -> None:
    """Check that memory suffices for a training: its parameters, and a lower bound of the tensors saved for the backward pass.

    Args:
        config: the model.
        tokens: tokens of one forward pass.
        chunk: tokens whose logits exist at a time.
        shards: processes that share parameters, gradients and optimizer.

    Raises:
        ValueError: stating the required and the available memory.
    """
    parameters = language_parameters(config)
    kept = HALF * tokens * config.layers * config.dim + FLOAT * min(chunk, tokens) * config.vocab_size  # each block's input, and the logits
    require(
        TRAINED * parameters // shards + kept,
        f"{parameters:,} parameters (dim {config.dim:,}, layers {config.layers:,}) and batches of {tokens:,} tokens",
    )


def require(nbytes: int, what: str) -> None:
    """Check that ``nbytes`` of memory are available for ``what``.

    Raises:
        ValueError: stating both sizes if not.
    """
    there = available()
    if there is not None and nbytes > there:
        raise ValueError(f"{what} need at least {_in_units(nbytes)} of memory, but there are {_in_units(there)}")


def available() -> int | None:
    """Bytes that this process can still allocate, on the accelerator if there is one, else on the host; None if unknown."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    limits = [limit for limit in (_free(), _allowed()) if limit is not None]
    return min(limits, default=None)


def _free() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # Windows


def _allowed() -> int | None:
    """Memory limit of the container."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # "max": no limit
            continue
    return None


def _shortened(config: LMConfig, layers: int) -> LMConfig:
    given = {f.name: getattr(config, f.name) for f in fields(LMConfig)}
    return LMConfig(**{**given, "layers": layers})


def _in_units(nbytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:,} bytes"
