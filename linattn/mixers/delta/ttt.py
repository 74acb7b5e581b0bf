"""TTT-Linear (arXiv 2407.04620): the state is a linear model that is trained, mini-batch by mini-batch, to tell values from keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.carry import Carry
from linattn.mixers.delta.blocks import Blocks
from linattn.mixers.parts import head_size, rotate, wide
from linattn.mixers.registry import register


@register(
    "ttt_linear",
    title="TTT-Linear",
    paper="Learning to (Learn at Test Time): RNNs with Expressive Hidden States",
    arxiv="2407.04620",
    year=2024,
    equation=r"W_t = W_{t'} - c_{t-t'} \sum_{t' < s \le t} \eta_s"
    r" \nabla_W \tfrac12 \big\lVert \mathrm{LN}(k_s W_{t'}) + k_s - v_s \big\rVert^2,"
    r"\quad o_t = q_t + \mathrm{LN}(q_t W_t),\quad t' = n \lfloor (t - 1) / n \rfloor",
    linear_in_values=False,
    oracle="torch.autograd of the loss in the paper, and the states of fla-core 0.6.0, chunk_ttt_linear_ref",
)
class TTTLinear(Mixer):
    """A model W, b for each head; within a mini-batch of ``batch`` = n tokens all gradients are taken at the W it began with.

    Sequential over mini-batches, which are counted from the start of a sequence; inside one everything is matrix products (the
    dual form). Learned are the W and b to start from, the layer norm in the model, the rate η = σ(x w + a) / K of every token
    and the factor c for every place in a mini-batch (starting from 1 / place). q and k are rotated by the place in the
    mini-batch. State: W, b and the gradients summed since the mini-batch began. Checked against the authors' repository
    (the block without short convolutions and gate), whose weights fit after renaming.
    """

    keep_float32 = ("W", "b")

    def __init__(self, dim: int, heads: int = 4, *, batch: int = 16, base: float = 10000.0) -> None:
        super().__init__(dim)
        if batch < 1:
            raise ValueError(f"batch must be at least 1, but came as {batch}")
        self.heads, self.size, self.batch, self.base = heads, head_size("dim", dim, heads), batch, base
        if self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.rate_proj = nn.Linear(dim, heads)
        nn.init.normal_(self.rate_proj.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)
        self.place = nn.Parameter(torch.zeros(batch))  # added to 1 / place
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(heads, self.size)), nn.Parameter(torch.zeros(heads, self.size))
        self.W = nn.Parameter(0.02 * torch.randn(heads, self.size, self.size))
        self.b = nn.Parameter(torch.zeros(heads, 1, self.size))
        self.post_norm = nn.LayerNorm(dim, eps=1e-6)

    def load_ttt_lm(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the ``state_dict`` of a TTTLinear of the authors' ttt-lm-pytorch with the same sizes (no ``share_qk``, no gate)."""
        own = {name: weights[name] for name in ("post_norm.weight", "post_norm.bias", *(f"{n}_proj.weight" for n in "qkvo"))}
        own |= {"rate_proj.weight": weights["learnable_ttt_lr_weight"][:, 0], "rate_proj.bias": weights["learnable_ttt_lr_bias"][:, 0]}
        own |= {"place": weights["learnable_token_idx"], "W": weights["W1"], "b": weights["b1"]}
        self.load_state_dict(own | {f"norm_{name}": weights[f"ttt_norm_{name}"] for name in ("weight", "bias")})

    def mix(self, x: Tensor, carry: Carry) -> Tensor:
        q, k, v = (wide(p(x)).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        channel = torch.arange(0, self.size, 2, dtype=q.dtype, device=q.device)
        angles = (carry.positions % self.batch)[..., None] * self.base ** (-channel / self.size)
        q, k = rotate(q, angles, interleaved=True), rotate(k, angles, interleaved=True)
        rate = wide(self.rate_proj(x)).sigmoid() / self.size
        blocks = Blocks(carry, self.batch, x.device)
        q, k, v, rate = (blocks.place(t) for t in (q, k, v, rate))
        o = blocks.back(self._learn(q, k, v, rate, blocks, carry))
        return self.o_proj(self._after(o.flatten(-2), x))

    def _after(self, o: Tensor, x: Tensor) -> Tensor:
        """The norm over all heads, in float32."""
        norm = self.post_norm
        return F.layer_norm(o, norm.normalized_shape, norm.weight.to(o.dtype), norm.bias.to(o.dtype), norm.eps).to(x.dtype)

    def _learn(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, blocks: Blocks, carry: Carry) -> list[Tensor]:
        """q, k, v [rows, blocks, H, n, K] and the rates [rows, blocks, H, n], zero where no token stands."""
        w, b, w_sum, b_sum = self._first(q, carry)
        place = (wide(self.place) + 1 / torch.arange(1, self.batch + 1, dtype=q.dtype, device=q.device)).clamp(min=0)[:, None]  # [n, 1]
        out = []
        for i in range(blocks.count):
            query, key, eta = q[:, i], k[:, i], rate[:, i, :, None]  # [rows, H, 1, n] is eta
            error = self._error(key @ w + b, v[:, i] - key)
            met = (eta * (query @ key.mT)).tril()
            z = query @ w + b - place * (query @ w_sum + b_sum + met @ error + eta.expand_as(met).tril() @ error)
            out.append(query + self._norm(z)[0])
            w_sum, b_sum = w_sum + (eta.mT * key).mT @ error, b_sum + eta @ error
            done = blocks.finished[:, i, None, None, None]
            w, b = torch.where(done, w - place[-1] * w_sum, w), torch.where(done, b - place[-1] * b_sum, b)
            w_sum, b_sum = torch.where(done, 0.0, w_sum), torch.where(done, 0.0, b_sum)
        for name, t in {"W": w, "b": b, "W_sum": w_sum, "b_sum": b_sum}.items():
            carry.keep(name, t)
        return out

    def _first(self, like: Tensor, carry: Carry) -> list[Tensor]:
        """W, b and the sums of their gradients, a row for every sequence."""
        w, b = (t.to(like.dtype).expand(carry.rows, -1, -1, -1).clone() for t in (self.W, self.b))
        new = {"W": w, "b": b, "W_sum": torch.zeros_like(w), "b_sum": torch.zeros_like(b)}
        return [t if carry.fresh else wide(cast(Tensor, carry.get(name))) for name, t in new.items()]

    def _norm(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer norm of each head, and what its derivative needs."""
        centred = z - z.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
        weight, bias = wide(self.norm_weight)[:, None], wide(self.norm_bias)[:, None]
        return centred * inverse * weight + bias, centred * inverse, inverse

    def _error(self, z: Tensor, target: Tensor) -> Tensor:
        """The gradient of half the squared distance of LN(z) and ``target``, for z."""
        y, unit, inverse = self._norm(z)
        g = (y - target) * wide(self.norm_weight)[:, None]
        return inverse * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        maps = 4 * dim * dim + dim * self.heads
        among = 3 * (self.batch + 1) // 2  # tokens of a mini-batch meet
        inner = dim * (4 * self.size + among)  # k W, q W, q with the sums of gradients, and those sums
        return 2 * batch * tokens * (maps + inner)
