"""TTT-Linear and TTT-MLP (arXiv 2407.04620): the state is a model trained at test time, in mini-batches, to predict values from keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.delta.blocks import Blocks
from linattn.mixers.parts import WideLayerNorm, head_size, positive, rotate, to_float32
from linattn.mixers.registry import register


@dataclass(frozen=True)
class Layer:
    """A map of the model, ``W`` [rows, H, in, out] and ``b`` [rows, H, 1, out], and the sums of gradients of the current mini-batch."""

    W: Tensor
    b: Tensor
    W_sum: Tensor
    b_sum: Tensor


class TTT(Mixer):
    """The layer around a model of ``layers`` maps with GELU between them and a layer norm and a residual at its end.

    Within a mini-batch of ``batch`` = n tokens all gradients are taken at the model of its start. Sequential over mini-batches,
    which are counted from the start of a sequence; within one it is matrix products (the dual form). Learned are the
    initial model, its layer norm, the rate η = σ(x w + a) / K of every token and the factor c for every place in a
    mini-batch (starting from 1 / place). q and k are rotated by the place in the mini-batch. State: the model and the sums
    of gradients of the current mini-batch. Checked against the authors' repository (the block without short convolutions and gate),
    whose weights fit after renaming.
    """

    layers: ClassVar[tuple[tuple[str, str], ...]]  # names of W and b

    def __init__(self, dim: int, heads: int = 4, *, batch: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim)
        if batch < 1:
            raise ValueError(f"batch must be at least 1, but came as {batch}")
        positive(base=base)
        self.heads, self.size, self.batch, self.base = heads, head_size("dim", dim, heads), batch, base
        if self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.rate_proj = nn.Linear(dim, heads)
        nn.init.normal_(self.rate_proj.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)
        self.place = nn.Parameter(torch.zeros(batch))  # added to 1 / place
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(heads, self.size)), nn.Parameter(torch.zeros(heads, self.size))
        for (weight, bias), (inner, outer) in zip(self.layers, self.widths(), strict=True):
            setattr(self, weight, nn.Parameter(0.02 * torch.randn(heads, inner, outer)))
            setattr(self, bias, nn.Parameter(torch.zeros(heads, 1, outer)))
        self.post_norm = WideLayerNorm(dim, eps=1e-6)

    def widths(self) -> list[tuple[int, int]]:
        """Input and output widths of each map."""
        raise NotImplementedError

    def load_ttt_lm(self, weights: Mapping[str, Tensor]) -> None:
        """Load the ``state_dict`` of the same layer, of the same sizes, of the authors' ttt-lm-pytorch (no ``share_qk``, no gate)."""
        own = {name: weights[name] for name in ("post_norm.weight", "post_norm.bias", *(f"{n}_proj.weight" for n in "qkvo"))}
        own |= {"rate_proj.weight": weights["learnable_ttt_lr_weight"][:, 0], "rate_proj.bias": weights["learnable_ttt_lr_bias"][:, 0]}
        for number, names in enumerate(self.layers, 1):
            own |= {name: weights[f"{name[0]}{number}"] for name in names}
        own |= {f"norm_{name}": weights[f"ttt_norm_{name}"] for name in ("weight", "bias")}
        self.load_state_dict(own | {"place": weights["learnable_token_idx"]})

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        q, k, v = (to_float32(p(x)).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        channel = torch.arange(0, self.size, 2, dtype=q.dtype, device=q.device)
        angles = (call.positions % self.batch)[..., None] * self.base ** (-channel / self.size)
        q, k = rotate(q, angles, interleaved=True), rotate(k, angles, interleaved=True)
        rate = to_float32(self.rate_proj(x)).sigmoid() / self.size
        blocks = Blocks(call, self.batch, x.device)
        q, k, v, rate = (blocks.place(t) for t in (q, k, v, rate))
        o = blocks.back(self._learn(q, k, v, rate, blocks, call))
        return self.o_proj(self.post_norm(o.flatten(-2)).to(x.dtype))

    def _learn(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, blocks: Blocks, call: CallContext) -> list[Tensor]:
        """Learn from q, k, v [rows, blocks, H, n, K] and the rates [rows, blocks, H, n], zero for missing tokens."""
        model = self._first(q, call)
        place = (to_float32(self.place) + 1 / torch.arange(1, self.batch + 1, dtype=q.dtype, device=q.device)).clamp(min=0)[
            :, None
        ]  # [n, 1]
        out = []
        for i in range(blocks.count):
            query, key, eta = q[:, i], k[:, i], rate[:, i, :, None]  # [rows, H, 1, n] is eta
            inputs, errors = self._gradients(key, v[:, i] - key, model)
            out.append(query + self._norm(self._read(query, model, inputs, errors, eta, place))[0])
            done = blocks.finished[:, i, None, None, None]
            model = [self._after_block(*things, eta, place[-1], done) for things in zip(model, inputs, errors, strict=True)]
        for names, layer in zip(self.layers, model, strict=True):
            for name, part, total in zip(names, (layer.W, layer.b), (layer.W_sum, layer.b_sum), strict=True):
                call.keep(name, part)
                call.keep(f"{name}_sum", total)
        return out

    def _first(self, like: Tensor, call: CallContext) -> list[Layer]:
        """Incoming model, or the learned initial one, a row for every sequence."""
        model = []
        for names in self.layers:
            parts = [getattr(self, name).to(like.dtype).expand(call.rows, -1, -1, -1).clone() for name in names]
            if call.fresh:
                model.append(Layer(*parts, *(torch.zeros_like(t) for t in parts)))
            else:
                model.append(Layer(*(to_float32(cast(Tensor, call.get(name))) for name in (*names, *(f"{n}_sum" for n in names)))))
        return model

    def _gradients(self, key: Tensor, target: Tensor, model: list[Layer]) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of ½‖LN(model(k)) − target‖²: for each map its inputs and the errors at its outputs."""
        inputs, outputs = [key], []
        for layer in model:
            outputs.append(inputs[-1] @ layer.W + layer.b)
            inputs.append(gelu(outputs[-1]))
        errors = [self._error(outputs[-1], target)]
        for layer, z in zip(reversed(model[1:]), reversed(outputs[:-1]), strict=True):
            errors.insert(0, (errors[0] @ layer.W.mT) * gelu_slope(z))
        return inputs[:-1], errors

    def _read(self, q: Tensor, model: list[Layer], inputs: list[Tensor], errors: list[Tensor], eta: Tensor, place: Tensor) -> Tensor:
        """Compute model_t(q_t) before its norm without forming model_t: each map minus the gradients so far."""
        for level, (layer, a, d) in enumerate(zip(model, inputs, errors, strict=True)):
            q = gelu(q) if level else q
            met = (eta * (q @ a.mT + 1)).tril()  # 1 for the gradients of b
            q = q @ layer.W + layer.b - place * (q @ layer.W_sum + layer.b_sum + met @ d)
        return q

    def _after_block(self, layer: Layer, a: Tensor, d: Tensor, eta: Tensor, last: Tensor, done: Tensor) -> Layer:
        """Add the gradients of a block to the sums of a map; apply the sums where the block is ``done``."""
        w_sum, b_sum = layer.W_sum + (eta.mT * a).mT @ d, layer.b_sum + eta @ d
        w, b = torch.where(done, layer.W - last * w_sum, layer.W), torch.where(done, layer.b - last * b_sum, layer.b)
        return Layer(w, b, torch.where(done, 0.0, w_sum), torch.where(done, 0.0, b_sum))

    def _norm(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer norm of each head, with the values needed by its derivative."""
        centred = z - z.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
        weight, bias = to_float32(self.norm_weight)[:, None], to_float32(self.norm_bias)[:, None]
        return centred * inverse * weight + bias, centred * inverse, inverse

    def _error(self, z: Tensor, target: Tensor) -> Tensor:
        """The gradient of half the squared distance of LN(z) and ``target``, for z."""
        y, unit, inverse = self._norm(z)
        g = (y - target) * to_float32(self.norm_weight)[:, None]
        return inverse * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        total = 4 * dim * dim + dim * self.heads
        for level, (inner, outer) in enumerate(self.widths()):
            total += self.heads * inner * outer * (5 if level else 4)  # with k, with q twice, into the sums; errors backward
            total += self.heads * (inner + outer) * (self.batch + 1) // 2  # products of pairs in a mini-batch
        return 2 * batch * tokens * total


def gelu(z: Tensor) -> Tensor:
    """GELU in its tanh approximation, as in the authors' code."""
    return F.gelu(z, approximate="tanh")


def gelu_slope(z: Tensor) -> Tensor:
    """The derivative of :func:`gelu`."""
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (z + 0.044715 * z**3))
    return (1 + t) / 2 + z / 2 * (1 - t.square()) * scale * (1 + 3 * 0.044715 * z.square())


