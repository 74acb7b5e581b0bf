"""Time to restore a state from the accelerator's memory, main memory or a disk."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn import mixers
from linattn.data.corpus import cache_folder
from linattn.experiment.study import Result
from linattn.state import State

PLACES = ("accelerator", "memory", "disk")
ROUNDS = 5  # repetitions of restoring, whose median is reported


def filled(mixer: str, context: int, *, layers: int, dim: int, **options: Any) -> State:
    """State of ``layers`` of a bfloat16 model after ``context`` tokens, with random content, in main memory."""
    with torch.device("meta"):
        made = mixers.create(mixer, dim=dim, **options).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        _, fake = made.to_empty(device="cpu")(torch.empty(1, context, dim, dtype=torch.bfloat16), return_state=True)
        sizes = {name: (tuple(t.shape), t.dtype) for name, t in fake.items()}
    layer = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
    for t in layer.values():
        t.uniform_() if t.is_floating_point() else t.fill_(1)
    return State([layer, *({name: t.clone() for name, t in layer.items()} for _ in range(layers - 1))])


def brought(state: State, device: str, folder: Path | None) -> Result:
    """``bytes`` of ``state`` and the median seconds to copy it from "accelerator", "memory" and "disk" to new memory on ``device``.

    To an accelerator it is copied from pinned memory, as in servers. From the disk it is read by :meth:`linattn.State.load` with a
    cold page cache. None for storage that does not exist.
    """
    places: dict[str, Callable[[], State] | None] = {**dict.fromkeys(PLACES), "memory": state.clone}
    if device != "cpu":
        there, pinned = state.to(device), _mapped(state, Tensor.pin_memory)
        places |= {"accelerator": there.clone, "memory": lambda: _mapped(pinned, lambda t: t.to(device, non_blocking=True))}
    if folder is not None:
        path = folder / "state.safetensors"
        state.save(path)
        places["disk"] = lambda: State.load(path, device=device)
    taken: dict[str, list[float]] = {place: [] for place in places}
    for _ in range(1 + ROUNDS):
        for place, bring in places.items():
            if bring is not None:
                if place == "disk":
                    _forget(path)
                taken[place].append(_timed(bring, device))
    return {"bytes": state.nbytes, **{place: statistics.median(each[1:]) if each else None for place, each in taken.items()}}


def _mapped(state: State, function: Callable[[Tensor], Tensor]) -> State:
    return State([{name: function(t) for name, t in layer.items()} for layer in state.layers])


def _timed(bring: Callable[[], State], device: str) -> float:
    begin = time.perf_counter()
    state = bring()  # noqa: F841  (freeing it is no part of bringing it)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _forget(path: Path) -> None:
    """Drop the file, already on the disk, from the system's page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


@contextmanager
def disk() -> Iterator[tuple[Path | None, str]]:
    """A folder on a disk and the name of its file system; None if files are in main memory or cannot be dropped from the page cache."""
    if not hasattr(os, "posix_fadvise"):
        yield None, "this system can't empty its page cache"
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache_folder()) as folder:
        kind = _file_system(Path(folder))
        yield (None if kind in {"tmpfs", "ramfs"} else Path(folder)), kind


def _file_system(path: Path) -> str:
    """Kind of the file system, from the longest mount point above ``path``; "unknown" if the system does not report it."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    above = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(above)[1] if above else "unknown"
