"""Patch of fla (flash-linear-attention): fla's layers, models and callers run linattn's ops."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from inspect import signature
from threading import RLock
from types import ModuleType
from typing import Any, Self

import torch

from linattn.hf.fla.given import Given, Refused
from linattn.hf.fla.rules import SERVED, Served
from linattn.ops.checks import choice
from linattn.ops.dispatch import BACKENDS
from linattn.ops.inputs import Backend

_lock = RLock()
_on: list[FlaPatch] = []  # the active patch, if any


class FlaPatch:
    """Record of :func:`patch_fla`; a context manager that undoes it at the end.

    Attributes:
        names: patched functions of ``fla.ops``.
        calls: number of calls that linattn's ops have run, by fla's name; calls in compiled graphs are not counted.
        refused: reasons why calls went to fla's own function, with their number, by fla's name.
    """

    def __init__(self, names: tuple[str, ...], backend: Backend) -> None:
        self.names, self.backend = names, backend
        self.calls: Counter[str] = Counter()
        self.refused: dict[str, Counter[str]] = {}
        self._replacements: dict[int, Callable] = {}  # by the id of the original
        self._originals: dict[int, Callable] = {}  # by the id of the replacement

    def explain(self) -> str:
        """Format one line per name: which calls linattn and fla's own function ran so far, the latter with the reasons."""
        lines = []
        for name in self.names:
            reasons = "; ".join(f"{n} by fla's own ({reason})" for reason, n in self.refused.get(name, Counter()).items())
            lines.append(f"{name}: {self.calls[name]} calls by linattn" + (f", {reasons}" if reasons else ""))
        return "\n".join(lines)

    def undo(self) -> None:
        """Restore fla's functions everywhere in fla, also in modules imported meanwhile; a second call does nothing."""
        with _lock:
            _exchange(self._originals)
            self._replacements, self._originals = {}, {}
            if self in _on:
                _on.remove(self)

    def __enter__(self) -> Self:
        if self not in _on:
            raise ValueError("this patch has been undone: call patch_fla again")
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"FlaPatch({len(self.names)} functions; {'on' if self in _on else 'undone'})"

    def _serve(self, name: str, original: Callable, served: Served) -> None:
        if id(original) in self._replacements:
            return  # another name of a function that is already replaced
        parameters = signature(original)

        @wraps(original, updated=())  # not the mark of torch.compiler.disable, which would split compiled graphs
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = served(Given(parameters, args, kwargs), self.backend)
            except (Refused, TypeError, ValueError, NotImplementedError) as error:  # fla's own function then runs, or reports bad input
                self.refused.setdefault(name, Counter())[str(error)] += 1
                return original(*args, **kwargs)
            if not torch.compiler.is_compiling():  # a changing number would cause recompilation
                self.calls[name] += 1
            return result

        self._replacements[id(original)], self._originals[id(call)] = call, original


def patch_fla(names: Iterable[str] | None = None, backend: Backend = "auto") -> FlaPatch:
    """Make fla's layers and models call :func:`linattn.linear_attention` and ``diagonal_scan`` in place of its kernels.

    The supported functions of ``fla.ops`` are replaced by identity in every module of fla, under all their names; others are
    unchanged. Signatures, dtypes, state layouts and return values are fla's. An unsupported call (decays of the values, context
    parallelism, intermediate states, sizes that our ops refuse) goes to fla's own function, and :meth:`FlaPatch.explain` states the reason.
    Weights are unchanged. On a CPU, where fla has no kernels, these functions run; the norms, convolutions and losses of its
    layers are Triton kernels, which need a GPU.

    Args:
        names: functions of ``fla.ops``, such as ``"chunk_gla"``; None: all supported ones of the installed fla.
        backend: backend of the recurrences, as in :func:`linattn.linear_attention`.

    Returns:
        A :class:`FlaPatch`: ``with patch_fla() as patch: ...``, or ``patch.undo()``.

    Raises:
        ImportError: where fla is not installed.
        ValueError: for an unknown name or backend, and while another patch is on.
    """
    choice("backend", backend, ("auto", *BACKENDS))
    try:
        ops = import_module("fla.ops")
    except ModuleNotFoundError as error:
        if error.name not in ("fla", "fla.ops"):
            raise
        raise ImportError("patch_fla needs fla, which is not installed: pip install flash-linear-attention") from error
    functions = {name: function for name in SERVED if (function := _found(ops, name)) is not None}
    chosen = tuple(functions) if names is None else _known(names, functions)
    with _lock:
        if _on:
            raise ValueError("patch_fla is on already: undo that patch first")
        patch = FlaPatch(chosen, backend)
        for name in chosen:
            patch._serve(name, functions[name], SERVED[name])
        _exchange(patch._replacements)
        _on.append(patch)
    return patch


def _found(ops: ModuleType, name: str) -> Callable | None:
    """Find a function in ``fla.ops``, or in one of its packages that ``fla.ops`` does not re-export."""
    if hasattr(ops, name):
        return getattr(ops, name)
    places = (module for key, module in list(sys.modules.items()) if key.startswith("fla.ops.") and key.count(".") == 2)
    return next((getattr(module, name) for module in places if hasattr(module, name)), None)


def _known(names: Iterable[str], functions: dict[str, Callable]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"names must be a list of functions of fla.ops, but came as {names!r}")
    wanted = tuple(names)
    if unknown := [name for name in wanted if name not in functions]:
        raise ValueError(f"names has {', '.join(map(repr, unknown))}, but must be of {', '.join(sorted(functions))}")
    return wanted


def _exchange(functions: dict[int, Callable]) -> None:
    """Replace functions by identity, given by their ids, in all modules of fla."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "fla" and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in functions:
                    setattr(module, name, functions[id(value)])
