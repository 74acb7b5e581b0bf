"""Step graph: a model's decoding step as one flat graph of tensor operations, without modules, checks and branches.

A step is the same for every token, so it is traced once, on fake tensors. The graph then has fewer operations than the model:

* values that depend on weights alone are computed once;
* products with weights become linear maps, and those of one vector are fused, with the norm before them and the gate or the residual
  after them;
* the recurrence updates its states in place, and attention writes a token into its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import linattn.ops.norms
import linattn.ops.short_convolution  # noqa: F401  registers the operators that are matched
from linattn.generate import fusion
from linattn.generate.fusion import Node, calls, constant, fuse, is_node
from linattn.ops.convolution_step import step_
from linattn.ops.inputs import Flat
from linattn.ops.torch import deferred as portable
from linattn.ops.torch.deferred import Deferred

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
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*examples)
    _refuse_writing(module.graph)
    _drop_casts(module.graph)
    _fold_constants(module)
    _write_in_place(module, defer)
    _convolve_in_place(module.graph)
    _append_in_place(module.graph)
    module.meta["counters"] = _counters(module)
    _turn_matrices(module)
    fuse(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _refuse_writing(graph: fx.Graph) -> None:
    """Refuse operations that write, because other nodes may share the memory, and all steps share the constants."""
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


# Indices of output, denominator and final states in the results of the recurrence's operators, without and with a denominator.
_RECURRENCES = {
    "linattn.recurrent.default": ((0, None, 1, None), (0, 1, 2, 3)),
    "linattn.cpu_linear_attention.default": ((0, None, 1, None), (0, 2, 1, 3)),
}
_STATES = 8, 9  # indices of the initial states in their arguments
_NORMALIZED = 12


def step_in_place(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Step of the recurrence that writes the final states over the initial ones; takes its operator's arguments on either device."""
    call = Flat(*arguments[:13])
    if fusion.on_gpu(call.v):
        from linattn.ops.triton import decode

        out = decode.step_(call.inputs(), overlapped=True)  # each state occurs once in a step, and steps run one after the other
        return out.o, out.denominator
    from linattn.ops.cpu.linear_attention import bound_step

    o, denominator, run = bound_step(*call)
    run()
    return o, denominator


def deferred_step_in_place(*arguments: Any) -> tuple[Tensor, None]:
    """:func:`step_in_place` with deferred writes: the first 13 arguments are those of the operator, the others a :class:`Deferred`."""
    call, deferred = Flat(*arguments[:13]), Deferred(*arguments[13:])
    if fusion.on_gpu(call.v):
        from linattn.ops.triton.deferred import step_

        return step_(call, deferred), None
    return portable.step_(call, deferred), None


def _write_in_place(module: fx.GraphModule, defer: Defer) -> None:
    """Let the recurrence update a state in place if no other node reads the state before or after."""
    graph = module.graph
    placeholders, end = _ends(graph)
    outputs = list(end.args[0])
    for node in [n for n in graph.nodes if n.op == _CALL and str(n.target) in _RECURRENCES]:
        results = {get.args[1]: get for get in node.users}
        places = _RECURRENCES[str(node.target)][bool(node.args[_NORMALIZED])]
        states = [(node.args[i], results.get(p)) for i, p in zip(_STATES, places[2:], strict=True) if node.args[i] is not None]
        if not states or not all(_only_carried(old, new, placeholders, outputs, end) for old, new in states):
            continue
        with graph.inserting_before(node):
            deferred = _deferred(module, node, placeholders, defer)
            target = step_in_place if deferred is None else deferred_step_in_place
            step = graph.call_function(target, node.args if deferred is None else (*node.args[:13], *deferred))
        for i, place in enumerate(places[:2]):
            if place in results:
                results[place].args = (step, i)
        new: Node
        for old, new in states:
            new.replace_all_uses_with(old)
        outputs = list(end.args[0])
    graph.eliminate_dead_code()


def _deferred(module: fx.GraphModule, node: Node, placeholders: list[Node], defer: Defer) -> list[Node | None] | None:
    """Constants of the tokens beside the state that ``node`` updates; None if its writes are not deferred."""
    if node.args[_STATES[0]] not in placeholders:
        return None
    call = Flat(*fx.node.map_arg(node.args[:13], lambda n: n.meta["val"]))
    kept = defer(placeholders.index(node.args[_STATES[0]]), call)
    if kept is None:
        return None
    found: list[Node | None] = []
    for name, t in zip(kept._fields, kept, strict=True):
        if t is not None:
            module.register_buffer(f"_{name}_{node.name}", t, persistent=False)
        found.append(None if t is None else constant(module.graph, f"_{name}_{node.name}", t))
    return found


