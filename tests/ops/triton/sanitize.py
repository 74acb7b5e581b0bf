"""Every kernel once, on few tokens, under compute-sanitizer: ``python -m tests.ops.triton.sanitize [PART ...]``.

memcheck finds accesses out of bounds, racecheck races of warps on shared memory. Each tensor has its own allocation, so that an
access one byte too far is found.

What one warpgroup of a Hopper kernel hands over to another is left out of racecheck's report: the tool does not see that a barrier of
the warpgroup and then one thread's arrival at an mbarrier order what the other threads wrote, and reports even the smallest correct
kernel that does so. ``early`` in ``compiling.py`` finds arrivals without such a barrier in the compiled code. A wait that is missing on the
other side neither finds; ``test_shared.py`` runs these kernels beside another process, which made such faults appear.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import product

from tests.ops.cases import KINDS

TOOLS = {"memcheck": (), "racecheck": ("--racecheck-report", "hazard", "--strip-paths", "no", "--show-backtrace", "no")}
THREAD = r"=+ +(?:Read|Write) Thread \((\d+),0,0\) at (.*)\n"
HAZARD = re.compile(rf"Potential \w+ hazard detected at .*\n{THREAD}{THREAD}")
FOUND = 9  # exit status of a tool that found something
WARPGROUP = 128  # threads
LINES = 12  # shown of what a tool found
TOKENS = 150
DTYPES = ("float32", "bfloat16")  # of operations other than the recurrence
SIZES = {  # K, V, and the dtypes
    "odd": (40, 24, ("bfloat16", "float32")),  # neither a power of two nor a multiple of a block
    "small": (64, 64, ("bfloat16",)),  # sizes of the kernels for Hopper
    "large": (128, 128, ("bfloat16",)),
}


def recurrence(kind: str, size: str) -> None:
    """Forward and backward of every rank of decays with the rule ``kind``, dense and packed, in several segments; as the second of three
    processes that share a row; decoding.

    In half precision also with all but q, k and v in float32, as in layers.
    """
    import torch

    from linattn.ops.triton import decode, linear_attention, table
    from tests.ops import cases
    from tests.ops.triton import device
    from tests.ops.triton.compiling import Second

    table.SHORTEST, table.FEWEST = 128, 2
    K, V, dtypes = SIZES[size]
    for rank, dtype in product(("none", "BTH", "BTHK"), dtypes):
        for lengths in (None, (0, 1, TOKENS, 64)):
            call = device.here(cases.make(kind, rank, B=1, T=TOKENS, lengths=lengths, H=2, Hk=1, K=K, V=V)).to(getattr(torch, dtype))
            cases.gradients(call, backend="triton")
            extras = {name: t.float() for name, t in call.tensors.items() if name not in ("q", "k", "v")}
            cases.gradients(call.with_(**extras), backend="triton")
        if dtype == dtypes[0]:
            shared = call.without("S", "z").set(cu_seqlens=None)
            differentiated(lambda q, call=shared: linear_attention.chunked(inputs(call.with_(q=q)), Second()).o, shared.tensors["q"])
        step = call.tokens(0, 1).set(cu_seqlens=torch.tensor([0, 0, 1, 1, 1], device=device.DEVICE))
        decode.recurrent(inputs(step))
    synchronize()


def inputs(call):
    """The checked arguments of ``call``."""
    from linattn.ops import checks
    from linattn.ops.inputs import Given

    return checks.call(Given(**call.arguments()))[0]


def others() -> None:
    """The elementwise scans, Mamba's, the short convolution, norms and gates, forward and backward, scans packed too."""
    import torch

    import linattn
    from linattn.ops.gated import KERNELS
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
        differentiated(lambda gate, x: KERNELS["triton"](gate, x, True), x, torch.randn_like(x))
    synchronize()


def steps() -> None:
    """Operations of decoding: steps, in place and deferred, linear maps of one and several vectors, split between two programs, with
    quantised matrices too, and copies of rows.
    """
    import torch

    from linattn.models.quantised import Format
    from linattn.ops.recurrent_step import recurrent_step_
    from linattn.ops.torch.linears import Norm
    from linattn.ops.triton import convolution_step, decode, deferred, linears, quantised
    from linattn.ops.triton.rows import Table
    from linattn.quantization.rounding import rounded
    from tests.ops import cases
    from tests.ops.steps import token
    from tests.ops.triton.device import DEVICE, here
    from tests.ops.triton.test_deferred import steps as deferred_steps

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
        for kind in KINDS:
            small = cases.make(kind, "BTHK", B=2, T=1, H=2, Hk=1, K=8, V=8)
            decode.recurrent(inputs(here(small.to(dtype))))
        for kind, rank in product(("plain", "beta"), ("none", "BTH", "BTHK")):
            deferred_steps(cases.make(kind, rank, B=2, T=4, H=2, Hk=1, K=24, V=20), 3, deferred.step_, dtype)
        for form, rows in product((Format("int8"), Format("int4", 32)), (1, 3, 20)):
            matrices = [rounded(torch.randn(40, 96, device=DEVICE), form), new(24, 96)]
            quantised.linears(new(rows, 96), matrices, [None, new(24)], Norm(new(96), 1e-6, 96), None, False, (), None)
            quantised.linears(new(rows, 96), matrices[:1] * 2, [None] * 2, None, new(rows, 40), True, (), None)
            quantised.rows(matrices[0], torch.tensor([39, 0], device=DEVICE), dtype)
        memory, packed = new(5, 4100), torch.zeros(2, 4100 * dtype.itemsize, device=DEVICE, dtype=torch.uint8)
        table = Table([memory], [0])
        table.pack(packed, 3)
        table.unpack(packed, 0)
        table.move(4, 2)
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
    options = ["--error-exitcode", str(FOUND), "--print-limit", "0", "--report-api-errors", "no"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tooled = ["compute-sanitizer", "--tool", tool, *options, *TOOLS[tool]] if tool in TOOLS else []
    command = [*tooled, sys.executable, "-m", "tests.ops.triton.sanitize", "--run", part]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    code, text = done.returncode, done.stdout + done.stderr
    if tool == "racecheck" and code == FOUND:
        text = races(text)
        code = FOUND if text else 0
    return tool, part, code, text


def races(text: str) -> str:
    """Each pair of places in racecheck's report and how often it races, but for pairs of warpgroups of a Hopper kernel."""
    pairs: Counter[tuple[str, str]] = Counter()
    found = HAZARD.findall(text)
    if not found or len(found) != text.count("hazard detected at"):
        return f"racecheck's report is not understood:\n{text}"
    for thread, place, other, other_place in found:
        if int(thread) // WARPGROUP == int(other) // WARPGROUP or "/hopper/" not in place + other_place:
            pairs[place, other_place] += 1
    return "\n".join(f"{n} hazards: {place} and {other}" for (place, other), n in reversed(pairs.most_common()))


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
        pending = {pool.submit(check, "compiling", part) for part in parts}  # the compiler runs outside of the tools
        while pending:
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            for done in ended:
                tool, part, code, text = done.result()
                said = f"exit status {code}" if code else "clean" if tool in TOOLS else "done"
                print(f"{time.monotonic() - start:4.0f} s  {tool} {part}: {said}", flush=True)
                if code:
                    failed += 1
                    print("\n".join(text.splitlines()[-LINES:]), flush=True)
                elif tool not in TOOLS:
                    pending |= {pool.submit(check, each, part) for each in TOOLS}
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
