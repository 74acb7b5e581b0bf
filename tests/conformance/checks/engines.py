"""Checks of a mixer under compile and checkpointing, and of its mixing matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import linattn
from linattn.mixers import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.inspect import values
from tests.conformance.tools import TOKENS, WIDTH, Make, assert_bits, assert_same, build, tokens, weighed


def check_compile(make: Make) -> None:
    """``torch.compile(fullgraph=True)`` supports padding and a step in float32, where each kernel is one operator."""
    mixer, x = build(make, dtype=torch.float32), tokens(2, 4, dtype=torch.float32)
    mask = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]).bool()

    def some(x: Tensor, mask: Tensor) -> list[Tensor]:
        y, state = mixer(x, return_state=True, mask=mask)
        last, after = mixer(x[:, :1], state, return_state=True)
        return [y, last, *after.values()]

    assert_compiled(some, x, mask, tolerance=1e-5)


def check_compile_layouts(make: Make) -> None:
    """``torch.compile(fullgraph=True)`` supports every layout in float64, with states: a batch, padding, packed sequences, a step."""
    mixer, x = build(make), tokens(2, 4)
    mask, cu = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]]).bool(), torch.tensor([0, 0, 8])

    def every(x: Tensor, mask: Tensor, cu: Tensor) -> list[Tensor]:
        y, state = mixer(x, return_state=True)
        padded, after = mixer(x, state, return_state=True, mask=mask)
        packed = mixer(x.reshape(1, -1, WIDTH), state, cu_seqlens=cu)
        return [y, padded, packed, mixer(x[:, :1], after), *after.values()]

    assert_compiled(every, x, mask, cu)


def assert_compiled(function: Callable[..., list[Tensor]], *inputs: Tensor, tolerance: float = 1e-9) -> None:
    """Assert that the compiled ``function`` agrees with the eager one."""
    torch.compiler.reset()  # its code is compiled once per mixer
    with quiet():
        traced = torch.compile(function, fullgraph=True, backend="eager")(*inputs)
    for i, (ours, theirs) in enumerate(zip(traced, function(*inputs), strict=True)):
        assert_same({"it": ours}, {"it": theirs}, f"compiled output {i}", tolerance)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress a warning from Dynamo: Dynamo itself makes an instance of an autograd.Function, which PyTorch deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'> should not be instantiated", DeprecationWarning)
        yield


def check_checkpoint(make: Make) -> None:
    """Gradient checkpointing gives the bits of the plain pass."""
    mixer, runs = build(make), []
    _, state = mixer(tokens(2, 3, seed=5), return_state=True)
    for call in (mixer, lambda *args: checkpoint(mixer, *args, use_reentrant=False)):
        x = tokens(2, TOKENS).requires_grad_()
        y = call(x, {name: t.detach() for name, t in state.items()})
        runs.append([y, *torch.autograd.grad(weighed(y), [x, *mixer.parameters()], materialize_grads=True)])
    for plain, again in zip(*runs, strict=True):
        assert_bits(again, plain, "under checkpointing")


def check_forms(make: Make) -> None:
    """The public check of the equal forms agrees."""
    linattn.check_forms(build(make), tokens(1, 66))  # more than a chunk


def check_mixing_matrix(make: Make) -> None:
    """The mixing matrix is causal and, times the values, read out, is the output; a mixer that is not linear in its values has none."""
    mixer, x = build(make), tokens(2, TOKENS)
    if not mixer.info.linear_in_values:
        with pytest.raises(ValueError, match=mixer.info.name):
            linattn.mixing_matrix(mixer, x)
        return
    matrix = linattn.mixing_matrix(mixer, x)  # [B, H, T, T]
    assert matrix.ndim == 4 and matrix.shape[0] == 2 and matrix.shape[2:] == (TOKENS, TOKENS), f"its shape is {list(matrix.shape)}"
    assert not matrix.triu(1).any(), "the matrix is not lower triangular"
    assert_same({"the output": _read(mixer, matrix, x)}, {"the output": mixer(x)}, "the matrix times the values")


def _read(mixer: Mixer, matrix: Tensor, x: Tensor) -> Tensor:
    o = torch.einsum("bhts,bshv->bthv", matrix, values(mixer, x))
    skip = mixer.recurrence(x, CallContext(x)).skip
    return mixer.read(o if skip is None else o + skip, x)
