"""Checks of one call of a mixer of any kind except causal sequence mixers, for which see :mod:`outputs` and :mod:`states`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import linattn
from linattn.mixers import Mixer, Resampler
from linattn.mixers.inspect import values
from tests.conformance.checks.engines import assert_compiled
from tests.conformance.checks.outputs import check_distinct, check_options, check_seed  # noqa: F401  (checks of any kind too)
from tests.conformance.tools import TOKENS, WIDTH, Make, assert_bits, assert_finite, assert_same, build, called, tokens, weighed

GROWTH = {"n": lambda n: n, "n log n": lambda n: n * math.log2(n), "n^1.5": lambda n: n**1.5, "n^2": lambda n: n * n}
LENGTHS = (4096, 16384)  # squares; long enough for windows to be full


def check_shape(make: Make) -> None:
    """Outputs have the kind's shape and the tokens' dtype; T = 0 and T = 1 are supported."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mixer = build(make, dtype=dtype)
        for length in (6, 1, 0):
            x = tokens(2, length, dtype=dtype).requires_grad_()
            y = called(mixer, x)
            wanted = mixer.resampled(length) if isinstance(mixer, Resampler) else length
            assert y.shape == (2, wanted, WIDTH), f"{length} tokens of {dtype}: the output has shape {list(y.shape)}"
            assert y.dtype == dtype, f"{length} tokens of {dtype}: the output is {y.dtype}"
            y.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape


def check_widths(make: Make) -> None:
    """The defaults support every multiple of 32 as width; tokens of another width are refused."""
    for dim in (32, 96, 160):
        mixer = build(make, dim=dim, dtype=torch.float32)
        assert_finite(called(mixer, tokens(1, 6, dim, dtype=torch.float32)), f"the output of width {dim}")
    with pytest.raises((ValueError, RuntimeError)):
        called(mixer, tokens(1, 6, dtype=torch.float32))


def check_rows(make: Make) -> None:
    """Rows of a batch are independent: another row's NaN changes no bit, nor a gradient.

    Bits are compared for operations of equal shapes. Where shapes depend on tokens, as in experts without a capacity, a NaN row changes
    them, and so possibly the rounding: there results may differ by rounding.
    """
    mixer, x = build(make), tokens(3, TOKENS).requires_grad_()
    y, shapes = _watched(mixer, x)
    assert_same({"the output": y[1:2]}, {"the output": called(mixer, x[1:2])}, "a row in a batch", 1e-12)
    poisoned = x.detach().clone()
    poisoned[1, 3] = torch.nan
    poisoned.requires_grad_()
    ours, others = _watched(mixer, poisoned)
    for row in (0, 2):
        got, wanted, what = ours[row].detach(), y[row].detach(), f"row {row} beside a row with NaN"
        if others == shapes:
            assert_bits(got, wanted, what)
        else:
            assert_same({"the output": got}, {"the output": wanted}, what, 1e-12)
    (gradient,) = torch.autograd.grad(ours[[0, 2]].sum(), poisoned)
    assert_finite(gradient[[0, 2]], "the gradient of rows beside a row with NaN")


def _watched(mixer: Mixer, x: Tensor) -> tuple[Tensor, list[tuple]]:
    """The output, and every operation on the way with the shapes that it took."""
    with Shapes() as seen:
        return called(mixer, x), seen.shapes


def check_reach(make: Make) -> None:
    """The first output depends on the last token, or on the last one of the context."""
    mixer, x = build(make), tokens(2, TOKENS)
    arguments = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in mixer.arguments(x)]
    seen = [a for a in arguments if isinstance(a, Tensor)][-1]
    y = mixer(*arguments)
    (gradient,) = torch.autograd.grad(weighed((y[0] if isinstance(y, tuple) else y)[:, 0]), seen)
    size = gradient.norm(dim=-1)  # [B, T]
    assert (size[:, -1] > 1e-9 * size.amax(1)).all(), f"the gradient of the last token is {size[:, -1].tolist()} of {size.amax(1).tolist()}"


