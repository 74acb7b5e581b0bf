"""Fusion of linear maps in a step graph: the maps of one vector, the norm before them and the operations after them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from linattn.ops.convolution_step import step_
from linattn.ops.gpu import on_gpu
from linattn.ops.linears import linears
from linattn.ops.quantised import LINEAR as QUANTISED
from linattn.ops.torch.linears import Norm
from linattn.ops.torch.quantised import Quantised

Node = Any  # fx.Node, whose arguments are untyped
aten = torch.ops.aten
NARROW = 64  # channels between two maps up to which their product replaces them on a GPU: a launch costs more than reading it
PRODUCT = 4 << 20  # bytes of such a product
COUNTERS = 256  # counters of finished programs, one per tile of a product, on a GPU
UNARY = {  # elementwise operations by their names in FINISHES of ops/torch/linears.py
    aten.log_sigmoid.default: "log_sigmoid", aten.softplus.default: "softplus", aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh", aten.exp.default: "exp", aten.neg.default: "neg",
}  # fmt: skip
_BINARY = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten.div.Tensor: "div"}


def fuse(module: fx.GraphModule) -> None:
    """Fuse linear maps of ``module`` in place into calls of :func:`linattn.ops.linears.linears`."""
    _drop_joined(module.graph)
    _fuse_unit_heads(module.graph)
    _fuse_narrow(module)
    _fuse_linears(module.graph)
    _fuse_gates(module.graph)
    _fuse_residuals(module.graph)
    _fuse_finishes(module.graph)
    _count(module)


def calls(graph: fx.Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def is_node(x: Any) -> bool:
    return isinstance(x, fx.Node)


def named(node: Node) -> dict[str, Any]:
    """Arguments of a call of an operator of torch by their names in its schema, defaults included."""
    arguments = node.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def constant(graph: fx.Graph, name: str, value: Any) -> Node:
    """Node that reads the module's tensor ``name`` at the current place of insertion."""
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _drop_joined(graph: fx.Graph) -> None:
    """Replace pieces of a concatenation that is split where it was joined, as products of a matrix whose rows are partly quantised."""
    for split in calls(graph, aten.split_with_sizes.default):
        joined = split.args[0]
        if joined.target is not aten.cat.default or named(split)["dim"] != named(joined)["dim"]:
            continue
        parts, dim = joined.args[0], named(split)["dim"]
        same = all(part.meta["val"].dtype == joined.meta["val"].dtype for part in parts)
        if same and [part.meta["val"].shape[dim] for part in parts] == list(named(split)["split_sizes"]):
            for piece in split.users:
                piece.replace_all_uses_with(parts[piece.args[1]])
    graph.eliminate_dead_code()


def _fuse_unit_heads(graph: fx.Graph) -> None:
    """Let a step of the short convolution on a GPU divide the heads of its first channels by their lengths."""
    for node in calls(graph, step_):
        size, channels, eps, norms = _unit_heads(node)
        if norms and on_gpu(node.meta["val"]):
            node.kwargs = {**node.kwargs, "size": size, "normed": channels, "eps": eps}
            for norm in norms:
                norm.replace_all_uses_with(named(norm)["x"])
    graph.eliminate_dead_code()


def _unit_heads(node: Node) -> tuple[int, int, float, list[Node]]:
    """Size of the heads that are divided by their lengths after ``node``, their channels in all, eps, and the nodes that do it."""
    none: tuple[int, int, float, list[Node]] = (0, 0, 0.0, [])
    if len(node.users) != 1 or next(iter(node.users)).target is not aten.split_with_sizes.default:
        return none
    (split,) = node.users
    if named(split)["dim"] not in (-1, 2):
        return none
    norms, channels = [], 0
    for i, piece in enumerate(sorted(split.users, key=lambda n: n.args[1])):
        norm = _after(_after(piece, aten.unflatten.int), torch.ops.linattn.norm.default)
        if piece.args[1] != i or norm is None or not _plain_length(norm):
            break
        norms.append(norm)
        channels += piece.meta["val"].shape[-1] if isinstance(piece.meta["val"], Tensor) else 0
    kinds = {(norm.meta["val"].shape[-1], named(norm)["eps"]) for norm in norms}
    if len(kinds) != 1:
        return none
    size, eps = kinds.pop()
    return (size, channels, eps, norms) if size & (size - 1) == 0 else none


