"""Language models under data, context and sharded parallelism, compared with one process; and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import linattn
from linattn.models import LMConfig
from linattn.parallel import Layout, context_parallel, next_tokens, parallelize, token_loss
from tests.parallel import compare
from tests.parallel.compare import counted, error, fault, numbers_like

TOKENS, VOCABULARY = 11, 17
HYBRID = "gated_deltanet, gla, mamba, rwkv7, softmax"


def cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    contiguous = {"sizes": [TOKENS - 2 * mesh.size() + 2, *[2] * (mesh.size() - 1)]}
    packed = {"cu_seqlens": [0, 4, 9, TOKENS], "order": "zigzag"}
    for name, how in (("contiguous", contiguous), ("packed zigzag", packed)):
        layout = Layout.of(mesh, TOKENS, **how)
        for checkpoint in (False, True):
            for wrap in (replicated, sharded):
                title = f"model, {wrap.__name__}, {name}{', checkpointed' * checkpoint}"
                yield title, partial(trained, layout, wrap, checkpoint)
    yield (
        "model, reversible",
        partial(trained, Layout.of(mesh, TOKENS, **contiguous), replicated, False, mixer="gla, rwkv6, softmax", block="reversible"),
    )
    yield "model, backward outside of the context", partial(trained, Layout.of(mesh, TOKENS), replicated, True, inside=False)
    if mesh.size() == 4:
        yield "model, two by two", partial(two_by_two, None)
        yield "model, two by two, packed", partial(two_by_two, [0, 4, 9, TOKENS])
    yield "collectives", partial(collectives, mesh)
    yield "gradients of one input", partial(some_gradients, mesh)
    yield "float32 parameters", partial(float32_kept, mesh)
    yield "refusals", partial(refusals, mesh)


def language_model(mixer: str = HYBRID, **config: str) -> linattn.LanguageModel:
    torch.manual_seed(0)
    names = mixer.count(",") + 1
    return (
        linattn.LanguageModel(LMConfig(vocab_size=VOCABULARY, dim=32, layers=names, mixer=mixer, **config))
        .double()
        .train()
        .to(compare.DEVICE)
    )


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize(model, init_device_mesh(compare.DEVICE, (mesh.size(),), mesh_dim_names=("cp",)))


def trained(layout: Layout, wrap: Callable[..., nn.Module], checkpoint: bool, *, inside: bool = True, **config: str) -> str | None:
    """Loss, gradients and the weights after a step."""
    plain = language_model(**config)
    mine = copy.deepcopy(plain)
    mine.model.gradient_checkpointing = checkpoint
    model = wrap(mine, dist.device_mesh.init_device_mesh(compare.DEVICE, (layout.ranks,)))
    rows = 1 if layout.cu_seqlens else 2
    ids = numbers_like(rows, TOKENS).abs().mul(1e3).long() % VOCABULARY
    cu = None if layout.cu_seqlens is None else torch.tensor(layout.cu_seqlens, device=compare.DEVICE)
    wanted = whole_loss(plain(ids, cu_seqlens=cu), ids, layout)
    wanted.backward()
    with context_parallel(layout):
        loss = token_loss(model(layout.shard(ids, 1)), next_tokens(ids, layout), layout)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    for m in (plain, model):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = {"loss": error(mean / layout.ranks, wanted)}
    for (name, p), q in zip(plain.named_parameters(), mine.parameters(), strict=True):
        found[f"gradient of {name}"] = error(full(q.grad), p.grad)
        found[name] = error(full(q), p)
    return fault(found)


def two_by_two(cu_seqlens: list[int] | None) -> str | None:
    """Two sequences of two processes each, with sharded parameters and checkpointed activations."""
    mesh = init_device_mesh(compare.DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    layout = Layout.of(mesh["cp"], TOKENS, cu_seqlens=cu_seqlens, sizes=[TOKENS - 3, 3])
    plain = language_model()
    mine = parallelize(copy.deepcopy(plain), mesh, checkpoint=True)
    ids = numbers_like(2, TOKENS).abs().mul(1e3).long() % VOCABULARY
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=compare.DEVICE)
    wanted = torch.stack([whole_loss(plain(row[None], cu_seqlens=cu), row[None], layout) for row in ids]).mean()
    wanted.backward()
    own = ids[mesh.get_local_rank("dp")][None]
    with context_parallel(layout):
        loss = token_loss(mine(layout.shard(own, 1)), next_tokens(own, layout), layout)
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = {"loss": error(mean / 4, wanted)}
    pairs = zip(plain.named_parameters(), mine.parameters(), strict=True)
    return fault(found | {f"gradient of {name}": error(full(q.grad), p.grad) for (name, p), q in pairs})


def whole_loss(logits: Tensor, ids: Tensor, layout: Layout) -> Tensor:
    """The mean over all tokens but the last of each sequence."""
    losses = []
    for start, stop in zip(layout.borders[:-1], layout.borders[1:], strict=True):
        for row in range(len(ids)):
            losses += [nn.functional.cross_entropy(logits[row, start : stop - 1], ids[row, start + 1 : stop], reduction="none")]
    return torch.cat(losses).mean()


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def collectives(mesh: DeviceMesh) -> str | None:
    """One collective each way for a call of a recurrence."""
    q = numbers_like(1, 4, 1, 2).requires_grad_()
    with context_parallel(Layout.of(mesh, 4 * mesh.size())):
        for beta in (None, torch.ones_like(q[..., 0])):
            with counted() as counts:
                o, state = linattn.linear_attention(q, q, q, beta=beta, return_state=True)
                (o.sum() + state.sum()).backward()
            if set(counts.values()) != {1}:
                return f"a call takes {counts}"
    return None


def some_gradients(mesh: DeviceMesh) -> str | None:
    """Gradients of one input, in whose collective a process without a part must take part."""
    layout = Layout.of(mesh, 4 * mesh.size())
    whole = {name: numbers_like(1, layout.tokens, 1, 2) + i for i, name in enumerate("qkv")}
    for name in whole:
        found = []
        for cut in (False, True):
            given = {n: layout.shard(t, 1).clone() if cut else t.clone() for n, t in whole.items()}
            given[name].requires_grad_()
            with context_parallel(layout) if cut else nullcontext():
                found += torch.autograd.grad(linattn.linear_attention(**given).square().sum(), [given[name]])
        if (told := fault({f"gradient of {name}": error(found[1], layout.shard(found[0], 1))})) is not None:
            return told
    return None


def float32_kept(mesh: DeviceMesh) -> str | None:
    """Mixers see their float32 parameters in float32, for any dtype of others."""
    named = init_device_mesh(compare.DEVICE, (mesh.size(),), mesh_dim_names=("dp",))
    seen = []
    for stored, computed in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        model = language_model("gated_deltanet").to(stored)
        parallelize(model, named, dtype=computed)
        mixer = model.model.layers[0].mixer
        mixer.conv.register_forward_pre_hook(lambda *_, m=mixer: seen.append((m.A_log.dtype, m.dt_bias.dtype, m.o_proj.weight.dtype)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(8, device=compare.DEVICE)[None]).float().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if mixer.A_log.dtype != torch.float32 or not isinstance(mixer.A_log, DTensor):
            return f"A_log became {mixer.A_log.dtype}"
    wanted = [(torch.float32, torch.float32, torch.bfloat16)] * 2
    return None if seen == wanted else f"in forward they are {seen}"


def refusals(mesh: DeviceMesh) -> str | None:
    """Calls that must raise a clear error."""
    from torch.distributed.tensor.experimental import context_parallel as torchs

    model = language_model("gla")
    ids = torch.arange(4 * mesh.size(), device=compare.DEVICE)[None] % VOCABULARY
    layout = Layout.of(mesh, ids.shape[1])
    own = layout.shard(ids, 1)
    buffer = ids.clone()
    # pytest.raises inside: torch 2.11 stays in its context when an exception leaves it.
    with torchs(mesh, buffers=[buffer], buffer_seq_dims=[1]), pytest.raises(RuntimeError, match="linattn.parallel.context_parallel"):
        model(buffer)
    model(own)  # and not after it
    with context_parallel(layout):
        with pytest.raises(ValueError, match="mask cannot be used"):
            model(own, mask=own >= 0)
        with pytest.raises(ValueError, match="to Layout.of"):
            model(own[:1], cu_seqlens=torch.tensor([0, 4], device=compare.DEVICE))
        with pytest.raises(ValueError, match="this process's 4 tokens"):
            model(ids)
        q = torch.randn(1, own.shape[1], 1, 2, device=compare.DEVICE)
        with pytest.raises(TypeError, match="q must be a plain tensor, but came as a DTensor"):
            linattn.linear_attention(*[DTensor.from_local(q, mesh)] * 3)
        with pytest.raises(ValueError, match="to Layout.of"):
            linattn.linear_attention(q, q, q, cu_seqlens=torch.tensor([0, 4], device=compare.DEVICE))
        with pytest.raises(ValueError, match="must have this process's 4 tokens"):
            linattn.linear_attention(q[:, 1:], q[:, 1:], q[:, 1:])
        with pytest.raises(NotImplementedError, match="long_conv does not run under context_parallel"):
            linattn.long_conv(q[..., 0], q[0, :, :, 0])
        with pytest.raises(NotImplementedError, match="slstm does not run under context_parallel"):
            language_model("slstm")(own)
        transformers = pytest.importorskip("transformers")
        config = linattn.LMConfig(vocab_size=VOCABULARY, dim=32, layers=1, mixer="gla")
        hf = transformers.AutoModelForCausalLM.from_config(config).to(compare.DEVICE)
        with pytest.raises(ValueError, match=r"linattn\.parallel\.token_loss"):
            hf(own, labels=own)
    sharded_model = sharded(language_model("gla"), mesh)
    with pytest.raises(ValueError, match="model must be whole, but its parameters are sharded among processes: save it"):
        linattn.generate.stream(sharded_model, [1, 2], max_new_tokens=1)
    return "torch's would be tried" if hf.supports_context_parallel else None
