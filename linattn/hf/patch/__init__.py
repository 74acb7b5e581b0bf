"""Patch of transformers' own models to use our ops: their functions are replaced, module by module, and restored exactly.

Functions that a family's modeling module calls are globals of that module, and its mixer's forward is a method of a class: both are
exchanged while a patch is on, for models made before and after. Weights are unchanged, and no package is faked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from threading import RLock
from typing import Any, Self

import torch

from linattn.hf.patch import delta, mamba, mamba2, rwkv
from linattn.hf.patch.call import Family, Replacement
from linattn.ops.checks import choice
from linattn.ops.dispatch import BACKENDS
from linattn.ops.inputs import Backend

_GROUPS = (delta, mamba, mamba2, rwkv)
FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
_patched: dict[str, Patch] = {}  # folder: its active patch
_lock = RLock()  # a second thread that patches the same family is refused, because each would save the other's replacement


class Patch:
    """Record of :func:`patch_transformers`; a context manager that undoes it at the end.

    Attributes:
        families: the patched model types.
        calls: number of runs of each of our ops for transformers since, by its name (of tokens decoded one by one ``recurrent_step_``,
            ``selective_step_`` or ``wkv_step``); calls in compiled graphs are not counted.
        replaced: ``(owner, attribute, old value, new value)`` of every replacement, empty once undone.
    """

    def __init__(self, families: tuple[str, ...], backend: Backend) -> None:
        self.families, self.backend = families, backend
        self.calls: Counter[str] = Counter()
        self.replaced: list[tuple[Any, str, Any, Any]] = []

    def undo(self) -> None:
        """Restore everything; a second call does nothing."""
        with _lock:
            for owner, name, original, _ in reversed(self.replaced):
                setattr(owner, name, original)
            self.replaced.clear()
            for folder in [folder for folder, patch in _patched.items() if patch is self]:
                del _patched[folder]

    def __enter__(self) -> Self:
        if self.families and not self.replaced:
            raise ValueError("this patch has been undone: call patch_transformers again")
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Patch({', '.join(self.families)}; {'on' if self.replaced else 'undone'})"

    def _run(self, op: Callable, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a changing number would cause recompilation
            self.calls[op.__name__] += 1
        return op(*args, backend=self.backend, **kwargs)

    def _replace(self) -> None:
        for name in self.families:
            if _patched.get(FAMILIES[name].folder) is self:
                continue  # another model type of the same module
            for owner, attribute, new in self._replacements(name):
                self.replaced.append((owner, attribute, vars(owner)[attribute], new))
                setattr(owner, attribute, new)
            _patched[FAMILIES[name].folder] = self

    def _replacements(self, name: str) -> Iterator[Replacement]:
        folder = FAMILIES[name].folder
        module = import_module(f"transformers.models.{folder}.modeling_{folder}")
        group = next(group for group in _GROUPS if name in group.FAMILIES)
        yield from list(group.replacements(module, name, self._run))


def patch_transformers(families: Iterable[str] | None = None, backend: Backend = "auto") -> Patch:
    """Let transformers' own classes call :func:`linattn.linear_attention`, ``selective_scan``, the scans, their steps, norms and gates.

    Besides speed, cases that are wrong or refused otherwise become right: packed sequences (``cu_seq_lens_q``, ``cu_seqlens``,
    ``seq_idx`` or positions that restart, in one row) do not see each other; a batch padded on the right, or anywhere, decodes as its rows
    alone do; Mamba, Falcon-Mamba and Jamba continue from their cache with many tokens at once; RWKV decodes batches. On a CPU nothing
    of fla, mamba_ssm or causal_conv1d is called, installed or not.

    Args:
        families: transformers' ``model_type`` names; None: all supported ones.
        backend: backend of the recurrences, as in :func:`linattn.linear_attention`. Unsupported calls are refused when they are made.

    Returns:
        A :class:`Patch`: ``with patch_transformers(["mamba"]) as patch: ...``, or ``patch.undo()``. Models in use follow at once.

    Raises:
        ValueError: for an unknown model type or backend, and for a family that is patched already.
    """
    names = tuple(FAMILIES) if families is None else _known(families)
    choice("backend", backend, ("auto", *BACKENDS))
    with _lock:
        busy = sorted(name for name in names if FAMILIES[name].folder in _patched)
        if busy:
            raise ValueError(
                f"families must not be patched already, as {', '.join(busy)} {'is' if len(busy) == 1 else 'are'}: undo that patch first"
            )
        patch = Patch(names, backend)
        try:
            patch._replace()
        except BaseException:
            patch.undo()
            raise
    return patch


def _known(families: Iterable[str]) -> tuple[str, ...]:
    if isinstance(families, str) or not isinstance(families, Iterable):
        raise ValueError(f"families must be a list of model types, but came as {families!r}")
    names = tuple(families)
    unknown = [name for name in names if not isinstance(name, str) or name not in FAMILIES]
    if unknown:
        raise ValueError(f"families has {', '.join(map(repr, unknown))}, but must be of {', '.join(sorted(FAMILIES))}")
    return names
