"""Titans' neural memory (arXiv 2501.00663): a network that learns at test time, by gradient descent with momentum and forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.delta.blocks import Blocks
from linattn.mixers.parts import HeadNorm, ShortConvolution, head_size, to_float32, unit
from linattn.mixers.registry import register


@dataclass(frozen=True)
class BlockFactors:
    """Factors of each token in a block: of the memory at its start (``kept``, c) and of the momentum at its start
    (``pushed``, f), both [rows, H, n, 1], and of each token's gradient (``learned`` G for the memory, ``moving`` E for the
    momentum), both [rows, H, n, n] and scaled by the rates. ``decayed`` [rows, H, n, 1] is the decay of the momentum.
    """

    kept: Tensor
    pushed: Tensor
    learned: Tensor
    decayed: Tensor
    moving: Tensor


@dataclass(frozen=True)
class Memory:
    """The maps of a memory [rows, depth, H, K, K]: at the start of the block, ``now``, and their momentum."""

    start: Tensor
    now: Tensor
    momentum: Tensor

    def at_start(self, q: Tensor) -> Tensor:
        """Output of the memory at the block's start for ``q`` [rows, H, n, K]."""
        for level, w in enumerate(self.start.unbind(1)):
            q = (F.silu(q) if level else q) @ w
        return q


