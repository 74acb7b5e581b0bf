"""The original xLSTM's block around mLSTM (arXiv 2405.04517): up-projection before the memory, and a short convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.decay.mlstm import HeadLayerNorm, MatrixMemory
from linattn.mixers.parts import ShortConvolution, head_size, to_float32
from linattn.mixers.registry import register
from linattn.mixers.rwkv.block import TimeMixing

_MULTIPLE = 64  # the inner width is rounded up to a multiple of it


@register(
    "mlstm_block",
    title="mLSTM block with projection up before it (xLSTM)",
    paper="xLSTM: Extended Long Short-Term Memory",
    arxiv="2405.04517",
    year=2024,
    seeds=("004",),
    equation=r"y_t = \left(\mathrm{norm}(h_t) + s \odot c_t\right) \odot \mathrm{silu}(x_t W_z)\, W_o,\quad"
    r" h_t = \mathrm{mLSTM}(c_t W_q, c_t W_k, u_t W_v),\quad u_t = x_t W_u,\quad c_t = \mathrm{silu}(\mathrm{conv}(u)_t)",
    oracle="xlstm 2.0.6, mLSTMLayer",
    chinese={"mLSTM block with projection up before it (xLSTM)": "先升维的 mLSTM 块（xLSTM）"},
)
class MLSTMBlock(TimeMixing, MatrixMemory):
    """Figure 11 of the paper. Inside are ``factor`` dim channels (rounded up to a multiple of 64); maps to q, k and v see groups of 4 of
    them; the gates' inputs come from q, k and v together, without a cap; a layer norm per head; c is added to it by a learned weight s.

    Checked against mLSTMLayer of the package xlstm, whose block is this between a layer norm and the residual, without a feed-forward:
    ``LMConfig(mixer="mlstm_block", ffn="none", norm="layer")``. As in its step, m starts at 0; in its parallel form it does not, which
    matters by the 1e-6 that both add to the divided normaliser. Initially gates are independent of the token, and forget biases go from
    3 to 6.
    """

    def __init__(self, dim: int, heads: int = 4, *, factor: float = 2.0, conv_width: int = 4, group: int = 4, eps: float = 1e-6) -> None:
        super().__init__(dim)
        inner = math.ceil(factor * dim / _MULTIPLE) * _MULTIPLE
        head_size("factor * dim", inner, heads)
        if group < 1 or inner % group:
            raise ValueError(f"group must divide the inner width {inner}, but came as {group}")
        self.heads, self.eps = heads, eps
        self.up_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = ShortConvolution(inner, conv_width, bias=True)
        self.q_proj, self.k_proj, self.v_proj = (nn.Parameter(torch.empty(inner // group, group, group)) for _ in range(3))
        self.i_proj, self.f_proj = nn.Linear(3 * inner, heads), nn.Linear(3 * inner, heads)
        self.norm = HeadLayerNorm(inner, eps=1e-5)
        self.skip = nn.Parameter(torch.ones(inner))
        self.o_proj = nn.Linear(inner, dim, bias=False)
        self._start(dim)

    @torch.no_grad()
    def _start(self, dim: int) -> None:
        for weight in (self.up_proj.weight, self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(weight, std=math.sqrt(2 / (5 * dim)))
        nn.init.normal_(self.o_proj.weight, std=2 / math.sqrt(dim))
        for gate in (self.i_proj, self.f_proj):
            gate.weight.zero_()
        nn.init.normal_(self.i_proj.bias, std=0.1)
        self.f_proj.bias.copy_(torch.linspace(3.0, 6.0, self.heads))

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        u, gate = self.up_proj(x).chunk(2, -1)
        seen = self.conv(u, call)
        q, k, v = _grouped(seen, self.q_proj), _grouped(seen, self.k_proj), _grouped(u, self.v_proj)
        both = torch.cat([q, k, v], -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        return self.memory(q, k, v, to_float32(self.i_proj(both)), to_float32(self.f_proj(both)), call), (seen, gate)

    def finish(self, o: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        seen, gate = beside
        return self.o_proj((self.norm(o).to(gate.dtype) + self.skip.to(gate.dtype) * seen.to(gate.dtype)) * F.silu(gate))

    def load_xlstm(self, weights: Mapping[str, Tensor]) -> None:
        """Load the ``state_dict`` of an mLSTMLayer of the package xlstm of the same sizes, whose norm stores weight - 1."""
        names = {
            "up_proj.weight": "proj_up.weight", "conv.weight": "conv1d.conv.weight", "conv.bias": "conv1d.conv.bias",
            "q_proj": "q_proj.weight", "k_proj": "k_proj.weight", "v_proj": "v_proj.weight", "skip": "learnable_skip",
            "i_proj.weight": "mlstm_cell.igate.weight", "i_proj.bias": "mlstm_cell.igate.bias",
            "f_proj.weight": "mlstm_cell.fgate.weight", "f_proj.bias": "mlstm_cell.fgate.bias", "o_proj.weight": "proj_down.weight",
        }  # fmt: skip
        own = {ours: weights[theirs] for ours, theirs in names.items()}
        self.load_state_dict(own | {"norm.weight": 1 + weights["mlstm_cell.outnorm.weight"]})


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear map ``weight`` [groups, out, in] to each group of channels of x [B, T, D]."""
    return torch.einsum("btgi,goi->btgo", x.unflatten(-1, (weight.shape[0], -1)), weight.to(x.dtype)).flatten(-2)
