"""Mamba-3 (arXiv 2603.15569): a state-space model by the trapezoid rule with rotating (complex) states, SISO or MIMO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, head_size, to_float32
from linattn.mixers.registry import register
from linattn.ops import diagonal_scan, linear_attention, sharding

PAPER = "Mamba-3: Improved Sequence Modeling using State Space Principles"


@dataclass(frozen=True, kw_only=True)
class Trapezoid(Recurrence):
    """``near`` λΔ [B, T, H] weighs a token in its own step and ``far`` (1 - λ) Δ the one before it; the decay is the same for both."""

    near: Tensor
    far: Tensor


@register(
    "mamba3",
    title="Mamba-3",
    paper=PAPER,
    arxiv="2603.15569",
    year=2026,
    equation=r"S_t = \alpha_t S_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t B_{t-1}^\top x_{t-1} + \lambda_t \Delta_t B_t^\top x_t,\quad"
    r" \alpha_t = e^{\Delta_t A_t},\quad o_t = C_t S_t + D x_t",
    oracle="the paper's recurrence, step by step in float64, as in the authors' mamba3_siso_step_ref",
    families=("state spaces",),
    chinese={"as in the authors' mamba3_siso_step_ref": "同作者的 mamba3_siso_step_ref"},
)
class Mamba3(Mixer):
    """C is the query, B the key, x the value. No short convolution: the trapezoid rule weighs two tokens in every step.

    A token is written with the next one, which has the second part of its weight, and added to its own output separately; so
    one recurrence over the previous tokens suffices, and the state holds the last token beside S. B and C have RMS norm and a bias
    per head, and half of their channels rotate, in pairs, by the sum of Δ π tanh(x w). A is -1 - a for
    positive a = x w, else -1 / (1 - a). Checked against the authors' mamba_ssm (mamba3.py and the references in its tests).
    """

    shards = True

    keep_float32 = ("dt_bias",)
    rank = 1
    interleaved = True  # pairs channels 2i and 2i + 1, else i and i + N / 2

    def __init__(self, dim: int, *, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1) -> None:
        super().__init__(dim)
        at_least(1, expand=expand, head_dim=head_dim, state_size=state_size)
        self.inner, self.state_size, self.groups = expand * dim, state_size, groups
        if self.inner % head_dim:
            raise ValueError(f"expand * dim must be a multiple of head_dim = {head_dim}, but is {self.inner}")
        if state_size % 4:
            raise ValueError(f"state_size must be a multiple of 4, half of it turns in pairs, but came as {state_size}")
        self.heads, self.turning = self.inner // head_dim, state_size // 4
        head_size("the number of heads, expand * dim / head_dim,", self.heads, groups)
        shared = self.rank * groups * state_size
        self.parts = (self.inner, shared, shared, self.heads, self.heads, self.heads, self.turning)  # x, B, C, Δ, A, λ, angles
        self.in_proj, self.g_proj = nn.Linear(dim, sum(self.parts), bias=False), nn.Linear(dim, self.inner, bias=False)
        dt = torch.empty(self.heads, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.B_bias, self.C_bias = (nn.Parameter(torch.ones(self.heads, self.rank, state_size)) for _ in range(2))
        self.B_norm, self.C_norm = HeadNorm(state_size), HeadNorm(state_size)
        self.D = nn.Parameter(torch.ones(self.heads))
        self.o_proj = nn.Linear(self.inner, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        """q and k [B, T, rank · H, N], the heads of the first rank first; v [B, T, H, P]."""
        x, b, c, dt, a, mix, angles = self.in_proj(x).split(self.parts, -1)
        dt, mix = F.softplus(to_float32(dt) + self.dt_bias), to_float32(mix).sigmoid()
        turned = self._phase(dt[..., None] * (math.pi * to_float32(angles).tanh())[:, :, None], call)[:, :, None]
        q, k = (self._expand(t, norm, bias, turned) for t, norm, bias in ((c, self.C_norm, self.C_bias), (b, self.B_norm, self.B_bias)))
        v = x.unflatten(-1, (self.heads, -1))
        a = to_float32(a)
        rate = (a.clamp(min=0) + 1 / (1 - a.clamp(max=0))).clamp(min=1e-4)
        skip = (to_float32(self.D)[:, None] * self.inputs(v)).flatten(2, 3)
        return Trapezoid(q, k, v, decay=-rate * dt, scale=1.0, skip=skip, near=mix * dt, far=(1 - mix) * dt)

    def _phase(self, steps: Tensor, call: CallContext) -> Tensor:
        """Sums of the angles [B, T, H, n] from the start of each sequence; in float64, or 10⁵ tokens would not be exact."""
        kind = steps.dtype if steps.device.type == "mps" else torch.float64
        steps = steps.to(kind).flatten(2)
        if call.valid is not None:
            steps = torch.where(call.valid[..., None], steps, 0.0)
        old = call.get("angle")
        sums, last = diagonal_scan(
            steps.new_zeros(steps.shape[2]), steps,
            initial_state=None if old is None else old.to(kind).flatten(1), return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        dtype = to_float32(self.dt_bias).dtype
        circle = 2 * math.pi
        call.keep("angle", (last - circle * (last / circle).floor().detach()).to(dtype).unflatten(1, (self.heads, -1)))
        return (sums - circle * (sums / circle).floor().detach()).to(dtype).unflatten(2, (self.heads, -1))

    def _expand(self, t: Tensor, norm: HeadNorm, bias: Tensor, angles: Tensor) -> Tensor:
        """Norm, bias and rotation of B or C [B, T, rank · G · N] by ``angles`` [B, T, 1, H, n]: [B, T, rank · H, N]."""
        t = to_float32(norm(t.unflatten(-1, (self.rank, self.groups, -1)))).repeat_interleave(self.heads // self.groups, 3)
        t = t + to_float32(bias).transpose(0, 1)
        still = t.shape[-1] // 2 - self.turning
        cos, sin = F.pad(angles.cos(), (0, still), value=1.0), F.pad(angles.sin(), (0, still))
        a, b = (t[..., 0::2], t[..., 1::2]) if self.interleaved else t.chunk(2, -1)
        pair = (a * cos - b * sin, a * sin + b * cos)
        return (torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)).flatten(2, 3)

    def inputs(self, v: Tensor) -> Tensor:
        """Values [B, T, rank, H, P] that [B, T, H, P] writes."""
        return to_float32(v)[:, :, None]

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Trapezoid)
        assert r.decay is not None
        q, k = (to_float32(t).unflatten(2, (self.rank, -1)) for t in (r.q, r.k))  # [B, T, rank, H, N]
        v, dtype = self.inputs(r.v), r.v.dtype
        own = torch.einsum("btrhn,btshn,bth,btshp->btrhp", q, k, r.near, v)
        k_last, v_last, near_last, fade = self._last(call, k, v, r.near, r.decay)
        k_last = k_last * (near_last + r.far)[:, :, None, :, None]
        if call.valid is not None:
            k_last = torch.where(call.valid[:, :, None, None, None], k_last, 0.0)
            fade = torch.where(call.valid[..., None], fade, 0.0)
        q = q * r.decay.exp()[:, :, None, :, None]
        fade = F.pad(fade[:, :, None], (0, 0, 0, self.rank - 1)).flatten(1, 2)  # on the first of a token's substeps
        with sharding.repeated(self.rank):
            o = linear_attention(
                *(t.to(dtype).flatten(1, 2) for t in (q, k_last, v_last)), decay=fade, scale=1.0,
                initial_state=call.get("S"), return_state=call.returning,
                cu_seqlens=None if call.cu_seqlens is None else call.cu_seqlens * self.rank, form=self.form,
            )  # fmt: skip
        if call.returning:
            o, state = o
            call.keep("S", state)
        o = to_float32(o).unflatten(1, (-1, self.rank)) if call.tokens else own
        if self.rank > 1:  # later ranks of the previous token are not written yet
            missing = torch.einsum("btrhn,btshn->btrsh", q, k_last).permute(0, 1, 4, 2, 3).triu(1)
            o = o + torch.einsum("bthrs,btshp->btrhp", missing, v_last)
        return (o + own).flatten(2, 3).to(dtype)

    def _last(self, call: CallContext, k: Tensor, v: Tensor, near: Tensor, decay: Tensor) -> list[Tensor]:
        """Shift each by one token, with zeros at the start of a sequence; keeps the last token."""
        everything = [k, v, near, decay]
        flat = torch.cat([t.flatten(2) for t in everything], -1)
        longer, places = call.context("pending", flat, 1)
        before = longer[:, :-1] if places is None else longer.index_select(1, places - 1)
        parts = before.split([math.prod(t.shape[2:]) for t in everything], -1)
        return [p.reshape(t.shape) for p, t in zip(parts, everything, strict=True)]

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj((to_float32(o).flatten(-2) * F.silu(to_float32(self.g_proj(x)))).to(o.dtype))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.v.shape
        pairs = self.rank * self.rank * (r.q.shape[3] + size) * 2
        return batch * tokens * heads * (r.q.shape[3] * size * (4 * self.rank + 1) + pairs)

    def load_mamba_ssm(self, weights: Mapping[str, Tensor]) -> None:
        """Load the ``state_dict`` of mamba_ssm's Mamba3 of the same sizes, whose ``in_proj`` begins with the gate."""
        gate, rest = weights["in_proj.weight"].split((self.inner, sum(self.parts)))
        own = {"g_proj.weight": gate, "in_proj.weight": rest, "o_proj.weight": weights["out_proj.weight"]}
        same = [name for name in self.state_dict() if name not in own]
        self.load_state_dict(own | {name: weights[name] for name in same})


