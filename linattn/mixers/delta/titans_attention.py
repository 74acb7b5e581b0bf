"""Titans' three arrangements of memory and attention (arXiv 2501.00663): memory as context, as a gate, as a layer.

Section 4 of the paper; there is no official code. Where the paper is silent: blocks of the memory are counted from the first token that is
not persistent, gates are sigmoids of the normed memory, and attention has no positions beside short convolutions and causality.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, pieces, softmax
from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.delta.blocks import Blocks
from linattn.mixers.delta.titans import Titans
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, to_float32, unit
from linattn.mixers.registry import register


def arrangement(name: str, title: str, chinese: str, equation: str) -> Callable[[type[Mixer]], type[Mixer]]:
    """Register one of the three arrangements."""
    return register(
        name, title=f"Titans ({title})", paper="Titans: Learning to Memorize at Test Time", arxiv="2501.00663", year=2024,
        equation=equation, linear_in_values=False, families=("memories learned at test time",),
        chinese={f"Titans ({title})": f"Titans（{chinese}）"},
        oracle="a float64 loop over tokens: the memory by torch.autograd of the loss in the paper, attention by its definition",
    )  # fmt: skip


@arrangement(
    "titans_mac",
    "memory as context",
    "记忆作上下文",
    r"h_t = M_{s}(q_t),\quad y_t = \mathrm{Attend}\big(x_t;\ p_1,\dots,p_{N},\ h_{s+1},\dots,h_t,\ x_{s+1},\dots,x_t\big),"
    r"\quad o_t = y_t \otimes M_t(y_t),\quad s = n \lfloor (t - 1) / n \rfloor",
)
class TitansMAC(Titans):
    """Segments of ``segment`` tokens that attend to themselves, to retrievals from the memory, and to ``persistent`` learned tokens.

    The memory answers the tokens of a segment as it was at the segment's start, learns the outputs y of attention, a segment
    being its block, and gates them by what it answers to them: RMS norm of both, and a sigmoid. All is causal: token t sees
    no answer to a later token of its segment, and is gated by the memory as it is after t, not after the segment. Keys and
    values of answers and persistent tokens come from the same maps as the tokens', without the convolution over time. Only
    segments are processed one after the other. State: beside the memory's the keys and values of the segment so far.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, segment: int = 64, persistent: int = 4, depth: int = 2, rate: float = 0.1, conv_width: int = 4,
    ) -> None:  # fmt: skip
        at_least(1, segment=segment)
        at_least(0, persistent=persistent)
        super().__init__(dim, heads, depth=depth, block=segment, rate=rate, conv_width=conv_width)
        self.persistent = nn.Parameter(torch.randn(persistent, dim))
        self.retrieve_proj = nn.Linear(dim, dim, bias=False)
        self.retrieve_conv = ShortConvolution(dim, conv_width, name="retrieve_conv")
        self.attention_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_conv = ShortConvolution(3 * dim, conv_width, name="attention_conv")
        self.attention_norm = HeadNorm(self.size)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        blocks, memory, out = Blocks(call, self.block, x.device), self.memory_before(call), []
        tokens = self.attention_conv(self.attention_proj(x), call).unflatten(-1, (3, self.heads, -1)).unbind(2)
        asked = unit(self.retrieve_conv(self.retrieve_proj(x), call).unflatten(-1, (self.heads, -1)))
        q, k, v, asked = (blocks.place(t) for t in (*tokens, asked))
        segment, past = Segment(self, blocks, call, like=k), PastOutputs(self, blocks, call)
        for i in range(blocks.count):
            h = memory.at_start(asked[:, i]).transpose(1, 2).flatten(-2).to(x.dtype)  # [rows, n, D]
            y = segment.attend(i, q[:, i], k[:, i], v[:, i], h)  # [rows, H, n, K]
            outputs = y.transpose(1, 2).flatten(-2).to(x.dtype)
            placed = [t.transpose(1, 2) for t in self.inputs(past.convolved(i, self.qkv_proj(outputs)), outputs)]
            answer, memory = self.learn(memory, placed, blocks.present[:, i], blocks.finished[:, i])
            out.append(self.attention_norm(y) * self.norm(answer).sigmoid())
        self.keep_memory(memory, call)
        segment.keep(call)
        past.keep(call)
        return self.finish(blocks.back(out).flatten(-2), x)

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        maps = 6 * dim * dim + 4 * dim * self.conv.width  # retrieval, attention, keys and values of retrievals
        seen = sum(len(self.persistent) + 2 * (t % self.block + 1) for t in range(past, past + tokens))
        answers = tokens * dim * self.depth * self.size
        return super().flops(x, past) + 2 * batch * (tokens * maps + 2 * dim * seen + answers)


