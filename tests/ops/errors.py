"""Tolerances of results against the float64 reference on the same rounded inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops import definition
from tests.ops.cases import Call, gradients, reference

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF_GRADIENT = {"decay": 0.025, "beta": 0.025, "read": 0.025, "write": 0.025}  # else 0.015
DEVIATIONS = 4  # tolerance in standard deviations of the rounding errors of all factors


def error(out: Tensor, ref: Tensor, floor: float | Tensor = 0.0) -> float:
    """‖out − ref‖ / max(‖ref‖, floor) in float64; 0 if both are 0, infinite for NaN."""
    assert out.shape == ref.shape, f"came with {list(out.shape)}, wanted {list(ref.shape)}"
    difference, size = (out.double() - ref.double()).norm().item(), max(ref.double().norm().item(), float(floor))
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0 and math.isfinite(difference) else math.inf


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of an output: from its inputs, and of itself."""

    e_in: float
    e_out: float

    def tolerance(self, dtype: torch.dtype, capped: bool = True) -> float:
        both = 2 * math.hypot(self.e_in, self.e_out)
        return (min(both, 0.006) if capped else both) if dtype == torch.bfloat16 else max(both, 0.003)


def check_values(unrounded: Call, dtype: torch.dtype, *, at_any_length: bool = False, decay: torch.dtype | None = None, **how: str) -> None:
    """Every result of ``unrounded`` rounded to ``dtype`` lies within the tolerance of that dtype."""
    call = unrounded.to(dtype, decay)
    out, ref = call(**how), reference(call)
    exact = ref if dtype in EXACT else reference(unrounded)
    for name, wanted in ref.items():
        e = error(out[name], wanted)
        if dtype in EXACT:
            limit = 1e-4 if at_any_length and dtype == torch.float32 else EXACT[dtype]
        else:
            limit = Rounding(error(wanted, exact[name]), error(wanted.to(out[name].dtype), wanted)).tolerance(dtype)
        assert e <= limit, f"{name}: error {e:.2e} > {limit:.2e} in {dtype} {how}"


def check_gradients(
    unrounded: Call, dtype: torch.dtype, *, decay: torch.dtype | None = None, limit: float | None = None, **how: str
) -> None:
    """Values and gradients, through every output and the final state, lie within the tolerance of ``dtype``."""
    call = unrounded.to(dtype, decay)
    out, grads = gradients(call, **how)
    ref, wanted = gradients(call.double(), backend="reference")
    compare(out, ref, limit or EXACT.get(dtype, math.inf), str(how))  # halves: see check_values
    for name, grad in grads.items():
        assert grad.dtype == call.tensors[name].dtype
        allowed = limit or EXACT.get(dtype) or HALF_GRADIENT.get(name, 0.015)
        e = error(grad, wanted[name])
        if e > allowed:
            e = error(grad, wanted[name], rounding(call, dtype)[f"gradient of {name}"].norm() / allowed)
        assert e <= allowed, f"gradient of {name}: error {e:.2e} > {allowed:.2e} in {dtype} {how}"


