"""Step graph: a model's decoding step as one flat graph of tensor operations, without modules, checks and branches.

A step is the same for every token, so it is traced once, on fake tensors. The graph then has fewer operations than the model:

* values that depend on weights alone are computed once;
* products with weights become linear maps, and those of one vector are fused, with the norm before them and the gate or the residual
  after them;
* states are updated in place: by the recurrence, the short convolution, and attention, which writes a token into its slot.

The parts of a model that have states emit step operators (:mod:`linattn.ops.steps`), which say what updates a state in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from linattn.generate.fusion import Node, calls, constant, fuse, is_node, named
from linattn.ops import recurrence
from linattn.ops.inputs import Flat
from linattn.ops.steps import STEPS, after
from linattn.ops.torch.deferred import Deferred
from linattn.ops.tracing import step_recorded

aten = torch.ops.aten
_CALL = "call_function"


Defer = Callable[[int, Flat], Deferred | None]  # number of an input that is a state, and a call that updates it


def make_step_graph(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], defer: Defer = lambda number, call: None
) -> fx.GraphModule:
    """Trace ``function(*examples)`` without running it; the last outputs are states, in the order of the last inputs.

    An output that is its own input is updated in place. ``meta["counters"]`` holds the numbers of the inputs that only grow by one.
    ``defer`` returns the tokens beside a state whose writes are deferred, None for states that are written at each step.
    """
    with torch.no_grad(), step_recorded():
        module = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*examples)
    _refuse_writing(module.graph)
    _drop_casts(module.graph)
    _fold_constants(module)
    _write_in_place(module, defer)
    module.meta["counters"] = _counters(module)
    _turn_matrices(module)
    fuse(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _refuse_writing(graph: fx.Graph) -> None:
    """Refuse in-place operations, because other nodes may alias the memory, and all steps share the constants."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise NotImplementedError(f"{node.target} writes into a tensor, and a step is a graph of values")


def _drop_casts(graph: fx.Graph) -> None:
    """Remove conversions to the dtype that the tensor already has."""
    for node in calls(graph, aten.to.dtype):
        if node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _fold_constants(module: fx.GraphModule) -> None:
    """Fold operations on weights and numbers alone; ``meta["computed"]`` holds the weights that were copied or computed with."""
    graph, copied = module.graph, []
    roots: dict[str, list[Tensor]] = {}  # folded constant -> the weights that it was computed from
    for node in list(graph.nodes):
        if node.op != _CALL or not _repeatable(node.target) or any(n.op != "get_attr" for n in node.all_input_nodes):
            continue
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: getattr(module, str(n.target)))
        with torch.no_grad():
            value = node.target(*given[0], **given[1])
        name = f"_folded_{node.name}"
        module.register_buffer(name, value, persistent=False)
        roots[name] = [t for n in node.all_input_nodes for t in roots.get(str(n.target), [getattr(module, str(n.target))])]
        if value.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in roots[name]}:
            copied += roots[name]
        with graph.inserting_before(node):
            node.replace_all_uses_with(constant(graph, name, node.meta["val"]))
        graph.erase_node(node)
    module.meta["computed"] = copied


