"""Attention with bounded-memory control (arXiv 2110.02488): every slot of a fixed memory holds a weighted average of the tokens so far."""

from __future__ import annotations

from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.decay.gsa import SlotMemory, Slots
from linattn.mixers.kernel.attention import log_fading, logsumexp_so_far, only_real
from linattn.mixers.parts import at_least, head_size, to_float32
from linattn.mixers.registry import register


@register(
    "abc",
    title="ABC (attention with bounded-memory control)",
    paper="ABC: Attention with Bounded-memory Control",
    arxiv="2110.02488",
    year=2021,
    equation=r"\tilde K_t = \sum_{i \le t} \phi_{t,i}^\top k_i,\quad \tilde V_t = \sum_{i \le t} \phi_{t,i}^\top v_i,\quad"
    r" \phi_{t,i} = \frac{\exp(x_i W)}{\sum_{j \le t} \exp(x_j W)},\quad o_t = \mathrm{softmax}(q_t \tilde K_t^\top) \tilde V_t",
    oracle="fla-core 0.6.0, naive_recurrent_abc; the averages of the equation on every prefix in float64",
    families=("neural memory", "linear attention with decay"),
    chinese={
        "ABC (attention with bounded-memory control)": "ABC（有界内存控制的注意力）",
        "the averages of the equation on every prefix in float64": "float64 下按公式对每个前缀求平均",
    },
)
class ABC(SlotMemory):
    """ABC-MLP of the paper, causal: a token's weights on the slots of its head are a softmax over time, learned from the token.

    With L_t = log Σ_{i ≤ t} exp(x_i W) a slot keeps exp(L_{t-1} - L_t) and takes exp(x_t W - L_t) of the token, so that no
    exponential overflows; fla clamps x W to [-32, 32] instead. Beside :class:`SlotMemory`'s the state has L,
    ``log_total`` [rows, H M]. Projections as of softmax attention; fla's layer adds rotary positions and a gated norm.
    """

    def __init__(self, dim: int, heads: int = 4, *, slots: int = 64) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        at_least(1, slots=slots)
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.s_proj = nn.Linear(dim, heads * slots, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        control = only_real(to_float32(self.s_proj(x)), call)
        before, total, _ = logsumexp_so_far(control, call, "log_total")
        fade, write = log_fading(before, total), (control - total).exp()
        return Slots(q, k, v, fade=fade.unflatten(-1, (self.heads, -1)), write=write.unflatten(-1, (self.heads, -1)))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))
