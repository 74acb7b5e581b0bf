"""Cases of the GPU benchmarks: kinds of recurrence, shapes, passes, and the tensors of one call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# Tensors of a call besides q, k and v; scans have others.
FAMILIES = {
    "none": (),
    "constant": ("constant",),  # RetNet, Lightning
    "head": ("decay",),  # Mamba-2, simple GLA
    "channel": ("decay",),  # GLA, HGRN2
    "rwkv6": ("decay", "bonus"),
    "delta": ("beta",),
    "gated_delta": ("decay", "beta"),
    "kda": ("decay", "beta"),
    "erase": ("decay", "read", "write"),  # RWKV-7
    "scan": ("decay",),  # HGRN: elementwise over all H · D channels
    "selective_scan": (),  # Mamba: H · D channels of 16 states
    "softmax": (),  # causal attention, the baseline of all others
}
PER_HEAD = ("head", "gated_delta")
SCANS = ("scan", "selective_scan")  # over H · D channels
STATES = 16  # of a channel of the selective scan
STEPS = ("head", "channel", "delta", "gated_delta", "kda", "erase")  # kinds timed in single-token steps
PASSES = ("forward", "forward+backward")
DECODE = ("decode", "decode eager")  # one token with a float32 state, in a CUDA graph and without
GRAPHED = ("forward in a graph", "forward+backward in a graph")  # without launch overhead, which exceeds the time of short kernels
FIRST = "first call"  # forward and backward of a fresh process, with an empty compiler cache and with its own
MODES = (*PASSES, *GRAPHED, *DECODE, FIRST)
DECAY = -0.05  # mean natural logarithm


@dataclass(frozen=True)
class Shape:
    """Batch, tokens, heads, and the size of keys and values."""

    B: int
    T: int
    H: int
    D: int

    def __str__(self) -> str:
        return f"B{self.B} T{self.T} H{self.H} D{self.D}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse ``"B1 T32768 H16 D128"``, blanks or not."""
        found = re.fullmatch(r"B([1-9]\d*)T([1-9]\d*)H([1-9]\d*)D([1-9]\d*)", text.replace(" ", "").upper())
        if found is None:
            raise ValueError(f"--shapes must be like B1T32768H16D128, but has {text!r}")
        return cls(*map(int, found.groups()))


FIRST_SHAPE = Shape(1, 32768, 16, 128)
SHAPES = (FIRST_SHAPE, Shape(8, 4096, 16, 128), Shape(1, 8192, 64, 128), Shape(4, 2048, 16, 128), Shape(8, 1024, 8, 64))
SHORT = SHAPES[3:]  # shapes whose passes take tens of microseconds
SMALL_HEADS = Shape(1, 32768, 32, 64)  # RWKV-7's own head size
START_SHAPE = replace(FIRST_SHAPE, T=4096)  # shape of the first call, whose compilation does not depend on T
DECODE_SHAPES = (Shape(64, 1, 16, 128), Shape(256, 1, 16, 128))
LENGTHS = tuple(Shape(1, 1 << n, 16, 128) for n in (12, 14, 16, 18, 20))  # to check that time is linear in T
SWEEP = (-0.001, -1.0, -5.0)
TINY = (Shape(1, 64, 2, 16), Shape(2, 32, 2, 16))  # for tests without a GPU


@dataclass(frozen=True)
class Case:
    """Case of one figure: q, k, v, beta and the rest in bfloat16, the decay in ``decay_dtype`` with the mean ``decay``."""

    family: str
    shape: Shape
    mode: str
    decay: float | None = None
    decay_dtype: str | None = None

    @classmethod
    def of(cls, family: str, shape: Shape, mode: str) -> Case:
        """Make the case with the usual decays."""
        return cls(family, shape, mode, *usual(family))

    def __str__(self) -> str:
        decays = "" if self.decay is None else f" decay {self.decay:g} {self.decay_dtype}"
        return f"{self.family} {self.mode} {self.shape}{decays}"


