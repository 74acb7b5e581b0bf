"""Measured results as data, and the programs that make them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def bench(suite: str, options: Sequence[str]) -> int:
    """Run ``linattn bench suite`` and keep the figures in :data:`RESULTS`, unless ``options`` name another file or ask for few."""
    from linattn.cli.main import main

    sys.argv = ["linattn", "bench", suite, *options]  # the command recorded in the results
    kept = () if {"--out", "--quick"} & {option.partition("=")[0] for option in options} else ("--out", str(RESULTS))
    return main(["bench", suite, *options, *kept])


def destination(parser: argparse.ArgumentParser, kind: str, device: str, out: Path) -> tuple[dict[str, Any], Path]:
    """Description of ``device`` and its software, and the file for its figures; a missing part ends the program in one line, first."""
    import torch

    from linattn.bench.files import file_for
    from linattn.bench.gpu.record import about

    if device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, f"{parser.prog} needs an NVIDIA GPU, and torch sees none\n")
    facts = about(device)
    try:
        return facts, file_for(out, kind, facts["card"])
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def allow_refused() -> None:
    """Let fla run, for timing only, the backward pass that it refuses on Hopper under triton 3.4 to 3.7.0 because of wrong results."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number
