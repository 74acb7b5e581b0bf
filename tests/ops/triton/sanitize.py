"""Every kernel once, on few tokens, under compute-sanitizer: ``python -m tests.ops.triton.sanitize [PART ...]``.

memcheck finds what is read or written out of bounds, racecheck what two warps do to shared memory at once. Each tensor has an
allocation of its own here, so that one byte too far is found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product

from tests.ops.cases import KINDS

TOOLS = ("memcheck", "racecheck")
SIZES = {  # K, V, and the dtypes
    "odd": (40, 24, ("bfloat16", "float32")),  # neither a power of two nor a multiple of a block
    "small": (64, 64, ("bfloat16",)),  # what the kernels for Hopper take
    "large": (128, 128, ("bfloat16",)),
}


def recurrence(kind: str, size: str) -> None:
    """Forward and backward of every rank of decays with the rule ``kind``, dense and packed, in several segments; decoding.

    In half precision once more with all but q, k and v in float32, as layers give decays and rates.
    """
    import torch

    from linattn.ops import checks
    from linattn.ops.triton import decode, table
    from tests.ops import cases
    from tests.ops.triton import device

    table.SHORTEST = (128, 128, 128)
    K, V, dtypes = SIZES[size]
    for rank, dtype in product(("none", "BTH", "BTHK"), dtypes):
        for lengths in (None, (0, 1, 150, 64)):
            call = device.here(cases.make(kind, rank, B=1, T=150, lengths=lengths, H=2, Hk=1, K=K, V=V)).to(getattr(torch, dtype))
            cases.gradients(call, backend="triton")
            extras = {name: t.float() for name, t in call.tensors.items() if name not in ("q", "k", "v")}
            cases.gradients(call.with_(**extras), backend="triton")
        decode.recurrent(checks.call(**call.tokens(0, 1).set(cu_seqlens=torch.tensor([0, 0, 1, 1, 1]).cuda()).arguments())[0])
    torch.cuda.synchronize()


def others() -> None:
    """The elementwise scans, Mamba's, the short convolution and the norms, forward and backward."""
    import torch

    import linattn
    from linattn.ops.norms import rms_norm
    from linattn.ops.short_convolution import short_convolution

    decay = -torch.rand(2, 150, 40, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn_like(decay).to(dtype)
        for scan in (linattn.diagonal_scan, linattn.running_max):
            differentiated(lambda a, b, scan=scan: scan(a, b, backend="triton"), decay, x)
        step, A, B = torch.rand_like(x), -torch.rand(40, 16, device="cuda"), torch.randn(2, 150, 16, device="cuda", dtype=dtype)
        differentiated(lambda *t: linattn.selective_scan(*t, backend="triton"), x, step, A, B, B.clone(), A[:, 0].clone())
        differentiated(short_convolution, x, torch.randn(40, 1, 4, device="cuda", dtype=dtype))
        differentiated(lambda *t: rms_norm(*t, eps=1e-6), x, torch.randn(40, device="cuda", dtype=dtype), torch.randn_like(x))
    torch.cuda.synchronize()


def differentiated(op, *tensors) -> None:
    """One forward and one backward pass."""
    op(*(t.detach().requires_grad_() for t in tensors)).float().sum().backward()


PARTS = [*(f"{kind} {size}" for kind in KINDS for size in SIZES), "others"]


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
        recurrence(*of) if len(of := sys.argv[-1].split()) == 2 else others()
        return 0
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    parts = sys.argv[1:] or PARTS
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
