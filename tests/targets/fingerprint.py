"""Fingerprints of the kernels for Hopper, to show that a change of their source does not change the machine code.

A line is a launched kernel: hashes of Triton's IR after its first passes (without names of values and source lines) and of its PTX,
registers, shared memory, spills and the constants it was compiled with. Results are cached by IR in a folder, with the IR itself, so
that only changed kernels are compiled further, which takes most of the time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton._C.libtriton import ir, passes
from triton.backends.nvidia.compiler import CUDABackend

import linattn
from linattn.ops.triton import hopper
from linattn.ops.triton.hopper import choice
from tests.ops import cases as calls
from tests.targets.cards import CARDS
from tests.targets.machine import Kernel, Machine, facts

TARGET, WANTED = "sm_90", "linattn.ops.triton.hopper."
SIZES = {(128, 128): 4, (64, 64): 2, (64, 128): 1, (128, 64): 1, (128, 256): 1}  # of keys and values: patterns of options
PATTERNS = ((0, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 0, 1, 1, 0), (1, 0, 0, 0, 1))  # with their complements, every pair of options
FUSED = (("plain", "BTH"), ("plain", "BTHK"), ("beta", "none"), ("beta", "BTH"))  # with one kernel for the backward pass on a busy card
FIELDS = ("ir", "ptx", "registers", "shared", "spills", "failure", "options")


def attention(kind: str, rank: str, sizes: tuple[int, int], options: tuple[bool, ...]) -> None:
    """Both passes over one head: with a decay of float32, its gradient, sequences packed, an initial state, in segments."""
    wide, ddecay, packed, initial, split = options
    tokens = 2048 if split else 200
    lengths = (tokens - 70, 70) if packed else None
    call = calls.make(kind, rank, B=1, T=tokens, H=1, K=sizes[0], V=sizes[1], lengths=lengths, initial=initial)
    call = call.to(torch.bfloat16, torch.float32 if wide else torch.bfloat16)
    leaves = {n: t.requires_grad_(n != "decay" or ddecay) for n, t in call.tensors.items()}
    arguments = calls.arguments(leaves, {**call.options, "return_state": True})
    with torch.no_grad():
        linattn.linear_attention(**arguments, form="chunk", backend="triton")
    o, state = linattn.linear_attention(**arguments, form="chunk", backend="triton")
    (o.float().sum() + state.sum()).backward()


def busy(kind: str, rank: str, sizes: tuple[int, int], options: tuple[bool, ...]) -> None:
    """As :func:`attention` with enough heads to keep all multiprocessors busy."""
    with mock.patch.object(choice, "multiprocessors", return_value=1):
        attention(kind, rank, sizes, options)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls that together launch each kernel with each of its options."""
    for kind, rank in product(("plain", "beta", "erase", "bonus"), ("none", "BTH", "BTHK")):
        for at, (sizes, patterns) in enumerate(SIZES.items()):
            for options, said in _options(at, patterns):
                yield f"{kind}-{rank}-{sizes[0]}x{sizes[1]}-{said}", partial(attention, kind, rank, sizes, options)
    for kind, rank in FUSED:
        for options, said in _options(0, len(PATTERNS)):
            yield f"{kind}-{rank}-busy-{said}", partial(busy, kind, rank, (128, 128), options)


def _options(first: int, patterns: int) -> Iterator[tuple[tuple[bool, ...], str]]:
    """Options of calls, ``patterns`` of them with their complements, and their names."""
    for n, turned in product(range(patterns), (False, True)):
        options = tuple(bool(x) != turned for x in PATTERNS[(first + n) % len(PATTERNS)])
        yield options, "-".join(name for name, on in zip(("wide", "ddecay", "packed", "initial", "split"), options, strict=True) if on)


class Known(Exception):
    """Ends a compilation whose result is cached."""


