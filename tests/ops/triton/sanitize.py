"""Every kernel once, on few tokens, under compute-sanitizer: ``python -m tests.ops.triton.sanitize [PART ...]``.

memcheck finds accesses out of bounds, racecheck races of warps on shared memory. Each tensor has its own allocation, so that an
access one byte too far is found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import product

from tests.ops.cases import KINDS

TOOLS = ("memcheck", "racecheck")
TOKENS = 150
DTYPES = ("float32", "bfloat16")  # of operations other than the recurrence
SIZES = {  # K, V, and the dtypes
    "odd": (40, 24, ("bfloat16", "float32")),  # neither a power of two nor a multiple of a block
    "small": (64, 64, ("bfloat16",)),  # sizes of the kernels for Hopper
    "large": (128, 128, ("bfloat16",)),
}


def recurrence(kind: str, size: str) -> None:
    """Forward and backward of every rank of decays with the rule ``kind``, dense and packed, in several segments; decoding.

    In half precision also with all but q, k and v in float32, as in layers.
    """
    import torch

    from linattn.ops import checks
    from linattn.ops.inputs import Given
    from linattn.ops.triton import decode, table
    from tests.ops import cases
    from tests.ops.triton import device

    table.SHORTEST, table.FEWEST = 128, 2
    K, V, dtypes = SIZES[size]
    for rank, dtype in product(("none", "BTH", "BTHK"), dtypes):
        for lengths in (None, (0, 1, TOKENS, 64)):
            call = device.here(cases.make(kind, rank, B=1, T=TOKENS, lengths=lengths, H=2, Hk=1, K=K, V=V)).to(getattr(torch, dtype))
            cases.gradients(call, backend="triton")
            extras = {name: t.float() for name, t in call.tensors.items() if name not in ("q", "k", "v")}
            cases.gradients(call.with_(**extras), backend="triton")
        step = call.tokens(0, 1).set(cu_seqlens=torch.tensor([0, 0, 1, 1, 1], device=device.DEVICE))
        decode.recurrent(checks.call(Given(**step.arguments()))[0])
    synchronize()


def others() -> None:
    """The elementwise scans, Mamba's, the short convolution and the norms, forward and backward, scans packed too."""
    import torch

    import linattn
    from linattn.ops.norms import rms_norm
    from linattn.ops.short_convolution import short_convolution
    from tests.ops.triton.device import DEVICE

    decay, ends = -torch.rand(1, TOKENS, 40, device=DEVICE), torch.tensor([0, 0, 1, TOKENS - 64, TOKENS], device=DEVICE)
    for dtype in map(partial(getattr, torch), DTYPES):
        x = torch.randn_like(decay).to(dtype)
        step, A, B = torch.rand_like(x), -torch.rand(40, 16, device=DEVICE), torch.randn(1, TOKENS, 16, device=DEVICE, dtype=dtype)
        for cu in (None, ends):
            packed = {"cu_seqlens": cu, "backend": "triton"}
            for scan in (linattn.diagonal_scan, linattn.running_max):
                differentiated(lambda a, b, scan=scan, packed=packed: scan(a, b, **packed), decay, x)
            differentiated(lambda *t, packed=packed: linattn.selective_scan(*t, **packed), x, step, A, B, B.clone(), A[:, 0].clone())
        differentiated(lambda *t: short_convolution(*t, backend="triton"), x, torch.randn(40, 1, 4, device=DEVICE, dtype=dtype))
        weight = torch.randn(40, device=DEVICE, dtype=dtype)
        differentiated(lambda *t: rms_norm(*t, eps=1e-6, backend="triton"), x, weight, torch.randn_like(x))
    synchronize()


def steps() -> None:
    """Operations of decoding: steps in place, and linear maps of one and several vectors, split between two programs."""
    import torch

    from linattn.ops.recurrent_step import recurrent_step_
    from linattn.ops.torch.linears import Norm
    from linattn.ops.triton import convolution_step, linears
    from tests.ops.steps import token
    from tests.ops.triton.device import DEVICE

    for dtype in map(partial(getattr, torch), DTYPES):
        new = partial(torch.randn, device=DEVICE, dtype=dtype)
        q, state = new(2, 1, 2, 24), torch.randn(2, 2, 24, 24, device=DEVICE)
        recurrent_step_(state, q, q, q, beta=new(2, 1, 2).sigmoid(), unit=1e-6, backend="triton")
        token(20, 6, heads=2).to(dtype, DEVICE).step("triton")
        convolution_step.step_(new(2, 1, 48), new(2, 3, 48), new(48, 1, 4), new(48), True, 8, 16, 1e-6, True)
        weights, counters = [new(40, 1024), new(24, 1024)], torch.zeros(64, device=DEVICE, dtype=torch.int32)
        for rows, size in ((1, 1024), (3, 256)):
            x, norm = new(rows, 1024), new(size)
            linears.linears(x, weights, [None, new(24)], Norm(norm, 1e-6, size, new(rows, 1024)), None, False, counters=counters)
            linears.linears(x, [weights[0]] * 2, [None] * 2, None, new(rows, 40), True)
    synchronize()


def synchronize() -> None:
    """Synchronise, so that a fault is attributed to its part."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def differentiated(op, *tensors) -> None:
    """One forward and one backward pass."""
    op(*(t.detach().requires_grad_() for t in tensors)).float().sum().backward()


ALONE = {"others": others, "steps": steps}
PARTS = [*(f"{kind} {size}" for kind in KINDS for size in SIZES), *ALONE]


def check(tool: str, part: str) -> tuple[str, str, int, str]:
    """Run ``part`` in a process under ``tool``: both names, its exit status and what was printed."""
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--report-api-errors", "no"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tooled = ["compute-sanitizer", *options] if tool in TOOLS else []
    command = [*tooled, sys.executable, "-m", "tests.ops.triton.sanitize", "--run", part]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return tool, part, done.returncode, done.stdout + done.stderr


def main() -> int:
    if "--run" in sys.argv:
        part = sys.argv[-1]
        ALONE[part]() if part in ALONE else recurrence(*part.split())
        return 0
    parts = sys.argv[1:] or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        print(f"parts must be among {', '.join(PARTS)}, but are {', '.join(unknown)}", file=sys.stderr)
        return 2
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    start, failed = time.monotonic(), 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for tools in (("compiling",), TOOLS):  # the compiler runs outside of the tools
            for done in as_completed(pool.submit(check, tool, part) for tool, part in product(tools, parts)):
                tool, part, code, text = done.result()
                print(f"{time.monotonic() - start:4.0f} s  {tool} {part}: {'clean' if code == 0 else f'exit status {code}'}", flush=True)
                if code:
                    failed += 1
                    print("\n".join(text.splitlines()[-12:]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
