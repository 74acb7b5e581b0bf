"""Kernels as operators of torch: signatures of forward and backward pass as data, one registration, one autograd.Function.

An :class:`Operator` runs its kernels directly without gradients in eager mode, through :class:`Kernels` with gradients, and as
``torch.ops.linattn.name`` under tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops import checks, tracing

EVERYWHERE = "CompositeExplicitAutograd"  # the dispatch key of every device
Gradients = Sequence[Tensor | None]
Derivative = Callable[[Tensor, Sequence[Any], Sequence[Any]], Gradients]
_library = torch.library.Library("linattn", "FRAGMENT")


def register(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, key: str = EVERYWHERE,
    gradient: Callable[..., Any] | None = None, keep: Callable[..., None] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:  # fmt: skip
    """Register ``torch.ops.linattn.name``, which calls ``run`` on devices of ``key``; ``fake`` makes its results without memory.

    ``gradient(ctx, *cotangents)`` is its backward pass, for which ``keep(ctx, inputs, output)`` saves tensors.
    ``torch.library.custom_op`` would add 10 us of Python to every call.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, key)
    torch.library.register_fake(f"linattn::{name}", fake, lib=_library)
    if gradient is not None:
        torch.library.register_autograd(f"linattn::{name}", gradient, setup_context=keep, lib=_library)
    return getattr(torch.ops.linattn, name).default


def refused(why: str) -> Callable[..., Any]:
    """Build the ``gradient`` of an operator without one, which raises NotImplementedError with the reason ``why``."""

    def gradient(*_: Any) -> Any:
        raise NotImplementedError(why)

    return gradient


class Pass(NamedTuple):
    """A pass of kernels as an operator of torch."""

    schema: str
    name: str = ""  # name of registration; empty: not registered


class Plan(NamedTuple):
    """Arguments of the backward pass, as indices into the inputs of the forward pass followed by its results."""

    kept: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # tensors, followed by options
    tensors: int  # number of saved tensors
    flags: tuple[int, ...]  # inputs whose ``needs_input_grad`` it gets
    order: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # (*kept, *cotangents, *flags) -> arguments of the backward pass
    gradients: tuple[int, ...]  # inputs whose gradients it returns
    like: int  # index among the saved tensors
    inputs: int  # number of inputs


@dataclass(frozen=True)
class Operator:
    """Forward pass of kernels with its backward pass.

    Args:
        load: imports the module of the kernels, with functions ``refusal``, ``forward``, ``backward`` and, if registered, ``outputs``
            and ``gradients``. A missing result is None; a registered operator returns an empty tensor in its place.
        forward, backward: the passes. The name of an argument of the backward pass is that of an argument or result of the forward
            pass; ``d_`` or ``d`` with a result for its cotangent; ``of_`` or ``d`` with an argument for a flag that is True if its
            gradient is wanted.
        results: names of the results of the forward pass.
        gradients: names of the arguments whose gradients the backward pass returns.
        like: the argument or result that a missing first cotangent is zeros like.
        key: dispatch key of the kernels' devices.
        save_flag: the last argument of the forward pass is a flag to save for backward; calls omit it.
        recorded: function of ``load`` for the registered forward pass, if not ``forward``.
        saves: function from inputs and results to the inputs to save, if others can replace them.
        derivative: the backward pass in operations of torch, from the first cotangent, the tensors and the options.
        once: reason why there are no second derivatives, without a ``derivative``.
    """

    load: Callable[[], Any]
    forward: Pass
    backward: Pass
    results: str
    gradients: str
    like: str
    key: str = EVERYWHERE
    save_flag: bool = False
    recorded: str = "forward"
    saves: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None
    derivative: Derivative | None = None
    once: str = ""
    tensors: slice = field(init=False)  # indices of the tensors among the arguments
    plan: Plan = field(init=False)
    registered: tuple[Any, Any] = field(init=False, default=(None, None))

    def __post_init__(self) -> None:
        places = [i for i, a in enumerate(_arguments(self.forward)) if _is_tensor(a)]
        object.__setattr__(self, "tensors", slice(places[0], places[-1] + 1))
        object.__setattr__(self, "plan", _plan(self))
        if self.forward.name:
            forward = self._register(self.forward, (self.recorded, "outputs"), self._differentiate_recorded, self._keep)
            object.__setattr__(self, "registered", (forward, self._register(self.backward, ("backward", "gradients"), refused(self.once))))

    @cached_property
    def kernels(self) -> Any:
        """Module that ``load`` returns, cached for calls in eager mode."""
        return self.load()

    def refusal(self, *call: Any) -> str | None:
        """Reason why the kernels do not run ``call``, or None if they do."""
        refused: str | None = self.load().refusal(*call)
        return refused

    def __call__(self, *arguments: Any) -> Any:
        """Run the forward pass."""
        tensors = arguments[self.tensors]
        wanted = tracing.wanted(*tensors)
        if self.save_flag:
            arguments = (*arguments, wanted)
        if self.forward.name and tracing.traced(*tensors):
            return self.registered[0](*arguments)
        return Kernels.apply(*arguments, self) if wanted else self.kernels.forward(*arguments)

    def _register(self, one: Pass, names: tuple[str, str], gradient: Callable[..., Any], keep: Callable[..., None] | None = None) -> Any:
        run, fake = map(self._whole, names)
        return register(one.name, one.schema, run, fake, key=self.key, gradient=gradient, keep=keep)

    def _whole(self, name: str) -> Callable[..., Any]:
        """Function ``name`` of the kernels with empty tensors in place of None."""

        def run(*given: Any) -> Any:
            results = getattr(self.load(), name)(*given)
            if isinstance(results, Tensor):
                return results
            like = next(t for t in given if isinstance(t, Tensor))
            return tuple([like.new_empty((0,)) if t is None else t for t in results])

        return run

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        if self.save_flag and not inputs[-1]:
            raise RuntimeError(f"linattn::{self.forward.name} was called without saving for backward, as its last argument says")
        if self.saves is not None:
            inputs = self.saves(inputs, output)
        kept = self.plan.kept((*inputs, *output) if isinstance(output, tuple) else (*inputs, output))
        ctx.save_for_backward(*kept[: self.plan.tensors])
        ctx.options = kept[self.plan.tensors :]
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, *cotangents: Tensor | None) -> Gradients:
        plan, needed, saved, first = self.plan, ctx.needs_input_grad, ctx.saved_tensors, cotangents[0]
        if first is None:
            first = saved[plan.like].new_zeros(saved[plan.like].shape)
        given = (*saved, *ctx.options, first, *cotangents[1:])
        arguments = plan.order((*given, *[needed[i] for i in plan.flags]) if plan.flags else given)
        if torch.is_grad_enabled() or tracing.traced(first, saved[plan.like]) or torch._C._is_any_autocast_enabled():
            with checks.no_autocast(first):
                found = self._differentiable_backward(arguments, tracing.traced(first, saved[plan.like]))
        else:
            found = self.kernels.backward(*arguments)
        gradients: list[Tensor | None] = [None] * plan.inputs
        for i, g in zip(plan.gradients, found, strict=True):
            if needed[i]:
                gradients[i] = g
        return tuple(gradients)

    def _differentiate_recorded(self, ctx: Any, *cotangents: Tensor | None) -> Gradients:
        return self._differentiate(ctx, *map(_present, cotangents))

    def _differentiable_backward(self, arguments: tuple[Any, ...], traced: bool) -> Gradients:
        """Run the backward pass under tracing, or if a second derivative may be taken."""
        again = torch.is_grad_enabled()
        if self.derivative is not None and (again or (traced and not self.backward.name)):
            count = 1 + len(self.plan.gradients)
            return self.derivative(arguments[0], arguments[1:count], arguments[count:])
        if again and not self.backward.name:
            raise NotImplementedError(self.once)
        found: Gradients = (self.registered[1] if self.backward.name and (again or traced) else self.kernels.backward)(*arguments)
        return found


