"""Time the loss of training, forward and backward, beside Liger's and cut-cross-entropy's: ``python -m benchmarks.cross_entropy``.

Hidden states are bfloat16, weights float32 under autocast, as in ``linattn train``. A library that is not installed is skipped. Errors
of gradients are relative to those in float32. Results are written to results/cross-entropy-CARD.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import RESULTS, destination, positive
from linattn.bench.gpu.timing import milliseconds, peak_megabytes
from linattn.models.loss import TokenLoss, chunk_of
from linattn.report.folder import write_text

Loss = Callable[[Tensor, Any, Tensor], Tensor]  # hidden [N, D], head with weight [V, D], targets [N] -> mean loss
PACKAGES = {"Liger": "liger-kernel", "cut-cross-entropy": "cut-cross-entropy"}


def whole(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
    """Loss of all logits at once, as transformers computes it."""
    return F.cross_entropy(F.linear(hidden, head.weight).float(), targets)


def ours(compiled: bool, chunk: int | None = None) -> Loss:
    """The trainer's loss; ``chunk``: tokens at a time, None: the default."""

    def loss(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
        size = chunk or chunk_of(len(hidden), len(head.weight))
        return TokenLoss(size, aligned=True, compile=compiled)(hidden[None], head, targets[None])

    return loss


def liger() -> Loss:
    """Liger's fused linear cross entropy."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, head, targets: fused(head.weight.to(hidden.dtype), hidden, targets)


def cut() -> Loss:
    """Apple's cut cross entropy."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    return lambda hidden, head, targets: linear_cross_entropy(hidden, head.weight.to(hidden.dtype), targets)


WAYS: dict[str, Callable[[], Loss]] = {
    "all logits": lambda: whole,
    "all logits, compiled": lambda: torch.compile(whole),
    "linattn": lambda: ours(False),
    "linattn, compiled": lambda: ours(True),
    "linattn, compiled, 4,096 tokens at a time": lambda: ours(True, 4096),
    "Liger": liger,
    "cut-cross-entropy": cut,
}


def measured(
    make: Callable[[], Loss], inputs: tuple[Tensor, Any, Tensor], exact: list[Tensor], device: str, seconds: float
) -> dict[str, Any]:
    """Milliseconds, peak memory and errors of the gradients of one way."""
    hidden, head, targets = inputs
    loss = make()

    def step() -> None:
        hidden.grad = head.weight.grad = None
        with torch.autocast(device, torch.bfloat16):
            value = loss(hidden, head, targets)
        value.backward()

    step()
    found = zip((hidden.grad, head.weight.grad), exact, strict=True)
    errors = [((g.float() - e).norm() / e.norm()).item() for g, e in found]
    ms = milliseconds([step], device, seconds)
    return {"ms": ms, "peak_mb": peak_megabytes(step, device), "hidden_error": errors[0], "weight_error": errors[1]}


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cross_entropy", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=positive, default=32768)
    parser.add_argument("--dim", type=positive, default=1024)
    parser.add_argument("--vocabularies", default=[8192, 32000, 128256], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    facts, path = destination(parser, "cross-entropy", asked.device, asked.out)
    rows: list[dict[str, Any]] = []
    for vocabulary in asked.vocabularies:
        torch.manual_seed(0)
        hidden = torch.randn(asked.tokens, asked.dim, device=asked.device, dtype=torch.bfloat16, requires_grad=True)
        head: Any = nn.Linear(asked.dim, vocabulary, bias=False, device=asked.device)
        head.soft_cap = None
        targets = torch.randint(vocabulary, (asked.tokens,), device=asked.device)
        wide = hidden.detach().float().requires_grad_()
        exact = list(torch.autograd.grad(ours(False, 2048)(wide, head, targets), (wide, head.weight)))
        for name, make in WAYS.items():
            row = {"way": name, "tokens": asked.tokens, "dim": asked.dim, "vocabulary": vocabulary, "version": _version(name)}
            try:
                row |= measured(make, (hidden, head, targets), exact, asked.device, asked.seconds)
            except ModuleNotFoundError as error:
                print(f"without {name}: {error}")
                continue
            except (RuntimeError, torch.OutOfMemoryError) as error:
                row["failure"] = str(error).split("\n")[0][:200]
            rows.append(row)
            print(row, flush=True)
            body = {"schema": "linattn.cross-entropy", "command": "python -m benchmarks.cross_entropy", **facts, "rows": rows}
            write_text(path, json.dumps(body, indent=1) + "\n")
    return 0


def _version(name: str) -> str:
    try:
        return version(PACKAGES.get(name, "linattn"))
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
