"""EfficientViT (arXiv 2205.14756): ReLU linear attention at several scales, and the block's convolutional feed-forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.mixers.vision.parts import depthwise, grid_of, to_image, to_tokens

_BATCH_NORM = "in training its batch norm takes the mean over all rows"


class Convolution(nn.Module):
    """Convolution, followed by a batch norm and an activation where the paper has them."""

    def __init__(self, conv: nn.Conv2d, *, norm: bool = False, activation: bool = False) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels) if norm else nn.Identity()
        self.act = nn.Hardswish() if activation else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


@register(
    "efficientvit",
    title="EfficientViT, multi-scale linear attention",
    paper="EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense Prediction",
    arxiv="2205.14756",
    year=2022,
    seeds=("001",),
    equation=r"o_t = \frac{\mathrm{relu}(q_t) \sum_i \mathrm{relu}(k_i)^\top v_i}{\mathrm{relu}(q_t) \sum_i \mathrm{relu}(k_i)^\top},\quad"
    r" (q, k, v) \text{ of tokens and of their } s \times s \text{ neighbourhoods}",
    kind="grid",
    causal=False,
    oracle="timm 1.0.31, EfficientVit, its whole blocks",
    exemptions=dict.fromkeys(("grid.rows", "ddp", "fsdp2"), _BATCH_NORM),
    chinese={
        "EfficientViT, multi-scale linear attention": "EfficientViT：多尺度线性注意力",
        " of tokens and of their ": " 取自 token 及其 ",
        " neighbourhoods": " 邻域",
    },
)
class EfficientViT(GridMixer):
    """Linear attention on the tokens and, for each scale s, on depthwise s x s convolutions of their q, k and v.

    A head's channels are its q, k and v in sequence, and every scale has its own heads. A batch norm follows the last map. Parameters
    have the names of the authors' code and of timm.

    Args:
        dim: width D of the model.
        head_dim: channels of a head; dim must be a multiple.
        scales: tokens on a side of the neighbourhoods.
        eps: added to the denominator: 1e-5 as in timm; the authors' code has 1e-15.
    """

    def __init__(self, dim: int, *, head_dim: int = 8, scales: tuple[int, ...] = (5,), eps: float = 1e-5) -> None:
        super().__init__(dim)
        if head_dim < 1 or dim % head_dim:
            raise ValueError(f"dim must be a multiple of head_dim, but came as {dim} with head_dim {head_dim}")
        self.heads, self.eps = dim // head_dim, eps
        self.qkv = Convolution(nn.Conv2d(dim, 3 * dim, 1, bias=False))
        self.aggreg = nn.ModuleList(nn.Sequential(depthwise(3 * dim, s, bias=False), _heads(3 * dim, 3 * self.heads)) for s in scales)
        self.proj = Convolution(nn.Conv2d((1 + len(scales)) * dim, dim, 1, bias=False), norm=True)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        qkv = self.qkv(to_image(x, *grid_of(call)))
        scales = torch.cat([qkv, *(neighbourhood(qkv) for neighbourhood in self.aggreg)], 1)
        q, k, v = to_tokens(scales).unflatten(-1, ((1 + len(self.aggreg)) * self.heads, 3, -1)).unbind(3)
        return Recurrence(F.relu(to_float32(q)), F.relu(to_float32(k)), v, normalize=self.eps, scale=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return to_tokens(self.proj(to_image(o.flatten(-2), o.shape[1], 1)))  # independent of the grid, because it is applied token by token


@register(
    "mbconv",
    title="MBConv, mobile inverted bottleneck",
    paper="MobileNetV2: Inverted Residuals and Linear Bottlenecks",
    arxiv="1801.04381",
    year=2018,
    equation=r"y = W_3\, h(\mathrm{DWC}(h(W_1 x))),\quad h = \mathrm{hardswish}",
    kind="grid",
    causal=False,
    linear_in_values=False,
    oracle="timm 1.0.31, EfficientVit, its whole blocks",
    exemptions=dict.fromkeys(("grid.rows", "ddp", "fsdp2"), _BATCH_NORM),
    families=("convolutions",),
    chinese={"MBConv, mobile inverted bottleneck": "MBConv：移动端倒残差块"},
)
class MBConv(GridMixer):
    """Feed-forward of an EfficientViT block with a depthwise convolution: a model is ``"efficientvit, mbconv"``.

    Args:
        dim: width D of the model.
        expansion: inner channels for each of D.
        kernel_size: side of the convolution in tokens.
    """

    def __init__(self, dim: int, *, expansion: int = 4, kernel_size: int = 3) -> None:
        super().__init__(dim)
        if expansion < 1:
            raise ValueError(f"expansion must be at least 1, but came as {expansion}")
        inner = expansion * dim
        self.inverted_conv = Convolution(nn.Conv2d(dim, inner, 1), activation=True)
        self.depth_conv = Convolution(depthwise(inner, kernel_size), activation=True)
        self.point_conv = Convolution(nn.Conv2d(inner, dim, 1, bias=False), norm=True)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return to_tokens(self.point_conv(self.depth_conv(self.inverted_conv(to_image(x, *grid_of(call))))))


def _heads(channels: int, groups: int) -> nn.Conv2d:
    """Map of each head's q, k and v on its own."""
    return nn.Conv2d(channels, channels, 1, groups=groups, bias=False)
