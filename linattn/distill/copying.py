"""Initialisation of a mixer from a softmax layer: projections copied by role, gates opened in closed form.

The result is a plain linear attention over the teacher's queries, keys and values:

* q, k, v, o: the teacher's weights if the sizes are equal, with grouped keys and values repeated for every head
* short convolution: the current token, scaled down so that the SiLU after it is nearly linear (unit length and norms undo the scale)
* decay: the same for every token; the lifetimes of the heads, 1 / rate, are spread geometrically up to the context
* β of delta rules: 1/2; gates computed by a matrix without bias keep their initialisation until calibration
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Mixer
from linattn.mixers.parts import ShortConvolution

TAP = 0.25  # weight of the current token in short convolutions: SiLU(x / 4) is x / 8 to 6 % for x from -0.5 to 0.5
_RATE = 0.6  # the strongest decay of RWKV-7 is e^-0.607


@torch.no_grad()
def copy_mixer(attention: Softmax, mixer: Mixer, *, context: int) -> None:
    """Initialise ``mixer`` from ``attention``; see the module's description. Parameters without a counterpart are unchanged."""
    wanted = projections(mixer)
    for role, weight in teacher_projections(attention).items():
        if (target := wanted.get(role)) is not None:
            grouped = weight.repeat_interleave(attention.heads // attention.kv_heads, 0) if role in "kv" else weight
            fits = [w for w in (weight, grouped) if w.numel() == target.numel() and w.shape[-1] == target.shape[-1]]
            if fits:
                target.copy_(fits[0].reshape(target.shape))
    for module in mixer.modules():
        if isinstance(module, ShortConvolution):
            _pass_through(module)
    set_decay(mixer, spread(getattr(mixer, "heads", 1), context))
    _open_gates(mixer)


def teacher_projections(attention: Softmax) -> dict[str, Tensor]:
    """Weights of q, k, v [heads, K, D] and o [D, H K]."""
    split = {name: getattr(attention, f"{name}_proj").weight.unflatten(0, (-1, attention.size)) for name in "qkv"}
    return {**split, "o": attention.o_proj.weight}


def projections(mixer: Mixer) -> dict[str, Tensor]:
    """Existing weights of ``mixer`` by role, as views: q, k, v with rows by head, [..., D], and o [D, H V]."""
    found = {role: weight for role in "qkvo" if (weight := _weight(mixer, f"{role}_proj")) is not None}
    own: Any = mixer
    joint, inner, receptance = (_weight(mixer, f"{name}_proj") for name in ("qkv", "in", "r"))
    if receptance is not None and "v" in found and "q" not in found:  # RWKV
        found["q"] = receptance
    if joint is not None and "o" in found and joint.shape[0] == 3 * found["o"].shape[1]:
        by_head = mixer.info.name == "lightning"  # rows are q, k, v of the first head, then of the second
        parts = joint.unflatten(0, (own.heads, 3, -1)).unbind(1) if by_head else joint.chunk(3)
        found |= zip("qkv", parts, strict=True)
    if inner is not None and hasattr(mixer, "widths"):  # Mamba-2 and log-linear: x is the value, B the key, C the query
        found |= zip("vkq", inner.split([*own.widths, inner.shape[0] - sum(own.widths)])[:3], strict=True)
    return found


def spread(heads: int, context: int) -> Tensor:
    """Decay rate [H] of each head: lifetimes context^(1/H), context^(2/H), ..., context."""
    return torch.tensor([float(context) ** (-(h + 1) / heads) for h in range(heads)])


@torch.no_grad()
def set_decay(mixer: Mixer, rates: Tensor) -> bool:
    """Set the decay of head h of ``mixer`` to exp(-rates[h]) for every token; returns False if it has no such gate.

    Args:
        mixer: any mixer.
        rates: [H], positive, natural logarithms per token.
    """
    own: Any = mixer
    if isinstance(getattr(mixer, "A_log", None), Tensor) and own.A_log.shape == rates.shape and hasattr(mixer, "dt_bias"):
        own.A_log.copy_(rates.log())
        own.dt_bias.fill_(math.log(math.expm1(1.0)))  # a time step of 1
        _zero_weight(mixer, "a_proj")
        _zero_weight(mixer, "decay_proj")
        if _weight(mixer, "in_proj") is not None:  # Mamba-2: the last rows give the time steps
            own.in_proj.weight[sum(own.widths) :] = 0
        return True
    if mixer.info.name == "gla":
        _zero_weight(mixer, "decay_proj")
        own.decay_proj[-1].bias.copy_(_logit(own.tau * rates).repeat_interleave(own.decay_proj[-1].out_features // len(rates)))
        return True
    if mixer.info.name in ("mlstm", "fox"):
        _zero_weight(mixer, "f_proj")
        cap = getattr(mixer, "soft_cap", math.inf)
        gate = _logit(rates)
        own.f_proj.bias.copy_(gate if math.isinf(cap) else cap * torch.atanh((gate / cap).clamp(-0.99, 0.99)))
        return True
    if mixer.info.name == "rwkv7":
        share = rates.clamp(max=_RATE - 1e-3) * math.exp(0.5)
        own.w0.copy_(torch.logit(share).repeat_interleave(own.w0.numel() // len(rates)))
        return True
    return False


def _logit(rates: Tensor) -> Tensor:
    """Solve log sigmoid(x) = -rates for x."""
    return -rates - torch.log(-torch.expm1(-rates))


def _open_gates(mixer: Mixer) -> None:
    """Initialise gates to 1, and token shifts and terms beside the recurrence to 0."""
    own: Any = mixer
    _zero_weight(mixer, "b_proj")
    for name in ("D", "correction", "r_k"):  # terms beside the recurrence
        if isinstance(term := getattr(mixer, name, None), nn.Parameter):
            term.zero_()
    if mixer.info.name in ("mlstm", "mlstm_block"):
        nn.init.zeros_(own.i_proj.weight)
        nn.init.zeros_(own.i_proj.bias)
    if mixer.info.name == "rwkv7":
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):  # weights of the previous token
            getattr(mixer, name).zero_()
        own.g2.add_((2 - own.g2.sum(0)) / len(own.g2))  # after sigmoids of 1/2: a gate of 1
    if mixer.info.name not in ("gla", "retnet") and isinstance(getattr(mixer, "g_proj", None), nn.Sequential):
        _zero_weight(mixer, "g_proj")  # input of a sigmoid: 1/2


def _pass_through(conv: ShortConvolution) -> None:
    """Make the convolution return the current token, times :data:`TAP` if a SiLU follows."""
    conv.weight.zero_()
    conv.weight[..., -1] = TAP if conv.activation else 1.0
    if conv.bias is not None:
        conv.bias.zero_()


def _zero_weight(mixer: Mixer, name: str) -> None:
    """Zero the weight of the projection ``name``, if there is one, so that it returns its bias for every token."""
    found = getattr(mixer, name, None)
    last = found[-1] if isinstance(found, nn.Sequential) else found
    if isinstance(last, nn.Linear):
        nn.init.zeros_(last.weight)


def _weight(mixer: Mixer, name: str) -> Tensor | None:
    found = getattr(mixer, name, None)
    return found.weight if isinstance(found, nn.Linear) else None