def rounding(call: Call, dtype: torch.dtype, outputs: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Tolerance from rounding to ``dtype`` of each number of a result, and of each "gradient of NAME". Expensive, so only for larger
    errors.
    """
    return {name: DEVIATIONS * t for name, t in definition.deviations(call.double(), dtype, outputs).items()}


def ratios(
    unrounded: Call, dtype: torch.dtype, *, run: Callable, exact: str, outputs: tuple[str, ...] | None = None, limit: float | None = None,
    decay: torch.dtype | None = None, capped: bool = True,
) -> dict[str, float]:  # fmt: skip
    """For each result, and each gradient, of ``unrounded`` rounded to ``dtype``: its error over the tolerance.

    ``run(call, outputs)`` gives both, the backend ``exact`` the expected ones. Errors beyond the limit are compared with the reference
    itself: other float64 forms keep 15 digits of the summands, not of a cancelled sum. Without ``capped``, bfloat16 may err by twice the
    rounding of the inputs, even above 0.6 %.
    """
    call = unrounded.to(dtype, decay)
    results = run(call, outputs)
    for backend in dict.fromkeys((exact, "reference")):
        found = _ratios(call, unrounded, dtype, results, outputs, limit, backend, capped)
        if all(ratio <= 1 for ratio in found.values()):
            break
    return found


def _ratios(call, unrounded, dtype, results, outputs, limit, exact, capped) -> dict[str, float]:
    """The same for the ``results`` of ``call`` beside one backend's; beside the reference, rounding beyond the limits counts too."""
    out, grads = results
    ref, wanted = gradients(call.double(), outputs, backend=exact)
    unlimited = ref if dtype in EXACT else unrounded(backend=exact)
    assert out.keys() == ref.keys()
    found = {}
    for name, right in ref.items():
        kept = dtype if name == "denominator" else out[name].dtype  # it divides an output of that dtype
        both = Rounding(error(right, unlimited[name]), error(right.to(kept), right))
        allowed = limit or EXACT.get(dtype) or both.tolerance(dtype, capped)
        e = error(out[name], right)
        if e > allowed and dtype in EXACT and exact == "reference":
            e = error(out[name], right, rounding(call, dtype, outputs)[name].norm() / allowed)
        found[name] = e / allowed
    for name, grad in grads.items():
        assert grad.dtype == call.tensors[name].dtype
        allowed = limit or EXACT.get(dtype) or HALF_GRADIENT.get(name, 0.015)
        inside, least = representable(grad, wanted[name])
        grad, right = grad.where(inside, 0), wanted[name].where(inside, 0)
        e = error(grad, right, least)
        if e > allowed and exact == "reference":
            lost = rounding(call, dtype, outputs)[f"gradient of {name}"].where(inside, 0)
            e = error(grad, right, max(least, lost.norm() / allowed))
        found[f"gradient of {name}"] = e / allowed
    return found


def representable(grad: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """Mask of numbers without overflow in the dtype of ``grad``, and the norm of as many at its underflow limit."""
    numbers = torch.finfo(grad.dtype)
    return right.abs() < 0.97 * numbers.max, numbers.tiny * grad.numel() ** 0.5


def compare(out: dict[str, Tensor], ref: dict[str, Tensor], limit: float, what: str = "") -> None:
    """Every named tensor is within ``limit`` of its reference, and none is missing."""
    assert out.keys() == ref.keys()
    for name, wanted in ref.items():
        e = error(out[name], wanted)
        assert e <= limit, f"{name}: error {e:.2e} > {limit:.0e} {what}"


def same_bits(out: dict[str, Tensor], ref: dict[str, Tensor], what: str = "") -> None:
    """Equal to the last bit; NaN equals NaN."""
    assert out.keys() == ref.keys()
    for name, wanted in ref.items():
        assert torch.equal(out[name].nan_to_num(nan=1e30), wanted.nan_to_num(nan=1e30)), f"{name}: bits differ {what}"


def admitted(call: Call) -> bool:
    """True if the recurrence itself is stable: β‖k‖² <= 2 after rounding and max‖S_t‖ <= 1e3 · max ‖k_t‖‖v_t‖ in float64."""
    t = call.double().tensors
    if t["k"].numel() == 0:
        return True
    heads = t["v"].shape[2] // t["k"].shape[2]
    k = t["k"].repeat_interleave(heads, 2).norm(dim=-1)
    if "beta" in t and bool((t["beta"] * k**2 > 2).any()):
        return False
    largest = (k * t["v"].norm(dim=-1)).max().item()
    if "S" in t:
        largest = max(largest, t["S"].flatten(2).norm(dim=-1).max().item())
    return definition.largest_state(call.double()) <= 1e3 * largest


def doubled(value):
    """``value`` with all tensors in it in float64: a tensor, or a dict, list or tuple of values."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, dict):
        return {name: doubled(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(doubled, value)) if hasattr(value, "_fields") else tuple(map(doubled, value))
    return [doubled(v) for v in value] if isinstance(value, list) else value