class Kernels(torch.autograd.Function):
    """Autograd function of the :class:`Operator` in the last argument, without the overhead of an operator of torch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.operator = operator = inputs[-1]
        output = operator.kernels.forward(*inputs[:-1])
        operator._keep(ctx, inputs[:-1], output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return *ctx.operator._differentiate(ctx, *cotangents), None


def by_definition(definition: Callable[..., Tensor]) -> Derivative:
    """Build the ``derivative`` of an operator from its ``definition`` in operations of torch, with the same tensors and options."""

    def derivative(cotangent: Tensor, tensors: Sequence[Any], options: Sequence[Any]) -> Gradients:
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = tensors if create else [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
            wanted = [t for t in leaves if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(definition(*leaves, *options), wanted, cotangent, create_graph=create))
        return [next(found) if t is not None and t.requires_grad else None for t in leaves]

    return derivative


def _arguments(one: Pass) -> Sequence[Any]:
    found: Sequence[Any] = torch._C.parse_schema(f"linattn::{one.name or 'unregistered'}{one.schema}").arguments
    return found


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _plan(of: Operator) -> Plan:
    forward = _arguments(of.forward)
    arguments, results = [a.name for a in forward], of.results.split()
    known = [*arguments, *results]
    options = {i for i, a in enumerate(forward) if not _is_tensor(a)}
    sources = [_source(a.name, arguments, results) for a in _arguments(of.backward)]
    kept = [known.index(name) for kind, name in sources if kind == "kept"]
    saved = tuple(dict.fromkeys([*(i for i in kept if i not in options), known.index(of.like)]))
    picked = tuple(i for i in kept if i in options)
    flags = tuple(arguments.index(name) for kind, name in sources if kind == "flag")
    places = [
        *(("kept", known[i]) for i in (*saved, *picked)),
        *(("cotangent", r) for r in results),
        *(("flag", arguments[i]) for i in flags),
    ]
    order = itemgetter(*(places.index(source) for source in sources))
    return Plan(
        itemgetter(*saved, *picked),
        len(saved),
        flags,
        order,
        tuple(arguments.index(n) for n in of.gradients.split()),
        saved.index(known.index(of.like)),
        len(arguments),
    )


def _source(name: str, arguments: Sequence[str], results: Sequence[str]) -> tuple[str, str]:
    """Source of an argument of the backward pass ("kept", "cotangent" or "flag"), and the argument or result that it belongs to."""
    if name in arguments or name in results:
        return "kept", name
    for prefix in ("d_", "of_", "d"):
        about = name.removeprefix(prefix)
        if about != name and about in results:
            return "cotangent", about
        if about != name and about in arguments:
            return "flag", about
    raise ValueError(f"the backward pass takes {name}, which is neither an argument nor a result of the forward pass")


def _present(cotangent: Tensor | None) -> Tensor | None:
    """Replace the cotangent of an empty tensor, which stands for a missing result, by None."""
    return None if cotangent is None or (cotangent.ndim == 1 and cotangent.shape[0] == 0) else cotangent
