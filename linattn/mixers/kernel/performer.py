"""Performer (arXiv 2009.14794): positive random features whose products are, on average, the exponential of q·k."""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention, log_fading, maximum_so_far, only_real, to_tokens
from linattn.mixers.registry import register
from linattn.ops.features import orthogonal_gaussian

_watched: WeakSet[RandomFeatures] = WeakSet()  # mixers that redraw features in training


def _watch(mixer: RandomFeatures) -> None:
    _watched.add(mixer)
    _hook()


@cache
def _hook() -> None:
    """Hook :func:`_after` into every optimizer: which one will train a mixer is unknown at its construction."""
    register_optimizer_step_post_hook(_after)


def _after(optimizer: Optimizer, *_: object) -> None:
    """Count a step for the mixers trained by ``optimizer``, those whose first trainable parameter it holds."""
    mixers = [m for m in _watched if m.training]
    own = {id(p) for group in optimizer.param_groups for p in group["params"]} if mixers else set()
    for mixer in mixers:
        if id(next((p for p in mixer.parameters() if p.requires_grad), None)) in own:
            mixer.stepped()


class RandomFeatures(KernelAttention):
    """Features exp(W x - g(x)) + ε of x = q or k, W orthogonal Gaussian [m, d] and the same for all heads.

    The exponent is at most 0: the maximum of W x is subtracted, of the query itself or of the keys so far, M_t. The state decays by
    exp(M_{t-1} - M_t), so no token depends on a later one. (The authors' code takes the largest of all keys, which
    together with ε lets the future be seen.) State: S, z and M, ``log_max`` [rows, H].

    ``redraw`` draws a new W. With ``redraw_every`` = n that happens after every n-th step of the optimizer that trains the mixer
    (the paper's n is 1000): steps are counted, not passes, so accumulated and recomputed gradients see one W. The draw depends
    only on two more buffers, ``redraw_seed`` and ``steps``: it is the same on every device and in training resumed from a state_dict.
    """

    normalize = 1e-30  # avoids 0 / 0 without tokens: features are positive
    keep_float32 = ("projection",)
    projection: Tensor
    redraw_seed: Tensor
    steps: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool,
        *,
        random_features: int | None,
        eps: float,
        out_bias: bool = False,
        redraw_every: int | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, out_bias=out_bias)
        size = self.feature_dim
        count = max(1, int(size * math.log(size))) if random_features is None else random_features
        if count < 1:
            raise ValueError(f"random_features must be at least 1, but came as {random_features}")
        self.random_features, self.eps = count, eps
        self.register_buffer("projection", orthogonal_gaussian(count, size))
        if redraw_every is not None and redraw_every < 1:
            raise ValueError(f"redraw_every must be at least 1 step of training, but came as {redraw_every}")
        self.redraw_every = redraw_every
        self._counted: tuple[Tensor, int] | None = None  # ``steps`` and its value, to avoid synchronising at every step
        if redraw_every is not None:
            self.register_buffer("redraw_seed", torch.randint(2**62, ()))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            _watch(self)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, from ``generator`` (of the CPU) if given. States made with the old ones do not fit the new."""
        self.projection.copy_(orthogonal_gaussian(*self.projection.shape, generator=generator))

    @torch.no_grad()
    def stepped(self) -> None:
        """Count a training step, and draw new random features when they are due."""
        assert self.redraw_every is not None
        known = self._counted is not None and self._counted[0] is self.steps  # otherwise the buffer was moved or loaded
        count = 1 + (self._counted[1] if known and self._counted is not None else int(self.steps))
        self.steps.fill_(count)
        self._counted = (self.steps, count)
        if count % self.redraw_every == 0:
            self.redraw(torch.Generator().manual_seed(int(self.redraw_seed) + count))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._counted = None

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self.redraw_every is not None:  # copies and unpickled mixers redraw too
            _watch(self)

    def exponents(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projections W q, W k [B, T, H, m], and the subtrahends g(q) and g(k) [B, T, H, 1]."""
        raise NotImplementedError(f"{type(self).__name__} must implement exponents(q, k)")

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.heads_of(x)
        q, k, less_q, less_k = self.exponents(q, k)
        k = only_real(k.flatten(-2), call).view_as(k)
        before, top, last = maximum_so_far(k.amax(-1), call, "log_max")  # [B, T, H]
        decay = log_fading(before, top) if self.causal else None
        if not self.causal:
            top = to_tokens(last, call)
        q = (q - less_q - q.amax(-1, keepdim=True)).exp() + self.eps
        k = (k - less_k - top[..., None]).exp() + self.eps
        ratio = self.random_features**-0.5
        return Recurrence(ratio * q, ratio * k, v, decay=decay, normalize=self.normalize, scale=1.0)


@register(
    "performer",
    title="Performer",
    paper="Rethinking Attention with Performers",
    arxiv="2009.14794",
    year=2020,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) S_t}{\phi(q_t) z_t^\top},"
    r"\quad \phi(x) = \frac{1}{\sqrt m} \left(\exp(W x - \lVert x \rVert^2 / 2) + \varepsilon\right),\quad x \leftarrow x / d^{1/4}",
    symmetry="permutation",
    oracle="performer-pytorch 1.1.4, FastAttention and SelfAttention with the same weights and features",
    families=("kernels", "low rank"),
    chinese={"FastAttention and SelfAttention with the same weights and features": "权重与特征相同的 FastAttention 与 SelfAttention"},
)
class Performer(RandomFeatures):
    """``kernel="softmax"``: FAVOR+, ε = 1e-4; ``"relu"``: max(W x, 0) + 1e-3, no exponentials, no stabiliser.

    Checked in performer-pytorch, which transcribes the authors' JAX code: m = d ln d, both ε, the scale d^-1/4, lengths of rows of W
    drawn as those of Gaussian vectors.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        random_features: int | None = None,
        kernel: str = "softmax",
        eps: float | None = None,
        causal: bool = True,
        redraw_every: int | None = None,
    ) -> None:
        if kernel not in ("softmax", "relu"):
            raise ValueError(f"kernel must be 'softmax' or 'relu', but came as {kernel!r}")
        eps = (1e-4 if kernel == "softmax" else 1e-3) if eps is None else eps
        super().__init__(dim, heads, causal, random_features=random_features, eps=eps, out_bias=True, redraw_every=redraw_every)
        self.kernel = kernel

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        if self.kernel == "softmax":
            return super().project(x, call)
        q, k, v = self.heads_of(x)
        q, k = ((t * self.feature_dim**-0.25 @ self.projection.to(t.dtype).T).relu() + self.eps for t in (q, k))
        return Recurrence(q, k, v, normalize=self.normalize, scale=1.0)

    def exponents(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k = q * self.feature_dim**-0.25, k * self.feature_dim**-0.25
        less_q, less_k = (t.square().sum(-1, keepdim=True) / 2 for t in (q, k))
        w = self.projection.to(q.dtype).T
        return q @ w, k @ w, less_q, less_k
