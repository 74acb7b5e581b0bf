"""What a call of the kernels launches, compiled for Hopper without one: ``python -m tests.ops.triton.compiling beta BTHK bfloat16``.

With ``gluon`` as a fourth word, the kernels that a Hopper gets: those in Gluon where there are any. With ``ampere``, for a small
Ampere (sm_86) and the largest heads.

Prints a JSON list of the kernels with their shared memory in bytes and the number of tensor core instructions.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction


class Driver:
    """A device that takes part in compiling alone."""

    def __init__(self, capability: int = 90):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def kernels(kind: str, rank: str, dtype: torch.dtype, how: str = "") -> list[dict]:
    """Of a forward and a backward pass over 2048 tokens of one head, K = V = 128; ``how`` as above."""
    from linattn.ops import checks
    from linattn.ops.triton import hopper
    from linattn.ops.triton import linear_attention as gpu
    from linattn.ops.triton.hopper import choice
    from tests.ops import cases

    hopper._hopper = lambda device: how == "gluon"
    choice.multiprocessors = lambda device: 132
    triton.runtime.driver.set_active(Driver(86 if how == "ampere" else 90))
    compiled: dict[str, dict] = {}
    launch = JITFunction.run

    def run(self, *arguments, warmup=False, **keywords):
        kernel = launch(self, *arguments, warmup=True, **keywords)
        kernel = kernel.result() if isinstance(kernel, FutureKernel) else kernel
        ptx = kernel.asm["ptx"]
        tensor_cores = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
        module = self.fn.__module__.removeprefix("linattn.ops.triton.")
        compiled[kernel.hash] = dict(name=self.fn.__name__, module=module, shared=kernel.metadata.shared, tensor_cores=tensor_cores)
        return kernel

    JITFunction.run = run
    size = 256 if how == "ampere" else 128
    call = cases.make(kind, rank, B=1, T=2048, H=1, K=size, V=size).to(dtype)
    leaves = {n: t.requires_grad_() for n, t in call.tensors.items()}
    out = gpu.chunked(checks.call(**cases.arguments(leaves, call.options))[0])
    (out.o.float().sum() + out.state.sum()).backward()
    return list(compiled.values())


if __name__ == "__main__":
    print(json.dumps(kernels(*sys.argv[1:3], getattr(torch, sys.argv[3]), *sys.argv[4:])))
