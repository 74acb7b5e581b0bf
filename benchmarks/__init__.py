"""Measured results, as data, and what makes them."""

import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def bench(suite: str, options: Sequence[str]) -> int:
    """Run ``linattn bench suite`` and keep the figures in :data:`RESULTS`, unless ``options`` name another file or ask for few."""
    from linattn.cli.main import main

    sys.argv = ["linattn", "bench", suite, *options]  # what the results name as their command
    kept = () if {"--out", "--quick"} & {option.partition("=")[0] for option in options} else ("--out", str(RESULTS))
    return main(["bench", suite, *options, *kept])