def check_finite(make: Make) -> None:
    """Hard tokens give finite outputs and gradients in bfloat16 and under autocast, whose outputs have its dtype or a wider one."""
    x = tokens(2, 24, dtype=torch.float32)
    hard = {"large": 1e4 * x[0], "tiny": 1e-20 * x[0], "constant": torch.full_like(x[0], 3.0), "equal": x[1, :1].expand(24, -1)}
    batch = torch.stack([*hard.values(), torch.zeros_like(x[0])])
    _assert_hard(build(make, dtype=torch.bfloat16), batch.bfloat16(), [*hard, "zero"], "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        _assert_hard(build(make, dtype=torch.float32), batch, [*hard, "zero"], "autocast")


def _assert_hard(mixer: Mixer, x: Tensor, kinds: list[str], what: str) -> None:
    x = x.clone().requires_grad_()
    y = called(mixer, x)
    for i, kind in enumerate(kinds):
        assert_finite(y[i], f"{what}, {kind} tokens: the output")
    names, leaves = zip(("the tokens", x), *mixer.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(weighed(y), leaves, materialize_grads=True), strict=True):
        assert_finite(gradient, f"{what}: the gradient of {name}")


def check_compile(make: Make) -> None:
    """``torch.compile(fullgraph=True)`` supports it."""
    mixer, x = build(make), tokens(2, 6)
    assert_compiled(lambda x: [called(mixer, x)], x)


def check_checkpoint(make: Make) -> None:
    """Gradient checkpointing gives the bits of the plain pass."""
    mixer, runs = build(make), []
    for call in (called, lambda *args: checkpoint(called, *args, use_reentrant=False)):
        x = tokens(2, TOKENS).requires_grad_()
        y = call(mixer, x)
        runs.append([y, *torch.autograd.grad(weighed(y), [x, *mixer.parameters()], materialize_grads=True)])
    for plain, again in zip(*runs, strict=True):
        assert_bits(again, plain, "under checkpointing")


def check_loaded(make: Make) -> None:
    """Loading its weights into another instance gives equal bits: ``state_dict`` is complete."""
    mixer, x = build(make), tokens(2, TOKENS)
    y = called(mixer, x)
    other = make(dim=WIDTH).double()
    other.load_state_dict(mixer.state_dict())
    assert_bits(called(other, x), y, "the output of loaded weights")


def check_mixing_matrix(make: Make) -> None:
    """The mixing matrix times the values, read out, is the output; a mixer that is not linear in its values has none."""
    mixer, x = build(make), tokens(2, TOKENS)
    arguments = mixer.arguments(x)
    if not mixer.info.linear_in_values:
        with pytest.raises(ValueError, match=mixer.info.name):
            linattn.mixing_matrix(mixer, *arguments)
        return
    matrix = linattn.mixing_matrix(mixer, *arguments)  # [B, H, T, T]
    assert matrix.ndim == 4 and matrix.shape[0] == 2 and matrix.shape[2:] == (TOKENS, TOKENS), f"its shape is {list(matrix.shape)}"
    o = torch.einsum("bhts,bshv->bthv", matrix, values(mixer, *arguments))
    skip = mixer.recurrence(x, mixer.begin(*arguments)).skip
    assert_same({"the output": mixer.read(o if skip is None else o + skip, x)}, {"the output": mixer(*arguments)}, "the matrix")


def check_symmetry(make: Make) -> None:
    """Permuted tokens give permuted outputs (of a new length, the same ones), or shifted ones shifted outputs, if ``info`` says so."""
    mixer = build(make)
    if mixer.info.symmetry == "permutation":
        x, order = tokens(2, TOKENS), torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))
        y = called(mixer, x)
        wanted = y if isinstance(mixer, Resampler) else y[:, order]
        assert_same({"the output": called(mixer, x[:, order])}, {"the output": wanted}, "permuted")
    if mixer.info.symmetry == "shift":
        x, by = tokens(1, 1500), 7
        assert_same({"the output": called(mixer, x[:, by:])[:, 493:900]}, {"the output": called(mixer, x)[:, 500:907]}, "shifted")


def check_growth(make: Make) -> None:
    """Operations and bytes written grow no faster with the tokens than ``info.growth`` says, and do grow so where it is beyond n."""
    mixer, measured = build(make, dtype=torch.float32), []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for length in LENGTHS:
            x = torch.empty(1, length, WIDTH)
            with Written() as written:
                called(mixer, x)
            measured.append((mixer.flops(x), written.bytes))
    for what, counts in zip(("operations", "bytes"), zip(*measured, strict=True), strict=True):
        grows_as(mixer.info.growth, what, *counts)


def grows_as(growth: str, what: str, fewer: int, more: int) -> None:
    """True if the count ``more`` at the longer length agrees with ``fewer`` at the shorter one."""
    least, most = (GROWTH[growth](n) for n in LENGTHS)
    assert more <= 1.1 * fewer * most / least, f"{fewer} and {more} {what} for {LENGTHS} tokens: more than {growth}"
    if growth in ("n^1.5", "n^2") and what == "operations":  # sorting is no arithmetic, and a fused kernel writes no scores
        assert more >= 1.05 * fewer * LENGTHS[1] / LENGTHS[0], f"{fewer} and {more} {what} for {LENGTHS} tokens: linear, not {growth}"


class Written(TorchDispatchMode):
    """Counts the bytes of every new tensor."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _storage(t) not in known]
        self.bytes += sum(t.untyped_storage().nbytes() for t in fresh)
        return out


class Shapes(TorchDispatchMode):
    """Notes every operation with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.shapes.append((func, *(tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))))
        return func(*args, **(kwargs or {}))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
