"""Preconditioned KDA (arXiv 2604.21100): Kimi Delta Attention with writes scaled by an inverse diagonal curvature of the keys."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.delta.kda import KDA
from linattn.mixers.delta.precond_gated_deltanet import CURVATURE, Preconditioned
from linattn.mixers.registry import register


@register(
    "precond_kda",
    title="Preconditioned KDA",
    paper="Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences",
    arxiv="2604.21100",
    year=2026,
    equation=r"S_t = (I - \beta_t p_t^\top k_t)\,\mathrm{Diag}(\alpha_t) S_{t-1} + \beta_t p_t^\top v_t,\quad o_t = q_t S_t," + CURVATURE,
    oracle="fla-core 0.6.0, naive_recurrent_precond_kda; the recurrence token by token in float64",
    chinese={"Preconditioned KDA": "预条件 KDA", "the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class PrecondKDA(Preconditioned, KDA):
    """KDA with a preconditioner, :class:`~linattn.mixers.delta.precond_gated_deltanet.Preconditioned`, and a bias in the output gate."""

    keep_float32 = (*KDA.keep_float32, "curvature_A_log", "curvature_dt_bias", "curvature_center")  # type: ignore[assignment]  # longer than the base class's

    def __init__(
        self, dim: int, heads: int = 4, *, size: int | None = None, conv_width: int = 4, negative_eigenvalues: bool = False,
        squash: float = 1.5, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, size=size, conv_width=conv_width, eps=eps, negative_eigenvalues=negative_eigenvalues, gate_bias=True)
        self.add_preconditioner(dim, heads, squash)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return self.preconditioned(super().project(x, call), x, call)