def usual(family: str) -> tuple[float | None, str | None]:
    """Mean and dtype of usual decays: float32 per head, where they are small, bfloat16 per channel, where they are as large as k."""
    if "decay" not in FAMILIES[family]:
        return None, None
    return DECAY, "float32" if family in PER_HEAD else "bfloat16"


def plan(*, quick: bool, device: str) -> Iterator[tuple[Case, bool]]:
    """All cases, the most important first, and whether other libraries run them too."""
    shapes = (SHAPES if not quick else SHAPES[:1]) if device == "cuda" else TINY[:1] if quick else TINY
    steps = DECODE_SHAPES if device == "cuda" else (replace(TINY[0], T=1),)
    for i, shape in enumerate(shapes):
        yield from ((Case.of(family, shape, mode), True) for family in FAMILIES for mode in PASSES)
        yield from ((Case.of(family, shape, mode), shape in SHORT) for family in FAMILIES for mode in GRAPHED)
        if i == 0:
            yield from ((Case.of(family, s, mode), True) for family in STEPS for s in steps for mode in DECODE)
    if quick or device != "cuda":
        return
    yield from ((Case.of("erase", SMALL_HEADS, mode), True) for mode in PASSES)
    yield from ((Case.of(family, START_SHAPE, FIRST), False) for family in FAMILIES if family != "softmax")
    decaying = [family for family, tensors in FAMILIES.items() if "decay" in tensors]
    for family in decaying:
        for mode in PASSES:
            case = Case.of(family, FIRST_SHAPE, mode)
            yield from ((replace(case, decay=mean), False) for mean in SWEEP)
            if family not in PER_HEAD:
                yield replace(case, decay_dtype="float32"), False
    recurrences = [family for family in FAMILIES if family not in (*SCANS, "softmax")]
    yield from ((Case.of(family, shape, mode), False) for shape in LENGTHS for family in recurrences for mode in PASSES)


def tensors(case: Case, device: str, seed: int) -> dict[str, Tensor]:
    """Arguments of one call, by name: q, k, v [B, T, H, D] in bfloat16 and the family's other arguments.

    Keys of the delta rule and of erase have unit length; decays are spread evenly over [2 · mean, 0]. A step has a float32
    ``state`` [B, H, D, D] too.
    """
    make = torch.Generator(device).manual_seed(seed)
    s, family = case.shape, case.family
    wide = (s.B, s.T, s.H, s.D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, device=device, dtype=torch.bfloat16)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=make, device=device)

    if family == "selective_scan":
        steps = F.softplus(normal(s.B, s.T, s.H * s.D) - 4)  # about 0.02, as Mamba begins
        A = -torch.arange(1.0, STATES + 1, device=device).expand(s.H * s.D, STATES).contiguous()
        return {"x": normal(*steps.shape), "dt": steps, "A": A, "B": normal(s.B, s.T, STATES), "C": normal(s.B, s.T, STATES)}
    if family == "scan":
        x = {"b": normal(s.B, s.T, s.H * s.D)}
        decayed: tuple[int, ...] = (s.B, s.T, s.H * s.D)
    else:
        x = {"q": normal(*wide), "k": normal(*wide), "v": normal(*wide)}
        decayed = wide[:3] if family in PER_HEAD else wide
    extras = FAMILIES[family]
    if "beta" in extras or "read" in extras:
        x["k"] = F.normalize(x["k"], dim=-1)
    if "constant" in extras:
        x["constant"] = torch.log1p(-torch.exp2(-5 - torch.arange(s.H, device=device, dtype=torch.float32)))
    if case.decay is not None:
        x["decay"] = (uniform(*decayed).mul_(2 * case.decay)).to(getattr(torch, case.decay_dtype or "float32"))
    if "beta" in extras:
        x["beta"] = uniform(*wide[:3]).to(torch.bfloat16)
    if "bonus" in extras:
        x["bonus"] = normal(s.H, s.D)
    if "read" in extras:
        x["read"] = F.normalize(normal(*wide), dim=-1)
        x["write"] = -x["read"] * uniform(*wide[:3], 1).to(torch.bfloat16)
    if s.T == 1:
        x["state"] = torch.randn((s.B, s.H, s.D, s.D), generator=make, device=device)
    return x