def _repeatable(target: Any) -> bool:
    """True for deterministic operations without side effects."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _turn_matrices(module: fx.GraphModule) -> None:
    """Replace ``x @ W`` by a linear map whose matrix is a transposed copy of the weight W, because linear maps are fused."""
    for node in calls(module.graph, aten.matmul.default):
        _, weight = node.args
        if weight.op != "get_attr" or weight.meta["val"].ndim != 2:
            continue
        old, name = getattr(module, str(weight.target)), f"_turned_{node.name}"
        module.register_buffer(name, old.detach().mT.contiguous(), persistent=False)
        module.meta["computed"].append(old)
        with module.graph.inserting_before(node):
            node.args = node.args[0], constant(module.graph, name, weight.meta["val"].mT.contiguous())
        node.target = aten.linear.default
    module.graph.eliminate_dead_code()


def _write_in_place(module: fx.GraphModule, defer: Defer) -> None:
    """Let step operators update a state in place if no other operation reads the old state or writes the next one elsewhere."""
    graph = module.graph
    placeholders, end = _ends(graph)
    for node in calls(graph, *STEPS):
        step, given, results = STEPS[node.target], named(node), _results(node)
        states: list[tuple[Node, Node]] = [(given[a], results.get(b)) for a, b in step.carried.items() if given[a] is not None]
        if not all(set(old.users) == {node} and _into_place(old, new, placeholders, end) for old, new in states):
            continue
        with graph.inserting_before(node):
            kept = _deferred(module, given, placeholders, defer) if step.in_place is recurrence.step_ else None
            if kept is None:
                written = graph.call_function(step.in_place, node.args, {**node.kwargs, **step.options})
            else:
                written = graph.call_function(recurrence.deferred_step_, (*given.values(), *kept))
        for old, new in states:
            end.replace_input_with(new, old)
            if new.users:
                with graph.inserting_after(written):
                    new.replace_all_uses_with(reading := graph.call_function(after, (old, written)))
                reading.meta = new.meta
        _take_results(node, written)
        graph.eliminate_dead_code()


def _deferred(module: fx.GraphModule, given: dict[str, Any], placeholders: list[Node], defer: Defer) -> list[Node | None] | None:
    """Constants of the tokens beside the state of a step of the recurrence; None if its writes are not deferred."""
    call: Any = fx.node.map_arg(tuple(given.values()), lambda n: n.meta["val"])
    kept = defer(placeholders.index(given["initial"]), Flat(*call))
    if kept is None:
        return None
    found: list[Node | None] = []
    for name, t in zip(kept._fields, kept, strict=True):
        place = f"_{name}_{given['initial'].name}"
        if t is not None:
            module.register_buffer(place, t, persistent=False)
        found.append(None if t is None else constant(module.graph, place, t))
    return found


def _results(node: Node) -> dict[str, Node]:
    """Nodes of the results of a call of an operator, by their names in its schema."""
    names = [result.name for result in node.target._schema.returns]
    return {names[0]: node} if len(names) == 1 else {names[get.args[1]]: get for get in node.users}


def _take_results(node: Node, written: Node) -> None:
    """Take the results of the step operator ``node`` other than states from ``written``."""
    carried = STEPS[node.target].carried.values()
    rest = [result.name for result in node.target._schema.returns if result.name not in carried]
    for name, result in _results(node).items():
        if name in carried:
            continue
        if len(rest) > 1:
            result.args = (written, rest.index(name))
        else:
            written.meta = result.meta
            result.replace_all_uses_with(written)


def _ends(graph: fx.Graph) -> tuple[list[Node], Node]:
    """Input nodes and the output node."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders, next(node for node in graph.nodes if node.op == "output")


def _counters(module: fx.GraphModule) -> list[int]:
    """Remove nodes that only add one to a state: one operation outside of the graph advances all of them."""
    inputs, end = _ends(module.graph)
    found = []
    for node in calls(module.graph, aten.add.Tensor):
        old, one = node.args
        if set(node.users) != {end} or node.kwargs or old not in inputs or not is_node(one) or one.op != "get_attr":
            continue
        if bool((getattr(module, str(one.target)) == 1).all()) and _into_place(old, node, inputs, end):
            node.replace_all_uses_with(old)
            found.append(inputs.index(old))
    module.graph.eliminate_dead_code()
    return found


def _into_place(old: Node, new: Node | None, placeholders: list[Node], end: Node) -> bool:
    """True if ``new`` is the next state of the input ``old`` and of no other input."""
    outputs = list(end.args[0])
    if new is None or old.op != "placeholder" or outputs.count(new) != 1:
        return False
    return placeholders.index(old) == outputs.index(new) + len(placeholders) - len(outputs)
