"""MesaNet (arXiv 2506.05233): for every token the linear map that fits all pairs of key and value so far best, by least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.carry import Carry
from linattn.mixers.parts import HeadNorm, ShortConvolution, head_size, unit, wide
from linattn.mixers.registry import register
from linattn.ops import linear_attention


@dataclass(frozen=True, kw_only=True)
class LeastSquares(Recurrence):
    """``weight`` β [B, T, H]: how much a pair counts; ``v`` is scaled by it already."""

    weight: Tensor


@register(
    "mesanet",
    title="MesaNet",
    paper="MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
    arxiv="2506.05233",
    year=2025,
    equation=r"H_t = \gamma_t H_{t-1} + \beta_t k_t^\top k_t,\quad G_t = \gamma_t G_{t-1} + \beta_t k_t^\top v_t,"
    r"\quad o_t = q_t (H_t + \Lambda)^{-1} G_t",
    oracle="fla-core 0.6.0, naive_mesa_net_exact",
)
class MesaNet(Mixer):
    """Two recurrences, and ``steps`` of conjugate gradients between them, each for all tokens at once by one linear attention.

    Short convolution and SiLU on q and k, both of unit length; γ and β are sigmoids of the token; the ridge Λ is a learned
    number per channel, at least ``ridge``, and starts at 1. The steps start from 0 and end early for a token whose residual is
    rounding noise; the authors' code in fla adds 1e-5 to the denominators instead, which stops it at an error of about 5e-4.
    """

    keep_float32 = ("ridge_raw",)

    def __init__(self, dim: int, heads: int = 4, *, steps: int = 30, ridge: float = 0.25, conv_width: int = 4) -> None:
        super().__init__(dim)
        if steps < 1 or not 0 < ridge < 1:
            raise ValueError(f"steps must be at least 1 and ridge between 0 and 1, but came as {steps} and {ridge}")
        self.heads, self.steps, self.ridge = heads, steps, ridge
        size = head_size("dim", dim, heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.q_conv, self.k_conv = ShortConvolution(dim, conv_width, name="q_conv"), ShortConvolution(dim, conv_width, name="k_conv")
        self.a_proj, self.b_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        self.ridge_raw = nn.Parameter(torch.full((heads, size), 1.0 - ridge, dtype=torch.float32).expm1().log())
        self.norm = HeadNorm(size)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, state: Carry) -> Recurrence:
        q, k, v = self.q_conv(self.q_proj(x), state), self.k_conv(self.k_proj(x), state), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        weight = wide(self.b_proj(x)).sigmoid()
        decay = F.logsigmoid(wide(self.a_proj(x)))
        return LeastSquares(unit(q), unit(k).to(v.dtype), weight[..., None] * wide(v), decay=decay, scale=1.0, weight=weight)

    def attend(self, r: Recurrence, carry: Carry) -> Tensor:
        assert isinstance(r, LeastSquares)
        k, ridge = wide(r.k), F.softplus(wide(self.ridge_raw)) + self.ridge
        pair = k * r.weight[..., None]

        def times(p: Tensor, last: bool = False) -> tuple[Tensor, Tensor | None]:
            """``p`` [B, T, H, K] times H_t, and H after the last token."""
            out = linear_attention(
                p, k, pair, decay=r.decay, scale=1.0, initial_state=carry.get("H"), return_state=last, cu_seqlens=carry.cu_seqlens,
                form=self.form,
            )  # fmt: skip
            return out if last else (out, None)

        q = wide(r.q)
        length = q.detach().square().sum(-1, keepdim=True).sqrt()
        length = torch.where(length > 0, length, 1.0)  # of unit length nothing underflows, and the steps are the same
        q = q / length
        product, state = times(q, carry.returning)
        carry.keep("H", state)
        x = length * self._solve(q, product + ridge * q, lambda p: times(p)[0] + ridge * p)
        o = linear_attention(
            x, k, wide(r.v), decay=r.decay, scale=1.0, initial_state=carry.get("G"), return_state=carry.returning,
            cu_seqlens=carry.cu_seqlens, form=self.form,
        )  # fmt: skip
        if carry.returning:
            o, state = o
            carry.keep("G", state)
        return o.to(r.v.dtype)

    def _solve(self, q: Tensor, product: Tensor, apply) -> Tensor:
        """x with x A = q, by conjugate gradients; ``apply`` multiplies by A, ``product`` is q A; q has length 1 or 0."""
        x, residual, p = torch.zeros_like(q), q, q
        size = q.square().sum(-1, keepdim=True)
        for step in range(self.steps):
            if step:
                product = apply(p)
            going = size > torch.finfo(q.dtype).eps ** 2
            rate = torch.where(going, size / torch.where(going, (p * product).sum(-1, keepdim=True), 1.0), 0.0)
            x, residual = x + rate * p, residual - rate * product
            size, old = residual.square().sum(-1, keepdim=True), size
            p = residual + torch.where(going, size / torch.where(going, old, 1.0), 0.0) * p
        return x

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o).flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.k.shape
        per_state = batch * tokens * heads * size
        return per_state * (size * (3 + 2 * self.steps) + 5 * r.v.shape[3])  # both fade and are written once; H is read at every step
