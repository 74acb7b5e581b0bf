"""DeltaProduct (arXiv 2502.10297): several delta steps a token, so that a state's transition is a product of reflections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, clamp_beta, head_size, time_steps, to_float32, unit
from linattn.mixers.registry import register
from linattn.ops import flops, linear_attention, sharding

PAPER = "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products"


@register(
    "deltaproduct",
    title="DeltaProduct",
    paper=PAPER,
    arxiv="2502.10297",
    year=2025,
    equation=r"S_{t,j} = (I - \beta_{t,j} k_{t,j}^\top k_{t,j}) S_{t,j-1} + \beta_{t,j} k_{t,j}^\top v_{t,j},\quad"
    r" S_{t,0} = S_{t-1,n},\quad o_t = q_t S_{t,n}",
    linear_in_values=False,  # a token writes n values
    oracle="fla-core 0.6.0, naive_recurrent_gated_delta_product",
)
class DeltaProduct(Mixer):
    """``substeps`` keys, values and β for each token and head; β reaches 2 unless ``negative_eigenvalues`` is false.

    Short convolution and SiLU on q, k and v, queries and keys of unit length, RMS norm per head and then a swish gate, as in
    the authors' layer in fla. It is DeltaNet over T · n tokens of which every n-th is read.
    """

    shards = True

    def __init__(
        self, dim: int, heads: int = 4, *, substeps: int = 2, value_ratio: float = 2.0, conv_width: int = 4,
        negative_eigenvalues: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        if substeps < 1:
            raise ValueError(f"substeps must be at least 1, but came as {substeps}")
        self.heads, self.substeps, self.largest_beta = heads, substeps, 2.0 if negative_eigenvalues else 1.0
        self.keys, self.values = dim, int(dim * value_ratio)
        self.key_size, self.value_size = head_size("dim", dim, heads), head_size("dim * value_ratio", self.values, heads)
        channels = self.keys + substeps * (self.keys + self.values)
        self.qkv_proj = nn.Linear(dim, channels, bias=False)  # q, then k of every substep, then v of every substep
        self.conv = ShortConvolution(channels, conv_width)
        self.b_proj = nn.Linear(dim, substeps * heads, bias=False)
        self.g_proj = nn.Linear(dim, self.values, bias=False)
        self.norm = HeadNorm(self.value_size)
        self.o_proj = nn.Linear(self.values, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        """k [B, T, n H, K], v [B, T, n H, V] and beta [B, T, n H] hold every substep, the first one's heads first."""
        n = self.substeps
        q, k, v = self.conv(self.qkv_proj(x), call).split((self.keys, n * self.keys, n * self.values), -1)
        q, k = (unit(t.unflatten(-1, (-1, self.key_size)), dtype=t.dtype) for t in (q, k))
        beta = self.largest_beta * to_float32(self.b_proj(x)).sigmoid()
        return Recurrence(q, k, v.unflatten(-1, (-1, self.value_size)), decay=self.fading(x), beta=clamp_beta(beta, k))

    def fading(self, x: Tensor) -> Tensor | None:
        """The logarithm of the decay before a token's first substep, [B, T, H]; here none."""
        return None

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        n, beta, decay, cu = self.substeps, r.beta, r.decay, call.cu_seqlens
        assert beta is not None
        k, v, beta = (t.unflatten(2, (n, -1)).flatten(1, 2) for t in (r.k, r.v, beta))  # [B, T n, H, ...]
        q = F.pad(r.q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)  # only the last substep is read
        if decay is not None:
            decay = F.pad(decay[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)  # the decay comes before the first
        with sharding.repeated(n):
            o = linear_attention(
                q, k, v, decay=decay, beta=beta, initial_state=call.get("S"), return_state=call.returning,
                cu_seqlens=None if cu is None else cu * n, form=self.form,
            )  # fmt: skip
        if call.returning:
            o, state = o
            call.keep("S", state)
        return o[:, n - 1 :: n]

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))

    def flops(self, x: Tensor, past: int = 0) -> int:
        with flops.counter() as counter:
            r = self.recurrence(x, CallContext(x, returning=False))
            self.read(r.v[:, :, : self.heads], x)  # one output for n values
        return counter.get_total_flops() + self.attend_flops(r, past)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, written, size = r.v.shape  # n H heads erase and write, H decay and are read
        return batch * tokens * r.q.shape[3] * size * (6 * written + (2 if r.decay is None else 3) * self.heads)


@register(
    "gated_deltaproduct",
    title="Gated DeltaProduct",
    paper=PAPER,
    arxiv="2502.10297",
    year=2025,
    equation=r"S_{t,j} = (I - \beta_{t,j} k_{t,j}^\top k_{t,j}) S_{t,j-1} + \beta_{t,j} k_{t,j}^\top v_{t,j},\quad"
    r" S_{t,0} = \alpha_t S_{t-1,n},\quad \alpha_t = \exp(-e^{A}\,\mathrm{softplus}(x_t w + b)),\quad o_t = q_t S_{t,n}",
    linear_in_values=False,
    oracle="fla-core 0.6.0, naive_recurrent_gated_delta_product",
)
class GatedDeltaProduct(DeltaProduct):
    """DeltaProduct with a decay per head and token before the token's first substep, as in Gated DeltaNet."""

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, heads: int = 4, *, substeps: int = 2, value_ratio: float = 2.0, conv_width: int = 4,
        negative_eigenvalues: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, heads, substeps=substeps, value_ratio=value_ratio, conv_width=conv_width, negative_eigenvalues=negative_eigenvalues
        )
        self.a_proj = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(time_steps(heads))

    def fading(self, x: Tensor) -> Tensor:
        return -self.A_log.exp() * F.softplus(to_float32(self.a_proj(x)) + self.dt_bias)
