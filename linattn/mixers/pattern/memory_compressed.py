"""Memory-compressed attention (arXiv 1801.10198): a strided convolution compresses keys and values by a factor of three."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, pieces, softmax
from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register

NEVER = 2**62  # the position of a slot that no query sees


@register(
    "memory_compressed",
    title="Memory-compressed attention",
    paper="Generating Wikipedia by Summarizing Long Sequences",
    arxiv="1801.10198",
    year=2018,
    seeds=("001",),
    equation=r"o_t = \sum_{j : c j + c - 1 \le t} \mathrm{softmax}_j\big(q_t \tilde k_j^\top / \sqrt{d}\big) \tilde v_j,\quad"
    r" \tilde k_j = \sum_{s < c} k_{c j + s} W_s + b",
    recurrent=False,
    linear_in_values=False,  # slots of compressed tokens belong to no token
    oracle="memory-compressed-attention 0.0.7, MemoryCompressedAttention without a mask",
    exemptions={"forms": "a state has a slot more for every call it went through, so states that came by different calls differ in size"},
    families=("fixed patterns", "neural memory", "down-sampling"),
    chinese={
        "Memory-compressed attention": "记忆压缩注意力",
        "MemoryCompressedAttention without a mask": "不带掩码的 MemoryCompressedAttention",
        "a state has a slot more for every call it went through, so states that came by different calls differ in size": (
            "每经过一次调用，状态就多一个槽，因此经不同调用得到的状态大小不同"
        ),
    },
)
class MemoryCompressed(Mixer):
    """``rate`` = c tokens become one slot. A token sees the complete slots up to its own, and a learned slot without tokens, so that it
    always sees one. Without causality it sees all slots, the last of which may have fewer tokens.

    The convolution mixes the channels of a head (one map for keys and values, as in the oracle). The paper alternates it with local
    attention in blocks of 256 tokens: ``mixer="local, memory_compressed"`` with ``{"local": {"block": 256, "memory": 0}}``.
    State: the slots so far ``k``, ``v`` [rows, slots, D], each row's position in them, and the last c - 1 tokens.
    """

    packs = False
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, rate: int = 3, causal: bool = True) -> None:
        super().__init__(dim)
        if rate < 1:
            raise ValueError(f"rate must be at least 1, but came as {rate}")
        self.heads, self.size, self.rate, self.causal = heads, head_size("dim", dim, heads), rate, causal
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.compress = nn.Conv1d(dim, dim, rate, stride=rate, groups=heads)
        self.null_key, self.null_value = (nn.Parameter(torch.zeros(dim)) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        (k, place), (v, _) = self._slots("k", k, call), self._slots("v", v, call)  # [B, slots, D]
        k, v = (torch.cat([null.to(t.dtype).expand(t.shape[0], 1, -1), t], 1) for null, t in ((self.null_key, k), (self.null_value, v)))
        place = F.pad(place, (1, 0), value=-1)  # the last token of each slot; the learned slot comes first
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        out, position = [], call.positions
        for start, stop in pieces(call.tokens, self.piece):
            seen = self._seen(position[:, start:stop], place, call)
            scores = torch.einsum("rthk,rshk->rhts", to_float32(q[:, start:stop]), to_float32(k)) * self.size**-0.5
            out.append(softmax(scores, seen, v))
        return self.o_proj(torch.cat(out, 1).flatten(-2))

    def _seen(self, position: Tensor, place: Tensor, call: CallContext) -> Tensor:
        if self.causal:
            return place[:, None] <= position[..., None]
        real = place < (call.start + call.counts + self.rate - 1)[:, None]  # at least one of its tokens is real
        return real[:, None].expand(-1, position.shape[1], -1)

    def _slots(self, name: str, x: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Slots of earlier calls and of this one, and the position of the last token of each, [B, slots] both.

        Tokens of an incomplete slot stay in the state and precede those of the next call.
        """
        waiting, rate = call.start % self.rate, self.rate
        before = call.before(f"{name}_last", x, rate - 1) if rate > 1 else None
        before = x.new_zeros(x.shape[0], rate - 1, x.shape[2]) if before is None else before
        longer = torch.cat([before, x], 1)
        count = -(-(x.shape[1] + rate - 1) // rate) if x.shape[1] or not call.fresh else 0
        first = rate - 1 - waiting  # start of the first incomplete slot in ``longer``
        index = first[:, None] + torch.arange(count * rate, device=x.device)
        inside = index < longer.shape[1]
        tokens = longer.gather(1, index.clamp(max=max(longer.shape[1] - 1, 0))[..., None].expand(-1, -1, x.shape[2])) * inside[..., None]
        new = self.compress(tokens.transpose(1, 2)).transpose(1, 2) if count else x[:, :0]
        place = (call.start - waiting)[:, None] + rate * (1 + torch.arange(count, device=x.device)) - 1
        old, old_place = call.get(name), call.get("place")
        slots = new if old is None else torch.cat([old.to(new.dtype), new], 1)
        complete = torch.where(place < (call.start + call.counts)[:, None], place, NEVER)  # later slots are recomputed
        call.keep(name, slots)
        call.keep("place", complete if old_place is None else torch.cat([old_place, complete], 1))
        return slots, place if old_place is None else torch.cat([old_place, place], 1)

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        maps = 2 * dim * dim * (4 + 2 / self.heads)  # convolutions of keys and of values
        return int(batch * tokens * (maps + 4 * dim * (1 + -(-(past + tokens) // self.rate))))
