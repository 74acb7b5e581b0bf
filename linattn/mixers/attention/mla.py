"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) without positions: keys and values of all heads come from one latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, head_size
from linattn.mixers.registry import register
from linattn.ops.one_query import one_query


@register(
    "mla",
    title="Multi-head latent attention, without positions",
    paper="DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
    arxiv="2405.04434",
    year=2024,
    equation=r"o_t = \sum_{i \le t} \frac{\exp(q_t k_i^\top / \sqrt{d})}{\sum_{j \le t} \exp(q_t k_j^\top / \sqrt{d})}\, c_i W_v,\quad"
    r" k_i = [c_i W_k, x_i W_s],\quad c_i = \mathrm{norm}(x_i W_c)",
    recurrent=False,
    oracle="transformers, KimiLinearAttention",
    chinese={"Multi-head latent attention, without positions": "多头潜在注意力（MLA），不带位置"},
)
class MLA(Softmax):
    """The attention of Kimi Linear (arXiv 2510.26692), which leaves positions to its linear layers.

    The state keeps of a token its latent c of ``rank`` channels and ``shared`` key channels common to all heads. The up-projection
    of keys is absorbed into the queries, that of values into the output (section 2.1.2 of DeepSeek-V2's
    paper), so this is attention with one head of keys [c, x W_s] and values c.
    A head has ``head_dim`` + ``shared`` channels of query and ``value_dim`` of value; by default dim / heads, half of it and dim / heads.
    """

    heads_apart = None

    def __init__(
        self, dim: int, heads: int = 4, *, rank: int | None = None, head_dim: int | None = None, shared: int | None = None,
        value_dim: int | None = None, eps: float = 1e-6,
    ) -> None:  # fmt: skip
        super(Softmax, self).__init__(dim)
        self.window, self.heads = None, heads
        self.head_dim = head_size("dim", dim, heads) if head_dim is None else head_dim
        self.rank, self.shared = dim // 2 if rank is None else rank, max(self.head_dim // 2, 1) if shared is None else shared
        self.value_dim = self.head_dim if value_dim is None else value_dim
        at_least(1, heads=heads, head_dim=self.head_dim, rank=self.rank, value_dim=self.value_dim)
        at_least(0, shared=self.shared)
        self.q_proj = nn.Linear(dim, heads * (self.head_dim + self.shared), bias=False)
        self.latent_proj = nn.Linear(dim, self.rank + self.shared, bias=False)
        self.norm = HeadNorm(self.rank, eps=eps)
        self.kv_proj = nn.Linear(self.rank, heads * (self.head_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, own = self.q_proj(x).unflatten(-1, (self.heads, -1)).split((self.head_dim, self.shared), -1)
        c, common = self.latent_proj(x)[:, :, None].split((self.rank, self.shared), -1)  # [B, T, 1, ...]
        c = self.norm(c)
        q = torch.cat([torch.einsum("bthk,hkc->bthc", q, self._maps(c)[0]), own], -1)  # [B, T, H, rank + shared]
        scale = ((self.rank + self.shared) / (self.head_dim + self.shared)) ** 0.5  # attention divides by the former
        return Recurrence(q * scale, torch.cat([c, common], -1), c)

    def attend_cache(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, taken: Tensor) -> Tensor:
        """Attend to a cache of keys, whose first channels are the values: torch's fast path needs equal sizes of both."""
        return one_query(q, k, k, seen, taken)[..., : v.shape[-1]]

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(torch.einsum("bthc,hvc->bthv", o, self._maps(o)[1]).flatten(-2))

    def _maps(self, like: Tensor) -> tuple[Tensor, ...]:
        """Maps from a latent to each head's key and value: [H, head_dim, rank] and [H, value_dim, rank].

        If the map is more than its weight (a PEFT adapter, a weight that accelerate loads), the map itself is called.
        """
        weight = self.kv_proj.weight
        if type(self.kv_proj) is not nn.Linear or hasattr(self.kv_proj, "_hf_hook"):
            weight = self.kv_proj(torch.eye(self.rank, dtype=weight.dtype, device=like.device)).T
        return weight.unflatten(0, (self.heads, -1)).split((self.head_dim, self.value_dim), 1)
