"""Step operators: the operations of a decoding step that read a state and give the next one.

While a step graph is recorded (:func:`linattn.ops.tracing.recording_step`) the parts of a model emit them as ``torch.ops.linattn``. Each
is a function of values, and :data:`STEPS` has the function that may take its place where nothing else reads the state before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from linattn.ops.operator import register


class Step(NamedTuple):
    """Step operator.

    Args:
        in_place: function with the operator's arguments that overwrites the states; returns the other results, as a tuple if several.
        carried: by argument, the name of the result that is its next value.
        options: keywords of ``in_place`` in a step graph.
    """

    in_place: Callable[..., Any]
    carried: Mapping[str, str]
    options: Mapping[str, Any] = {}


STEPS: dict[Any, Step] = {}  # by operator


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], step: Step, **options: Any) -> Any:
    """Register ``torch.ops.linattn.name`` as the step operator ``step``; the arguments are those of ``linattn.ops.operator.register``.

    ``schema`` names its results.
    """
    operator = register(name, schema, run, fake, **options)
    STEPS[operator] = step
    fx.node.has_side_effect(step.in_place)
    return operator


def after(state: Tensor, written: Any) -> Tensor:  # noqa: ARG001
    """Return ``state``; what reads it in a step graph then depends on ``written``, the call that updates it, and cannot be moved before."""
    return state
