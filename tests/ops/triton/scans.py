"""Sequences and bounds of the tests of scans."""

from collections.abc import Sequence

import torch
from torch import Tensor

LENGTHS = (0, 3, 0, 6, 1, 4, 0)
LIMIT = {torch.float32: (1e-5, 1e-5), torch.float16: (0.001, 0.005), torch.bfloat16: (0.004, 0.015)}  # of values, of gradients


def check_replays(graph: torch.cuda.CUDAGraph, results: Sequence[Tensor]) -> None:
    """Assert that three replays of ``graph`` give equal ``results``."""
    before = None
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        now = [t.clone() for t in results]
        assert before is None or all(map(torch.equal, now, before))
        before = now
