"""Native sparse attention: each branch against fla-core's, and the whole against the equations as loops."""

from functools import partial

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.conformance.checks import states
from tests.oracles import standins
from tests.oracles.compare import assert_graded, distance


def fla_nsa():
    return standins.module("fla-core==0.6.0", "fla/ops/nsa/naive.py", fla__ops__utils__pooling="mean_pooling prepare_chunk_offsets")


def branch(mixer, x, number):
    """The output of one branch of three alone, before the last map."""
    r = mixer.project(x, CallContext(x))
    r.gates.copy_(torch.eye(3)[number].expand_as(r.gates))
    return mixer.attend(r, CallContext(x, returning=False))


@pytest.mark.filterwarnings("ignore:Flash Attention is not installed")
@pytest.mark.parametrize("blocks", [3, 4])
@torch.no_grad()
def test_fla(blocks):
    torch.manual_seed(blocks)
    mixer, x = create("nsa", dim=64, heads=4, kv_heads=2, block=4, blocks=blocks), 3 * torch.randn(2, 32, 64)
    r, naive = mixer.project(x, CallContext(x)), fla_nsa()
    k_mean, v_mean = (t.unflatten(1, (8, 4)).mean(2) for t in (r.k, r.v))
    wanted, _ = naive.naive_nsa_compression(r.q, k_mean, v_mean, 4, 0.25)
    assert distance(branch(mixer, x, 0), wanted) < 1e-5
    indices = naive.naive_nsa_topk(r.q, k_mean, blocks, 4, 0.25)
    values = r.v.repeat_interleave(2, 2)  # the oracle allocates its output by the values' heads
    q, k = r.q, r.k.repeat_interleave(2, 2)
    wanted = naive.naive_nsa_selection(q, k, values, indices.repeat_interleave(2, 2), 4)
    assert distance(branch(mixer, x, 1), wanted) < 1e-5


def loops(mixer, x):
    """Query by query: the means of complete blocks, the blocks selected by them, the window."""
    r = mixer.project(x, CallContext(x))
    tokens, heads, size = r.q.shape[1:]
    rows = []
    for t in range(tokens):
        own, group, parts = t // mixer.block, heads // mixer.kv_heads, [[] for _ in range(heads)]
        complete = [range(j * mixer.block, (j + 1) * mixer.block) for j in range((t + 1) // mixer.block)]
        for g in range(mixer.kv_heads):
            of_group = range(g * group, (g + 1) * group)
            k, v = r.k[0, :, g], r.v[0, :, g]
            matters = torch.zeros(own + 1, dtype=x.dtype)
            for h in of_group:
                q, gates = r.q[0, t, h] * size**-0.5, r.gates[0, t, h]
                if complete:
                    means = [torch.stack([u[list(c)].mean(0) for c in complete]) for u in (k, v)]
                    weights = (means[0] @ q).softmax(0)
                    parts[h].append(gates[0] * weights @ means[1])
                    matters[: len(complete)] += weights.detach() / group
            matters[[j for j in {0, own - 1, own} if j >= 0]] = torch.inf
            read = matters.topk(min(mixer.blocks, own + 1)).indices.tolist()
            top, near = [i for i in range(t + 1) if i // mixer.block in read], list(range(max(0, t + 1 - mixer.near), t + 1))
            for h in of_group:
                q, gates = r.q[0, t, h] * size**-0.5, r.gates[0, t, h]
                parts[h] += [gate * (k[at] @ q).softmax(0) @ v[at] for gate, at in ((gates[1], top), (gates[2], near))]
        rows.append(torch.stack([torch.stack(p).sum(0) for p in parts]))
    return mixer.read(torch.stack(rows)[None], x)


@pytest.mark.parametrize("piece", [256, 6])  # queries at a time
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_equations(kv_heads, piece):
    torch.manual_seed(piece)
    mixer = create("nsa", dim=32, kv_heads=kv_heads, block=3, blocks=4, window=5).double()
    mixer.piece = piece
    x = 2 * torch.randn(1, 26, 32, dtype=torch.float64)
    assert_graded(mixer, lambda x: loops(mixer, x), x, list(mixer.parameters()))


@pytest.mark.parametrize("check", [states.check_resume, states.check_packed, states.check_padding, states.check_saved])
def test_states_where_blocks_are_chosen(check):
    check(partial(create, "nsa", kv_heads=2, block=2, blocks=3, window=3))
