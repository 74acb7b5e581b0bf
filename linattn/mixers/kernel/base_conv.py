"""BaseConv (arXiv 2312.04927): a short convolution gated by the token, used by Based between its attentions."""

from __future__ import annotations

from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import ShortConvolution
from linattn.mixers.registry import register


@register(
    "base_conv",
    title="BaseConv (gated short convolution)",
    paper="Zoology: Measuring and Improving Recall in Efficient Language Models",
    arxiv="2312.04927",
    year=2023,
    equation=r"u_t = x_t W_1 + b_1,\quad c_t = \mathrm{silu}\Big(\sum_{j=0}^{2} h_j \odot u_{t-j}\Big),\quad"
    r" y_t = \big(c_t \odot (x_t W_2 + b_2)\big) W_3 + b_3",
    linear_in_values=False,
    oracle="the layer's equation token by token in float64, with weights under the names of HazyResearch/based",
    exemptions={"past": "by its definition it sees the two tokens before and none earlier"},
    families=("convolutions",),
    chinese={
        "BaseConv (gated short convolution)": "BaseConv（门控短卷积）",
        "the layer's equation token by token in float64": "float64 下逐 token 计算该层公式",
        "with weights under the names of HazyResearch/based": "权重沿用 HazyResearch/based 的命名",
        "by its definition it sees the two tokens before and none earlier": "按定义它只看得见前两个 token，再早的看不见",
    },
)
class BaseConv(Mixer):
    """The layer of Based (arXiv 2402.18668): 2 dim channels inside, a filter of 3 tokens a channel, SiLU, biases on the maps only.

    Checked in HazyResearch/based (models/mixers/base_conv.py and the configs of its 360m and 1b models): ``in_proj`` gives the
    convolved channels, then their factors. The state is the last two tokens of the former, ``conv`` [rows, 2, 2 dim].
    """

    shards = True

    def __init__(self, dim: int, *, expand: int = 2, conv_width: int = 3) -> None:
        super().__init__(dim)
        for name, value in (("expand", expand), ("conv_width", conv_width)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.in_proj = nn.Linear(dim, 2 * expand * dim)
        self.conv = ShortConvolution(expand * dim, conv_width)
        self.o_proj = nn.Linear(expand * dim, dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        u, gate = self.in_proj(x).chunk(2, -1)
        return self.o_proj(self.conv(u, call) * gate)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return 2 * x.shape[0] * x.shape[1] * sum(p.numel() for p in self.parameters() if p.ndim > 1)
