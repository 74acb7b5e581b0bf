"""mLSTM (xLSTM, arXiv 2405.04517): a matrix memory with exponential input gates, kept in range by a running maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, positive, to_float32
from linattn.mixers.registry import register
from linattn.ops import running_max


@dataclass(frozen=True)
class Stabilised(Recurrence):
    """Recurrence divided by e^m_t; ``floor`` [B, T, H] is the least value of the normaliser, e^-m_t."""

    floor: Tensor | None = None


class MatrixMemory(Mixer):
    """Recurrence of mLSTM for a mixer's queries, keys, values and gates. ``eps`` is added to the denominator.

    The state is S and z divided by e^m, and m [rows, 1, H], the running maximum of the input gates decayed by the forget gates.
    """

    shards = True

    eps: float

    def memory(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, call: CallContext) -> Stabilised:
        """q, k, v [B, T, H, ...]; the inputs of the gates, e^i and σ(f), are float32 [B, T, H]."""
        decay = F.logsigmoid(f)
        if call.valid is not None:
            valid = call.valid[..., None]
            decay, i = torch.where(valid, decay, 0.0), torch.where(valid, i, -torch.inf)
        before, m = _maxima(decay, i, call)
        faded = (decay + before - m).clamp(max=0).to(decay.dtype)
        k = k * (i - m).exp().to(decay.dtype)[..., None]
        floor = (-m).clamp(max=80).exp().to(decay.dtype)  # larger ones give 0 in float32
        return Stabilised(q, k, v, decay=faded, normalize="return", floor=floor)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Stabilised)
        assert r.floor is not None
        o, normaliser = super().attend(r, call)
        return (o / (torch.maximum(normaliser.abs(), r.floor) + self.eps)[..., None]).to(r.v.dtype)


@register(
    "mlstm",
    title="mLSTM (xLSTM with matrix memory)",
    paper="xLSTM: Extended Long Short-Term Memory",
    arxiv="2405.04517",
    year=2024,
    seeds=("004",),
    equation=r"S_t = \sigma(f_t) S_{t-1} + e^{i_t} k_t^\top v_t,\quad z_t = \sigma(f_t) z_{t-1} + e^{i_t} k_t,\quad"
    r" o_t = \frac{q_t S_t}{\max(|q_t z_t^\top|, 1)}",
    oracle="transformers, xLSTMLayer",
    chinese={"mLSTM (xLSTM with matrix memory)": "mLSTM（以矩阵为记忆的 xLSTM）"},
)
class MLSTM(MatrixMemory):
    """The layer of xLSTM-7B (arXiv 2503.13427): keys of dim / 2, values of dim, layer norm per head, sigmoid gate, no convolution.

    ``soft_cap`` c replaces a gate's input x by c tanh(x / c). Checked against xLSTMLayer of transformers: m starts at 0, and 1e-6 is
    added to the divided normaliser. The block of the first xLSTM is :class:`~linattn.mixers.decay.mlstm_block.MLSTMBlock`.
    """

    heads_apart = ()

    def __init__(
        self, dim: int, heads: int = 4, *, key_ratio: float = 0.5, value_ratio: float = 1.0, soft_cap: float = 15.0, eps: float = 1e-6
    ) -> None:
        super().__init__(dim)
        keys, values = int(dim * key_ratio), int(dim * value_ratio)
        head_size("dim * key_ratio", keys, heads)
        head_size("dim * value_ratio", values, heads)
        positive(soft_cap=soft_cap)
        self.heads, self.soft_cap, self.eps = heads, soft_cap, eps
        self.q_proj, self.k_proj = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.i_proj, self.f_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        self.norm = HeadLayerNorm(values, eps=1e-6)
        self.o_proj = nn.Linear(values, dim, bias=False)
        with torch.no_grad():  # small input gates and large forget gates at first
            for gate in (self.i_proj, self.f_proj):
                gate.weight.zero_()
            self.i_proj.bias.fill_(-10.0)
            self.f_proj.bias.copy_(torch.linspace(3.0, 6.0, heads))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        i, f = (self.soft_cap * torch.tanh(to_float32(p(x)) / self.soft_cap) for p in (self.i_proj, self.f_proj))  # [B, T, H]
        return self.memory(q, k, v, i, f, call)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o) * self.g_proj(x).sigmoid())


def _maxima(decay: Tensor, gate: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
    """Stabiliser m before and after each token, [B, T, H] each; it starts at 0.

    In float64, cheap for one number a head: a decay is a difference of two m, whose float32 rounding errors would accumulate.
    """
    exact = torch.float32 if decay.device.type == "mps" else torch.float64  # MPS has no float64
    old = call.get("m")
    first = decay.new_zeros(call.rows, decay.shape[-1], dtype=exact) if old is None else old[:, 0]
    m = running_max(decay.to(exact), gate.to(exact), initial_state=first, cu_seqlens=call.cu_seqlens)
    assert isinstance(m, Tensor)
    longer, places = call.context("m", m, 1)
    return longer[:, :-1] if places is None else longer.index_select(1, places - 1), m


class HeadLayerNorm(nn.Module):
    """Layer norm of each head: [B, T, H, V] -> [B, T, H V] with a weight per channel; sums in float32."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, o: Tensor) -> Tensor:
        x = to_float32(o)
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x.flatten(-2) * self.weight).to(o.dtype)
