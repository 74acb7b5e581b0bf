"""Step graph as a list of bound calls on static memory, with little Python between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from linattn.generate.fusion import Node
from linattn.ops import one_query, recurrence
from linattn.ops.convolution_step import step_
from linattn.ops.cpu import convolution_step, library, linear_attention, pages, small_operations, step_end
from linattn.ops.cpu import linears as cpu
from linattn.ops.cpu.small_operations import Small
from linattn.ops.linears import linears
from linattn.ops.memory import dense
from linattn.ops.quantised import ROWS
from linattn.ops.torch.linears import Norm
from linattn.ops.torch.quantised import Quantised

Step = Callable[[], Any]
_COPIES = ("to", "_to_copy", "clone", "contiguous")  # of torch's operators


class Program:
    """Step graph ``module`` bound to ``inputs`` on a CPU; every call recomputes ``outputs`` in place from the inputs' current values.

    At its end each call adds one to ``counters``, inputs that no operation changes.

    Each operation runs once here. An operation without writes whose result aliases its arguments is a view
    and never runs again; every other operation overwrites its first result.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Tensor], counters: Sequence[Tensor] = ()) -> None:
        self.steps: list[Any] = []  # functions without arguments; small operations until they are fused
        self.copied: list[Tensor] = []  # weights read through a copy in another layout
        self._constants: dict[int, Tensor] = {}  # by their ids
        values: dict[Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            match node.op:
                case "placeholder":
                    values[node] = next(given)
                case "get_attr":
                    values[node] = constant = getattr(module, node.target)
                    self._constants[id(constant)] = constant
                case "call_function":
                    values[node] = self._bind(node.target, args, kwargs)
                case "output":
                    self.outputs: list[Tensor] = list(args[0])
        self.steps = _joined(self.steps)
        if counters and step_end.refusal_of_increase(counters) is None:
            self.steps.append(step_end.bound_increase(counters))
        elif counters:
            self.steps.append(partial(torch._foreach_add_, counters, 1))
        self._runs = _sequences(self.steps)
        self._likeliest: Tensor | None = None
        self._read = [*self._constants.values(), *inputs]

    def __call__(self) -> None:
        for run in self._runs:
            run()

    def likeliest(self) -> Tensor | None:
        """Places [...] int64 of the largest numbers of the first output [..., V], kept up to date by later calls; None if no kernel can."""
        if self._likeliest is None and step_end.refusal_of_argmax(self.outputs[0]) is None:
            self._likeliest, run = step_end.bound_argmax(self.outputs[0])
            self.steps.append(run)
            self._runs = _sequences(self.steps)
        return self._likeliest

    def enlarge(self) -> None:
        """Move weights and inputs to huge pages, which takes as long as hundreds of runs gain; later calls do nothing."""
        pages.enlarge(self._read)
        self._read = []

    def _bind(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation, append the call that repeats it, and return its result."""
        if target is operator.getitem:
            return args[0][args[1]]
        if target is linears and cpu.refusal(args[0], *args[1]) is None and _one_dtype(args, kwargs):
            return self._linears(args, kwargs)
        if target is recurrence.step_:
            o, denominator, run = linear_attention.bound_step(*map(self._dense, args))
            self._first(run)
            return o, denominator
        if str(target) == "linattn.norm.default" and _normable(*(args := self._in_one_dtype(args))):
            x, weight, gate, eps, mean, _ = map(self._dense, args)
            y, run = cpu.bound_norm(x, weight, gate, eps, mean=mean)
            self._first(run)
            return y
        if target is torch.ops.aten.rms_norm.default and _of_last_axis(*args):
            x, _, weight, eps = map(self._dense, args)
            y, run = cpu.bound_norm(x, weight, None, eps, mean=True)
            self._first(run)
            return y
        if target is step_ and _native_step(*args[:4], **kwargs):
            x, state, weight, *rest = args
            y, run = convolution_step.bound(x, state, self._channels_together(weight), *rest)
            self._first(run)
            return y
        if target is one_query.append_:
            self._first(partial(target, *args))
            return None
        rows = _rows(target, args)
        if rows is not None:
            weight, ids, dtype = rows
            y, run = cpu.bound_rows(weight, self._dense(ids), dtype)
            self._first(run)
            return y
        target = one_query.of_taken if target is torch.ops.linattn.one_query.default else target
        value = target(*args, **kwargs)
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            self.steps.append(partial(target, *args, **kwargs))
            return value
        memory = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        if any(t.untyped_storage().data_ptr() not in memory for t in _tensors(value)):
            small = small_operations.small(target, args, kwargs, value)
            self.steps.append(_again(target, args, kwargs, value) if small is None else small)
        return value

    def _in_one_dtype(self, args: tuple) -> tuple:
        """Arguments of a norm, with a constant weight in the dtype of the result."""
        x, weight, *rest = args
        if weight is not None and weight.dtype != x.dtype == args[5] and id(weight) in self._constants:
            self.copied.append(weight)
            return x, weight.to(x.dtype), *rest
        return args

    def _channels_together(self, weight: Tensor) -> Tensor:
        """``weight`` [D, 1, W] of a short convolution, if it is a constant, in a copy with contiguous channels, as in the vectors."""
        if id(weight) not in self._constants or weight.stride(0) == 1:
            return weight
        self.copied.append(weight)
        return weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    def _linears(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        x, weights, biases = args
        options = {"norm": None, "residual": None, "gated": False, "finish": (), **kwargs}
        constants = [t for t in _tensors((biases, options["finish"])) if not t.is_contiguous()]
        copied = [w for w in weights if not isinstance(w, Quantised) and w.stride(1) != 1]
        self.copied += [*copied, *constants]
        weights = [w.contiguous() if any(w is c for c in copied) else w for w in weights]
        biases = [b if b is None else b.contiguous() for b in biases]
        norm = options.pop("norm")
        norm = None if norm is None else Norm(*map(self._dense, norm))
        y, run = cpu.bound(self._dense(x), weights, biases, norm, *map(self._dense, options.values()))
        self._first(run)
        return y

    def _dense(self, x: Any) -> Any:
        """Return ``x`` if it is dense, else a buffer into which each call copies ``x`` before its use."""
        if not isinstance(x, Tensor) or (x.is_contiguous() and not x.is_neg()):
            return x
        copy = dense(x)
        self.steps.append(small_operations.copy(copy, x) or partial(copy.copy_, x))
        return copy

    def _first(self, run: Step) -> None:
        run()
        self.steps.append(run)


def _one_dtype(args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if norm, gate, bias, residual and plain weights have one dtype, as the kernels require."""
    x, weights, biases = args
    plain = x, biases, [w for w in weights if not isinstance(w, Quantised)]
    return len({t.dtype for name, given in (("", plain), *kwargs.items()) if name != "finish" for t in _tensors(given)}) == 1


def _rows(target: Any, args: tuple) -> tuple[Any, Tensor, torch.dtype] | None:
    """Matrix, ids and dtype of the result if ``target`` reads rows of an embedding that the kernel takes, else None."""
    if target is ROWS:
        weight, ids, dtype = Quantised(*args[:2]), *args[2:4]
    elif target is torch.ops.aten.embedding.default and args[0].is_contiguous():
        weight, ids, dtype = *args[:2], args[0].dtype
    else:
        return None
    taken = dtype in library.DTYPES and ids.dtype == torch.int64 and library.refusal(ids) is None
    return (weight, ids, dtype) if taken else None


def _native_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, normed: int = 0, **_: Any) -> bool:
    return convolution_step.refusal(x, state, weight, bias, 0, normed) is None


def _normable(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype) -> bool:  # noqa: ARG001
    return all(t.dtype == dtype for t in (x, weight, gate) if t is not None) and cpu.refusal(x[:1].flatten()[:1]) is None


def _of_last_axis(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> bool:
    return eps is not None and x.shape[-1:] == tuple(shape) and _normable(x, weight, None, eps, True, x.dtype)


def _joined(steps: Sequence[Step | Small]) -> list[Step]:
    """Calls of ``steps`` in order, of which one runs all neighbouring small operations."""
    found: list[Step] = []
    waiting: list[Small] = []
    for step in steps:
        if isinstance(step, Small):
            waiting.append(step)
            continue
        found += [*_run_of(waiting), step]
        waiting = []
    return [*found, *_run_of(waiting)]


def _sequences(steps: Sequence[Step]) -> list[Step]:
    """Calls of ``steps`` in order, of which one runs all neighbouring kernels."""
    runs: list[Step] = []
    for native, some in groupby(steps, lambda step: isinstance(step, library.Bound)):
        calls: list[Any] = list(some)
        runs += [library.sequence(calls)] if native else calls
    return runs


def _run_of(waiting: Sequence[Small]) -> list[Step]:
    return [small_operations.joined(waiting).bound()] if waiting else []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)


def _again(target: Any, args: tuple, kwargs: dict[str, Any], value: Any) -> Step:
    """Call that recomputes ``value`` in place."""
    if isinstance(value, Tensor) and isinstance(target, torch._ops.OpOverload):
        if target.namespace == "aten" and target._schema.name.removeprefix("aten::") in _COPIES:
            return partial(value.copy_, args[0])
        writing = _writing(target)
        if writing is not None:
            return partial(writing, *args, **kwargs, out=value)

    def step() -> None:
        for old, new in zip(_tensors(value), _tensors(target(*args, **kwargs)), strict=True):
            old.copy_(new)

    return step


def _writing(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Overload of ``target`` that writes into a tensor ``out``; None if there is none."""
    packet, wanted = target._overloadpacket, [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        outs = [a.name for a in schema.arguments if a.is_out]
        if outs == ["out"] and [(a.name, str(a.type)) for a in schema.arguments if not a.is_out] == wanted:
            return getattr(packet, name)
    return None
