"""Transformer-XL (arXiv 1901.02860) and the Compressive Transformer (arXiv 1911.05507): attention with a memory of past segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, pieces, softmax
from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register


@dataclass(frozen=True, kw_only=True)
class Hidden(Recurrence):
    """``x`` [B, T, D]: the tokens themselves, which the memory keeps."""

    x: Tensor


@dataclass(frozen=True)
class Past:
    """``k`` and ``v`` [rows, slots, H, ...] of which the first ``before`` are from earlier calls; ``first`` [rows] is where they begin."""

    k: Tensor
    v: Tensor
    before: int
    first: Tensor


@dataclass(frozen=True)
class Slots:
    """Visible slots: ``k`` and ``v`` [rows, slots, H, ...], ``seen`` and ``distance`` [rows, T, slots]."""

    k: Tensor
    v: Tensor
    seen: Tensor
    distance: Tensor


@register(
    "transformer_xl",
    title="Transformer-XL",
    paper="Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
    arxiv="1901.02860",
    year=2019,
    seeds=("001",),
    equation=r"s_{ti} = (q_t + u) k_i^\top + (q_t + w) (W_R R_{t-i})^\top,\quad"
    r" o_t = \sum_{i} \mathrm{softmax}_i(s_{ti} / \sqrt{d})\, v_i,\quad"
    r" L \lfloor t / L \rfloor - M \le i \le t",
    oracle="transformers, XLNetRelativeAttention",
    families=("recurrence",),
)
class TransformerXL(Mixer):
    """The sequence is cut into segments of ``segment`` = L tokens; a token sees its own segment up to itself and the ``memory`` = M tokens
    before the segment.

    State: the last M + L - 1 tokens [rows, M + L - 1, D], the inputs of this layer; keys and values are recomputed from them.
    The paper passes no gradient into the memory: detach the state after every segment for that. Positions are projected
    sinusoids of distances, and the learned vectors u and w. Without norm and residual.
    """

    piece = PIECE  # queries per block of scores

    def __init__(self, dim: int, heads: int = 4, *, segment: int = 128, memory: int = 128) -> None:
        super().__init__(dim)
        for name, value, least in (("segment", segment, 1), ("memory", memory, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but came as {value}")
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines, but came as {dim}")
        self.heads, self.size, self.segment, self.memory = heads, head_size("dim", dim, heads), segment, memory
        self.kept = memory + segment - 1
        self.q_proj, self.k_proj, self.v_proj, self.r_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.content_bias = nn.Parameter(0.02 * torch.randn(heads, self.size))  # u
        self.position_bias = nn.Parameter(0.02 * torch.randn(heads, self.size))  # w

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return Hidden(q, k, v, x=x)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        q, _ = call.to_rows(r.q)
        here, past, table, out = call.start[:, None, None], self.past(r, call), self._sinusoids(q), []
        for start, stop in pieces(call.tokens, self.piece):
            now = here + torch.arange(start, stop, device=q.device)[:, None]  # [rows, queries, 1]: positions
            out.append(self._attend(to_float32(q[:, start:stop]), self.slots(past, start, stop, now), table))
        return call.from_rows(torch.cat(out, 1))

    def _attend(self, q: Tensor, slots: Slots, table: Tensor) -> Tensor:
        """The output of queries [rows, queries, H, K] at ``slots``; ``table`` [distances, H, K] is :meth:`_sinusoids`."""
        content = torch.einsum("rthk,rshk->rhts", q + to_float32(self.content_bias), to_float32(slots.k))
        position = torch.einsum("rthk,dhk->rhtd", q + to_float32(self.position_bias), to_float32(table))
        index = slots.distance.clamp(0, len(table) - 1)[:, None].expand(-1, self.heads, -1, -1)
        return softmax((content + position.gather(3, index)) * self.size**-0.5, slots.seen, slots.v)

    def past(self, r: Recurrence, call: CallContext) -> tuple[Past, ...]:
        """Concatenate the tokens in the state and those of this call."""
        assert isinstance(r, Hidden)
        (k, _), (v, _) = call.to_rows(r.k), call.to_rows(r.v)
        old = call.get("memory")
        if old is not None:
            k, v = (torch.cat([p(old.to(t.dtype)).unflatten(-1, (self.heads, -1)), t], 1) for p, t in ((self.k_proj, k), (self.v_proj, v)))
        call.context("memory", r.x, self.kept)
        before = 0 if old is None else self.kept
        return (Past(k, v, before, call.start - before),)

    def slots(self, past: tuple[Past, ...], start: int, stop: int, now: Tensor) -> Slots:
        """Slots for the queries from ``start`` to before ``stop`` of this call, at positions ``now`` [rows, queries, 1]."""
        tokens = past[-1]
        low, high = max(0, tokens.before + start - self.kept), tokens.before + stop  # no query sees further back
        slot = tokens.first[:, None, None] + torch.arange(low, high, device=now.device)  # [rows, 1, slots]: positions
        seen = (slot <= now) & (slot >= now // self.segment * self.segment - self.memory) & (slot >= 0)
        return Slots(tokens.k[:, low:high], tokens.v[:, low:high], seen, now - slot)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        pairs = sum(p + 1 - max(0, p // self.segment * self.segment - self.memory) for p in range(past, past + tokens))
        return 2 * batch * heads * pairs * (2 * size + r.v.shape[3])

    def _sinusoids(self, like: Tensor) -> Tensor:
        """The mapped sines and cosines of all distances that occur, [distances, H, K]."""
        dim = self.r_proj.in_features
        wider = to_float32(like).dtype
        rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=wider, device=like.device) / dim)
        angles = torch.arange(self.reach, dtype=wider, device=like.device)[:, None] * rate
        return self.r_proj(torch.cat([angles.sin(), angles.cos()], -1).to(self.r_proj.weight.dtype)).unflatten(-1, (self.heads, -1))

    @property
    def reach(self) -> int:
        """One more than the largest distance."""
        return self.kept + 1


@register(
    "compressive_transformer",
    title="Compressive Transformer",
    paper="Compressive Transformers for Long-Range Sequence Modelling",
    arxiv="1911.05507",
    year=2019,
    equation=r"o_t = \mathrm{Attend}\big(q_t,\ [c_{b},\dots;\ h_{s-M},\dots,h_t]\big),\quad"
    r" c_b = W\,[h_{bc};\dots;h_{bc+c-1}] + a,\quad s = L \lfloor t / L \rfloor",
    linear_in_values=False,  # slots of compressed tokens belong to no token
    oracle="transformers, XLNetRelativeAttention, with the compressed slots as further memory",
    families=("recurrence",),
    chinese={"with the compressed slots as further memory": "以压缩后的槽作为额外的记忆"},
)
class CompressiveTransformer(TransformerXL):
    """Transformer-XL in which tokens that leave the memory are compressed ``rate`` = c to one, into ``slots_kept`` further slots.

    The compression is a convolution of width and stride c, the best one of the paper. Distances count slots, as if compressed
    slots, memory and segment were one row. The paper trains the convolution by a loss of its own, on detached tokens; here the
    gradient of the task reaches it. State: beside the memory the compressed slots, including those not yet visible.
    """

    def __init__(self, dim: int, heads: int = 4, *, segment: int = 128, memory: int = 128, compressed: int = 128, rate: int = 4) -> None:
        super().__init__(dim, heads, segment=segment, memory=memory)
        if rate < 1 or segment % rate or memory % rate:
            raise ValueError(f"segment and memory must be multiples of rate, but came as {segment} and {memory} with a rate of {rate}")
        self.compressed, self.rate = compressed, rate
        self.blocks = compressed + (memory + segment) // rate  # a block is compressed when complete and visible when it left the memory
        self.compress = nn.Linear(rate * dim, dim)

    @property
    def reach(self) -> int:
        return self.kept + 1 + self.compressed

    def past(self, r: Recurrence, call: CallContext) -> tuple[Past, ...]:
        assert isinstance(r, Hidden)
        hidden, first = self._blocks(r.x, call)
        k, v = (p(hidden).unflatten(-1, (self.heads, -1)) for p in (self.k_proj, self.v_proj))
        return (Past(k.to(r.k.dtype), v.to(r.v.dtype), self.blocks, first), *super().past(r, call))

    def slots(self, past: tuple[Past, ...], start: int, stop: int, now: Tensor) -> Slots:
        near, squeezed = super().slots(past, start, stop, now), past[0]
        low, high = max(0, start // self.rate - 2), stop // self.rate + squeezed.before + 2  # blocks within a query's reach
        k, v = squeezed.k[:, low:high], squeezed.v[:, low:high]
        block = squeezed.first[:, None, None] + torch.arange(low, low + k.shape[1], device=now.device)  # [rows, 1, blocks]
        border = now // self.segment * self.segment - self.memory  # start of the memory
        back = border // self.rate - block  # [rows, queries, blocks]: slots before the memory
        seen = (block >= 0) & (back >= 1) & (back <= self.compressed)
        return Slots(
            torch.cat([k, near.k], 1), torch.cat([v, near.v], 1), torch.cat([seen, near.seen], 2),
            torch.cat([now - border + back, near.distance], 2),
        )  # fmt: skip

    def _blocks(self, x: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Compressed slots, old and of this call [rows, blocks, D], and the number of the first; unfinished ones are at the end."""
        rows, _ = call.to_rows(x)
        old, memory = call.get("compressed"), call.get("memory")
        old = x.new_zeros(call.rows, self.blocks, x.shape[-1]) if old is None else old.to(x.dtype)
        memory = x.new_zeros(call.rows, self.kept, x.shape[-1]) if memory is None else memory.to(x.dtype)
        longer = torch.cat([memory, rows], 1)
        many, begun = -(-call.tokens // self.rate) + (call.tokens > 0), call.start // self.rate  # may be one too many
        token = torch.arange(many * self.rate, device=x.device) + (begun * self.rate - call.start)[:, None] + self.kept
        inside = token.clamp(max=longer.shape[1] - 1)[..., None].expand(-1, -1, x.shape[-1])
        new = self.compress(longer.gather(1, inside).unflatten(1, (many, self.rate)).flatten(2))
        both = torch.cat([old, new.to(x.dtype)], 1)
        done = (call.start + call.counts) // self.rate - begun
        last = done[:, None] + torch.arange(self.blocks, device=x.device)
        call.keep("compressed", both.gather(1, last[..., None].expand(-1, -1, x.shape[-1])))
        return both, begun - self.blocks

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        border = (p // self.segment * self.segment - self.memory for p in range(past, past + tokens))
        pairs = sum(min(self.compressed, max(0, b) // self.rate) for b in border)
        squeezing = tokens * (self.rate * heads * size) * heads * size // self.rate
        return super().attend_flops(r, past) + 2 * batch * (heads * pairs * (2 * size + r.v.shape[3]) + squeezing)
