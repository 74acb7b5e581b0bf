"""RWKV's channel mixing: the feed-forward of its blocks, which reads the previous token and so has a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least
from linattn.mixers.registry import register
from linattn.mixers.rwkv.block import place_of, previous, ramp, ratios


@register(
    "rwkv_channel",
    title="RWKV channel mixing",
    paper="RWKV: Reinventing RNNs for the Transformer Era",
    arxiv="2305.13048",
    year=2023,
    seeds=("000", "001"),
    equation=r"y_t = \sigma(x^r_t W_r) \odot \max(x^k_t W_k, 0)^2 W_v,\quad x^k_t = \mu_k \odot x_t + (1 - \mu_k) \odot x_{t-1}",
    linear_in_values=False,
    oracle="transformers, RwkvFeedForward; rwkv 0.8.32, ffn_seq_v6 and RWKV_x070_CMix_seq",
    exemptions={"past": "by its definition it sees the token before and none earlier"},
    chinese={
        "RWKV channel mixing": "RWKV 的通道混合",
        "ffn_seq_v6 and RWKV_x070_CMix_seq": "ffn_seq_v6 与 RWKV_x070_CMix_seq",
        "by its definition it sees the token before and none earlier": "按定义它只看得见前一个 token，再早的看不见",
    },
)
class RWKVChannel(Mixer):
    """Channel mixing. RWKV's blocks are the pattern ``mixer="rwkv6, rwkv_channel", ffn="none"``: two of this library's blocks each.

    ``gated=False`` omits the receptance, as in RWKV-7. The initial mix with the previous token depends on the index ``layer`` of
    ``layers``. The state is the last token [rows, 1, D].
    """

    shards = True

    def __init__(self, dim: int, *, hidden: int | None = None, gated: bool = True, layer: int = 0, layers: int = 1) -> None:
        super().__init__(dim)
        hidden = 4 * dim if hidden is None else hidden
        at_least(1, hidden=hidden)
        self.gated, (_, almost) = gated, ratios(layer, layers)
        self.time_mix_key = nn.Parameter(ramp(dim, almost if gated else almost**4))
        self.k_proj, self.o_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        if gated:
            self.time_mix_receptance = nn.Parameter(ramp(dim, almost))
            self.r_proj = nn.Linear(dim, dim, bias=False)

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return place_of(index, count)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        before = previous(x, call)
        y = self.o_proj(self.k_proj(torch.lerp(before, x, self.time_mix_key)).relu().square())
        return self.r_proj(torch.lerp(before, x, self.time_mix_receptance)).sigmoid() * y if self.gated else y

    def flops(self, x: Tensor, past: int = 0) -> int:
        return 2 * x.shape[0] * x.shape[1] * sum(p.numel() for p in self.parameters() if p.ndim == 2)
