"""RWKV-4 (arXiv 2305.13048): a weighted mean of the values for each channel, with a decay per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.mixers.rwkv.block import RWKV, previous, ramp, ratios, zigzag
from linattn.ops import diagonal_scan, running_max

_NOTHING = -1e38  # the exponent of an empty sum; finite, so that differences are finite


@register(
    "rwkv4",
    title="RWKV-4",
    paper="RWKV: Reinventing RNNs for the Transformer Era",
    arxiv="2305.13048",
    year=2023,
    seeds=("000", "001", "003"),
    equation=r"o_t = \sigma(r_t) \odot \frac{\sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t}"
    r"{\sum_{i<t} e^{-(t-1-i) w + k_i} + e^{u + k_t}},\quad w = e^{d}",
    oracle="transformers, RwkvSelfAttention and RwkvModel",
    chinese={"RwkvSelfAttention and RwkvModel": "RwkvSelfAttention 与 RwkvModel"},
)
class RWKV4(RWKV):
    """Time mixing. Every channel is a head with a key and a value of size 1; the state is num, den [rows, D] and their exponent max.

    Both sums are kept relative to e^max, the largest weight so far, so that no exponential overflows. Gradients take max as constant: the
    output does not depend on it. The initialisation depends on the index ``layer`` of ``layers``.
    """

    shards = True

    keep_float32 = ("time_decay", "time_first")

    def __init__(self, dim: int, *, layer: int = 0, layers: int = 1) -> None:
        super().__init__(dim)
        depth, almost = ratios(layer, layers)
        self.time_decay = nn.Parameter(-5 + 8 * (torch.arange(dim) / max(dim - 1, 1)) ** (0.7 + 1.3 * depth))
        self.time_first = nn.Parameter(torch.full((dim,), 0.3).log() + 0.5 * zigzag(dim))
        self.time_mix_key = nn.Parameter(ramp(dim, almost))
        self.time_mix_value = nn.Parameter(ramp(dim, almost) + 0.3 * depth)
        self.time_mix_receptance = nn.Parameter(ramp(dim, 0.5 * almost))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        before = previous(x, call)
        xk, xv, xr = (torch.lerp(before, x, mix) for mix in (self.time_mix_key, self.time_mix_value, self.time_mix_receptance))
        k, v = self.k_proj(xk)[..., None], self.v_proj(xv)[..., None]  # [B, T, D, 1]
        decay, bonus = -self.time_decay.exp()[:, None], self.time_first[:, None]
        return Recurrence(k, k, v, decay=decay, bonus=bonus, scale=1.0), (self.r_proj(xr),)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        """Weighted mean of v [B, T, D, V]: V values share each channel's weights."""
        assert r.decay is not None
        assert r.bonus is not None
        k, v, first = to_float32(r.k)[..., 0], to_float32(r.v), r.bonus[:, 0]
        fade = (r.decay[..., 0] if r.decay.ndim == 4 else r.decay[:, 0].expand(k.shape)).to(k.dtype)  # [B, T, D]
        if call.valid is not None:
            k = torch.where(call.valid[..., None], k, _NOTHING)
        top = self._old(call, "max", k, _NOTHING)
        largest, last = running_max(fade, k, initial_state=top, return_state=True, cu_seqlens=call.cu_seqlens)
        largest, earlier = largest.detach(), call.shifted(largest, top).detach()
        log = earlier + fade - largest
        log = log - log.detach().clamp(min=0)  # rounding may exceed 0
        weight = (k - largest).exp()
        if call.valid is not None:  # before the first real token the maximum is of padding, whose weight is 0
            weight = torch.where(call.valid[..., None], weight, 0.0)
        columns = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column sums the weights
        sums = self._old(call, "sums", columns.flatten(-2), 0.0)
        h, after = diagonal_scan(
            log[..., None].expand(columns.shape).flatten(-2), (weight[..., None] * columns).flatten(-2),
            initial_state=sums, return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        call.keep("max", last)
        call.keep("sums", after)
        own = first + k
        base = torch.maximum(earlier, own).detach()
        past = (earlier - base).exp()[..., None] * call.shifted(h, sums).view(columns.shape)
        seen = past + (own - base).exp()[..., None] * columns
        return (seen[..., :-1] / seen[..., -1:]).to(r.v.dtype)

    def finish(self, o: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        return self.o_proj(beside[0].sigmoid() * o[..., 0].to(beside[0].dtype))

    def _old(self, call: CallContext, name: str, like: Tensor, fill: float) -> Tensor:
        old = call.get(name)
        return like.new_full((call.rows, like.shape[-1]), fill) if old is None else old.to(like.dtype)