@register(
    "ttt_linear",
    title="TTT-Linear",
    paper="Learning to (Learn at Test Time): RNNs with Expressive Hidden States",
    arxiv="2407.04620",
    year=2024,
    equation=r"e_s = \mathrm{LN}(k_s W_{t'}) + k_s - v_s,\quad"
    r" W_t = W_{t'} - c_{t-t'} \sum_{t' < s \le t} \eta_s \nabla_W \tfrac12 \lVert e_s \rVert^2,"
    r"\quad o_t = q_t + \mathrm{LN}(q_t W_t),\quad t' = n \lfloor (t - 1) / n \rfloor",
    linear_in_values=False,
    families=("memories learned at test time",),
    oracle="torch.autograd of the loss in the paper, and the states of fla-core 0.6.0, chunk_ttt_linear_ref",
    chinese={
        "torch.autograd of the loss in the paper, and the states of fla-core {}, chunk_ttt_linear_ref": (
            "对论文中的损失用 torch.autograd 求导，以及 fla-core {} chunk_ttt_linear_ref 的状态"
        ),
    },
)
class TTTLinear(TTT):
    """The model is one map W, b for each head."""

    keep_float32 = ("W", "b")
    layers = (("W", "b"),)

    def widths(self) -> list[tuple[int, int]]:
        return [(self.size, self.size)]


@register(
    "ttt_mlp",
    title="TTT-MLP",
    paper="Learning to (Learn at Test Time): RNNs with Expressive Hidden States",
    arxiv="2407.04620",
    year=2024,
    equation=r"f(x) = x + \mathrm{LN}\big(\mathrm{gelu}(x W^1 + b^1) W^2 + b^2\big),\quad"
    r" W_t = W_{t'} - c_{t-t'} \sum_{t' < s \le t} \eta_s \nabla_W \tfrac12 \lVert f_{t'}(k_s) - v_s \rVert^2,"
    r"\quad o_t = f_t(q_t),\quad t' = n \lfloor (t - 1) / n \rfloor",
    linear_in_values=False,
    families=("memories learned at test time",),
    oracle="torch.autograd of the loss in the paper, token by token in float64",
)
class TTTMLP(TTT):
    """The model is two maps for each head, from K channels to 4 K and back."""

    keep_float32 = ("W1", "b1", "W2", "b2")
    layers = (("W1", "b1"), ("W2", "b2"))

    def widths(self) -> list[tuple[int, int]]:
        return [(self.size, 4 * self.size), (4 * self.size, self.size)]
