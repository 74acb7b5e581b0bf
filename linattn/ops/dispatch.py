"""Choice of the backend that runs a call, with the reasons why the others do not, for every operation.

The choice follows the tensors alone: their device, their dtypes, the options of the call. Nothing is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops import checks, gpu, tracing

BACKENDS: tuple[str, ...] = ("triton", "cpu", "torch", "reference")  # in the order in which auto asks them
Refusal = Callable[..., str | None]  # of a backend's name, whether it was asked for by it, and a call: why it does not run that, or None


def choose(backend: str, refusal: Refusal, *call: Any) -> str:
    """The backend that runs ``call``: the one asked for, or the first that does not refuse.

    Raises:
        ValueError: ``backend`` is none, or refuses the call.
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

    On a CPU the kernels only ever run under Triton's interpreter, and only when asked for.
    """
    return gpu.refusal(x.device, asked)


def gpu_refusal(x: Tensor, asked: bool) -> str | None:
    """Reason why no GPU kernel runs ``x`` now, whatever it computes, or None."""
    return device_refusal(x, asked) or tracing.refusal()


def definition_refusal(asked: bool) -> str | None:
    """Reason why the reference does not run a call."""
    return None if asked else "it is the definition that the others are tested against; it runs when asked for"


def refusal(name: str, asked: bool, x: Tensor, kernels: Callable[[str], Any], call: Sequence[Any], *, defined: bool = False) -> str | None:
    """Reason why the backend ``name`` does not run ``call``, or None. torch runs every call; ``kernels`` have the other refusals.

    ``defined``: there is a definition apart from the operations of torch.
    """
    if name == "torch":
        return None
    if name == "reference":
        return definition_refusal(asked) if defined else "the definition is written in operations of torch"
    if name == "triton" and (reason := gpu_refusal(x, asked)) is not None:
        return reason
    refused: str | None = kernels(name).refusal(*call)
    return refused


class Explained(NamedTuple):
    """A checked call of an operation, as :func:`explain` takes it."""

    title: str
    device: torch.device
    refusal: Refusal
    call: tuple[Any, ...]
    form: Callable[..., str] | None = None  # that a backend runs the call in, of its name and the call
    off: Callable[..., list[str]] | None = None  # what the GPU's kernels would be faster by and have not, of the call


def explained(op: Callable[..., Any], x: Tensor, refusal: Refusal, *call: Any, more: str = "") -> Explained:
    """A call of ``op`` on ``x``."""
    return Explained(f"{op.__name__} on {x.device}, {x.dtype}, {list(x.shape)}{more}", x.device, refusal, call)


_explained: dict[Callable[..., Any], Callable[..., Explained]] = {}


def explains(op: Callable[..., Any], checked: Callable[..., Explained]) -> None:
    """Have :func:`explain` know ``op``; ``checked`` makes a call of its arguments by name, and refuses what ``op`` refuses."""
    _explained[op] = checked


def explain(*args: Any, form: str = "auto", backend: str = "auto", **kwargs: Any) -> str:
    """Print, for the arguments of :func:`linattn.linear_attention`, which backend and form run and why each other does not,
    and what makes the GPU kernels faster elsewhere and is off here.

    Of another operation, the function comes first: ``linattn.explain(linattn.selective_scan, x, dt, ...)``. Returns the printed text.
    """
    op, args = (args[0], args[1:]) if args and callable(args[0]) else (_named("linear_attention"), args)
    if op not in _explained:
        others = ", ".join(sorted(f.__name__ for f in _explained if f.__name__ != "linear_attention"))
        raise ValueError(f"explain knows linear_attention, whose name may be left out, and {others}, but came with {op!r}")
    taken = signature(op).parameters
    for name, value, those in (("form", form, "linear_attention"), ("backend", backend, "operations that let it be chosen")):
        if name in taken:
            kwargs[name] = value
        elif value != "auto":
            raise ValueError(f"{name} is for {those}: {op.__name__} has none, but it came as {value!r}")
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