@register(
    "titans",
    title="Titans (neural long-term memory)",
    paper="Titans: Learning to Memorize at Test Time",
    arxiv="2501.00663",
    year=2024,
    equation=r"M_t = (1 - \alpha_t) M_{t-1} + S_t,\quad"
    r" S_t = \eta_t S_{t-1} - \theta_t \nabla_M \lVert M(k_t) - v_t \rVert^2 \big|_{M_{t'}},"
    r"\quad o_t = M_t(q_t)",
    linear_in_values=False,
    families=("memories learned at test time",),
    oracle="torch.autograd of the loss in the paper, token by token in float64",
    chinese={"Titans (neural long-term memory)": "Titans（神经长期记忆）"},
)
class Titans(Mixer):
    """The memory module alone, as the paper's LMM. For each head it is a network of ``depth`` square maps with SiLU between them.

    Within a block of ``block`` tokens, counted from the start of the sequence, all gradients are taken at the memory that it
    began with (t'), while momentum, forgetting and reading go token by token; that makes a block a few matrix products. Only
    blocks are processed one after the other. Short convolution and SiLU on q, k and v, queries and keys of unit length, norm
    and a SiLU gate on the output. α and η are sigmoids of the token, α starting near 0; θ is a third one times (1 - η) ``rate`` /
    ``block``, without which the memory diverges on a run of equal tokens, whose equal gradients accumulate in the momentum. State: the
    memory at the start of the block, the memory and the momentum now. ``depth`` = 1 is a linear memory. The paper leaves rate and
    initialisation open; there is no official code. The reference in fla-core 0.6.0 is TTT's inner model with an error: in the derivative
    of its layer norm the first of three terms is not divided by the deviation.
    """

    def __init__(self, dim: int, heads: int = 4, *, depth: int = 2, block: int = 16, rate: float = 0.1, conv_width: int = 4) -> None:
        super().__init__(dim)
        for name, value in (("depth", depth), ("block", block)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.heads, self.size, self.depth, self.block, self.rate = heads, head_size("dim", dim, heads), depth, block, rate
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = ShortConvolution(3 * dim, conv_width)
        self.gates_proj = nn.Linear(dim, 3 * heads)  # α, η, θ
        with torch.no_grad():
            self.gates_proj.bias.copy_(torch.tensor([-4.0, 0.0, 0.0]).repeat_interleave(heads))
        self.memory = nn.Parameter(torch.randn(depth, heads, self.size, self.size) * self.size**-0.5)
        self.norm = HeadNorm(self.size)
        self.g_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return self.finish(self.norm(self.recall(x, call)).flatten(-2), x)

    def recall(self, x: Tensor, call: CallContext) -> Tensor:
        """Output M_t(q_t) of the memory for each token after it has learned the token: [B, T, H, K]."""
        blocks, memory, out = Blocks(call, self.block, x.device), self.memory_before(call), []
        placed = [blocks.place(t) for t in self.inputs(self.conv(self.qkv_proj(x), call), x)]
        for i in range(blocks.count):
            o, memory = self.learn(memory, [t[:, i] for t in placed], blocks.present[:, i], blocks.finished[:, i])
            out.append(o)
        self.keep_memory(memory, call)
        return blocks.back(out)

    def inputs(self, qkv: Tensor, x: Tensor) -> list[Tensor]:
        """q, k, v [..., H, K], and the gates α, η, θ [..., H] of ``x`` [..., D] before their sigmoids."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return [unit(q), unit(k), to_float32(v), *to_float32(self.gates_proj(x)).unflatten(-1, (3, self.heads)).unbind(-2)]

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate the normed output ``o`` [B, T, D] by the tokens, and map it."""
        return self.o_proj((o * F.silu(to_float32(self.g_proj(x)))).to(x.dtype))

    def memory_before(self, call: CallContext) -> Memory:
        """Incoming memory, or the learned initial one."""
        if not call.fresh:
            return Memory(*(to_float32(cast(Tensor, call.get(name))) for name in ("start", "memory", "momentum")))
        memory = to_float32(self.memory).expand(call.rows, -1, -1, -1, -1)
        return Memory(memory.clone(), memory.clone(), torch.zeros_like(memory))

    def keep_memory(self, memory: Memory, call: CallContext) -> None:
        for name, t in {"start": memory.start, "memory": memory.now, "momentum": memory.momentum}.items():
            call.keep(name, t)

    def learn(self, memory: Memory, placed: list[Tensor], present: Tensor, finished: Tensor) -> tuple[Tensor, Memory]:
        """Process one block of :meth:`inputs`, q, k, v [rows, H, n, K] and gates [rows, H, n]: outputs, and the memory after it.

        ``present`` [rows, n] marks real tokens, ``finished`` [rows] the rows whose block ends with them.
        """
        q, k, v, *gates = placed
        inputs, errors = self._gradients(k, v, memory.start)
        factors = self._factors(gates, present[:, None])
        out = self._read(q, memory.now, memory.momentum, inputs, errors, factors)
        last = {name: getattr(factors, name)[:, None, :, -1:] for name in ("kept", "pushed", "decayed", "learned", "moving")}
        a, d = torch.stack(inputs, 1), torch.stack(errors, 1)  # [rows, depth, H, n, K]
        now = last["kept"] * memory.now + last["pushed"] * memory.momentum - (last["learned"].mT * a).mT @ d
        momentum = last["decayed"] * memory.momentum - (last["moving"].mT * a).mT @ d
        return out, Memory(torch.where(finished[:, None, None, None, None], now, memory.start), now, momentum)

    def _gradients(self, k: Tensor, v: Tensor, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of ‖M(k) − v‖²: for each map of M its inputs and the errors at its outputs, [rows, H, n, K] each."""
        inputs, outputs = [k], []
        for w in memory.unbind(1):
            outputs.append(inputs[-1] @ w)
            inputs.append(F.silu(outputs[-1]))
        errors = [2 * (outputs[-1] - v)]
        for w, z in zip(reversed(memory.unbind(1)[1:]), reversed(outputs[:-1]), strict=True):
            gate = z.sigmoid()
            errors.insert(0, (errors[0] @ w.mT) * gate * (1 + z * (1 - gate)))
        return inputs[:-1], errors

    def _factors(self, gates: list[Tensor], present: Tensor) -> BlockFactors:
        """Factors of the gates [rows, H, n] of a block; tokens that are not ``present`` [rows, 1, n] change nothing."""
        alpha, eta, theta = gates
        keep, slow = (torch.where(present, F.logsigmoid(g), 0.0) for g in (-alpha, eta))
        size = self.block
        behind = torch.ones(size, size, dtype=torch.bool, device=alpha.device).tril()

        def products(log: Tensor) -> Tensor:
            """Products of the gates after token j up to token t, [rows, H, t, j]; 0 for later j."""
            steps = torch.where(behind.tril(-1), log[..., None], 0.0).cumsum(-2)  # direct sums, since differences of sums lose digits
            return torch.where(behind, steps, -torch.inf).exp()

        rates = torch.where(present, self.rate / self.block * theta.sigmoid() * torch.sigmoid(-eta), 0.0)[..., None, :]
        counted = products(keep) * present[..., None, :]  # padding does not move the memory
        decayed, moving = slow.cumsum(-1).exp()[..., None], products(slow)
        return BlockFactors(keep.cumsum(-1).exp()[..., None], counted @ decayed, counted @ moving * rates, decayed, moving * rates)

    def _read(self, q: Tensor, now: Tensor, momentum: Tensor, inputs: list[Tensor], errors: list[Tensor], factors: BlockFactors) -> Tensor:
        """Compute M_t(q_t) without forming M_t: each map is the decayed old one plus decayed gradients, applied to q."""
        for level, (a, d) in enumerate(zip(inputs, errors, strict=True)):
            q = F.silu(q) if level else q
            q = factors.kept * (q @ now[:, level]) + factors.pushed * (q @ momentum[:, level]) - (factors.learned * (q @ a.mT)) @ d
        return q

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        maps = 5 * dim * dim + 3 * dim * self.heads + 3 * dim * self.conv.width
        inner = dim * self.depth * (6 * self.size + self.block + 1)  # forward, backward, two reads, two sums; products of pairs in a block
        return 2 * batch * tokens * (maps + inner)
