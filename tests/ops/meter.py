"""Cost of a call, counted in torch's dispatcher: operations, allocated bytes, the largest tensor, peak live bytes."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.cases import Call, cotangent


class Meter(TorchDispatchMode):
    """Counts within its ``with`` block. Views count as operations without bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.made = self.largest = self.alive = self.peak = 0
        self.shape: tuple[int, ...] = ()
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given | self.known:
                self._born(t)
        return out

    def _born(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.made += size
        if size > self.largest:
            self.largest, self.shape = size, tuple(t.shape)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._died, key, size)

    def _died(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def measured(call: Call, form: str = "chunk", backward: bool = False) -> Meter:
    """Measure one forward, or one backward including what the forward has left alive."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in call.tensors.items()}
    meter = Meter()
    with meter:
        out = call.with_(**leaves)(form)
    if not backward:
        return meter
    weights = [cotangent(o) for o in out.values()]
    meter.operations = meter.made = 0
    with meter:
        grads = torch.autograd.grad(list(out.values()), list(leaves.values()), weights)
    del grads
    return meter


def size(call: Call) -> int:
    """Bytes of the arguments."""
    return sum(t.nbytes for t in call.tensors.values())
