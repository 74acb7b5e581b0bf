"""Native sparse attention (arXiv 2502.11089): block means, selected blocks, and a window, each with a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, pieces, weights
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, to_float32
from linattn.mixers.pattern.learned import best, block_means, in_blocks
from linattn.mixers.registry import register


@dataclass(frozen=True, kw_only=True)
class Branches(Recurrence):
    """``gates`` [B, T, H, 3]: the weights of means, chosen blocks and window."""

    gates: Tensor


@dataclass(frozen=True)
class Blocks:
    """Keys and values [rows, slots, G, ...] at ``place`` [rows, slots], and the means of their blocks [rows, blocks, G, ...]."""

    k: Tensor
    v: Tensor
    place: Tensor
    k_mean: Tensor
    v_mean: Tensor

    def before(self, slot: int) -> Blocks:
        return Blocks(self.k[:, :slot], self.v[:, :slot], self.place[:, :slot], self.k_mean, self.v_mean)


@register(
    "nsa",
    title="Native sparse attention",
    paper="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
    arxiv="2502.11089",
    year=2025,
    equation=r"o_t = \sum_c \sigma(x_t w_c) \sum_{i \in I_t^c} \mathrm{softmax}_i\big(q_t k_i^{c \top} / \sqrt{d}\big) v_i^c,\quad"
    r" c \in \{\mathrm{mean}, \mathrm{top}, \mathrm{near}\},\quad"
    r" I_t^{\mathrm{top}} = \mathrm{top}_n \text{ blocks of } p_t^{\mathrm{mean}},\quad I_t^{\mathrm{near}} = \{t - w + 1, \dots, t\}",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_nsa_compression, naive_nsa_topk and naive_nsa_selection; the equations with loops in float64",
    families=("learnable patterns", "sparse"),
    chinese={
        "Native sparse attention": "原生稀疏注意力（NSA）",
        " blocks of ": " 个块，依 ",
        "naive_nsa_topk and naive_nsa_selection": "naive_nsa_topk 与 naive_nsa_selection",
        "the equations with loops in float64": "float64 下用循环写出的公式",
    },
)
class NSA(Softmax):
    """Blocks of ``block`` tokens, and heads in groups that share keys and values, ``kv_heads`` of them.

    Of every complete block a query reads the mean of its keys and values. A block's importance is its mean weight there over the group:
    the ``blocks`` most important ones are read token by token, always including the first, the query's own and the one before it.
    The query also reads the last ``window`` tokens. The choice has no gradient; ties with the last chosen block
    are included.

    As in the layer of fla, blocks of means and chosen blocks are the same, all three branches share keys and values, and means replace
    the paper's learned map of a block (32 tokens, stride 16). All scores are computed, so time grows as for softmax. The
    state is that of ``softmax``, and the position of every slot.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        kv_heads: groups G of heads.
        block: tokens in a block.
        blocks: number of them that are read token by token, at least 3.
        window: number of last tokens, itself included, that a query also reads.
        rotary: rotates queries and keys by position.
    """

    heads_apart = None

    packs = False
    piece = PIECE

    def __init__(
        self, dim: int, heads: int = 4, *, kv_heads: int = 1, block: int = 64, blocks: int = 16, window: int = 512, rotary: bool = True
    ) -> None:
        super().__init__(dim, heads, kv_heads=kv_heads, rotated=None if rotary else 0)
        at_least(1, block=block, window=window)
        at_least(3, blocks=blocks)
        self.block, self.blocks, self.near = block, blocks, window
        self.gate_proj = nn.Linear(dim, 3 * heads, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return Branches(r.q, r.k, r.v, gates=to_float32(self.gate_proj(x)).sigmoid().unflatten(-1, (self.heads, 3)))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Branches)
        position = call.positions
        slots, _, before = cached(call, k=r.k, v=r.v, place=position if call.valid is None else torch.where(call.valid, position, -1))
        k, v, place = to_float32(slots["k"]), to_float32(slots["v"]), slots["place"]
        past, out = Blocks(k, v, place, *(block_means(t, place, self.block) for t in (k, v))), []
        for start, stop in pieces(call.tokens, self.piece):
            q, gates = (t[:, start:stop].unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) for t in (to_float32(r.q), r.gates))
            o = self._piece(q * self.size**-0.5, gates, position[:, None, None, start:stop, None], past.before(before + stop))
            out.append(o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(r.v.dtype))
        return torch.cat(out, 1)

    def _piece(self, q: Tensor, gates: Tensor, now: Tensor, past: Blocks) -> Tensor:
        """Output for queries q [rows, G, H / G, T, K] with gates at positions ``now`` [rows, 1, 1, T, 1]: [rows, G, H / G, T, V]."""
        mean, top, near = gates.split(1, -1)
        block = torch.arange(past.k_mean.shape[1], device=q.device)
        matters = weights(torch.einsum("rgntk,rbgk->rgntb", q, past.k_mean), (block + 1) * self.block <= now + 1)
        o = mean * torch.einsum("rgntb,rbgv->rgntv", matters, past.v_mean)
        place = past.place[:, None, None, None]
        seen = (place >= 0) & (place <= now)
        scores = torch.einsum("rgntk,rsgk->rgnts", q, past.k)
        chosen = in_blocks(self._chosen(matters.detach().mean(2), now[:, 0]), past.place, self.block)[:, :, None]
        tokens = top * weights(scores, seen & chosen) + near * weights(scores, seen & (place > now - self.near))
        return o + torch.einsum("rgnts,rsgv->rgntv", tokens, past.v)

    def _chosen(self, matters: Tensor, now: Tensor) -> Tensor:
        """Choose the blocks to read token by token from their weights [rows, G, T, blocks]."""
        own, block = now // self.block, torch.arange(matters.shape[-1], device=now.device)
        always = (block == 0) | (block == own) | (block == own - 1)
        return best(matters.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf), self.blocks)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        means = 2 * batch * heads * tokens * ((past + tokens) // self.block) * (size + r.v.shape[3])
        return super().attend_flops(r, past) + means
