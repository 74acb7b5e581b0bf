"""Compilation for Hopper, without one, of the kernels that a call launches: ``python -m tests.ops.triton.compiling beta BTHK bfloat16``.

A fourth word ``gluon`` selects the kernels used on a Hopper, in Gluon where there are any; ``wide``, those for 256 values;
``parts``, those of a process with a part of the sequence; ``busy``, those for enough heads to keep the card busy.
With ``ampere``, for a small Ampere (sm_86) and the largest heads. Without a word, the kernel of hopper/trial.py.

Prints a JSON list of the kernels with their shared memory in bytes, the number of tensor core instructions, barriers whose memory is
reused, early arrivals at barriers, and ptxas' report: registers and spilled bytes of a thread, and whether wgmma products are
serialised. Uses the installed triton, or the first on PYTHONPATH.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction


class Driver:
    """A device only for compilation."""

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


class Second:
    """The second of three processes, which receives zeros from the others."""

    rank, ranks, joined, passes = 1, 3, True, True

    def gather(self, t: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: t.new_zeros(self.ranks, *t.shape)


def not_alone(ptx: str) -> list[int]:
    """Addresses of barriers [8 bytes] whose memory is reused for another barrier or for arguments of warps."""
    bases = dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx), 0)
    places = {name: int(offset) for name, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx) if base in bases}
    barriers = [(bases | places)[name] for name in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)]
    stores = re.findall(r"st\.shared\.(?:v(\d)\.)?b(\d+)\s+\[global_smem\+?(\d*)\]", ptx)
    spans = [(int(at or 0), int(at or 0) + int(n or 1) * int(bits) // 8) for n, bits, at in stores]
    return [at for at in barriers if barriers.count(at) > 1 or any(first < at + 8 and at < end for first, end in spans)]


def early(ptx: str) -> list[str]:
    """Arrivals at an mbarrier with accesses to shared memory since the last barrier of the warps, each with the last access.

    One thread arrives for its warps, which orders their accesses only behind such a barrier; the compiler has to add it. Reads the
    instructions in the order of the text, one part of a specialised kernel after the other.
    """
    found = []
    for part in ptx.split("barrier.sync"):  # where specialised warps start and end
        barrier = "bar.sync" if "bar.sync" in part else "bar.warp.sync"  # the latter in parts of one warp
        access = None
        for line in map(str.strip, part.splitlines()):
            if barrier in line:
                access = None
            elif re.search(r"\b(?:ld|st)(?:\.shared|matrix)", line):
                access = line
            elif access and re.search(r"mbarrier\.arrive\.(?!expect_tx)", line):
                found.append(f"{line} after {access}")
    return found


def resources(ptx: str, arch: int) -> dict[str, int | bool]:
    """Report of this triton's ptxas on a kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", "-o", "/dev/null", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return dict(registers=int(registers), spill_stores=spilled[0], spill_loads=spilled[1], serialized="are serialized" in said)


def trial() -> list[dict]:
    """The tiny kernel that decides whether those for Hopper run."""
    from linattn.ops.triton import launch
    from linattn.ops.triton.hopper import trial

    triton.runtime.driver.set_active(Driver(90))
    x, weights, y = trial._example(torch.device("cpu"))
    compiled = trial.trial.warmup(x, weights, y, C=trial.SIZE, num_warps=4, grid=(1,), **launch.FUSED)
    ptx = compiled.asm["ptx"]
    return [dict(name="trial", not_alone=not_alone(ptx), early=early(ptx), **resources(ptx, 90))]


def kernels(kind: str, rank: str, dtype: torch.dtype, how: str = "") -> list[dict]:
    """Kernels of a forward and a backward pass over 2048 tokens of one head, K = V = 128; ``how`` as above."""
    from linattn.ops import checks
    from linattn.ops.inputs import Given
    from linattn.ops.triton import hopper, launch
    from linattn.ops.triton import linear_attention as gpu
    from linattn.ops.triton.hopper import choice
    from tests.ops import cases

    hopper._hopper = lambda device: how in ("gluon", "wide", "parts", "busy")
    choice.multiprocessors = lambda device: 1 if how == "busy" else 132
    launch.replay_refusal = lambda device: None
    triton.runtime.driver.set_active(Driver(86 if how == "ampere" else 90))
    compiled: dict[str, dict] = {}
    launch_kernel = JITFunction.run

    def run(self, *arguments, warmup=False, **keywords):
        kernel = launch_kernel(self, *arguments, warmup=True, **keywords)
        kernel = kernel.result() if isinstance(kernel, FutureKernel) else kernel
        ptx = kernel.asm["ptx"]
        tensor_cores = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
        module = self.fn.__module__.removeprefix("linattn.ops.triton.")
        if kernel.hash not in compiled:
            compiled[kernel.hash] = dict(
                name=self.fn.__name__, module=module, shared=kernel.metadata.shared, tensor_cores=tensor_cores, not_alone=not_alone(ptx),
                early=early(ptx), **resources(ptx, kernel.metadata.target.arch),
            )  # fmt: skip
        return kernel

    JITFunction.run = run
    size_k, size_v = {"ampere": (256, 256), "wide": (128, 256)}.get(how, (128, 128))
    of_decay = dtype if how == "busy" and rank == "BTHK" else None  # one kernel for the backward pass takes no other
    call = cases.make(kind, rank, B=1, T=2048, H=1, K=size_k, V=size_v).to(dtype, of_decay)
    leaves = {n: t.requires_grad_() for n, t in call.tensors.items()}
    group = Second() if how == "parts" else None
    out = gpu.chunked(checks.call(Given(**cases.arguments(leaves, call.options)))[0], group)
    (out.o.float().sum() + out.state.sum()).backward()
    return list(compiled.values())


if __name__ == "__main__":
    print(json.dumps(kernels(*sys.argv[1:3], getattr(torch, sys.argv[3]), *sys.argv[4:]) if sys.argv[1:] else trial()))