@register(
    "mamba3_mimo",
    title="Mamba-3 (several inputs and outputs)",
    paper=PAPER,
    arxiv="2603.15569",
    year=2026,
    equation=r"P_{t,r} = B_{t,r}^\top x_{t,r},\quad"
    r" S_t = \alpha_t S_{t-1} + \Delta_t \sum_r \big((1 - \lambda_t) \alpha_t P_{t-1,r} + \lambda_t P_{t,r}\big),\quad"
    r" o_t = \sum_r u_r \odot \mathrm{SiLU}(z_{t,r}) \odot (C_{t,r} S_t + D x_{t,r})",
    linear_in_values=False,  # every channel of a value has its own weight in each rank
    oracle="the paper's recurrence, step by step in float64, as in the authors' mamba3_MIMO_step_ref",
    families=("state spaces",),
    chinese={
        "Mamba-3 (several inputs and outputs)": "Mamba-3（多输入多输出）",
        "as in the authors' mamba3_MIMO_step_ref": "同作者的 mamba3_MIMO_step_ref",
    },
)
class Mamba3MIMO(Mamba3):
    """Mamba-3 that writes ``rank`` keys and reads ``rank`` queries a token; values and gates differ by a learned factor per channel.

    The ranks are substeps of the recurrence, of which only the first decays. Channels i and i + N / 2 rotate in pairs.
    """

    interleaved = False

    def __init__(self, dim: int, *, rank: int = 4, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, but came as {rank}")
        self.rank = rank
        super().__init__(dim, expand=expand, head_dim=head_dim, state_size=state_size, groups=groups)
        shape = (self.heads, rank, head_dim)
        self.mimo_x, self.mimo_o = (nn.Parameter(torch.ones(shape) / rank) for _ in range(2))
        self.mimo_z = nn.Parameter(torch.ones(shape))

    def inputs(self, v: Tensor) -> Tensor:
        return to_float32(v)[:, :, None] * to_float32(self.mimo_x).transpose(0, 1)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        z, u = to_float32(self.mimo_z).transpose(0, 1), to_float32(self.mimo_o).transpose(0, 1)  # [rank, H, P]
        gate = F.silu(to_float32(self.g_proj(x)).unflatten(-1, (1, self.heads, -1)) * z)
        return self.o_proj((to_float32(o).unflatten(2, (self.rank, -1)) * gate * u).sum(2).flatten(-2).to(o.dtype))
