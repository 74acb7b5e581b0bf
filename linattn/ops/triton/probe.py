"""Probe for replayed launches under the installed triton: a tiny kernel, launched by Triton and then replayed.

The arguments of a compiled kernel's ``run`` are private to Triton, so ``record.Program`` is tried first. The arguments that Triton
itself passes are compared before that, because a call with wrong ones could crash the process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops.triton import record

SIZE, BLOCK, FACTOR = 48, 32, 0.5
LEADING = 9  # grid, stream, function, packed metadata, launch metadata, two hooks; before the kernel's arguments


@triton.jit
def scale_and_add(x, absent, y, size, one, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    tl.store(y + i, tl.load(x + i, mask=inside) * factor + one, mask=inside)


def _twice(recorder: record.Recorder, x: Tensor) -> record.Tensors:
    """Run two launches with an intermediate tensor, an absent tensor, and numbers with and without Triton's specialisation."""
    between, y = (recorder.empty(SIZE, dtype=torch.float32) for _ in range(2))
    for source, to in ((x, between), (between, y)):
        recorder.launch(scale_and_add, (-(-SIZE // BLOCK), 1, 1), (source, None, to), (SIZE, 1, FACTOR), BLOCK=BLOCK)
    return (y,)


def refusal(device: torch.device) -> str | None:
    """Reason why launches on ``device`` cannot be replayed, or None. Compiles a kernel and synchronizes."""
    try:
        with record.on_device(device):
            first = torch.linspace(-1, 1, SIZE, device=device)
            second = first.flip(0).contiguous()
            recorder = record.Recorder(first, (first,))
            program = record.Program(recorder, _twice(recorder, first))
            if (reason := unlike_ours(recorder)) is not None:
                return reason
            (wanted,) = _twice(record.Recorder(second, (second,)), second)
            (got,) = program(second, [second.data_ptr()])
            right = torch.equal(got, wanted) and torch.equal(got, second * FACTOR**2 + FACTOR + 1)
    except Exception as error:
        return f"replaying a launch fails under triton {triton.__version__}: {short(error)}"
    return None if right else f"a replayed launch gives another result under triton {triton.__version__}"


def unlike_ours(recorder: record.Recorder) -> str | None:
    """Difference between the arguments that Triton passes to a compiled kernel and those of ``record.Program``, or None."""
    kernel, compiled, grid, tensors, numbers = recorder.launches[0]
    seen: list[tuple] = []
    run = compiled.run
    compiled._run = lambda *arguments: seen.append(arguments)  # in place of the launch
    try:
        record.Recorder(tensors[0], ()).launch(kernel, grid, tensors, numbers, BLOCK=BLOCK)
    finally:
        compiled._run = run
    if compiled.run is not run or len(seen) != 1:
        return f"triton {triton.__version__} does not launch by CompiledKernel.run"
    given = (*grid, record.current_stream(), compiled.function, compiled.packed_metadata)
    arguments = (*tensors, *numbers)
    (told,) = seen
    same = len(told) == LEADING + len(kernel.params) and told[: len(given)] == given
    same = same and all(a is b or (not isinstance(b, Tensor) and a == b) for a, b in zip(told[LEADING:], arguments, strict=False))
    return None if same else f"triton {triton.__version__} passes other arguments to a compiled kernel than those that are replayed"


def short(error: Exception) -> str:
    """Type and last line of ``error``; a compiler's message begins with the source."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
