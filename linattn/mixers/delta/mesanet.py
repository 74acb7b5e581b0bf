"""MesaNet (arXiv 2506.05233): for every token the least-squares linear map of all key-value pairs so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, head_size, to_float32, unit
from linattn.mixers.registry import register
from linattn.ops import linear_attention, operator
from linattn.ops.inputs import Form


@dataclass(frozen=True, kw_only=True)
class LeastSquares(Recurrence):
    """``weight`` β [B, T, H]: weight of a pair; ``v`` is already scaled by it."""

    weight: Tensor


class System(NamedTuple):
    """The equations x_t (H_t + Λ) = q_t of all tokens: ``k`` and ``pair`` = β k [B, T, H, K], whose outer products H_t sums, ``ridge`` Λ
    [H, K], ``decay`` [B, T, H], the initial H, and options of the solver.
    """

    k: Tensor
    pair: Tensor
    ridge: Tensor
    decay: Tensor | None
    initial: Tensor | None
    cu_seqlens: Tensor | None
    steps: int
    form: Form

    def times(self, p: Tensor) -> Tensor:
        """``p`` [B, T, H, K] times H_t + Λ."""
        h = linear_attention(
            p, self.k, self.pair, decay=self.decay, scale=1.0, initial_state=self.initial, cu_seqlens=self.cu_seqlens, form=self.form
        )
        return h + self.ridge * p

    def last(self) -> Tensor:
        """H after the last token."""
        return linear_attention(
            self.k, self.k, self.pair, decay=self.decay, scale=1.0, initial_state=self.initial, return_state=True,
            cu_seqlens=self.cu_seqlens, form=self.form,
        )[1]  # fmt: skip


def _solve(
    q: Tensor, k: Tensor, pair: Tensor, ridge: Tensor, decay: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
    steps: int, form: Form,
) -> Tensor:  # fmt: skip
    """Solve a :class:`System` for ``q`` of any length by conjugate gradients."""
    system = System(k, pair, ridge, decay, initial, cu_seqlens, steps, form)
    scale = q.abs().amax(-1, keepdim=True)
    q = q / torch.where(scale > 0, scale, 1.0)  # avoids underflow; the steps are the same
    x, residual, p = torch.zeros_like(q), q, q
    size = first = q.square().sum(-1, keepdim=True)
    for _ in range(steps):
        product = system.times(p)
        going = size > torch.finfo(q.dtype).eps ** 2 * first
        rate = torch.where(going, size / torch.where(going, (p * product).sum(-1, keepdim=True), 1.0), 0.0)
        x, residual = x + rate * p, residual - rate * product
        size, old = residual.square().sum(-1, keepdim=True), size
        p = residual + torch.where(going, size / torch.where(going, old, 1.0), 0.0) * p
    return scale * x


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.steps, ctx.form = inputs
    ctx.save_for_backward(output, *tensors)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the solution implicitly, not the steps of the solver.

    From x A = q follows dx = (dq - x dA) A⁻¹. With g the gradient of x, that of q is g A⁻¹, a solution of the same symmetric system, and
    that of A is the gradient of the product x A for the cotangent -g A⁻¹.
    """
    x, *tensors = ctx.saved_tensors
    needed, again = ctx.needs_input_grad[1:], torch.is_grad_enabled()
    solved = solve(g, *tensors, ctx.steps, ctx.form)
    with torch.enable_grad():
        views = [t.view_as(t) if n else t for t, n in zip(tensors, needed, strict=False)]  # detached from earlier operations
        product = System._make((*views, ctx.steps, ctx.form)).times(x)
        wanted = [t for t, n in zip(views, needed, strict=False) if n]
        found = iter(torch.autograd.grad(product, wanted, -solved, create_graph=again) if wanted else ())
    return solved, *(next(found) if n else None for n in needed)


# An operator, since compilers would unroll the steps.
solve = operator.register(
    "mesa_solve",
    "(Tensor q, Tensor k, Tensor pair, Tensor ridge, Tensor? decay, Tensor? initial, Tensor? cu_seqlens, SymInt steps, str form) -> Tensor",
    _solve, lambda q, *_: torch.empty_like(q), gradient=_backward, keep=_keep,
)  # fmt: skip


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
    number per channel, at least ``ridge``, and starts at 1. The steps start from 0 and stop for a token whose residual is
    rounding noise; the authors' code in fla adds 1e-5 to the denominators instead, which stops it at an error of about 5e-4.
    The backward pass solves the same kind of equations and saves nothing of the steps.
    """

    heads_apart = ()

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

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.q_conv(self.q_proj(x), call), self.k_conv(self.k_proj(x), call), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        weight = to_float32(self.b_proj(x)).sigmoid()
        decay = F.logsigmoid(to_float32(self.a_proj(x)))
        return LeastSquares(unit(q), unit(k).to(v.dtype), weight[..., None] * to_float32(v), decay=decay, scale=1.0, weight=weight)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, LeastSquares)
        k = to_float32(r.k)
        system = System(
            k, k * r.weight[..., None], F.softplus(to_float32(self.ridge_raw)) + self.ridge, r.decay, call.get("H"), call.cu_seqlens,
            self.steps, self.form,
        )  # fmt: skip
        x = solve(to_float32(r.q), *system)
        if call.returning:
            call.keep("H", system.last())
        o = linear_attention(
            x, k, to_float32(r.v), decay=r.decay, scale=1.0, initial_state=call.get("G"), return_state=call.returning,
            cu_seqlens=call.cu_seqlens, form=self.form,
        )  # fmt: skip
        if call.returning:
            o, state = o
            call.keep("G", state)
        return o.to(r.v.dtype)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o).flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.k.shape
        per_state = batch * tokens * heads * size
        return per_state * (size * (3 + 2 * self.steps) + 5 * r.v.shape[3])  # both fade and are written once; H is read at every step
