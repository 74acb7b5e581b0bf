"""Kernels as operators of torch: what a forward and a backward pass take and give as data, one registration, one autograd.Function.

An :class:`Operator` runs its kernels directly where nothing watches and nobody wants gradients, through :class:`Kernels` where
gradients are wanted, and as ``torch.ops.linattn.name`` where something traces.
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
    """``torch.ops.linattn.name``, which calls ``run`` on devices of ``key``; ``fake`` gives its results without memory.

    ``gradient(ctx, *cotangents)`` is its backward pass, and ``keep(ctx, inputs, output)`` saves what that takes. By hand, because
    ``torch.library.custom_op`` adds 10 us of Python to every call.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, key)
    torch.library.register_fake(f"linattn::{name}", fake, lib=_library)
    if gradient is not None:
        torch.library.register_autograd(f"linattn::{name}", gradient, setup_context=keep, lib=_library)
    return getattr(torch.ops.linattn, name).default


def refused(why: str) -> Callable[..., Any]:
    """The ``gradient`` of an operator that has none."""

    def gradient(*_: Any) -> Any:
        raise NotImplementedError(why)

    return gradient


class Pass(NamedTuple):
    """A pass of kernels as an operator of torch."""

    schema: str
    name: str = ""  # that it is registered by; none: it is not


class Plan(NamedTuple):
    """Arguments of the backward pass, as indices into the inputs of the forward pass followed by its results."""

    kept: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # tensors, and behind them options
    tensors: int  # how many
    flags: tuple[int, ...]  # inputs that it is asked of whether their gradients are wanted
    order: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # of (*kept, *cotangents, *flags), as the backward pass takes them
    gradients: tuple[int, ...]  # inputs that it gives the gradients of
    like: int  # among the tensors
    inputs: int  # how many


@dataclass(frozen=True)
class Operator:
    """A forward pass of kernels, and the backward pass that belongs to it.

    Args:
        load: the module of the kernels, with functions ``refusal``, ``forward``, ``backward``, and, for what is registered, ``outputs``
            and ``gradients``. None stands for a result that there is not; of a registered operator it is an empty tensor.
        forward, backward: the passes. An argument of the backward pass goes by its name: that of an argument or a result of the
            forward pass; ``d_`` or ``d`` and a result for its cotangent; ``of_`` or ``d`` and an argument for whether its gradient is
            wanted.
        results: names of the results of the forward pass.
        gradients: names of the arguments that the backward pass gives the gradients of.
        like: the argument or result in whose shape and dtype a missing first cotangent is zeros.
        key: the dispatch key of the devices that the kernels run on.
        keeps: the last argument says whether the forward pass keeps what its gradients take; calls leave it out.
        recorded: the function of ``load`` that the registered forward pass runs, where it is not ``forward``.
        saves: the inputs as they are saved, of the inputs and the results, where others may stand in for them.
        derivative: the backward pass in operations of torch, of the first cotangent, the tensors and the options.
        once: why there are no gradients of gradients, where there is no ``derivative``.
    """

    load: Callable[[], Any]
    forward: Pass
    backward: Pass
    results: str
    gradients: str
    like: str
    key: str = EVERYWHERE
    keeps: bool = False
    recorded: str = "forward"
    saves: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None
    derivative: Derivative | None = None
    once: str = ""
    tensors: slice = field(init=False)  # places of the tensors among the arguments
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
        """The kernels that ``load`` returns, for calls in eager mode."""
        return self.load()

    def refusal(self, *call: Any) -> str | None:
        """Reason why the kernels do not run ``call``, or None if they do."""
        refused: str | None = self.load().refusal(*call)
        return refused

    def __call__(self, *arguments: Any) -> Any:
        """Run the forward pass."""
        tensors = arguments[self.tensors]
        wanted = tracing.wanted(*tensors)
        if self.keeps:
            arguments = (*arguments, wanted)
        if self.forward.name and tracing.traced(*tensors):
            return self.registered[0](*arguments)
        return Kernels.apply(*arguments, self) if wanted else self.kernels.forward(*arguments)

    def _register(self, one: Pass, names: tuple[str, str], gradient: Callable[..., Any], keep: Callable[..., None] | None = None) -> Any:
        run, fake = map(self._whole, names)
        return register(one.name, one.schema, run, fake, key=self.key, gradient=gradient, keep=keep)

    def _whole(self, name: str) -> Callable[..., Any]:
        """The function ``name`` of the kernels with an empty tensor for None."""

        def run(*given: Any) -> Any:
            results = getattr(self.load(), name)(*given)
            if isinstance(results, Tensor):
                return results
            like = next(t for t in given if isinstance(t, Tensor))
            return tuple([like.new_empty((0,)) if t is None else t for t in results])

        return run

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        if self.keeps and not inputs[-1]:
            raise RuntimeError(f"linattn::{self.forward.name} has kept nothing for its gradients, as its last argument says")
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
                found = self._watched(arguments, tracing.traced(first, saved[plan.like]))
        else:
            found = self.kernels.backward(*arguments)
        gradients: list[Tensor | None] = [None] * plan.inputs
        for i, g in zip(plan.gradients, found, strict=True):
            if needed[i]:
                gradients[i] = g
        return tuple(gradients)

    def _differentiate_recorded(self, ctx: Any, *cotangents: Tensor | None) -> Gradients:
        return self._differentiate(ctx, *map(_there, cotangents))

    def _watched(self, arguments: tuple[Any, ...], traced: bool) -> Gradients:
        """The backward pass where something traces, or a second derivative may be asked for."""
        again = torch.is_grad_enabled()
        if self.derivative is not None and (again or (traced and not self.backward.name)):
            count = 1 + len(self.plan.gradients)
            return self.derivative(arguments[0], arguments[1:count], arguments[count:])
        found: Gradients = (self.registered[1] if again or traced else self.kernels.backward)(*arguments)
        return found


class Kernels(torch.autograd.Function):
    """The kernels of the :class:`Operator` that comes last, with no operator of torch, which costs more than they take on short inputs."""

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
    """The ``derivative`` of an operator whose tensors and options ``definition`` takes, in operations of torch."""

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
    raise ValueError(f"a backward pass takes {name}, of which its forward pass knows nothing")


def _there(cotangent: Tensor | None) -> Tensor | None:
    """Replace the cotangent of an empty tensor, which stands for a missing result, by None."""
    return None if cotangent is None or (cotangent.ndim == 1 and cotangent.shape[0] == 0) else cotangent
