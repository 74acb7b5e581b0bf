"""Fallbacks for a kernel that does not fit a card or that a compiler fails on.

The tables have configurations for known cards. On another card, or with another version of Triton, a launch may need more shared
memory, threads or tensor memory than available, or fail to compile. The launch is then tried with fewer stages, smaller tiles and more
warps, and the first variant that works is remembered. If none works, :class:`Unfit` has the reason, and torch's operations are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError

F = TypeVar("F", bound=Callable[..., Any])
Grid = tuple[int, ...]
STAGES = 3  # Triton's own choice
WARPS = 16  # at most
REGISTERS = 65536  # of a multiprocessor
_served: dict[Hashable, dict[str, Any] | str] = {}  # changed constants of a launch, or the reason why no variant works
_unfit: dict[Hashable, str] = {}  # reasons by the names of operations' calls


class Tiles(NamedTuple):
    """Constants of a launch that may be halved, with their lower bounds, and the grid as a function of the constants."""

    least: dict[str, int]
    grid: Callable[[dict[str, Any]], Grid] | None = None


class Unfit(RuntimeError):
    """No variant of a kernel fits the device."""


def launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any], tiles: Tiles | None = None) -> tuple[Any, Grid]:
    """Launch ``kernel``; returns the compiled kernel and its grid.

    Costs no more than the launch unless a launch has failed.
    """
    if not _served:
        try:
            return kernel[grid](*arguments, **constants), grid
        except Exception as error:
            if reason_of(error) is None:
                raise
    key = _key(kernel, arguments, constants)
    known = _served.get(key)
    if isinstance(known, str):
        raise Unfit(known)
    for changes in shapes(constants, tiles) if known is None else (known,):
        changed = {**constants, **changes}
        place = tiles.grid(changed) if tiles and tiles.grid else grid
        try:
            compiled = kernel[place](*arguments, **changed)
        except Exception as error:
            if (reason := reason_of(error)) is None:
                raise
            known = known if isinstance(known, str) else reason  # the reason of the first variant, the intended one
            continue
        _served[key] = changes
        return compiled, place
    _served[key] = f"{kernel.fn.__name__} does not fit this GPU: {known}"
    raise Unfit(_served[key])


def chosen(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """``constants`` with the changes that were found to work."""
    known = _served.get(_key(kernel, arguments, constants)) if _served else None
    return {**constants, **known} if isinstance(known, dict) else constants


def _key(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Hashable:
    return kernel, driver.active.get_current_device(), tuple(map(_kind, arguments)), tuple(constants.items())


def _kind(x: Any) -> Hashable:
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return x.dtype if isinstance(x, Tensor) else x is None


def shapes(constants: dict[str, Any], tiles: Tiles | None) -> Iterator[dict[str, Any]]:
    """Variants of a launch in the order of their cost: as it is, with fewer stages, with smaller tiles, and with more warps."""
    yield {}
    stages, warps = constants.get("num_stages", STAGES), constants.get("num_warps", 4)
    for fewer in range(stages - 1, 0, -1):
        yield {"num_stages": fewer}
    if tiles is None:
        return
    names = [name for name, least in tiles.least.items() if constants[name] >= 2 * least]
    sizes = [{name: constants[name] // 2 for name in names[:count]} for count in range(len(names) + 1)]
    for more in (warps, 2 * warps):
        for smaller in sizes:
            if more <= WARPS and (smaller or more != warps):
                yield {"num_stages": 1, "num_warps": more, **smaller, **(registers(more) if "maxnreg" in constants else {})}


def registers(warps: int) -> dict[str, int]:
    """Option of a launch that gives threads of many warps all registers; by itself ptxas may give them half (sm_80), and spill."""
    return {"maxnreg": min(255, REGISTERS // (32 * warps))} if warps >= 8 else {}


def reason_of(error: Exception) -> str | None:
    """The missing resource or the compiler's message; None for other errors."""
    if isinstance(error, OutOfResources):
        return f"it needs {error.required} of {error.name}, and there are {error.limit}"
    if isinstance(error, (CompilationError, PTXASError)) or (isinstance(error, RuntimeError) and "PassManager::run failed" in str(error)):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"Triton's compiler fails with {type(error).__name__}: {lines[-1] if lines else ''}"
    return None


def or_else(otherwise: Callable[..., Any], name: Callable[..., Hashable]) -> Callable[[F], F]:
    """Decorate a function that launches kernels to call ``otherwise`` with the same arguments if a kernel is :class:`Unfit`.

    Warns once, and records the failure under ``name`` of the arguments for :func:`refusal`.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if _unfit and name(*arguments, **options) in _unfit:
                return otherwise(*arguments, **options)
            try:
                return function(*arguments, **options)
            except Unfit as error:
                remember(name(*arguments, **options), error)
                warnings.warn(f"a GPU kernel of linattn cannot run here, so PyTorch operations run instead: {error}", stacklevel=2)
                return otherwise(*arguments, **options)

        return run  # type: ignore[return-value]

    return decorate


def remember(name: Hashable, error: Unfit) -> None:
    """Record that calls with this name do not fit, for :func:`refusal`."""
    _unfit[name] = str(error)


def refusal(*names: Hashable) -> str | None:
    """Reason why the kernels do not run calls with these names, or None."""
    return next((_unfit[name] for name in names if name in _unfit), None) if _unfit else None


def alike(operation: str, *tensors: Tensor | None) -> Hashable:
    """Name shared by the calls of an operation that differ only in batch and length."""
    kinds = tuple(None if t is None else (t.dtype, t.shape[2:]) for t in tensors)
    return operation, next(t for t in tensors if t is not None).device, kinds


def differentiated(function: Callable[..., Any], tensors: tuple[Any, ...], cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients of the results of ``function`` with respect to floating ``tensors``, None for others, in operations of torch."""
    leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    with torch.enable_grad():
        results = function(*leaves)
        pairs = [(o, d) for o, d in zip(results, cotangents, strict=True) if o is not None and d is not None]
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, [d.to(o.dtype) for o, d in pairs], materialize_grads=True))
    del outputs, given
    return [next(found) if isinstance(t, Tensor) and t.requires_grad else None for t in leaves]


def forget() -> None:
    """Forget all failures."""
    _served.clear()
    _unfit.clear()
