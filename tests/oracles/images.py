"""Shared by tests of image mixers: weights and tokens reproducible in other code, and its recorded results."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from linattn.mixers import Mixer
from linattn.mixers.kinds import over_grid
from linattn.mixers.vision.parts import to_image, to_tokens
from tests.oracles import wheels
from tests.oracles.compare import distance
from tests.oracles.standins import Anything


def waved(module: nn.Module) -> nn.Module:
    """``module`` in float64, its parameters filled with sines in the order of their names, which is reproducible without a generator."""
    with torch.no_grad():
        for place, (_, p) in enumerate(sorted(module.double().named_parameters())):
            p.copy_(0.4 * torch.sin(1.0 + place + math.sqrt(2.0) * torch.arange(p.numel())).view(p.shape))
    return module


def tokens(height: int, width: int, dim: int) -> Tensor:
    """[2, height * width, dim] float64."""
    count = 2 * height * width * dim
    return 2.0 * torch.sin(math.sqrt(3.0) * torch.arange(count, dtype=torch.float64)).view(2, -1, dim)


def assert_figures(mixer: Mixer, x: Tensor, side: int, values: Sequence[float], gradients: Sequence[float]) -> None:
    """Compare with every hundredth of the authors' ``values`` for ``x`` with :func:`waved` weights, and ``gradients`` of Σ y³."""
    x = x.clone().requires_grad_()
    y = over_grid(waved(mixer), x, side, side)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x)
    assert distance(y.flatten()[::100], torch.tensor(values, dtype=torch.float64)) < 1e-9
    assert distance(gradient.flatten()[::100], torch.tensor(gradients, dtype=torch.float64)) < 1e-9


def assert_loop(mixer: Mixer, x: Tensor, shape: tuple[int, int], loop: Tensor) -> None:
    """Compare values and gradients of the mixer with ``loop``, the paper's equations token by token."""
    y = over_grid(mixer, x, *shape)
    assert distance(y, loop) < 1e-12
    g = torch.randn_like(y)
    names = [name for name, _ in mixer.named_parameters()]
    got, wanted = (torch.autograd.grad(t, [x, *mixer.parameters()], g, retain_graph=True) for t in (y, loop))
    wrong = {name: distance(a, b) for name, a, b in zip(["x", *names], got, wanted, strict=True) if not distance(a, b) < 1e-10}
    assert not wrong


def shaken(mixer: Mixer) -> Mixer:
    """The mixer in float64 with weights away from zero and one."""
    with torch.no_grad():
        for p in mixer.double().parameters():
            p.add_(0.3 * torch.randn_like(p))
    return mixer


def convolved(image: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """A depthwise convolution by its definition: image [height, width, C], weight [C, 1, k, k] -> [height, width, C]."""
    height, width, _ = image.shape
    half = weight.shape[-1] // 2
    rows = []
    for i in range(height):
        for j in range(width):
            near = [(a, b) for a in range(i - half, i + half + 1) for b in range(j - half, j + half + 1)]
            inside = [(a, b) for a, b in near if 0 <= a < height and 0 <= b < width]
            rows.append(sum(image[a, b] * weight[:, 0, a - i + half, b - j + half] for a, b in inside) + bias)
    return torch.stack(rows).view(image.shape)


@cache
def timm() -> ModuleType:
    """timm's EfficientVit, importable only here; torchvision, which it requires, is a stub."""
    root = wheels.path("timm==1.0.31") / "timm"
    places = {"timm": root, "timm.models": root / "models", "timm.data": None}
    places |= dict.fromkeys(("torchvision", "torchvision.ops", "torchvision.ops.misc"))
    with pytest.MonkeyPatch.context() as patch:
        for name, place in places.items():
            module = ModuleType(name)
            module.__path__ = [] if place is None else [str(place)]
            module.__version__ = "1.0.31"
            for bound in ("FrozenBatchNorm2d", "IMAGENET_DEFAULT_MEAN", "IMAGENET_DEFAULT_STD"):
                setattr(module, bound, Anything)
            patch.setitem(sys.modules, name, module)
        loaded = importlib.import_module("timm.models.efficientvit_mit")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]
    return loaded


def compared(theirs: nn.Module, ours: Mixer, x: Tensor, height: int, width: int) -> tuple[float, float]:
    """Distances of values and of gradients of tokens and weights, after loading their weights into ours."""
    ours.load_state_dict(theirs.state_dict())
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = ours(inputs[0], height, width), to_tokens(theirs(to_image(inputs[1], height, width)))
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, [inputs[0], *dict(sorted(ours.named_parameters())).values()], g)
    expected = torch.autograd.grad(wanted, [inputs[1], *dict(sorted(theirs.named_parameters())).values()], g)
    state = max(distance(a.double(), b.double()) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    return distance(y, wanted), max(state, *(distance(a, b) for a, b in zip(got, expected, strict=True)))
