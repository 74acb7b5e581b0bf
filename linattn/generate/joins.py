"""Linear maps of a flat graph, joined: those of one vector into one operation, with the norm before them and what stands behind them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from linattn.ops import gpu
from linattn.ops.linears import linears

Node = Any  # fx.Node, whose arguments have no types that help
aten = torch.ops.aten
NARROW = 64  # channels between two maps whose product is rather one map, on a GPU, where a launch costs more than reading it
PRODUCT = 4 << 20  # bytes of such a product
COUNTERS = 256  # tiles of a product whose programs count one another, on a GPU
UNARY = {  # single numbers, by their names in FINISHES of ops/torch/linears.py
    aten.log_sigmoid.default: "log_sigmoid", aten.softplus.default: "softplus", aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh", aten.exp.default: "exp", aten.neg.default: "neg",
}  # fmt: skip
_BINARY = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten.div.Tensor: "div"}


def join(module: fx.GraphModule) -> None:
    """Change ``module``, which then calls :func:`linattn.ops.linears.linears`."""
    _join_narrow(module)
    _join_linears(module.graph)
    _join_gates(module.graph)
    _join_residuals(module.graph)
    _join_finishes(module.graph)
    _count(module)


def calls(graph: fx.Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def on_gpu(t: Tensor) -> bool:
    """Whether the kernels for a GPU will have it."""
    return t.is_cuda and gpu.refusal(t.device) is None


def is_node(x: Any) -> bool:
    return isinstance(x, fx.Node)


def constant(graph: fx.Graph, name: str, value: Any) -> Node:
    """A tensor of the module, as a node that stands here."""
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _join_narrow(module: fx.GraphModule) -> None:
    """``(x A) B + b`` through few channels is ``x (A B) + b``."""
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


def _join_linears(graph: fx.Graph) -> None:
    """Linear maps of one vector become one operation, with the norm before them if it serves nobody else."""
    groups: dict[Node, list[Node]] = {}
    for node in calls(graph, aten.linear.default):
        x, weight, bias = (*node.args, None)[:3]
        if any(w is not None and w.op != "get_attr" for w in (weight, bias)) or weight.meta["val"].ndim != 2:
            continue
        if weight.meta["val"].dtype == x.meta["val"].dtype:
            groups.setdefault(x, []).append(node)
    for nodes in groups.values():
        x = nodes[0].args[0]  # by now perhaps a piece of another group
        with graph.inserting_before(nodes[0]):
            weights, biases = ([_again(graph, (*node.args, None)[i]) for node in nodes] for i in (1, 2))
            source, options = _normed(graph, x, len(nodes))
            joined = graph.call_function(linears, (source, weights, biases), options)
            for i, node in enumerate(nodes):
                piece = graph.call_function(operator.getitem, (joined, i))
                piece.meta = node.meta
                node.replace_all_uses_with(piece)
        for node in nodes:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _again(graph: fx.Graph, node: Node | None) -> Node | None:
    """A constant where it is wanted: nodes come before their users."""
    return None if node is None else constant(graph, str(node.target), node.meta["val"])


def _normed(graph: fx.Graph, x: Node, users: int) -> tuple[Node, dict[str, Any]]:
    """What ``x`` is the norm of, and that norm as options of :func:`linattn.ops.linears.linears`; ``x`` itself and none, else."""
    if len(x.users) != users or x.op != "call_function":
        return x, {}
    if x.target is aten.rms_norm.default:
        source, shape, weight, eps = (*x.args, None, None)[:4]
        if len(shape) == 1 and eps is not None and (weight is None or weight.op == "get_attr"):
            return source, {"norm": _again(graph, weight), "eps": eps, "size": shape[0]}
        return x, {}
    if x.target is aten.flatten.using_ints and x.args[1:] == (-2,) and len(x.args[0].users) == 1:
        normed = x.args[0]
        if normed.target is torch.ops.linattn.norm.default and normed.args[4] and _one_dtype(normed):
            o, weight, gate, eps = normed.args[:4]
            if weight is not None and (weight.op != "get_attr" or weight.meta["val"].dtype != o.meta["val"].dtype):
                return x, {}
            source = graph.call_function(aten.flatten.using_ints, (o, -2))
            source.meta["val"] = x.meta["val"]
            options = {"norm": _again(graph, weight), "eps": eps, "size": o.meta["val"].shape[-1]}
            if gate is not None:
                options["gate"] = graph.call_function(aten.flatten.using_ints, (gate, -2))
                options["gate"].meta["val"] = x.meta["val"]
            return source, options
    return x, {}


def _one_dtype(normed: Node) -> bool:
    o, gate, dtype = normed.args[0], normed.args[2], normed.args[5]
    return o.meta["val"].dtype == dtype and (gate is None or gate.meta["val"].dtype == dtype)


def _join_gates(graph: fx.Graph) -> None:
    """``silu(x A) ⊙ x B`` is one operation."""
    for node in calls(graph, aten.mul.Tensor):
        for a, b in (node.args, node.args[::-1]):
            if not (is_node(a) and is_node(b) and a.target is aten.silu.default and len(a.users) == 1):
                continue
            joined = _alone(a.args[0])
            if joined is None or joined is not _alone(b) or a.args[0].args[1] == b.args[1] or len(joined.args[1]) != 2:
                continue
            if _like(a.args[0]) == _like(b):  # one number may be the gate of many
                _replace(graph, node, joined, a.args[0].args[1] == 1, gated=True)
                break


def _join_residuals(graph: fx.Graph) -> None:
    """``y + x A`` is one operation."""
    for node in calls(graph, aten.add.Tensor):
        for y, product in (node.args, node.args[::-1]):
            joined = _alone(product) if is_node(y) and not node.kwargs else None
            if joined is None or len(joined.args[1]) != 1 or {"gated", "residual"} & set(joined.kwargs):
                continue
            if _like(y) == _like(product) == _like(node):
                _replace(graph, node, joined, residual=y)
                break


def _alone(node: Any) -> Node:
    """The ``linears`` of which ``node`` is a piece that has one user, or None."""
    if not is_node(node) or node.target is not operator.getitem or len(node.users) != 1:
        return None
    return node.args[0] if node.args[0].target is linears else None


def _like(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else ()


def _replace(graph: fx.Graph, node: Node, joined: Node, swapped: bool = False, **options: Any) -> None:
    """Put ``joined`` with more ``options`` into the place of ``node``."""
    x, weights, biases = joined.args
    with graph.inserting_before(node):
        weights, biases = ([_again(graph, n) for n in (reversed(nodes) if swapped else nodes)] for nodes in (weights, biases))
        new = graph.call_function(linears, (x, weights, biases), {**joined.kwargs, **options})
        piece = graph.call_function(operator.getitem, (new, 0))
    piece.meta = node.meta
    node.replace_all_uses_with(piece)
    graph.erase_node(node)
    graph.eliminate_dead_code()


def _join_finishes(graph: fx.Graph) -> None:
    """What single numbers of a product go through, in float32, is done where they are made.

    On a GPU it would be a launch. On a CPU torch has its threads come for few numbers too, and beside a busy process waits for them.
    """
    for joined in calls(graph, linears):
        if joined.kwargs.get("gated") or joined.kwargs.get("residual") is not None:
            continue
        finish = [_finish(get) for get in sorted(joined.users, key=lambda n: n.args[1])]
        if not any(steps for steps, _, _ in finish):
            continue
        names = [get.args[1] for get in sorted(joined.users, key=lambda n: n.args[1])]
        steps: list[list[tuple[str, Any]]] = [[] for _ in joined.args[1]]
        with graph.inserting_before(joined):
            for i, (own, _, _) in zip(names, finish, strict=True):
                steps[i] = [(name, _again(graph, other) if is_node(other) else other) for name, other in own]
        joined.kwargs = {**joined.kwargs, "finish": steps}
        for get, (_, views, last) in zip(sorted(joined.users, key=lambda n: n.args[1]), finish, strict=True):
            if last is not None:
                _move_views(graph, get, views, last)
    graph.eliminate_dead_code()


Steps = list[tuple[str, Any]]


def _finish(get: Node) -> tuple[Steps, list[Node], Node | None]:
    """The steps behind a piece, the views between them, and the last of them."""
    value = get.meta["val"]
    steps: Steps = []
    views: list[Node] = []
    last, between, node, wide = None, 0, get, value.dtype == torch.float32
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.unflatten.int and user.args[0] is node:
            views.append(user)
        elif user.target is aten.to.dtype and user.args[1] == torch.float32 and value.dtype != torch.float64:
            wide, last, between = True, user, len(views)
        elif wide and user.target in UNARY and len(user.args) == 1 and not user.kwargs:
            steps.append((UNARY[user.target], None))
            last, between = user, len(views)
        elif wide and (other := _other(user, node, value.shape[-1], bool(views))) is not None:
            steps.append((_BINARY[user.target], other))
            last, between = user, len(views)
        else:
            break
        node = user
    return (steps, views[:between], last) if steps and last is not None else ([], [], None)


def _other(user: Node, node: Node, size: int, viewed: bool) -> Any:
    """The number, or the constant of ``size`` numbers, that ``user`` takes beside ``node``; None for anything else."""
    if user.target not in _BINARY or user.kwargs or len(user.args) != 2 or (user.target is aten.div.Tensor and user.args[0] is not node):
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if isinstance(other, (int, float)):
        return other
    fits = is_node(other) and other.op == "get_attr" and tuple(other.meta["val"].shape) == (size,)
    return other if fits and not viewed and other.meta["val"].dtype == torch.float32 else None


def _move_views(graph: fx.Graph, get: Node, views: list[Node], last: Node) -> None:
    """The views between the steps come behind them."""
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
    """Maps of several vectors get counters on a GPU. They are the module's own, and its operations follow one another on one stream."""
    counting = [n for n in calls(module.graph, linears) if on_gpu(x := n.args[0].meta["val"]) and x.numel() > x.shape[-1]]
    if not counting:
        return
    x = counting[0].args[0].meta["val"]
    module.register_buffer("_counters", torch.zeros(COUNTERS, dtype=torch.int32, device=x.device), persistent=False)
    for node in counting:
        with module.graph.inserting_before(node):
            counters = constant(module.graph, "_counters", x.new_empty(COUNTERS, dtype=torch.int32))
        node.kwargs = {**node.kwargs, "counters": counters}