def _convolve_in_place(graph: fx.Graph) -> None:
    """Let the short convolution update its state in place and normalise the heads of its first outputs."""
    placeholders, end = _ends(graph)
    for node in calls(graph, torch.ops.linattn.short_convolution.default):
        x, old, weight, bias, activation, _ = node.args
        kept = _kept_tokens(old, x, node)
        shape = x.meta["val"].shape
        if kept is None or shape[1] != 1 or shape[2] != weight.meta["val"].shape[0]:
            continue
        if not _only_carried(old, kept, placeholders, list(end.args[0]), end, alone=False):
            continue
        size, normed, eps, norms = _unit_heads(node)
        with graph.inserting_before(node):
            step = graph.call_function(step_, (x, old, weight, bias, activation, size, normed, eps, True))
        step.meta = node.meta
        kept.replace_all_uses_with(old)
        for norm in norms:
            norm.replace_all_uses_with(norm.args[0])
        node.replace_all_uses_with(step)
    graph.eliminate_dead_code()


def _append_in_place(graph: fx.Graph) -> None:
    """Write a token into its slot of a preallocated state in place if no other node reads the state."""
    placeholders, end = _ends(graph)
    for node in calls(graph, aten.index_copy.default):
        old = node.args[0]
        if set(old.users) == {node} and end in node.users and _into_place(old, node, placeholders, list(end.args[0])):
            node.target = aten.index_copy_.default
            end.replace_input_with(node, old)  # others read it after this node


def _ends(graph: fx.Graph) -> tuple[list[Node], Node]:
    """Input nodes and the output node."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders, next(node for node in graph.nodes if node.op == "output")


def _kept_tokens(old: Node | None, x: Node, node: Node) -> Node | None:
    """Node of the convolution's next state, the last tokens of ``old`` and ``x``, if no other node reads ``old``; else None."""
    if old is None or len(old.users) != 2 or old.meta["val"].dtype != x.meta["val"].dtype:
        return None
    (both,) = (user for user in old.users if user is not node)
    if both.target is not aten.cat.default or list(both.args[0]) != [old, x] or both.args[1:] != (1,) or len(both.users) != 1:
        return None
    (last,) = both.users
    if last.target is not aten.slice.Tensor or last.args[1:3] != (1, 1) or len(last.users) != 1:
        return None
    (kept,) = last.users
    return kept if kept.target is aten.clone.default else None


def _unit_heads(node: Node) -> tuple[int, int, float, list[Node]]:
    """Size of the heads that are normalised to unit length after ``node``, their channels in all, eps, and the norm nodes."""
    none: tuple[int, int, float, list[Node]] = (0, 0, 0.0, [])
    if len(node.users) != 1 or next(iter(node.users)).target is not aten.split_with_sizes.default:
        return none
    (split,) = node.users
    if split.args[2:] not in ((-1,), (2,)):
        return none
    norms, channels = [], 0
    for i, piece in enumerate(sorted(split.users, key=lambda n: n.args[1])):
        norm = _after(_after(piece, aten.unflatten.int), torch.ops.linattn.norm.default)
        if piece.args[1] != i or norm is None or any(norm.args[j] is not None for j in (1, 2)) or norm.args[4] or not _keeps_dtype(norm):
            break
        norms.append(norm)
        channels += piece.meta["val"].shape[-1] if isinstance(piece.meta["val"], Tensor) else 0
    kinds = {(norm.meta["val"].shape[-1], norm.args[3]) for norm in norms}
    if len(kinds) != 1:
        return none
    size, eps = kinds.pop()
    return (size, channels, eps, norms) if size & (size - 1) == 0 else none


def _keeps_dtype(norm: Node) -> bool:
    return norm.args[0].meta["val"].dtype == norm.args[5]


def _after(node: Node | None, target: Any) -> Node | None:
    """Sole user of ``node`` if it is a call of ``target``, else None."""
    if node is None or len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.target is target else None


def _counters(module: fx.GraphModule) -> list[int]:
    """Remove nodes that only add one to a state: one operation outside of the graph advances all of them."""
    inputs, end = _ends(module.graph)
    found = []
    for node in calls(module.graph, aten.add.Tensor):
        old, one = node.args
        if set(node.users) != {end} or node.kwargs or old not in inputs or not is_node(one) or one.op != "get_attr":
            continue
        if bool((getattr(module, str(one.target)) == 1).all()) and _only_carried(old, node, inputs, list(end.args[0]), end, alone=False):
            node.replace_all_uses_with(old)
            found.append(inputs.index(old))
    module.graph.eliminate_dead_code()
    return found


def _only_carried(old: Node, new: Node | None, placeholders: list[Node], outputs: list[Any], end: Node, *, alone: bool = True) -> bool:
    """True if only its step reads the state ``old`` (``alone``) and ``new`` is used only as the state after it."""
    if new is None or (alone and len(old.users) != 1) or set(new.users) != {end}:
        return False
    return _into_place(old, new, placeholders, outputs)


def _into_place(old: Node, new: Node, placeholders: list[Node], outputs: list[Any]) -> bool:
    """True if ``new`` is the next state of ``old`` and of no other input."""
    if old.op != "placeholder":
        return False
    ahead = len(placeholders) - len(outputs)
    return outputs.count(new) == 1 and placeholders.index(old) == outputs.index(new) + ahead
