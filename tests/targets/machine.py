"""Simulated machine with a GPU: linattn chooses its launches for it, and each is compiled in a child process.

The tensors are on the CPU. Nothing runs, so results are meaningless; a crash of the compiler ends only a child.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from linattn.ops import gpu
from linattn.ops.gpu import Card
from linattn.ops.triton import launch
from tests.targets.cards import COLUMNS

COMPILERS_SECONDS = 300  # time limit of one compilation
_compile = JITFunction.run


class Kernel(NamedTuple):
    """A compiled kernel: bytes of shared memory, registers and bytes of spills of a thread, columns of tensor memory.

    ``ir`` and ``ptx`` are hashes of its IR and PTX, and ``options`` its constants, see fingerprint.py.
    """

    name: str
    module: str
    warps: int
    stages: int
    shared: int = 0
    registers: int = 0
    spills: int = 0
    columns: int = 0
    failure: str = ""
    ir: str = ""
    ptx: str = ""
    options: str = ""

    def refusal(self, card: Card) -> str | None:
        """Reason why it does not run on ``card``, or None."""
        if self.failure:
            return f"{self.name} does not compile: {self.failure}"
        if self.shared > card.shared:
            return f"{self.name} wants {self.shared} bytes of shared memory, and there are {card.shared}"
        if self.columns > COLUMNS:
            return f"{self.name} wants {self.columns} columns of tensor memory, and there are {COLUMNS}"
        return None


class Driver:
    """A device only for compilation, with separate caches in each kernel."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.generation, 32)

    def get_current_device(self) -> int:
        return self.card.generation

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Machine:
    """Compiles launches, ``jobs`` kernels at a time; ``kernels`` are the results, one per kind of launch.

    ``compiled(kernel, arguments, options)`` gives the fields of a :class:`Kernel` in a child process, for kernels of the modules
    whose names begin with ``wanted``; others are skipped.
    """

    def __init__(self, card: Card, jobs: int = 1, compiled: Callable[..., dict[str, Any]] | None = None, wanted: str = "") -> None:
        self.card, self.jobs, self.compiled, self.wanted = card, jobs, compiled or facts, wanted
        self.done: dict[str, Kernel] = {}  # by what is launched, of all cases
        self.asked: dict[str, None] = {}  # by the case
        self._running: dict[int, tuple[str, int, int]] = {}  # by the child's id

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which CPU tensors are treated as tensors on the card."""
        before = gpu._known, launch.run, JITFunction.run
        gpu._known = lambda *_: self.card  # type: ignore[assignment]
        launch.run = _run  # type: ignore[assignment]
        JITFunction.run = lambda kernel, *args, **options: self._launch(kernel, args, options)
        triton.runtime.driver.set_active(Driver(self.card))
        try:
            yield
        finally:
            gpu._known, launch.run, JITFunction.run = before  # type: ignore[assignment]

    def kernels(self) -> list[Kernel]:
        """The kernels of what has been launched since the last call."""
        while self._running:
            self._wait()
        asked, self.asked = self.asked, {}
        return [self.done[key] for key in asked]

    def _launch(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not kernel.fn.__module__.startswith(self.wanted):
            return
        options = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        key = repr((kernel.fn.__module__, kernel.fn.__name__, [_kind(a) for a in args], {n: _kind(a) for n, a in options.items()}))
        self.asked[key] = None
        if key in self.done or any(key == running for running, _, _ in self._running.values()):
            return
        while len(self._running) >= self.jobs:
            self._wait()
        result, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(result)
            _child(write, self.compiled, kernel, args, options)
        os.close(write)
        self._running[child] = key, result, 0

    def _wait(self) -> None:
        child, status = os.wait()
        key, result, _ = self._running.pop(child)
        with os.fdopen(result) as stream:
            said = stream.read()
        if said:
            self.done[key] = Kernel(**json.loads(said))
            return
        module, name = re.findall(r"'([\w.]+)', '(\w+)'", key)[0]
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status}"
        self.done[key] = Kernel(name, module, 0, 0, failure=f"the compiler ended its process ({ended})")


def _kind(value: Any) -> Any:
    """Key of a compilation."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, bool) or value is None:
        return value
    return (value == 1, value % 16 == 0) if isinstance(value, int) and value > 512 else str(value)


def _run(body, like, tensors, *options, then=None):
    """As ``launch.run``, without cached launches."""
    return body(launch.Recorder(like, tensors), *tensors, *options)


def _child(write: int, compiled: Callable[..., dict[str, Any]], kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile, report to the parent, exit."""
    signal.alarm(COMPILERS_SECONDS)
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    warps, stages = options.get("num_warps", 4), options.get("num_stages", 3)
    found = Kernel(kernel.fn.__name__, kernel.fn.__module__.removeprefix("linattn.ops.triton."), warps, stages)
    with tempfile.TemporaryDirectory() as folder:
        errors = os.open(f"{folder}/errors", os.O_CREAT | os.O_RDWR)
        os.dup2(errors, 2)
        knobs.cache.dir = folder
        try:
            found = found._replace(**compiled(kernel, args, options))
        except BaseException as error:
            with open(f"{folder}/errors", errors="replace") as said:
                first = next((x.partition("error:")[2].strip() for x in said if "error:" in x), "")
            found = found._replace(failure=f"{type(error).__name__}: {str(error).strip()[-200:]}{first and f' ({first[:200]})'}")
    os.write(write, json.dumps(found._asdict()).encode())
    os._exit(0)


def facts(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The resources of a kernel."""
    with redirect_stdout(io.StringIO()) as log:
        compiled = _compile(kernel, *args, grid=(1, 1, 1), warmup=True, **options)
    return dict(shared=compiled.metadata.shared, columns=getattr(compiled.metadata, "tmem_size", None) or 0, **_resources(log.getvalue()))


def _resources(log: str) -> dict[str, int]:
    """Resources of the largest function in the output of ``ptxas -v``."""
    registers, spills = (map(int, re.findall(pattern, log)) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return {"registers": max(registers), "spills": max(spills)}
