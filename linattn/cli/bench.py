"""``linattn bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Suite(StrEnum):
    """Groups of measurements."""

    ops = "ops"
    train = "train"
    vision = "vision"


class Device(StrEnum):
    """Device to measure on."""

    cpu = "cpu"
    cuda = "cuda"


SUITES = (
    "ops: operations against other implementations. train: training steps of a whole language model. "
    "vision: image mixers at growing resolutions."
)

TAKES = {
    (Suite.ops, Device.cpu): {"--peers"},
    (Suite.ops, Device.cuda): {"--peers", "--families", "--shapes", "--modes", "--seconds"},
    (Suite.train, Device.cpu): {"--models"},
    (Suite.train, Device.cuda): {"--models", "--peers", "--seconds"},
    (Suite.vision, Device.cpu): {"--models"},
    (Suite.vision, Device.cuda): {"--models"},
}  # options of each suite on each device


def bench(
    suite: Annotated[Suite, typer.Argument(help=SUITES, show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Few and short measurements, to check that everything runs.")] = False,
    device: Annotated[Device | None, typer.Option(help="Device to measure on. [default: cuda if available]", show_default=False)] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help='Compare with these only; "": with none. [default: all]', show_default=False),
    ] = None,
    families: Annotated[str, typer.Option(metavar="A,B,...", help="On a GPU: only these kinds of recurrence.")] = "",
    shapes: Annotated[str, typer.Option(metavar="A,B,...", help="On a GPU: only these shapes, such as B1T32768H16D128.")] = "",
    modes: Annotated[str, typer.Option(metavar="A,B,...", help='On a GPU: only these, such as "forward" or "first call".')] = "",
    models: Annotated[str, typer.Option(metavar="A,B,...", help="Train only these models, or measure only these image mixers.")] = "",
    seconds: Annotated[float | None, typer.Option(min=0, help="On a GPU: stop after this time with the measurements so far.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file as JSON; GPU figures are added to those in it.")
    ] = None,
) -> None:
    """Measure the library's speed on this machine.

    On a CPU the two sides of each comparison alternate in one process, and the medians of their ratios are printed. On a
    GPU each library runs in a process of its own, and only one is timed at a time.
    """
    chosen = None if peers is None else _names(peers)
    given = {
        "--peers": peers, "--families": families or None, "--shapes": shapes or None, "--modes": modes or None,
        "--models": models or None, "--seconds": seconds,
    }  # fmt: skip
    if device is None:
        import torch

        device = Device.cuda if torch.cuda.is_available() else Device.cpu
    if foreign := [option for option, value in given.items() if value is not None and option not in TAKES[suite, device]]:
        raise ValueError(f"{' and '.join(foreign)} cannot be used with {suite.value} on {device.value}")
    match suite, device:
        case Suite.ops, Device.cpu:
            from linattn.bench.ops import run

            run(quick=quick, out=out, only=chosen)
        case Suite.ops, _:
            from linattn.bench.gpu.ops import Request
            from linattn.bench.gpu.ops import run as run_gpu

            request = Request(
                quick=quick, families=_names(families), shapes=_names(shapes), modes=_names(modes), peers=chosen, seconds=seconds
            )
            run_gpu(request, device=device.value, out=out)
        case Suite.vision, _:
            from linattn.bench.vision import run as run_vision

            run_vision(quick=quick, device=device.value, models=_names(models), out=out)
        case Suite.train, Device.cpu:
            from linattn.bench.training import run as run_training

            run_training(quick=quick, models=_names(models), out=out)
        case _:
            from linattn.bench.gpu.train import run as run_train

            run_train(quick=quick, device=device.value, models=_names(models), peers=chosen, seconds=seconds, out=out)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
