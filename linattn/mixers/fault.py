"""Explanation of a failed module call: one line that names the argument, computed only after a failure inside torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linattn.arguments import described

Forward = TypeVar("Forward", bound=Callable[..., Any])
_FAILURES = (RuntimeError, IndexError, AttributeError, TypeError, KeyError, NotImplementedError)


def explain_failure(forward: Forward) -> Forward:
    """Decorate a module's ``forward`` so that a failure names the argument that does not fit the module, if there is one.

    A call that succeeds costs one more Python frame; devices and dtypes are compared only after a failure.
    """
    signature = inspect.signature(forward)

    @wraps(forward)
    def explained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        except _FAILURES as error:
            said = str(error)
            if any(said.startswith(f"{name} must be ") for name in signature.parameters):  # already names the argument
                raise
            line = _fault(self, signature, (self, *args), kwargs)
            if line is None:
                raise
            raise ValueError(line) from error

    return explained  # type: ignore[return-value]


def _fault(module: nn.Module, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # wrong arguments, which Python reports itself
        return None
    weights = [*module.parameters(), *module.buffers()]
    for name, value in given.items():
        annotation = str(signature.parameters[name].annotation)
        if value is None and "None" in annotation:
            continue
        if "Tensor" in annotation and (line := tensor_fault(name, value, weights)):
            return line
        if name == "state" and (line := _state_fault(module, value, given)):
            return line
        if annotation == "int" and (not isinstance(value, int) or isinstance(value, bool)):
            return f"{name} must be an integer, but came as {described(value)}"
    return None


def tensor_fault(name: str, t: Any, weights: list[Tensor]) -> str | None:
    """Reason why the argument ``name`` does not work with ``weights``; None if none is found."""
    if not isinstance(t, Tensor):
        return f"{name} must be a tensor, but came as {described(t)}"
    if t.layout != torch.strided or t.is_nested:
        return f"{name} must be a dense tensor, but came as {described(t)}"
    devices, dtypes = {w.device for w in weights}, {w.dtype for w in weights if w.is_floating_point()}
    if len(devices) == 1 and t.device not in devices:
        return f"{name} must be on {weights[0].device} like the weights, but is on {t.device}"
    if t.is_floating_point() and dtypes and t.dtype not in dtypes:
        return f"{name} must be {' or '.join(sorted(map(str, dtypes)))} like the weights, but came as {t.dtype}"
    if "mask" in name and (t.dtype != torch.bool or t.ndim != 2):
        return f"{name} must be torch.bool of shape [B, T], but came as {t.dtype} {list(t.shape)}"
    return None


def _state_fault(module: nn.Module, state: Any, given: dict[str, Any]) -> str | None:
    """Difference between ``state`` and the module's own state after a token; sizes that grow with the tokens may differ."""
    layers = getattr(state, "layers", None)
    x = next((t for t in given.values() if isinstance(t, Tensor) and t.ndim >= 2), None)
    if x is None:
        return None
    try:
        with torch.no_grad():
            _, own = module(torch.zeros_like(x[:, :1]), return_state=True)
    except Exception:  # the reason may be something else
        return None
    pairs = (
        [("", own, state)]
        if layers is None
        else [(f" of layer {i}", a, b) for i, (a, b) in enumerate(zip(own.layers, layers, strict=False))]
    )
    for where, ours, theirs in pairs:
        if not isinstance(theirs, dict):
            return f"state{where} must be a dict of tensors, as an earlier call returned it, but came as {described(theirs)}"
        for key, t in ours.items():
            other = theirs.get(key)
            if (
                not isinstance(other, Tensor)
                or other.layout != torch.strided
                or other.is_nested
                or (other.dtype, other.device, other.ndim) != (t.dtype, t.device, t.ndim)
                or not _alike(other, t)
            ):
                came = "is not there" if other is None else f"came as {described(other)}"
                return f"state{where} must have {key!r} as {t.dtype} on {t.device} in the sizes {list(t.shape)}, but it {came}"
    return None


def _alike(t: Tensor, own: Tensor) -> bool:
    """True if sizes are equal, except the second dimension, which may grow."""
    return t.shape[:1] == own.shape[:1] and t.shape[2:] == own.shape[2:]
