"""Every kernel once, on few tokens, under compute-sanitizer: ``python -m tests.ops.triton.sanitize``.

memcheck finds what is read or written out of bounds, racecheck what two warps do to shared memory at once. Each tensor has an
allocation of its own here, so that one byte too far is found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from itertools import product

TOOLS = ("memcheck", "racecheck")
DTYPES = ("bfloat16", "float32")
SIZE = dict(K=40, V=24)  # neither a power of two nor a multiple of a block


def everything() -> None:
    """Forward and backward of every rule and rank, dense and packed, in several segments; decoding; the elementwise scans."""
    import torch

    import linattn
    from linattn.ops import checks
    from linattn.ops.triton import decode, table
    from tests.ops import cases
    from tests.ops.triton import device

    table.SHORTEST = (128, 128, 128)
    for kind, rank, dtype in product(cases.KINDS, ("none", "BTH", "BTHK"), DTYPES):
        for lengths in (None, (0, 1, 150, 64)):
            call = device.here(cases.make(kind, rank, B=1, T=150, lengths=lengths, H=2, Hk=1, **SIZE)).to(getattr(torch, dtype))
            cases.gradients(call, backend="triton")
        decode.recurrent(checks.call(**call.tokens(0, 1).set(cu_seqlens=torch.tensor([0, 0, 1, 1, 1]).cuda()).arguments())[0])
    decay = -torch.rand(2, 150, 40, device="cuda")
    for scan, x in product((linattn.diagonal_scan, linattn.running_max), (torch.randn_like(decay), torch.randn_like(decay).bfloat16())):
        leaves = [decay.clone().requires_grad_(), x.clone().requires_grad_()]
        scan(*leaves, backend="triton").float().sum().backward()
    torch.cuda.synchronize()


def main() -> int:
    if "--run" in sys.argv:
        everything()
        return 0
    command = [sys.executable, "-m", "tests.ops.triton.sanitize", "--run"]
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    subprocess.run(command, check=True)  # compiles, outside of the tools
    failed = []
    for tool in [name for name in TOOLS if name in sys.argv] or TOOLS:
        start = time.monotonic()
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--report-api-errors", "no"]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code = subprocess.run(["compute-sanitizer", *options, *command], env=environment, check=False).returncode
        failed += [tool] if code else []
        print(f"{tool}: {'clean' if code == 0 else f'exit status {code}'}, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
