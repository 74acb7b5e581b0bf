"""Forward and backward passes in a CUDA graph, each compared with the first: ``python -m tests.ops.triton.shared FAMILY SECONDS``.

Several such processes at once share the GPU, which preempts kernels and resumes them later.
"""

from __future__ import annotations

import sys
import time

import torch

from linattn.bench.gpu import cases, libraries

SHAPE = cases.Shape(256, 256, 1, 64)  # many short sequences, as in the training of small models
TOGETHER = 20  # replays between comparisons


def main(family: str, seconds: float) -> int:
    """Return the number of comparisons that failed."""
    x = cases.tensors(cases.Case.of(family, SHAPE, "forward+backward"), "cuda", 0)
    wanted = [t.requires_grad_() for name, t in x.items() if name != "constant"]
    cotangent = torch.randn_like(x["v"])

    def step() -> list[torch.Tensor]:
        o = libraries.ours(x)
        return [o.detach(), *torch.autograd.grad(o, wanted, cotangent)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            first = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    end, looks, different = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        for _ in range(TOGETHER):
            graph.replay()
        torch.cuda.synchronize()
        looks += 1
        different += not all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    print(f"{family}: {looks * TOGETHER} passes, {different} of {looks} looks differ", flush=True)
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])) > 0)
