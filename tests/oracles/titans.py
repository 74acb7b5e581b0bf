"""Titans by the paper's equations in float64: the memory token by token, its gradients by autograd; attention by its definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers import Mixer, create
from tests.oracles.compare import distance


class Learner:
    """The memories of all heads of one sequence. ``qkv`` are the inputs of the convolution so far, the persistent tokens' included."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer, self.block = mixer, mixer.block
        self.maps = [list(mixer.memory[:, h]) for h in range(mixer.heads)]
        self.momentum = [[torch.zeros_like(w) for w in maps] for maps in self.maps]
        self.start, self.seen, self.qkv = self.maps, 0, []

    def forward(self, maps: list[Tensor], x: Tensor) -> Tensor:
        for level, w in enumerate(maps):
            x = (F.silu(x) if level else x) @ w
        return x

    def opening(self, queries: Tensor) -> Tensor:
        """Output of the block's initial memory for [H, K]."""
        return torch.stack([self.forward(self.start[h], q) for h, q in enumerate(queries)])

    def __call__(self, x: Tensor) -> Tensor:
        """Learn the token ``x`` [D]; returns the memory's output for it afterwards [H, K]."""
        mixer = self.mixer
        if self.seen % self.block == 0:
            self.start = [list(maps) for maps in self.maps]
        self.seen += 1
        self.qkv.append(mixer.qkv_proj.weight @ x)
        q, k, v = convolved(self.qkv, mixer.conv.weight).view(3, mixer.heads, -1)
        q, k = normal(q), normal(k)
        alpha, eta, theta = torch.sigmoid(mixer.gates_proj(x)).view(3, mixer.heads)
        out = []
        for h in range(mixer.heads):
            maps = [w + 0 for w in self.start[h]]  # k and v may depend on the memory too, but are constant in its gradient
            loss = (self.forward(maps, k[h]) - v[h]).square().sum()
            slopes = torch.autograd.grad(loss, maps, create_graph=True)
            rate = mixer.rate / mixer.block * theta[h] * (1 - eta[h])
            self.momentum[h] = [eta[h] * s - rate * g for s, g in zip(self.momentum[h], slopes, strict=True)]
            self.maps[h] = [(1 - alpha[h]) * w + s for w, s in zip(self.maps[h], self.momentum[h], strict=True)]
            out.append(self.forward(self.maps[h], q[h]))
        return torch.stack(out)

    def end_block(self) -> None:
        """Let the next token begin a block."""
        self.seen = 0


def convolved(inputs: list[Tensor], weight: Tensor) -> Tensor:
    """The causal convolution of the last of ``inputs``, and SiLU."""
    taps = weight[:, 0].unbind(1)  # the last one is the token's own
    return F.silu(sum(w * x for w, x in zip(reversed(taps), reversed(inputs), strict=False)))


def normal(x: Tensor) -> Tensor:
    """Of unit length."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Of one query to lists of keys and values, each [H, K]."""
    scores = torch.einsum("hk,shk->hs", q, torch.stack(keys)) / q.shape[-1] ** 0.5
    return torch.einsum("hs,shk->hk", scores.softmax(-1), torch.stack(values))


def make(name: str, tokens: int, **options) -> tuple[Mixer, Tensor]:
    """A mixer of two heads with no parameter at a special value, and tokens [1, T, D]."""
    torch.manual_seed(0)
    mixer = create(name, dim=32, heads=2, rate=0.5, **options).double()
    for p in mixer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return mixer, torch.randn(1, tokens, 32, dtype=torch.float64, requires_grad=True)


def check(mixer: Mixer, x: Tensor, wanted: Tensor) -> None:
    """Outputs at once and in pieces, and the gradients for the tokens and every parameter, are those of ``wanted`` [T, D]."""
    y = mixer(x)
    assert distance(y[0], wanted) < 1e-9
    state, parts = None, []
    for piece in x.split([5, 1, 9, x.shape[1] - 15], 1):
        part, state = mixer(piece, state, return_state=True)
        parts.append(part)
    assert distance(torch.cat(parts, 1)[0], wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(o.square().sum(), wrt, materialize_grads=True) for o in (y, wanted))
    assert all((a - b).norm() <= 1e-9 * b.norm() for a, b in zip(ours, theirs, strict=True))
