"""Other libraries' state-space kernels, and the equations as a loop."""

from __future__ import annotations

import sys
from functools import cache, partial
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from tests.oracles import wheels


@cache
def espnet_s4() -> ModuleType:
    """ESPnet's copy of models/s4/s4.py of state-spaces/s4; other imports from ESPnet are stubs, and einsum replaces opt_einsum.

    One error of the copy is corrected: ``cauchy_naive``, which it uses where there is no CUDA, sums over half of the conjugate pairs
    only, unlike the original and unlike the copy's own steps (test_s4.py shows it).
    """
    einsum, components = ModuleType("opt_einsum"), ModuleType("espnet2.asr.state_spaces.components")
    einsum.contract, einsum.contract_expression = torch.einsum, lambda equation, *shapes: partial(torch.einsum, equation)
    for name in ("Activation", "DropoutNd", "LinearActivation"):
        setattr(components, name, None)
    stand_ins = {name: ModuleType(name) for name in ("espnet2", "espnet2.asr", "espnet2.asr.state_spaces")}
    stand_ins |= {"opt_einsum": einsum, "espnet2.asr.state_spaces.components": components}
    with mock.patch.dict(sys.modules, stand_ins):
        module = wheels.module("espnet==202511", "espnet2/asr/state_spaces/s4.py")
    half = module.cauchy_naive

    def pairs(v: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return half(*(torch.cat([t, t.conj()], -1) if t is not z else t for t in (v, z, w)))

    module.cauchy_naive, module.cauchy_half = pairs, half
    return module


def convolved(u: Tensor, kernel: Tensor) -> Tensor:
    """``u`` [B, T, D] and ``kernel`` [T, D], sum by sum."""
    y = torch.zeros_like(u)
    for lag in range(u.shape[1]):
        y[:, lag:] += kernel[lag] * u[:, : u.shape[1] - lag]
    return y


def decoded(mixer: torch.nn.Module, x: Tensor) -> Tensor:
    """Token by token."""
    state, outputs = None, []
    for t in range(x.shape[1]):
        y, state = mixer(x[:, t : t + 1], state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, 1)
