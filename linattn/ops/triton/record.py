"""Record of a call: the tensors that it makes, its launches, and their replay or compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.driver import driver

from linattn.ops.triton import fitting
from linattn.ops.triton.fitting import Grid, Tiles

ALIGNED = 256  # bytes
FUSED: dict[str, Any] = {"enable_fp_fusion": True}  # explicit, since Triton 3.9 warns about a change of its default
# Where each lane has one product of a sum over lanes: fused with the first addition, it would differ from lane to lane in its last bit, and
# which lane hands on the sum is open.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}
Tensors = tuple[Any, ...]  # each a tensor or None


def current_stream() -> int:
    gpu = driver.active
    return gpu.get_current_stream(gpu.get_current_device())


class Recorder:
    """Recorder of the tensors made and kernels launched by a body."""

    def __init__(self, like: Tensor, given: Tensors, pauses: Sequence[Callable[[], object]] = ()) -> None:
        self.like, self.given, self.pauses = like, given, pauses
        self.made: list[tuple[Tensor, Callable[..., Tensor]]] = []
        self.launches: list[tuple] = []
        self.paused: list[int] = []  # numbers of launches before pauses

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._make(Tensor.new_empty, shape, dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Make zeros, only for results of the body."""
        return self._make(Tensor.new_zeros, shape, dtype)

    def _make(self, how: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = how(self.like, shape, dtype=dtype)
        self.made.append((t, how))
        return t

    def launch(
        self, kernel: Any, grid: Grid, tensors: Tensors, numbers: tuple[int | float, ...], *, tiles: Tiles | None = None, **constants: Any
    ) -> None:
        """Launch ``kernel``, whose arguments are tensors, then numbers, then constants; ``tiles`` may be halved if they do not fit."""
        compiled, grid = fitting.launch(kernel, grid, (*tensors, *numbers), FUSED | constants, tiles)
        self.launches.append((kernel, compiled, grid, tensors, numbers))

    def pause(self) -> None:
        """Call the next of ``pauses``, for what is not a launch."""
        self.pauses[len(self.paused)]()
        self.paused.append(len(self.launches))


class Compiler(Recorder):
    """Recorder that compiles kernels in place of launches, and allocates fake tensors."""

    def __init__(self, like: Tensor, given: Tensors) -> None:
        super().__init__(like, given)
        self.awaited: set[Future] = set()

    def _make(self, how: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return how(self.like, shape, dtype=dtype, device="meta")

    def pause(self) -> None:
        pass

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        tensors: Tensors,
        numbers: tuple[int | float, ...],
        *,
        tiles: Tiles | None = None,
        **constants: Any,
    ) -> None:
        compiled = kernel.warmup(*tensors, *numbers, grid=grid, **fitting.chosen(kernel, (*tensors, *numbers), FUSED | constants))
        future = getattr(compiled, "future", None)  # None if it was cached
        if future is not None and future not in self.awaited:
            self.awaited.add(future)
            future.add_done_callback(_build_launcher)


def _build_launcher(compiled: Future) -> None:
    """Compile the C launcher of a kernel into the cache; Triton compiles launchers one by one at the first launches."""
    with suppress(Exception):  # an error is reported at the launch
        kernel = compiled.result()
        driver.active.launcher_cls(kernel.src, kernel.metadata)


class Life(NamedTuple):
    """The launches from the first to the last that uses a tensor."""

    first: int
    last: int


class Place(NamedTuple):
    """Memory of a tensor: bytes from ``offset`` on in the ``host``-th result, or in the common allocation if that is None."""

    host: int | None
    offset: int


class Program:
    """Recorded launches without addresses.

    Tensors other than results share memory unless live at the same time: they alias results that later launches write, if they fit,
    else parts of one allocation.
    """

    def __init__(self, recorder: Recorder, results: Tensors) -> None:
        back = {id(t) for t in results}
        wanted = [(t, how) for t, how in recorder.made if id(t) in back]
        spare = [t for t, _ in recorder.made if id(t) not in back]
        self.results = [(how, t.shape, t.dtype) for t, how in wanted]
        lives = _lives(recorder)
        hosts = [(t.nbytes // ALIGNED * ALIGNED, lives[id(t)].first if how is Tensor.new_empty else 0) for t, how in wanted]
        self.places = placed([(_size(t), lives[id(t)]) for t in spare], hosts)
        self.bytes = max((p.offset + _size(t) for t, p in zip(spare, self.places, strict=True) if p.host is None), default=0)
        made = [id(t) for t, _ in wanted]
        self.order = [None if t is None else made.index(id(t)) for t in results]
        places = {id(t): i for i, t in enumerate((*recorder.given, *(t for t, _ in wanted), *spare))}
        places[id(None)] = len(recorder.given) + len(recorder.made)
        launches = []
        for kernel, compiled, grid, tensors, numbers in recorder.launches:
            rest = (None,) * (len(kernel.params) - len(tensors) - len(numbers))  # constants, which the launcher skips
            take = itemgetter(*(places[id(t)] for t in tensors))
            launches.append((compiled, grid, take, (*numbers, *rest)))
        self.launches = [launches[a:b] for a, b in pairwise([0, *recorder.paused, len(launches)])]  # between pauses

    def __call__(self, like: Tensor, addresses: list[int], pauses: Sequence[Callable[[], object]] = ()) -> Tensors:
        results = [make(like, shape, dtype=dtype) for make, shape, dtype in self.results]
        hosts = [t.data_ptr() for t in results]
        addresses += hosts
        spare = like.new_empty(self.bytes, dtype=torch.uint8) if self.bytes else None
        start = 0 if spare is None else spare.data_ptr()
        addresses += [(start if host is None else hosts[host]) + offset for host, offset in self.places]
        addresses.append(0)
        stream = current_stream()
        for i, launches in enumerate(self.launches):
            if i:
                pauses[i - 1]()
            for kernel, grid, take, numbers in launches:
                kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *take(addresses), *numbers)
        return tuple([None if i is None else results[i] for i in self.order])


def _size(t: Tensor) -> int:
    return -(-t.nbytes // ALIGNED) * ALIGNED


def _lives(recorder: Recorder) -> dict[int, Life]:
    """Live range of each tensor of the recorder, by id; unused ones are live throughout."""
    lives: dict[int, Life] = {}
    for i, (_, _, _, tensors, _) in enumerate(recorder.launches):
        for t in tensors:
            lives[id(t)] = Life(lives[id(t)].first if id(t) in lives else i, i)
    throughout = Life(0, len(recorder.launches))
    return {id(t): lives.get(id(t), throughout) for t, _ in recorder.made}


def placed(tensors: list[tuple[int, Life]], hosts: list[tuple[int, int]]) -> list[Place]:
    """Places of ``tensors``, given as size in bytes and live range, the largest first.

    ``hosts`` are results with their sizes and the launches from which on they are in use themselves.
    """
    taken: list[tuple[Place, int, Life]] = []
    found: dict[int, Place] = {}
    rooms: list[tuple[int | None, int | None, int]] = [(host, *of) for host, of in enumerate(hosts)]
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        size, life = tensors[i]
        for host, most, until in (*rooms, (None, None, life.last + 1)):
            if life.last >= until:
                continue
            offset = _gap(size, [(p.offset, p.offset + n) for p, n, other in taken if p.host == host and _meet(life, other)])
            if most is None or offset + size <= most:
                found[i] = Place(host, offset)
                taken.append((found[i], size, life))
                break
    return [found[i] for i in range(len(tensors))]


def _meet(one: Life, other: Life) -> bool:
    return one.first <= other.last and other.first <= one.last


def _gap(size: int, taken: list[tuple[int, int]]) -> int:
    """Smallest offset of ``size`` bytes outside of the spans ``taken``."""
    offset = 0
    for start, end in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def on_device(device: torch.device) -> AbstractContextManager:
    """Context in which ``device`` is current, for launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