class Segment:
    """Keys and values of the current segment: of its tokens and of the retrievals for them."""

    def __init__(self, mixer: TitansMAC, blocks: Blocks, call: CallContext, like: Tensor) -> None:
        rows, _, heads, n, size = like.shape
        self.mixer, self.blocks = mixer, blocks
        old = call.get("segment")
        self.old = like.new_zeros(rows, 4, heads, n, size) if old is None else old.to(like.dtype)
        self.kept = torch.zeros_like(self.old)
        learned = self._keys_and_values(mixer.persistent.to(like.dtype)[None])
        self.persistent = learned.expand(rows, -1, -1, -1, -1)  # [rows, 2, H, N, K]
        place = torch.arange(n, device=like.device)
        causal = place[:, None] >= place
        self.seen = torch.cat([causal.new_ones(n, learned.shape[3]), causal, causal], 1)
        end = (blocks.shift + call.counts[:, None])[:, :, None, None, None]
        self.open = [end // n == i for i in range(blocks.count)]  # segments begun, but not ended

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
        """Attention of the ``i``-th segment, q, k and v [rows, H, n, K] and the retrievals h [rows, n, D]: output [rows, H, n, K]."""
        here = torch.cat([torch.stack([k, v], 1), self._keys_and_values(h).to(k.dtype)], 1)  # [rows, 4, H, n, K]
        if i == 0:
            here = torch.where(self.blocks.present[:, 0, None, None, :, None], here, self.old)
        self.kept = torch.where(self.open[i], here, self.kept)
        keys, values = (to_float32(torch.cat([self.persistent[:, j], here[:, 2 + j], here[:, j]], 2)) for j in range(2))
        scores = (to_float32(q) @ keys.mT) * q.shape[-1] ** -0.5
        return scores.masked_fill(~self.seen, -torch.inf).softmax(-1) @ values

    def keep(self, call: CallContext) -> None:
        call.keep("segment", self.kept)

    def _keys_and_values(self, x: Tensor) -> Tensor:
        """Keys and values of tokens [rows, n, D] without the convolution over time: [rows, 2, H, n, K]."""
        mixer = self.mixer
        mapped = F.silu(mixer.attention_proj(x)[..., x.shape[-1] :])
        return mapped.unflatten(-1, (2, mixer.heads, -1)).permute(0, 2, 3, 1, 4)


class PastOutputs:
    """Short convolution of the memory's inputs, one segment a call. State: that of :class:`ShortConvolution`."""

    def __init__(self, mixer: TitansMAC, blocks: Blocks, call: CallContext) -> None:
        self.conv, self.blocks, self.call = mixer.conv, blocks, call
        self.before = self.conv.width - 1
        self.all: list[Tensor] = []  # inputs of each segment, after those of earlier calls

    def convolved(self, i: int, x: Tensor) -> Tensor:
        """Convolve the inputs ``x`` [rows, n, D] of the ``i``-th segment."""
        n = x.shape[1]
        longer = torch.cat([self.all[-1][:, n:], x], 1) if i else self._first(x)
        self.all.append(longer)
        return self.conv(longer, None)

    def _first(self, x: Tensor) -> Tensor:
        """Index of the first token of this call, after the kept inputs."""
        old = self.call.get(self.conv.name)
        longer = x.new_zeros(x.shape[0], self.before + x.shape[1], x.shape[2])
        if old is not None:
            slot = self.blocks.shift + torch.arange(self.before, device=x.device)
            longer = longer.scatter(1, slot[..., None].expand(-1, -1, x.shape[2]), old.to(x.dtype))
        real = F.pad(self.blocks.present[:, 0], (self.before, 0))[..., None]
        return torch.where(real, F.pad(x, (0, 0, self.before, 0)), longer)

    def keep(self, call: CallContext) -> None:
        every = torch.cat([self.all[0], *(longer[:, self.before :] for longer in self.all[1:])], 1)
        last = self.blocks.shift + call.counts[:, None] + torch.arange(self.before, device=every.device)
        call.keep(self.conv.name, every.gather(1, last[..., None].expand(-1, -1, every.shape[2])))


class Window(nn.Module):
    """Softmax attention of a token to itself and the ``size`` - 1 tokens before it, after a short convolution. Without output map."""

    def __init__(self, dim: int, heads: int, size: int, conv_width: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = ShortConvolution(3 * dim, conv_width, name="window_conv")

    def forward(self, x: Tensor, call: CallContext, *, always: Tensor | None = None, before: int = 0) -> Tensor:
        """Map ``x`` [B, T, D] to [B, T, H, K]. All tokens see ``always`` [N, D]; the state begins with ``before`` tokens already."""
        q, k, v = self.conv(self.qkv_proj(x), call).chunk(3, -1)
        own, old = torch.cat([k, v], -1), call.get("window")
        past = own.new_zeros(call.rows, self.size - 1, own.shape[-1]) if old is None else old.to(own.dtype)
        call.context("window", own, self.size - 1)
        slots = torch.cat([past, call.to_rows(own)[0]], 1)
        q, out = call.to_rows(q)[0].unflatten(-1, (self.heads, -1)), []
        fixed = self._fixed(always, slots)
        for start, stop in pieces(call.tokens, PIECE):
            slot = torch.arange(start, stop + self.size - 1, device=x.device)
            token = torch.arange(start, stop, device=x.device)[:, None]
            near = (slot >= token) & (slot < token + self.size)  # a token's own slot is size - 1 further
            real = call.start[:, None] + slot - (self.size - 1) >= -before  # [rows, slots]
            seen = F.pad(near & real[:, None], (fixed.shape[1], 0), value=True)
            k, v = torch.cat([fixed, slots[:, start : stop + self.size - 1]], 1).unflatten(-1, (2, self.heads, -1)).unbind(2)
            scores = torch.einsum("rthk,rshk->rhts", to_float32(q[:, start:stop]), to_float32(k)) * k.shape[-1] ** -0.5
            out.append(softmax(scores, seen, v))
        return call.from_rows(torch.cat(out, 1))

    def _fixed(self, always: Tensor | None, slots: Tensor) -> Tensor:
        """Keys and values of the tokens visible to all, a row for every sequence: [rows, N, 2 D]."""
        if always is None:
            return slots[:, :0]
        first = self.conv(self.qkv_proj(always[None]), CallContext(always[None], returning=False))
        return first[..., always.shape[-1] :].to(slots.dtype).expand(slots.shape[0], -1, -1)

    def flops(self, x: Tensor, past: int) -> int:
        """Operations of the maps, the convolution and the visible pairs."""
        batch, tokens, dim = x.shape
        pairs = sum(min(t + 1, self.size) for t in range(past, past + tokens))
        return 2 * batch * (tokens * 3 * dim * (dim + self.conv.width) + 2 * dim * pairs)


class Windowed(Titans):
    """Titans with attention in a sliding window, and ``persistent`` learned tokens at the start of every sequence."""

    def __init__(
        self, dim: int, heads: int = 4, *, window: int = 64, persistent: int = 4, depth: int = 2, block: int = 16, rate: float = 0.1,
        conv_width: int = 4,
    ) -> None:  # fmt: skip
        at_least(1, window=window)
        at_least(0, persistent=persistent)
        super().__init__(dim, heads, depth=depth, block=block, rate=rate, conv_width=conv_width)
        self.persistent = nn.Parameter(torch.randn(persistent, dim))
        self.window = Window(dim, heads, window, conv_width)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return self.arrange(x, self._opened(x, call) if call.fresh else call)

    def arrange(self, x: Tensor, call: CallContext) -> Tensor:
        """Memory and attention, in parallel or in sequence: [B, T, D] -> [B, T, D]."""
        raise NotImplementedError

    def _opened(self, x: Tensor, call: CallContext) -> CallContext:
        """Call context after the persistent tokens, which are blocks of their own."""
        persistent = self.persistent[None].to(x.dtype)
        first = CallContext(persistent)
        self.arrange(persistent, first)
        begun = first.new | {"start": first.new["memory"]}
        state = {name: t.expand(call.rows, *t.shape[1:]) for name, t in begun.items()} | {"position": call.start}
        opened = CallContext(x, state, lengths=call.lengths, cu_seqlens=call.cu_seqlens, returning=call.returning)
        opened.new = call.new
        return opened


@arrangement(
    "titans_mag",
    "memory as a gate",
    "记忆作门",
    r"y_t = \mathrm{Attend}\big(x_t;\ p_1,\dots,p_N,\ x_{t-w+1},\dots,x_t\big),\quad o_t = y_t \otimes M_t(x_t)",
)
class TitansMAG(Windowed):
    """Attention in a window of ``window`` tokens and to the persistent tokens, gated by the memory's output for the token.

    Both are normed; the gate is a sigmoid. The memory has learned the persistent tokens before the first token.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, window: int = 64, persistent: int = 4, depth: int = 2, block: int = 16, rate: float = 0.1,
        conv_width: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, window=window, persistent=persistent, depth=depth, block=block, rate=rate, conv_width=conv_width)
        self.attention_norm = HeadNorm(self.size)

    def arrange(self, x: Tensor, call: CallContext) -> Tensor:
        gate = self.norm(self.recall(x, call)).sigmoid()
        y = self.attention_norm(to_float32(self.window(x, call, always=self.persistent.to(x.dtype))))
        return self.finish((y * gate).flatten(-2), x)

    def flops(self, x: Tensor, past: int = 0) -> int:
        always = 4 * x.shape[0] * x.shape[1] * x.shape[2] * len(self.persistent)
        return super().flops(x, past) + self.window.flops(x, past) + always


@arrangement(
    "titans_mal",
    "memory as a layer",
    "记忆作一层",
    r"y_t = M_t(x_t),\quad o_t = \mathrm{Attend}(y_t;\ y_{t-w+1},\dots,y_t),\quad x = p_1,\dots,p_N,x_1,x_2,\dots",
)
class TitansMAL(Windowed):
    """The memory's whole layer, followed by attention in a window of ``window`` tokens with its own output map.

    The persistent tokens come before the first token and, like any other, leave the window.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, window: int = 64, persistent: int = 4, depth: int = 2, block: int = 16, rate: float = 0.1,
        conv_width: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, window=window, persistent=persistent, depth=depth, block=block, rate=rate, conv_width=conv_width)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def arrange(self, x: Tensor, call: CallContext) -> Tensor:
        y = super(Windowed, self).mix(x, call)
        return self.out_proj(self.window(y, call, before=len(self.persistent)).flatten(-2))

    def flops(self, x: Tensor, past: int = 0) -> int:
        seen = len(self.persistent) + past  # persistent tokens are in the window until they leave it
        return super().flops(x, past) + self.window.flops(x, seen) + 2 * x.shape[0] * x.shape[1] * x.shape[2] ** 2
