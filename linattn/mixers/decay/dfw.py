"""Decaying fast weights (arXiv 2210.04243): rows and columns of the state each decay by a gate of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register
from linattn.ops.outer_decay import outer_decay


@dataclass(frozen=True)
class OuterDecay(Recurrence):
    """``value_decay`` [B, T, H, V] beside the decay of the keys' channels."""

    value_decay: Tensor | None = None

    def masked(self, valid: Tensor | None) -> Recurrence:
        if valid is None or self.value_decay is None:
            return super().masked(valid)
        silent = torch.where(valid[..., None, None], self.value_decay, 0.0)
        return Recurrence.masked(replace(self, value_decay=silent), valid)


@register(
    "dfw",
    title="Decaying fast weights",
    paper="Fine-Tuning Pre-trained Transformers into Decaying Fast Weights",
    arxiv="2210.04243",
    year=2022,
    seeds=("004",),
    equation=r"S_t = (\alpha_t^\top \beta_t) \odot S_{t-1} + k_t^\top v_t,\quad \alpha_t = \sigma(x_t W_\alpha + b),\quad"
    r" \beta_t = \sigma(x_t W_\beta + c),\quad o_t = q_t S_t",
    linear_in_values=False,  # each channel of the values has a mixing matrix of its own
    oracle="the paper's recurrence, token by token in float64",
    chinese={"Decaying fast weights": "会衰减的快速权重"},
)
class DFW(Mixer):
    """Without feature map, normaliser, norm and output gate, as in the paper, which starts from the weights of softmax attention.

    Checked against the author's t2fw_torch (jenni-ai/T2FW, t2fw/torch.py): a token's own write does not decay, queries are not
    scaled, biases start as logits of numbers spread evenly over (0, 1) (``uniform_gate_init``).
    """

    shards = True

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.a_proj, self.b_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for gate in (self.a_proj, self.b_proj):
            with torch.no_grad():
                gate.bias.uniform_(1 / dim, 1 - 1 / dim).logit_()

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        a, b = (F.logsigmoid(to_float32(p(x))).unflatten(-1, (self.heads, -1)) for p in (self.a_proj, self.b_proj))
        return OuterDecay(q, k, v, decay=a, value_decay=b, scale=1.0)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, OuterDecay)
        assert r.decay is not None
        assert r.value_decay is not None
        o, state = outer_decay(
            r.q, r.k, r.v, r.decay, r.value_decay, scale=r.scale, initial_state=call.get("S"), return_state=True,
            cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        call.keep("S", state)
        return o

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return super().attend_flops(r, past) + r.v.numel() * r.k.shape[3]  # the second decay factor of every entry

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))
