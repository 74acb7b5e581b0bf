"""Visual Attention Network (arXiv 2202.09741): a large decomposed convolution gates each place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.registry import register
from linattn.mixers.vision.parts import depthwise, grid_of, to_image, to_tokens


class LargeKernel(nn.Module):
    """x ⊙ W (DWD (DW x)), [B, D, height, width]: a depthwise convolution, a dilated one, and a pointwise one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv0 = depthwise(dim, 5)
        self.conv_spatial = nn.Conv2d(dim, dim, 7, padding=9, groups=dim, dilation=3)
        self.conv1 = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv1(self.conv_spatial(self.conv0(x)))


@register(
    "van",
    title="VAN, large kernel attention",
    paper="Visual Attention Network",
    arxiv="2202.09741",
    year=2022,
    seeds=("001",),
    equation=r"y = x + W_2\big(u \odot W_1\, \mathrm{DWD}_{7, 3}(\mathrm{DW}_5(u))\big),\quad u = \mathrm{gelu}(W_0 x)",
    kind="grid",
    causal=False,
    linear_in_values=False,
    oracle="the paper's equations as a loop in float64, and figures of the authors' code",
    families=("convolutions",),
    chinese={"VAN, large kernel attention": "VAN：大核注意力"},
)
class VAN(GridMixer):
    """Large-kernel attention over 23 x 23 places: 5 x 5, then 7 x 7 spaced by 3. Parameters have the names of the authors' code.

    The output includes the tokens, x + .., in addition to the residual of the surrounding block, as in the authors' code.

    Args:
        dim: width D of the model.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.proj_1, self.proj_2 = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.spatial_gating_unit = LargeKernel(dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        inner = F.gelu(self.proj_1(to_image(x, *grid_of(call))))
        return x + to_tokens(self.proj_2(self.spatial_gating_unit(inner)))
