"""Mixture of memories (arXiv 2502.13685): several Gated DeltaNet states; every token writes and reads a few of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, head_size, time_steps, to_float32, unit
from linattn.mixers.registry import register


@register(
    "mom",
    title="Mixture of memories (Gated DeltaNet)",
    paper="MoM: Linear Sequence Modeling with Mixture-of-Memories",
    arxiv="2502.13685",
    year=2025,
    equation=r"S_t^m = \alpha_t^m (I - \beta_t^m k_t^{m \top} k_t^m) S_{t-1}^m + \beta_t^m k_t^{m \top} v_t^m,\quad \text{if}\ g_t^m > 0,"
    r"\ \text{else}\ S_{t-1}^m,\quad o_t = q_t \Big(S_t^0 + \sum_{m} g_t^m S_t^m\Big),\quad"
    r" g_t = \mathrm{norm}(\mathrm{top}_n\, \mathrm{softmax}(x_t W))",
    oracle="fla-core 0.6.0, naive_recurrent_gated_delta_rule, memory by memory on the tokens that chose it",
    chinese={
        "Mixture of memories (Gated DeltaNet)": "记忆混合 MoM（Gated DeltaNet）",
        "memory by memory on the tokens that chose it": "逐个记忆，作用于选中它的 token",
        "if": "若",
        "else": "否则",
    },
)
class MoM(Mixer):
    """``memories`` states, each with keys, values, β and α of its own. A token writes to the ``active`` best of them and reads
    these by weight; the others stay as they are. With ``shared`` there is one more, S^0, that every token writes and reads.

    The memories are heads of one call: memories that are not chosen cost as much as the others. Queries, keys and values go through a short
    convolution over the sequence; the authors' code in fla has it over the tokens of each memory. The load-balancing loss
    is not added.

    Args:
        dim: width D of the model.
        heads: H of each memory.
        memories: number of memories to choose from.
        active: memories that a token chooses.
        shared: adds a memory that all tokens use.
        key_size: channels of a head's keys; dim / heads by default.
        value_size: channels of its values; equal by default (fla: twice).
        conv_width: tokens in the short convolution.
        eps: epsilon of the norm.
    """

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, heads: int = 4, *, memories: int = 4, active: int = 2, shared: bool = True, key_size: int | None = None,
        value_size: int | None = None, conv_width: int = 4, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        if not 1 <= active <= memories:
            raise ValueError(f"active must be from 1 to memories = {memories}, but came as {active}")
        self.heads, self.memories, self.active, self.shared = heads, memories, active, shared
        self.key_size = head_size("dim", dim, heads) if key_size is None else key_size
        self.value_size = self.key_size if value_size is None else value_size
        at_least(1, heads=heads, key_size=self.key_size, value_size=self.value_size)
        count = (memories + shared) * heads  # heads of all memories
        self.widths = heads * self.key_size, count * self.key_size, count * self.value_size  # of q, k, v
        self.router = nn.Linear(dim, memories, bias=False)
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv = ShortConvolution(sum(self.widths), conv_width)
        self.b_proj, self.a_proj = nn.Linear(dim, count, bias=False), nn.Linear(dim, count, bias=False)
        self.g_proj = nn.Linear(dim, heads * self.value_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.norm = HeadNorm(self.value_size, eps=eps)
        self.o_proj = nn.Linear(heads * self.value_size, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        """Order heads by memory, the shared memory last."""
        q, k, v = self.conv(self.qkv_proj(x), call).split(self.widths, -1)
        q, k = (unit(t.unflatten(-1, (-1, self.key_size))) for t in (q, k))
        chosen, weights = self.routed(x)  # [B, T, memories]
        chosen = chosen.repeat_interleave(self.heads, -1)  # [B, T, memories H]
        a = to_float32(self.a_proj(x)).unflatten(-1, (-1, self.heads)) + self.dt_bias
        decay = (-self.A_log.exp() * F.softplus(a)).flatten(-2)
        return Recurrence(
            (q[:, :, None] * weights[..., None, None]).flatten(2, 3), k, v.unflatten(-1, (-1, self.value_size)),
            decay=torch.where(chosen, decay, 0.0), beta=torch.where(chosen, to_float32(self.b_proj(x)).sigmoid(), 0.0),
        )  # fmt: skip

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Memories that each token chooses, and their weights [B, T, memories], the shared one's last."""
        best, index = to_float32(self.router(x)).softmax(-1).topk(self.active, -1)
        none = best.new_zeros(*x.shape[:2], self.memories)
        weights = none.scatter(-1, index, best / best.sum(-1, keepdim=True))
        chosen = none.bool().scatter(-1, index, True)
        if not self.shared:
            return chosen, weights
        return F.pad(chosen, (0, 1), value=True), F.pad(weights, (0, 1), value=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        o = o.unflatten(2, (-1, self.heads)).sum(2)
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))
