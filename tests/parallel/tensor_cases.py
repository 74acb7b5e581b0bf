"""Language models whose heads several processes share, alone and with sharded parameters and sequences, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import linattn
from linattn.models import LMConfig
from linattn.parallel import Layout, context_parallel, next_tokens, parallelize, token_loss
from linattn.parallel.tensor import row_orders
from tests.parallel import compare
from tests.parallel.compare import error, fault, numbers_like
from tests.parallel.model_cases import TOKENS, VOCABULARY, whole_loss

HYBRID = "gated_deltanet, gla, mamba2, softmax"
OPTIONS = {"mamba2": {"head_dim": 8, "groups": 2, "state_size": 8}, "softmax": {"kv_heads": 2, "conv_width": 4, "out_bias": True}}


def cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for sizes in {2: ({"tp": 2},), 4: ({"cp": 2, "tp": 2}, {"dp": 2, "tp": 2})}[mesh.size()]:
        for tied in (False, True):
            yield f"shared heads, {sizes}{', tied' * tied}", partial(trained, mesh, sizes, tied)
        yield f"shared heads, {sizes}, checkpointed", partial(trained, mesh, sizes, False, checkpoint=True)
    if mesh.size() == 2:
        yield "float32 parameters of shared heads", partial(float32_kept, mesh)
        yield "heads that cannot be shared", partial(refusals, mesh)


def language_model(mixer: str = HYBRID, tied: bool = False, **options: dict) -> linattn.LanguageModel:
    torch.manual_seed(0)
    names = mixer.count(",") + 1
    options = options or {name: own for name, own in OPTIONS.items() if name in mixer}
    config = LMConfig(
        vocab_size=VOCABULARY, dim=32, layers=names, mixer=mixer, mixer_options=options, ffn="swiglu, mlp", tie_embeddings=tied
    )
    return linattn.LanguageModel(config).double().train().to(compare.DEVICE)


def mesh_of(ranks: int, sizes: dict[str, int]) -> DeviceMesh:
    shape = {"dp": 1, "cp": 1, "tp": 1} | sizes
    assert shape["dp"] * shape["cp"] * shape["tp"] == ranks
    return init_device_mesh(compare.DEVICE, tuple(shape.values()), mesh_dim_names=tuple(shape))


def trained(world: DeviceMesh, sizes: dict[str, int], tied: bool, *, checkpoint: bool = False) -> str | None:
    """Loss, gradients and the weights after a step of AdamW."""
    mesh, plain = mesh_of(world.size(), sizes), language_model(tied=tied)
    mine = parallelize(copy.deepcopy(plain), mesh, checkpoint=checkpoint)
    layout = Layout.of(mesh["cp"], TOKENS)
    ids = numbers_like(2, TOKENS).abs().mul(1e3).long() % VOCABULARY
    wanted = whole_loss(plain(ids), ids, layout)
    wanted.backward()
    own = ids if mesh["dp"].size() == 1 else ids[mesh.get_local_rank("dp")][None]
    with context_parallel(layout):
        loss = token_loss(mine(layout.shard(own, 1)), next_tokens(own, layout), layout)
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = {"loss": error(mean / world.size(), wanted)}
    orders = row_orders(mine)
    for (name, p), (other, q) in zip(plain.named_parameters(), mine.named_parameters(), strict=True):
        assert name == other
        found[f"gradient of {name}"] = error(full(q.grad), ordered(p.grad, orders.get(name)))
    for m in (plain, mine):
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
    for (name, p), q in zip(plain.named_parameters(), mine.parameters(), strict=True):
        found[name] = error(full(q), ordered(p, orders.get(name)))
    return fault(found)


def ordered(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t[order]


def full(t: Tensor) -> Tensor:
    assert isinstance(t, DTensor)
    return t.full_tensor()


def float32_kept(world: DeviceMesh) -> str | None:
    """Mixers see their part of float32 parameters in float32, for any dtype of others."""
    model, seen = language_model("gated_deltanet").float(), []
    mixer_class = type(model.model.layers[0].mixer)
    parallelize(model, mesh_of(world.size(), {"tp": world.size()}), dtype=torch.bfloat16)
    mixer = model.model.layers[0].mixer
    assert isinstance(mixer, mixer_class)
    mixer.register_forward_pre_hook(lambda m, _: seen.append((m.A_log.dtype, len(m.A_log), m.qkv_proj.weight.dtype)))
    model(torch.arange(TOKENS, device=compare.DEVICE)[None]).float().sum().backward()
    return None if seen == [(torch.float32, 8 // world.size(), torch.bfloat16)] else f"in forward they are {seen}"


def refusals(world: DeviceMesh) -> str | None:
    """Unsupported modules are refused by name, before the model is changed."""
    mesh = mesh_of(world.size(), {"tp": 2})
    for mixer, options, why in (
        ("retnet", {}, "retnet does not run under tensor parallelism of 2: its heads are not independent"),
        ("gla", {"gla": {"heads": 1}}, "gla does not run under tensor parallelism of 2: its 1 heads are not a multiple of 2"),
    ):
        model = language_model(mixer, **options)
        with pytest.raises(ValueError, match=why):
            parallelize(model, mesh)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError, match="compile_blocks does not run with tensor parallelism"):
        parallelize(language_model("gla"), mesh, compile_blocks=True)
    with pytest.raises(ValueError, match='a dimension "dp" or "cp" beside "tp"'):
        parallelize(language_model("gla"), init_device_mesh(compare.DEVICE, (2,), mesh_dim_names=("tp",)))
    return None
