"""The package ``rwkv`` of the authors: single layers of it, in float32 on a CPU, one sequence at a time."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn

from linattn.mixers import Mixer
from tests.oracles import wheels

NONE = [None] * 4  # of the scales of quantised matrices


@cache
def package(*, seven: bool = False) -> ModuleType:
    """Its model file, uncompiled, for version 7 or earlier ones; restores the torch settings that it changes."""
    environment = {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": "1" if seven else "0"}
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch._C._jit_set_autocast_mode(True)
    same = {"script": lambda f: f, "script_method": lambda f: f, "ScriptModule": nn.Module}
    try:
        with mock.patch.dict(os.environ, environment), mock.patch.multiple(torch.jit, **same):
            return wheels._load.__wrapped__(wheels.path("rwkv==0.8.32") / "rwkv/model.py")  # two modules of one file
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before[:3]
        torch._C._jit_set_autocast_mode(before[3])


def norm(x: Tensor) -> Tensor:
    """The weightless layer norm at the start of the package's layers, whose output is our mixers' input."""
    return nn.functional.layer_norm(x, x.shape[-1:])


def scattered(mixer: Mixer, std: float = 0.3, **others: float) -> Mixer:
    """Every parameter away from its special values; ``others`` are the parameters with a width of their own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            p.add_(others.get(name, std) * torch.randn(p.shape, generator=generator))
    return mixer
