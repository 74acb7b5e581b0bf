"""Selection of the layers to quantise, without the rows for decays and write strengths, and without small matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers import Mixer
from linattn.mixers.base import Recurrence
from linattn.models.quantised import Format, quantisable
from linattn.ops.torch.quantised import GROUPS

SMALL = 32  # minimum of rows and columns of a quantised matrix; smaller ones are of heads, ranks, experts
SCALED = (2.0**-14, 7 * 65504.0)  # largest magnitudes of a matrix whose scales of 4 bits fit float16
ENDS = ("model.embedding", "lm_head")
_TOKENS = 4  # tokens of a mixer's trial call


def formats(model: nn.Module, to: str, group: int, head: str = "int8") -> dict[str, Format]:
    """Format of every layer of ``model`` that is to be quantised, by name; ``head`` is that of the embedding and the head."""
    kept: dict[str, tuple[int, int]] = {}
    shared: dict[type, Tensor | None] = {}
    for place, mixer in model.named_modules():
        if isinstance(mixer, Mixer):
            kept |= {f"{place}.{name}": rows for name, rows in gate_rows(mixer, shared).items()}
    tied = model.get_submodule("lm_head") if model.config.tie_embeddings else None  # type: ignore[union-attr]
    found = {}
    for name, module in model.named_modules():
        if quantisable(module) and module is not tied:
            rows, columns = module.weight.shape
            first, last = kept.get(name, (0, 0))
            if min(rows - (last - first), columns) >= SMALL:
                own = "int8" if _beyond_float16(module.weight) else head if name in ENDS else to
                found[name] = _format(own, group, int(columns), (first, last) if last else None)
    return found


def _beyond_float16(weight: Tensor) -> bool:
    """True if the scales of 4 bits, in float16, would overflow or have few digits: then int8, with scales in float32."""
    largest = 0.0 if weight.is_meta else float(weight.detach().abs().max())
    return bool(largest) and not SCALED[0] <= largest <= SCALED[1]


def _format(to: str, group: int, columns: int, kept: tuple[int, int] | None) -> Format:
    """int4 in the largest groups up to ``group`` that divide the columns; int8 if none does."""
    fitting = [g for g in GROUPS if g <= group and columns % g == 0] if to == "int4" else []
    return Format("int4", max(fitting), kept) if fitting else Format("int8", None, kept)


def gate_rows(mixer: Mixer, shared: dict[type, Tensor | None] | None = None) -> dict[str, tuple[int, int]]:
    """Rows (first, one past the last) of the linear maps of ``mixer`` that its decays and write strengths depend on, by name.

    For mixers that project to the recurrence these rows are found by gradients; all rows of the maps in ``Mixer.gates`` are added.
    ``shared`` holds the tensors that mixers pass on to later ones of their class.
    """
    linear = {name: m for name, m in mixer.named_modules() if isinstance(m, nn.Linear) and quantisable(m)}
    found = {n: (0, m.out_features) for n, m in linear.items() if any(part in mixer.gates for part in n.split("."))}
    if type(mixer).project is Mixer.project:
        return found
    names = [name for name in linear if name not in found]
    for name, gradient in zip(
        names, _gradients(mixer, [linear[name].weight for name in names], {} if shared is None else shared), strict=True
    ):
        rows = [] if gradient is None else gradient.ne(0).any(1).nonzero().flatten().tolist()
        if rows:
            found[name] = (min(rows), max(rows) + 1)
    return found


def _gradients(mixer: Mixer, weights: list[Tensor], shared: dict[type, Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of a sum of decays and write strengths with respect to ``weights``; None if there is no path."""
    weight = weights[0] if weights else None
    if weight is None or weight.is_meta:
        return (None,) * len(weights)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wanted = [w.requires_grad for w in weights]
        for w in weights:
            w.requires_grad_()
        try:
            x = torch.randn(1, _TOKENS, mixer.dim or weight.shape[1]).to(weight)
            carry = mixer.begin(x)
            carry.shared = shared.get(type(mixer))
            projected: Any = mixer.project(x, carry)
            shared[type(mixer)] = carry.shared
            r: Recurrence = projected[0] if isinstance(projected, tuple) else projected
            gates = [t for t in (r.decay, r.beta) if t is not None and t.requires_grad]
            total = sum((t.clamp(min=-80).double() * torch.randn(t.shape, device=t.device)).sum() for t in gates)
            if not gates:
                return (None,) * len(weights)
            return torch.autograd.grad(total, weights, allow_unused=True)  # type: ignore[arg-type]
        finally:
            for w, before in zip(weights, wanted, strict=True):
                w.requires_grad_(before)