def _plain_length(norm: Node) -> bool:
    """True if ``norm`` divides by lengths, without a mean, a weight or a gate, and keeps the dtype."""
    given = named(norm)
    return not given["mean"] and given["weight"] is given["gate"] is None and given["x"].meta["val"].dtype == given["dtype"]


def _after(node: Node | None, target: Any) -> Node | None:
    """Sole user of ``node`` if it is a call of ``target``, else None."""
    if node is None or len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.target is target else None


def _fuse_narrow(module: fx.GraphModule) -> None:
    """Replace ``(x A) B + b`` by ``x (A B) + b`` where few channels lie between A and B."""
    graph = module.graph
    for node in calls(graph, aten.linear.default):
        inner, weight, bias = (*node.args, None)[:3]
        if inner.target is not aten.linear.default or len(inner.users) != 1 or len(inner.args) > 2 or not on_gpu(node.meta["val"]):
            continue
        x, first = inner.args
        if any(w is not None and w.op != "get_attr" for w in (weight, first, bias)) or first.meta["val"].shape[0] > NARROW:
            continue
        a, b = (getattr(module, str(w.target)) for w in (first, weight))
        if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype or a.shape[1] * b.shape[0] * a.itemsize > PRODUCT:
            continue
        with torch.no_grad():
            product = (b.double() @ a.double()).to(a.dtype)
        module.meta["computed"] += [a, b]
        name = f"_product_{node.name}"
        module.register_buffer(name, product, persistent=False)
        with graph.inserting_before(node):
            node.args = (x, constant(graph, name, weight.meta["val"].new_empty(product.shape)), bias)
    graph.eliminate_dead_code()


def _fuse_linears(graph: fx.Graph) -> None:
    """Fuse the linear maps of one vector into one operation, with the norm before them if they are its only users."""
    groups: dict[Node, list[Node]] = {}
    for node in calls(graph, aten.linear.default, QUANTISED):
        x, weight, bias = _operands(node)
        if any(w.op != "get_attr" for w in _nodes(weight, bias)):
            continue
        if isinstance(weight, Quantised) or _matrix(weight, x):
            groups.setdefault(x, []).append(node)
    for nodes in groups.values():
        x = nodes[0].args[0]  # may have become an output of another group
        with graph.inserting_before(nodes[0]):
            weights, biases = ([_again(graph, _operands(node)[i]) for node in nodes] for i in (1, 2))
            source, options = _normed(graph, x, len(nodes))
            fused = graph.call_function(linears, (source, weights, biases), options)
            for i, node in enumerate(nodes):
                piece = graph.call_function(operator.getitem, (fused, i))
                piece.meta = node.meta
                node.replace_all_uses_with(piece)
        for node in nodes:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _operands(node: Node) -> tuple[Node, Any, Node | None]:
    """Input, weight and bias of a linear map; a quantised weight is a pair of nodes."""
    given = named(node)
    if node.target is not QUANTISED:
        return given["input"], given["weight"], given["bias"]
    return given["x"], Quantised(given["codes"], given["scale"]), given["bias"]


def _nodes(*operands: Any) -> list[Node]:
    """Nodes among ``operands`` and in their pairs."""
    return [n for given in operands for n in (given if isinstance(given, tuple) else (given,)) if n is not None]


def _matrix(weight: Node, x: Node) -> bool:
    """True if ``weight`` is a matrix in the dtype of ``x``."""
    return weight.meta["val"].ndim == 2 and weight.meta["val"].dtype == x.meta["val"].dtype


def _again(graph: fx.Graph, node: Any) -> Any:
    """Repeat the constant ``node`` here, or each of a pair, since nodes come before their users."""
    if isinstance(node, tuple):
        return Quantised(*(_again(graph, n) for n in node))
    return None if node is None else constant(graph, str(node.target), node.meta["val"])


