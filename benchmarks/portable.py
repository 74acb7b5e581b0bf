"""Program ``python -m benchmarks.portable``: the kernels for all GPUs on this one, with those for Hopper switched off.

With ``--fla`` in alternation with fla's calls in one process; its autotuners choose for this card. ``--like sm_89`` uses the configurations
and the shared memory limit of another card on this one: the loss by them, not that card's speed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, allow_refused, destination
from linattn.bench.gpu import libraries, measure, timing
from linattn.bench.gpu.cases import FIRST_SHAPE, PASSES, SHAPES, Case, tensors
from linattn.ops import gpu
from linattn.ops.triton import hopper

FAMILIES = ("none", "head", "channel", "rwkv6", "delta", "gated_delta", "kda", "erase")
STRONG = (-0.7, -3.0)  # mean decays of trained models
TURNS = 3
KEY = ("library", "like", "family", "shape", "mode", "decay")


def cases(families: list[str]) -> list[Case]:
    """Both passes of every family over one long sequence and eight short ones, and training with strong decays per channel."""
    usual = [Case.of(family, shape, mode) for family in families for shape in SHAPES[:2] for mode in PASSES]
    channel = [family for family in ("channel", "kda") if family in families]
    return usual + [replace(Case.of(family, FIRST_SHAPE, PASSES[1]), decay=mean) for family in channel for mean in STRONG]


@contextmanager
def limited(like: str | None) -> Iterator[None]:
    """Context in which the kernels for all GPUs run, with the configurations and shared memory of the card ``like``."""
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    before = hopper._hopper, gpu._known, JITFunction.run
    hopper._hopper = lambda device: False
    if like is not None:
        from tests.targets.cards import CARDS

        known, run, most = gpu._known, JITFunction.run, CARDS[like].shared

        def pretended(*asked: Any) -> Any:
            card = known(*asked)
            return card if isinstance(card, str) else CARDS[like]._replace(multiprocessors=card.multiprocessors)

        def checked(self: Any, *arguments: Any, **options: Any) -> Any:
            kernel = run(self, *arguments, **options)
            wanted = 0 if kernel is None or options.get("warmup") else kernel.metadata.shared
            if wanted > most and self.fn.__module__.startswith("linattn"):
                raise OutOfResources(wanted, most, "shared memory")
            return kernel

        gpu._known, JITFunction.run = pretended, checked
    try:
        yield
    finally:
        hopper._hopper, gpu._known, JITFunction.run = before


def measured(case: Case, names: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Median milliseconds and peak memory of ``case`` for each library, in turns."""
    steps: dict[str, list[Callable[[], object]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        run = libraries.LIBRARIES[name](case)
        if run is None:
            continue
        try:
            own = [measure._step(run, tensors(case, "cuda", seed), case.mode) for seed in range(2)]
            timing.milliseconds(own, "cuda", 0.02)  # compiles
            steps[name], found[name] = own, {"ms": None, "peak_mb": None}
        except Exception as error:  # refusals of a library are results
            found[name] = {"ms": None, "peak_mb": None, "failure": type(error).__name__, "message": str(error)[:300]}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, own in steps.items():
            times[name].append(timing.milliseconds(own, "cuda", seconds / TURNS))
    for name, own in steps.items():
        found[name]["ms"] = statistics.median(times[name])
        found[name]["peak_mb"] = timing.peak_megabytes(own[0], "cuda") if "backward" in case.mode else None
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.portable", description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each case of a library is timed")
    parser.add_argument("--fla", action="store_true", help="beside fla's calls")
    parser.add_argument("--refused", action="store_true", help="also time the pass of fla that it refuses here for its results")
    parser.add_argument("--like", metavar="CARD", help="with the limits of another card, as sm_80 or sm_89")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for portable-CARD.json")
    given = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    names, versions = ["linattn"], {"linattn": libraries.find("linattn", "cuda")[0]}
    if given.fla:
        found = libraries.find("fla", "cuda")
        if isinstance(found, str):
            parser.error(found)
        versions["fla"], folders = found
        sys.path[:0] = folders
        measure.quick_tuning()
        names.append("fla")
        if given.refused:
            allow_refused()
    facts, path = destination(parser, "portable", "cuda", given.out)
    with Record(path, KEY, facts) as record, limited(given.like):
        record.body["runs"][-1]["command"] = command("python -m benchmarks.portable", arguments or sys.argv[1:])
        for case in cases(given.families):
            rows = measured(case, names, given.seconds)
            for name, row in rows.items():
                about = {"library": name, "version": versions[name], "like": given.like}
                of_case = {n: x for n, x in asdict(case).items() if n != "decay_dtype"} | {"shape": str(case.shape)}
                record.add({**about, **of_case, **row})
            print(f"{case}: " + ", ".join(f"{name} {row['ms'] and round(row['ms'], 3)}" for name, row in rows.items()), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