class Memo:
    """Results by the hash of the IR, in a folder; with ``ir_only`` only the simplified IR."""

    def __init__(self, folder: Path, ir_only: bool = False) -> None:
        self.folder, self.ir_only = folder, ir_only
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """The fields of a :class:`Kernel`, compiled unless cached."""
        said = f"{[_kind(a) for a in args]} { {n: str(x) for n, x in sorted(options.items())} }"
        with self._reading() as seen:
            try:
                found = facts(kernel, args, options) | {"ir": seen["ir"], "ptx": seen["ptx"]}
                (self.folder / f"{seen['ir']}.json").write_text(json.dumps(found))
            except Known as known:
                found = {"ir": str(known)} if self.ir_only else json.loads((self.folder / f"{known}.json").read_text())
        return found | {"options": said}

    @contextmanager
    def _reading(self) -> Iterator[dict[str, str]]:
        """Context in which compilations stop at a cached IR and report the results of others."""
        seen: dict[str, str] = {}
        to_llvm, to_cubin = CUDABackend.make_llir, CUDABackend.make_cubin

        def make_llir(backend: Any, module: Any, metadata: Any, options: Any, capability: int) -> Any:
            if self.ir_only:
                _simplify(module)
            text = normalized(str(module))
            seen["ir"] = _hash(text + str(options))
            if not (known := (self.folder / f"{seen['ir']}.json").exists()):
                (self.folder / f"{seen['ir']}.ttgir").write_text(text)
            if known or self.ir_only:
                raise Known(seen["ir"])
            return to_llvm(backend, module, metadata, options, capability)

        def make_cubin(backend: Any, ptx: str, metadata: Any, options: Any, capability: int) -> Any:
            text = instructions(ptx)
            seen["ptx"] = _hash(text)
            (self.folder / f"{seen['ir']}.ptx").write_text(text)
            return to_cubin(backend, ptx, metadata, options, capability)

        CUDABackend.make_llir, CUDABackend.make_cubin = make_llir, make_cubin
        try:
            yield seen
        finally:
            CUDABackend.make_llir, CUDABackend.make_cubin = to_llvm, to_cubin


def _simplify(module: Any) -> None:
    """Eliminate dead code and common subexpressions."""
    manager = ir.pass_manager(module.context)
    passes.common.add_canonicalizer(manager)
    passes.common.add_cse(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "simplify")


def normalized(ir: str) -> str:
    """``ir`` without source locations, its values numbered in the order of their definitions.

    Bodies of specialised warps redefine outer names, depending on the number of outer values.
    """
    ir = "\n".join(line for line in ir.splitlines() if not line.startswith("#loc"))
    ir = re.sub(r"\s*loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", "", ir)
    numbers: dict[str, str] = {}
    count = itertools.count()

    def numbered(found: re.Match[str]) -> str:
        name, defined = found.groups()
        if defined or name not in numbers:
            numbers[name] = f"%{next(count)}"
        return numbers[name] + defined

    return re.sub(r"(%[\w$.-]+)((?::\d+)? =|)", numbered, ir)


def instructions(ptx: str) -> str:
    """``ptx`` without comments, source locations and debug information."""
    ptx = re.sub(r"\.section\s+\.debug\w*\s*\{.*?\}", "", ptx, flags=re.DOTALL)
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func", "$L__info")))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "-" if value is None else ""


def lines(pattern: str, memo: Memo, jobs: int) -> Iterator[str]:
    """A line per kernel of the cases whose names match."""
    hopper._gluon_refusals[torch.device("cpu")] = None
    machine = Machine(CARDS[TARGET], jobs, memo, WANTED)
    for name, run in cases():
        if re.search(pattern, name):
            with machine():
                run()
                found = machine.kernels()
            for n, kernel in enumerate(found):
                yield f"{name} {n} {kernel.name} {_said(kernel)}"


def _said(kernel: Kernel) -> str:
    fields = kernel._asdict()
    return " ".join(f"{name}={fields[name]}" for name in FIELDS if fields[name])


def differing(before: str, after: list[str], field: str = "ptx") -> list[str]:
    """The lines of ``after`` whose ``field`` differs from that of the same launch in ``before``, or is missing there."""
    known = {_launch(line): _hash_of(line, field) for line in before.splitlines()}
    return [line for line in after if (found := _hash_of(line, field)) is None or known.get(_launch(line)) != found]


def _launch(line: str) -> str:
    return " ".join(line.split()[:3])


def _hash_of(line: str, field: str) -> str | None:
    found = re.search(rf" {field}=(\w+)", line)
    return found[1] if found else None