def _normed(graph: fx.Graph, x: Node, users: int) -> tuple[Node, dict[str, Any]]:
    """Input of the norm that made ``x``, and the norm as options of :func:`linattn.ops.linears.linears`; else ``x`` and no options."""
    if len(x.users) != users or x.op != "call_function":
        return x, {}
    if x.target is aten.rms_norm.default:
        source, shape, weight, eps = (*x.args, None, None)[:4]
        if len(shape) == 1 and eps is not None and (weight is None or weight.op == "get_attr"):
            return source, {"norm": Norm(_again(graph, weight), eps, shape[0])}
        return x, {}
    if x.target is aten.flatten.using_ints and x.args[1:] == (-2,) and len(x.args[0].users) == 1:
        normed = x.args[0]
        if normed.target is torch.ops.linattn.norm.default and named(normed)["mean"] and _one_dtype(normed):
            o, weight, gate, eps = (named(normed)[name] for name in ("x", "weight", "gate", "eps"))
            if weight is not None and (weight.op != "get_attr" or weight.meta["val"].dtype != o.meta["val"].dtype):
                return x, {}
            source = graph.call_function(aten.flatten.using_ints, (o, -2))
            source.meta["val"] = x.meta["val"]
            if gate is not None:
                gate = graph.call_function(aten.flatten.using_ints, (gate, -2))
                gate.meta["val"] = x.meta["val"]
            return source, {"norm": Norm(_again(graph, weight), eps, o.meta["val"].shape[-1], gate)}
    return x, {}


def _one_dtype(normed: Node) -> bool:
    o, gate, dtype = (named(normed)[name] for name in ("x", "gate", "dtype"))
    return o.meta["val"].dtype == dtype and (gate is None or gate.meta["val"].dtype == dtype)


def _fuse_gates(graph: fx.Graph) -> None:
    """Fuse ``silu(x A) ⊙ x B`` into one operation."""
    for node in calls(graph, aten.mul.Tensor):
        for a, b in (node.args, node.args[::-1]):
            if not (is_node(a) and is_node(b) and a.target is aten.silu.default and len(a.users) == 1):
                continue
            fused = _alone(a.args[0])
            if fused is None or fused is not _alone(b) or a.args[0].args[1] == b.args[1] or len(fused.args[1]) != 2:
                continue
            if _like(a.args[0]) == _like(b):  # a gate of one channel may be broadcast
                _replace(graph, node, fused, a.args[0].args[1] == 1, gated=True)
                break


def _fuse_residuals(graph: fx.Graph) -> None:
    """Fuse ``y + x A`` into one operation."""
    for node in calls(graph, aten.add.Tensor):
        for y, product in (node.args, node.args[::-1]):
            fused = _alone(product) if is_node(y) and not node.kwargs else None
            if fused is None or len(fused.args[1]) != 1 or {"gated", "residual"} & set(fused.kwargs):
                continue
            if _like(y) == _like(product) == _like(node):
                _replace(graph, node, fused, residual=y)
                break


def _alone(node: Any) -> Node:
    """Call of ``linears`` that ``node`` is an output of, if ``node`` has one user; else None."""
    if not is_node(node) or node.target is not operator.getitem or len(node.users) != 1:
        return None
    return node.args[0] if node.args[0].target is linears else None


