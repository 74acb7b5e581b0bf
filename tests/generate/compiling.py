"""Compilation, without a GPU, of a captured step's launches on a Hopper: ``python -m tests.generate.compiling``.

Prints a JSON list of the kernels: name, number of triggers of the next launch and of waits for the last one, and of loads and
prefetches before that.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from tests.ops.triton.compiling import Driver


class OnGpu(torch.Tensor):
    """Tensor that reports a GPU as device."""

    is_cuda = True  # type: ignore[assignment]


def kernels() -> list[dict]:
    from linattn.ops import checks, gpu
    from linattn.ops.inputs import Given
    from linattn.ops.torch.deferred import empty
    from linattn.ops.torch.linears import Norm
    from linattn.ops.triton import convolution_step, decode, deferred, launch, linears

    triton.runtime.driver.set_active(Driver(90))
    gpu.capability = lambda device: (9, 0)
    launch.replay_refusal = lambda device: "there is nothing to replay"
    compiled, run = [], JITFunction.run

    def compile_only(self, *arguments, warmup=False, **keywords):
        kernel = run(self, *arguments, warmup=True, **keywords)
        ptx = (kernel.result() if isinstance(kernel, FutureKernel) else kernel).asm["ptx"]
        before = ptx.partition("griddepcontrol.wait")[0]
        facts = {"starts": ptx.count("griddepcontrol.launch_dependents"), "waits": ptx.count("griddepcontrol.wait")}
        compiled.append({"name": self.fn.__name__, **facts, "loads": len(re.findall(r"(ld|prefetch)\.global", before))})

    JITFunction.run = compile_only

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    torch.empty = lambda *shape, dtype, device, make=torch.empty: make(*shape, dtype=dtype).as_subclass(OnGpu)
    vector, constant = torch.zeros(16), half(256)
    finish = [[], [("add", vector), ("softplus", None), ("mul", vector)], [("log_sigmoid", None), ("div", 16.0)]]
    counters = torch.zeros(64, dtype=torch.int32)
    for rows in (1, 64):
        x, weights = half(rows, 256), [half(512, 256), half(16, 256), half(96, 256)]
        linears.linears(x, weights, [None, None, half(96)], Norm(constant, 1e-5, 256), None, False, finish, counters)
        linears.linears(x, [half(512, 256)] * 2, [None] * 2, Norm(constant, 1e-5, 256), None, True, (), counters)
        linears.linears(x, [half(256, 256)], [None], Norm(half(64), 1e-5, 64, x), x, False, (), counters)
    x = half(1, 1, 384).as_subclass(OnGpu)
    convolution_step.step_(x, half(1, 3, 384), half(384, 1, 4), None, True, 128, 256, 1e-6, True)
    convolution_step.step_(x, half(1, 3, 384), half(384, 1, 4), None, True, 0, 0, 0.0, False)  # an earlier launch may write to the state
    q, v, state = half(1, 1, 2, 64), half(1, 1, 4, 64), torch.zeros(1, 4, 64, 64)
    decay = torch.zeros(1, 1, 4)
    inputs, _ = checks.call(Given(q, q, v, decay=decay, beta=decay, initial_state=state, return_state=True))
    object.__setattr__(inputs, "initial", state.as_subclass(OnGpu))
    decode.step_(inputs, overlapped=True)
    wide = torch.zeros(1, 4, 128, 128)
    for rank, rule in (((1, 1, 4), {"beta": decay}), ((1, 1, 4, 128), {})):
        q, v = half(1, 1, 2, 128), half(1, 1, 4, 128)
        call = checks.call(Given(q, q, v, decay=torch.zeros(rank), **rule, initial_state=wide, return_state=True))[0].flat
        deferred.step_(call._replace(v=v.as_subclass(OnGpu)), empty(call, 1, 12, torch.zeros(1, dtype=torch.int64)))
    from linattn.ops.triton import rows

    rows.rows_kernel[(1, 1)](torch.zeros(1, 5, dtype=torch.int64), torch.zeros(16, dtype=torch.uint8), 1, 2, 16, BLOCK=4096, WORD=4,
                             PACK=False, UNPACK=False, MOVE=True, CLEAR=True, num_warps=8)  # fmt: skip
    return compiled


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kernels()) + "\n")
