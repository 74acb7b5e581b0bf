"""Linear maps of a flat graph that follow one another, as chains: one launch each on a Hopper."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from linattn.generate import joins
from linattn.generate.joins import Node, calls, constant, is_node
from linattn.ops.linears import chained, linears

ON = False  # has not been measured


def chain(module: fx.GraphModule) -> None:
    """Change ``module``, whose maps have been joined: it then calls :func:`linattn.ops.linears.chained`."""
    graph = module.graph
    seen: set[Node] = set()
    for first in calls(graph, linears):
        if first in seen or not _wanted(first.args[0].meta["val"]):
            continue
        links, place = [first], {node: i for i, node in enumerate(graph.nodes)}
        while (following := _following(links, place)) is not None:
            links.append(following)
        seen.update(links)
        if len(links) > 1:
            _replace(module, links)
    graph.eliminate_dead_code()


def _wanted(x: Tensor) -> bool:
    if not ON or not joins.on_gpu(x) or x.numel() != x.shape[-1]:
        return False
    if not x.is_cuda:
        return True
    from linattn.ops.triton import launch

    return x.dtype in (torch.float16, torch.bfloat16) and launch.capability(x.device) >= (9, 0)


def _following(links: list[Node], place: dict[Node, int]) -> Node | None:
    """The one map of the last link's one result, if what it adds is there before the chain or made by it."""
    last = links[-1]
    if len(last.args[1]) > 1 and not last.kwargs.get("gated"):
        return None
    users = [n for get in last.users for n in get.users if n.target is linears and n.args[0] is get]
    if len(users) != 1 or users[0].kwargs.get("gate") is not None:
        return None
    added = users[0].kwargs.get("residual")
    there = added is None or place[added] < place[links[0]] or _link_of(added, links) is not None
    return users[0] if there else None


def _link_of(node: Any, links: list[Node]) -> int | None:
    """The number of the link whose result ``node`` is."""
    if not is_node(node) or node.target is not operator.getitem or node.args[0] not in links:
        return None
    return links.index(node.args[0])


def _replace(module: fx.GraphModule, links: list[Node]) -> None:
    graph, x = module.graph, links[0].args[0]
    with graph.inserting_before(links[0]):
        described = []
        for node in links:
            options = {**node.kwargs}
            if (link := _link_of(options.get("residual"), links)) is not None:
                options["residual"] = link
            described.append(fx.node.map_arg((*node.args[1:], options), lambda n: _again(graph, n)))
        new = graph.call_function(chained, (x, described, _kept(module, links)))
        results = [graph.call_function(operator.getitem, (new, i)) for i in range(len(links))]
        for node, result in zip(links, results, strict=True):
            for get in list(node.users):
                piece = graph.call_function(operator.getitem, (result, get.args[1]))
                piece.meta = get.meta
                get.replace_all_uses_with(piece)
    for node in reversed(links):
        for get in list(node.users):
            graph.erase_node(get)
        graph.erase_node(node)


def _again(graph: fx.Graph, node: Node) -> Node:
    """A constant where the chain begins; what is none is there by then."""
    return constant(graph, str(node.target), node.meta["val"]) if node.op == "get_attr" else node


def _kept(module: fx.GraphModule, links: list[Node]) -> Node | None:
    """What the kernel passes vectors on in, of the module's own."""
    x = links[0].args[0].meta["val"]
    if not x.is_cuda:
        return None
    from linattn.ops.triton.chain import room

    size = room([([w.meta["val"] for w in node.args[1]], node.args[2], node.kwargs) for node in links], x.device)
    name = f"_kept_{links[0].name}"
    module.register_buffer(name, torch.zeros(size, dtype=torch.int32, device=x.device), persistent=False)
    return constant(module.graph, name, x.new_empty(size, dtype=torch.int32))