def _like(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else ()


def _replace(graph: fx.Graph, node: Node, fused: Node, swapped: bool = False, **options: Any) -> None:
    """Replace ``node`` by ``fused`` with more ``options``."""
    x, weights, biases = fused.args
    with graph.inserting_before(node):
        weights, biases = ([_again(graph, n) for n in (reversed(nodes) if swapped else nodes)] for nodes in (weights, biases))
        new = graph.call_function(linears, (x, weights, biases), {**fused.kwargs, **options})
        piece = graph.call_function(operator.getitem, (new, 0))
    piece.meta = node.meta
    node.replace_all_uses_with(piece)
    graph.erase_node(node)
    graph.eliminate_dead_code()


def _fuse_finishes(graph: fx.Graph) -> None:
    """Fuse elementwise float32 operations on a product into the operation that computes it.

    On a GPU each would be a launch. On a CPU torch wakes its threads even for a few numbers, which takes long on a busy machine.
    """
    for fused in calls(graph, linears):
        if fused.kwargs.get("gated") or fused.kwargs.get("residual") is not None:
            continue
        finish = [_finish(get) for get in sorted(fused.users, key=lambda n: n.args[1])]
        if not any(steps for steps, _, _ in finish):
            continue
        names = [get.args[1] for get in sorted(fused.users, key=lambda n: n.args[1])]
        steps: list[list[tuple[str, Any]]] = [[] for _ in fused.args[1]]
        with graph.inserting_before(fused):
            for i, (own, _, _) in zip(names, finish, strict=True):
                steps[i] = [(name, _again(graph, other) if is_node(other) else other) for name, other in own]
        fused.kwargs = {**fused.kwargs, "finish": steps}
        for get, (_, views, last) in zip(sorted(fused.users, key=lambda n: n.args[1]), finish, strict=True):
            if last is not None:
                _move_views(graph, get, views, last)
    graph.eliminate_dead_code()


Steps = list[tuple[str, Any]]


def _finish(get: Node) -> tuple[Steps, list[Node], Node | None]:
    """Elementwise steps after the output ``get``, the views between them, and the last step's node."""
    value = get.meta["val"]
    steps: Steps = []
    views: list[Node] = []
    last, between, node, float32 = None, 0, get, value.dtype == torch.float32
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.unflatten.int and user.args[0] is node:
            views.append(user)
        elif user.target is aten.to.dtype and user.args[1] == torch.float32 and value.dtype != torch.float64:
            float32, last, between = True, user, len(views)
        elif float32 and user.target in UNARY and len(user.args) == 1 and not user.kwargs:
            steps.append((UNARY[user.target], None))
            last, between = user, len(views)
        elif float32 and (other := _other(user, node, value.shape[-1], bool(views))) is not None:
            steps.append((_BINARY[user.target], other))
            last, between = user, len(views)
        else:
            break
        node = user
    return (steps, views[:between], last) if steps and last is not None else ([], [], None)


def _other(user: Node, node: Node, size: int, viewed: bool) -> Any:
    """Other operand of ``user`` beside ``node``: a number or a constant of ``size`` numbers; None for anything else."""
    if user.target not in _BINARY or user.kwargs or len(user.args) != 2 or (user.target is aten.div.Tensor and user.args[0] is not node):
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if isinstance(other, (int, float)):
        return other
    fits = is_node(other) and other.op == "get_attr" and tuple(other.meta["val"].shape) == (size,)
    return other if fits and not viewed and other.meta["val"].dtype == torch.float32 else None


def _move_views(graph: fx.Graph, get: Node, views: list[Node], last: Node) -> None:
    """Move the views between the steps after the steps."""
    users = list(last.users)
    node = get
    first = next(iter(get.users))
    for view in views:
        with graph.inserting_before(first):
            new = graph.call_function(view.target, (node, *view.args[1:]), dict(view.kwargs))
        new.meta["val"] = view.meta["val"].float()
        node = new
    for user in users:
        user.replace_input_with(last, node)
    get.meta = {**get.meta, "val": get.meta["val"].float()}


def _count(module: fx.GraphModule) -> None:
    """Give maps of several vectors counters on a GPU: a buffer of the module, whose operations run one by one on one stream."""
    counting = [n for n in calls(module.graph, linears) if on_gpu(x := n.args[0].meta["val"]) and x.numel() > x.shape[-1]]
    if not counting:
        return
    x = counting[0].args[0].meta["val"]
    module.register_buffer("_counters", torch.zeros(COUNTERS, dtype=torch.int32, device=x.device), persistent=False)
    for node in counting:
        with module.graph.inserting_before(node):
            counters = constant(module.graph, "_counters", x.new_empty(COUNTERS, dtype=torch.int32))
        node.kwargs = {**node.kwargs, "counters": counters}
