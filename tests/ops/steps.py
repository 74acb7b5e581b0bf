"""Tokens for steps of the selective scan and the recurrence, in the layouts of models, and checks of kernels on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from linattn.ops.selective_step import selective_step_
from tests.ops.errors import error

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # by dtype of the tokens; states are float32
CHANNELS: list[dict[str, Any]] = [
    {"width": 1, "size": 1}, {"width": 70, "size": 16}, {"width": 33, "size": 19},
    {"heads": 3, "width": 21, "size": 5}, {"heads": 4, "groups": 2, "width": 9, "size": 20, "turned": True},
    {"heads": 2, "width": 35, "size": 3, "turned": True, "expanded": True}, {"heads": 2, "width": 4, "size": 17, "expanded": True},
]  # fmt: skip


@dataclass
class Token:
    """A state and the arguments of ``selective_step_`` beside it."""

    state: Tensor
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=lambda: {"softplus": True, "limit": (0.02, 1.5)})

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Token:
        """Copy with tokens of that dtype; float32 arguments beside them keep theirs."""
        tokens = ("x", "dt", "B", "C", "z")
        tensors = {n: (t.to(device, dtype) if n in tokens else t.to(device)) for n, t in self.tensors.items()}
        return replace(self, state=self.state.to(device), tensors=tensors)

    def double(self) -> Token:
        return replace(self, state=self.state.double(), tensors={n: t.double() for n, t in self.tensors.items()})

    def without(self, *names: str) -> Token:
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})

    def step(self, backend: str = "auto") -> tuple[Tensor, Tensor]:
        """y, and the state, updated in place."""
        state = torch.empty_strided(self.state.shape, self.state.stride(), dtype=self.state.dtype, device=self.state.device)
        state.copy_(self.state)
        y = selective_step_(state, **self.tensors, **self.options, backend=backend)
        return y, state

    def check(self, backend: str) -> None:
        """The kernel against torch's operations in float64."""
        (y, state), (wanted, after) = self.step(backend), self.double().step("torch")
        x = self.tensors["x"]
        assert y.dtype == x.dtype and y.shape == x.shape and state.dtype == torch.float32
        assert error(y.double(), wanted) <= LIMIT[x.dtype]
        assert error(state.double(), after) <= LIMIT[torch.float32]


def token(width: int, size: int, *, heads: int = 0, groups: int = 1, rows: int = 2, turned: bool = False, expanded: bool = False) -> Token:
    """``turned``: channels are contiguous; ``expanded``: dt, A, D and bias are per head, as in Mamba-2."""
    g = torch.Generator().manual_seed(width + size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    channels = (heads, width) if heads else (width,)
    own = (*channels[:-1], 1) if expanded else channels
    state = normal(rows, *channels, size)
    tensors = {"x": normal(rows, *channels), "dt": normal(rows, *own).expand(rows, *channels), "z": normal(rows, *channels)}
    tensors |= {"A": -normal(*own, 1 if expanded else size).abs().expand(*channels, size), "D": normal(*own).expand(channels)}
    tensors |= {"bias": normal(*own).expand(channels)}
    shared = (rows, groups, size) if heads else (rows, size)
    both = normal(*shared[:-1], 2 * size)
    tensors |= {"B": both[..., :size], "C": both[..., size:]}  # slices of one projection
    return Token(state.mT.contiguous().mT if turned else state, tensors)


def check_drift(case: Token, backend: str, steps: int) -> None:
    """A decay near 1 rounded to float32 would err by up to 3e-8, 9e-6 of the state after 300 steps."""
    case = replace(case.without("D", "z", "bias"), options={})
    case.tensors |= {"dt": torch.ones_like(case.tensors["dt"]), "A": torch.full_like(case.tensors["A"], -9e-8)}
    wide = case.double()
    for _ in range(steps):
        x = torch.randn_like(case.tensors["x"]) * 1e-3
        case.tensors["x"], wide.tensors["x"] = x, x.double()
        case.state, wide.state = case.step(backend)[1], wide.step("torch")[1]
    assert error(case.state.double(), wide.state) < 2e-6
