"""Choice of the backend that runs a call of any operation, with the reasons why the others do not.

The choice depends only on the devices and dtypes of the tensors and on the options of the call. Backends are imported on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops import checks, gpu, tracing
from linattn.ops.inputs import Backend, Form

BACKENDS: tuple[str, ...] = ("triton", "cpu", "torch", "reference")  # in the order in which auto asks them
Refusal = Callable[..., str | None]  # (backend, True if the caller named it, *call) -> reason why it does not run the call, or None


def choose(backend: str, refusal: Refusal, *call: Any) -> str:
    """Choose the backend that runs ``call``: the named one, or the first that does not refuse.

    Raises:
        ValueError: if ``backend`` is unknown or refuses the call.
    """
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        checks.choice("backend", backend, ("auto", *BACKENDS))
    for name in BACKENDS if backend == "auto" else (backend,):
        reason = refusal(name, backend == name, *call)
        if reason is None:
            return name
    raise ValueError(f"backend {backend!r} cannot run this call: {reason}")


def device_refusal(x: Tensor, asked: bool) -> str | None:
    """Reason why no GPU kernel runs on the device of ``x``, or None.

    On a CPU the kernels run only under Triton's interpreter, and only if the caller named the backend.
    """
    return gpu.refusal(x.device, asked)


def gpu_refusal(x: Tensor, asked: bool) -> str | None:
    """Reason why no GPU kernel of any operation runs on ``x``, or None."""
    return device_refusal(x, asked) or tracing.refusal()


def definition_refusal(asked: bool) -> str | None:
    """Reason why the reference does not run a call; None if the caller named it."""
    return None if asked else "it is the definition for tests, which runs only if named"


def refusal(name: str, asked: bool, x: Tensor, kernels: Callable[[str], Any], call: Sequence[Any], *, defined: bool = False) -> str | None:
    """Reason why the backend ``name`` does not run ``call``, or None. torch runs every call; ``kernels`` maps
    a name to a module with the function ``refusal``. ``defined``: the operation has a reference beside the portable form.
    """
    if name == "torch":
        return None
    if name == "reference":
        return definition_refusal(asked) if defined else "the definition is written in PyTorch operations"
    if name == "triton" and (reason := gpu_refusal(x, asked)) is not None:
        return reason
    refused: str | None = kernels(name).refusal(*call)
    return refused


class Explained(NamedTuple):
    """Checked call of an operation for :func:`explain`."""

    title: str
    device: torch.device
    refusal: Refusal
    call: tuple[Any, ...]
    form: Callable[..., str] | None = None  # (backend, *call) -> form that the backend takes
    off: Callable[..., list[str]] | None = None  # (*call) -> lines on optimizations that the GPU kernels do not get


def explained(op: Callable[..., Any], x: Tensor, refusal: Refusal, *call: Any, more: str = "") -> Explained:
    """Describe a call of ``op`` on ``x`` for :func:`explain`."""
    return Explained(f"{op.__name__} on {x.device}, {x.dtype}, {list(x.shape)}{more}", x.device, refusal, call)


_explained: dict[Callable[..., Any], Callable[..., Explained]] = {}


def explains(op: Callable[..., Any], checked: Callable[..., Explained]) -> None:
    """Register ``op`` for :func:`explain`; ``checked`` takes its arguments by name and raises as ``op`` does."""
    _explained[op] = checked


def explain(*args: Any, form: Form = "auto", backend: Backend = "auto", **kwargs: Any) -> str:
    """Print which backend and form run the arguments of :func:`linattn.linear_attention`, why the others do not, and which
    optimizations of the GPU kernels are off.

    For another operation, the function is the first argument: ``linattn.explain(linattn.selective_scan, x, dt, ...)``. Returns the
    printed text.
    """
    op, args = (args[0], args[1:]) if args and callable(args[0]) else (_named("linear_attention"), args)
    if op not in _explained:
        others = ", ".join(sorted(f.__name__ for f in _explained if f.__name__ != "linear_attention"))
        raise ValueError(f"explain knows linear_attention, the default, and {others}, but came with {op!r}")
    taken = signature(op).parameters
    for name, value, those in (("form", form, "linear_attention"), ("backend", backend, "operations that let it be chosen")):
        if name in taken:
            kwargs[name] = value
        elif value != "auto":
            raise ValueError(f"{name} must be 'auto' for {op.__name__}, because it is only for {those}, but came as {value!r}")
    given = signature(op).bind(*args, **kwargs)
    given.apply_defaults()
    text = "\n".join(_lines(_explained[op](**given.arguments), backend))
    print(text)
    return text


def _named(name: str) -> Callable[..., Any]:
    return next(op for op in _explained if op.__name__ == name)


def _lines(of: Explained, backend: str) -> list[str]:
    chosen, lines = choose(backend, of.refusal, *of.call), [of.title]
    for name in BACKENDS:
        reason = of.refusal(name, backend == name, *of.call) or ("it was not asked for" if backend != "auto" else f"{chosen} comes first")
        form = "" if of.form is None or name != chosen else f", {of.form(name, *of.call)} form"
        lines.append(f"{name:>10}: runs{form}" if name == chosen else f"{name:>10}: no, {reason}")
    if chosen != "triton":
        return lines
    if of.off is not None:
        return lines + of.off(*of.call)
    from linattn.ops.triton import launch

    return lines + launch.off(of.device)
