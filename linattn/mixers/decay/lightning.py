"""Lightning attention (arXiv 2401.04658), as in MiniMax-01 and TransNormerLLM: a constant decay per head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, check_place, head_size, to_float32
from linattn.mixers.registry import register


@register(
    "lightning",
    title="Lightning attention",
    paper="Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models",
    arxiv="2401.04658",
    year=2024,
    equation=r"S_t = e^{-s_h} S_{t-1} + k_t^\top v_t,\quad s_h = 2^{-8h/H} \left(1 - \tfrac{l}{L-1} + 10^{-5}\right),\quad o_t = q_t S_t",
    oracle="transformers, MiniMaxLightningAttention",
    chinese={"Lightning attention": "Lightning 注意力"},
)
class Lightning(Mixer):
    """SiLU on queries, keys and values, no scale; RMS norm over all heads together and a sigmoid gate on the output.

    ``layer`` of ``layers`` is the index l of L in a stack: heads of later layers decay less, those of the last hardly at all. A model
    counts its Lightning layers; MiniMax-01 counts its softmax layers too.
    The rates, and ``head_dim`` beside heads (128 and 64 for a width of 6144), are those of MiniMax-01 in transformers.
    """

    def __init__(self, dim: int, heads: int = 4, *, head_dim: int | None = None, layer: int = 0, layers: int = 1) -> None:
        super().__init__(dim)
        check_place(layer, layers)
        head_dim = head_size("dim", dim, heads) if head_dim is None else head_dim
        at_least(1, heads=heads, head_dim=head_dim)
        self.heads, width = heads, heads * head_dim
        self.strength = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        self.qkv_proj = nn.Linear(dim, 3 * width, bias=False)
        self.g_proj = nn.Linear(dim, width, bias=False)
        self.norm = HeadNorm(width, eps=1e-6)
        self.o_proj = nn.Linear(width, dim, bias=False)

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return {"layer": index, "layers": count}

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = F.silu(self.qkv_proj(x)).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        head = torch.arange(1, self.heads + 1, dtype=to_float32(x.new_empty(0)).dtype, device=x.device)
        return Recurrence(q, k, v, decay=-self.strength * torch.exp2(-8 * head / self.heads), scale=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o.flatten(-2)) * self.g_proj(x).sigmoid())
