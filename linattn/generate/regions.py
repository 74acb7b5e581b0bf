"""Compilation of the small operations between the kernels of a step: each region becomes one or two launches.

Layers of one kind have equal regions, and each kind is compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from linattn.generate.fusion import Node
from linattn.ops.torch.norms import norm as portable

aten = torch.ops.aten
_VIEWS = frozenset((
    "unflatten", "flatten", "view", "view_as", "reshape", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes", "chunk",
    "expand", "expand_as", "transpose", "permute", "movedim", "t", "mT", "alias", "detach", "unbind",
))  # fmt: skip
_OTHERS = frozenset((
    "to", "_to_copy", "clone", "contiguous", "cat", "stack", "sum", "mean", "amax", "amin", "softplus", "log_sigmoid", "silu", "square",
    "softmax", "log_softmax", "logsumexp", "zeros_like", "ones_like", "type_as", "rms_norm", "layer_norm", "repeat_interleave",
))  # fmt: skip


def compile_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Compile the small operations of ``module`` and return it."""
    partitioner = CapabilityBasedPartitioner(module, _Small(), allows_single_node_partition=False)
    partitions = [p for p in partitioner.propose_partitions() if any(_computes(node) for node in p.nodes)]
    module = partitioner.fuse_partitions(partitions, prefix="region_")
    compiled: dict[Hashable, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        region: Any = module.get_submodule(node.target)
        key = _kind(region, node)
        if key not in compiled:
            compiled[key] = node.target
            for norm in region.graph.find_nodes(op="call_function", target=torch.ops.linattn.norm.default):
                norm.target = portable
            region.recompile()
            setattr(module, node.target, torch.compile(region, fullgraph=True, dynamic=False))
        node.target = compiled[key]
    module.delete_all_unused_submodules()
    module.recompile()
    return module


class _Small(OperatorSupportBase):
    """Test for operations that may become part of a compiled region."""

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        if node.op != "call_function" or not _on_gpu(node.meta.get("val")):
            return False
        if any(_complex(n.meta.get("val")) for n in (node, *node.all_input_nodes)):
            return False
        if node.target is operator.getitem:
            return self.is_node_supported(submodules, node.args[0])
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        name = target._schema.name.removeprefix("aten::")
        return torch.Tag.pointwise in target.tags or name in _VIEWS or name in _OTHERS or name == "linattn::norm"


def _on_gpu(value: Any) -> bool:
    return all(t.is_cuda for t in value) if isinstance(value, (tuple, list)) else isinstance(value, Tensor) and value.is_cuda


def _complex(value: Any) -> bool:
    """True for complex tensors, which torch's compiler does not support."""
    return any(map(_complex, value)) if isinstance(value, (tuple, list)) else isinstance(value, Tensor) and value.is_complex()


def _computes(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.removeprefix("aten::") not in _VIEWS


def _kind(region: Any, call: Node) -> Hashable:
    """Key that is equal for regions with the same operations on tensors of the same shapes, strides and dtypes."""
    number = {node: i for i, node in enumerate(region.graph.nodes)}
    given = tuple((str(n.meta["val"].dtype), tuple(n.meta["val"].shape), n.meta["val"].stride()) for n in call.all_input_nodes)
    nodes = []
    for n in number:
        arguments = fx.node.map_arg((n.args, n.kwargs), lambda a: f"%{number[a]}")
        nodes.append((n.op if n.op != "call_function" else str(n.target), str(arguments)))
    return (given, *nodes)
