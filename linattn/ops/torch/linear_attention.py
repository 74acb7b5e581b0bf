"""Portable backend: operations of torch on every device, differentiable any number of times, in three forms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from linattn.ops.inputs import Inputs, Outputs
from linattn.ops.torch import chunk, recurrent
from linattn.ops.torch.layout import Packed, layout_of, shared


def _run(inputs: Inputs, form: str) -> Outputs:
    """Run a form; z is an additional column of S with values of 1, so that the forms need not handle it."""
    v, initial = inputs.v.to(inputs.compute_dtype), inputs.initial
    if initial is None:
        initial = v.new_zeros(inputs.rows, inputs.heads, inputs.k.shape[-1], v.shape[-1])
    if inputs.denominator:
        z = initial.new_zeros(initial.shape[:-1]) if inputs.initial_z is None else inputs.initial_z
        v, initial = torch.cat([v, torch.ones_like(v[..., :1])], -1), torch.cat([initial, z[..., None]], -1)
    if not inputs.causal:
        o, final = _total(inputs, v, initial)
    elif v.shape[1] == 0 or inputs.rows == 0:
        o, final = v, initial
    elif form == "recurrent":
        o, final = recurrent.causal(inputs, v, initial)
    else:
        size = chunk.size_for(inputs) if form == "chunk" else chunk.power_of_two(v.shape[1])
        o, final = chunk.causal(inputs, v, initial, size)
    if not inputs.denominator:
        return Outputs(o, None, final, None)
    return Outputs(o[..., :-1], o[..., -1], final[..., :-1], final[..., -1])


def _total(inputs: Inputs, v: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the form without causality: every query reads the sum over its sequence. Unpacked, q may have its own length."""
    q, k = (shared(x, inputs.heads).to(v.dtype) for x in (inputs.q, inputs.k))
    q = q * inputs.scale
    if inputs.cu_seqlens is None:
        final = initial + torch.einsum("bthk,bthv->bhkv", k, v)
        return torch.einsum("bthk,bhkv->bthv", q, final), final
    if v.shape[1] == 0 or inputs.rows == 0:
        return v, initial
    layout = layout_of(inputs, chunk.size_for(inputs))
    assert isinstance(layout, Packed)
    passage = layout.passage(initial)
    for k, v in zip(layout.split(k, v.dtype), layout.split(v, v.dtype), strict=True):
        chunk.carry(chunk.Step(None, k.mT @ v), passage)
    final = passage.final()
    return layout.join([q @ s for q, s in zip(layout.split(q, v.dtype), layout.of_chunks(final), strict=True)]), final


FORMS = {form: partial(_run, form=form) for form in ("parallel", "chunk", "recurrent")}
