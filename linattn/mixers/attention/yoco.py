"""The cross-decoder of YOCO (arXiv 2405.05254): several layers of softmax attention share one cache, computed by the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.mixers.attention.scores import PIECE, pieces, softmax, upto
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import rotate, to_float32
from linattn.mixers.registry import register


@register(
    "yoco",
    title="Attention to one shared cache (YOCO)",
    paper="You Only Cache Once: Decoder-Decoder Architectures for Language Models",
    arxiv="2405.05254",
    year=2024,
    equation=r"o_t = \sum_{i \le t} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad q_t = x_t^{l} W_q^{l},\quad"
    r" k_i = x_i^{L/2} W_k,\quad v_i = x_i^{L/2} W_v",
    recurrent=False,
    oracle="torch scaled_dot_product_attention of every layer to the first one's cache, turned as complex numbers, in float64",
    chinese={
        "Attention to one shared cache (YOCO)": "共享一份缓存的注意力（YOCO）",
        "torch scaled_dot_product_attention of every layer to the first one's cache": "各层对首层缓存的 torch 注意力",
        "turned as complex numbers": "以复数旋转",
        "in float64": "float64",
    },
)
class YOCO(Softmax):
    """Only the ``first`` layer of the kind in a model computes keys and values. The others attend to its cache, which is passed to
    them, and their state is only their position.

    Neighbouring channels are rotated as pairs, by the frequencies of the paper's code (microsoft/unilm, YOCO), those of
    ``gated_retnet``. There keys and values have a norm of their own before the projections; here it is the norm of the first
    layer's block: the two differ only in the weight, which the projections can absorb.

    State of the first layer: ``cache`` [rows, slots, 2 kv_heads K + 1], keys, values, and 1 for real tokens.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        kv_heads: heads of keys and values; H by default.
        first: whether the layer computes keys and values; set by a model.
    """

    packs = False
    shares = True
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, kv_heads: int | None = None, first: bool = True) -> None:
        super().__init__(dim, heads, kv_heads=kv_heads)
        self.first = first
        if not first:
            del self.k_proj, self.v_proj

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return super().placed(index, count) | {"first": index == 0}

    def example_shared(self, x: Tensor) -> Tensor | None:
        return None if self.first else x.new_ones(*x.shape[:2], 2 * self.kv_heads * self.size + 1)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        angles = self.angles(x, call)
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.size)), angles, interleaved=True)
        if not self.first:
            none = x.new_zeros(()).expand(*x.shape[:2], self.kv_heads, self.size)
            return Recurrence(q, none, none)
        k, v = (p(x).unflatten(-1, (-1, self.size)) for p in (self.k_proj, self.v_proj))
        return Recurrence(q, rotate(k, angles, interleaved=True), v)

    def angles(self, x: Tensor, call: CallContext) -> Tensor:
        frequencies = self.base ** -torch.linspace(0, 1, self.size // 2, dtype=to_float32(x.new_empty(0)).dtype, device=x.device)
        return call.positions[..., None] * frequencies

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if self.first:
            real = torch.ones_like(call.positions, dtype=r.k.dtype) if call.valid is None else call.valid.to(r.k.dtype)
            call.shared = call.append("cache", torch.cat([r.k.flatten(2), r.v.flatten(2), real[..., None]], -1))
        elif call.shared is None:
            raise ValueError("shared must be the first layer's cache where first is false, but came as None")
        width, before = self.kv_heads * self.size, call.shared.shape[1] - call.tokens
        k, v, flag = call.shared.tensor_split((width, call.shared.shape[2] - 1), -1)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).repeat_interleave(self.heads // self.kv_heads, 2) for t in (k, v))
        own = torch.ones(*flag.shape[:1], call.tokens, dtype=torch.bool, device=flag.device)
        real, out = torch.cat([flag[:, :before, 0] > 0, own], 1), []
        for start, stop in pieces(call.tokens, self.piece):
            last = before + stop
            scores = torch.einsum("rthk,rshk->rhts", to_float32(r.q[:, start:stop]), to_float32(k[:, :last])) * self.size**-0.5
            out.append(softmax(scores, upto(real, before + start, last), v[:, :last]))
        return torch.cat(out, 1)
