"""Mixture of memories against Gated DeltaNet on the tokens of each memory, by fla-core's recurrence, and the limit of one memory."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from tests.oracles.compare import assert_graded, distance, fla


def of_fla(*tensors):
    return fla("gated_delta_rule").naive_recurrent_gated_delta_rule(*tensors)[0]


def one_by_one(q, k, v, beta, decay):
    """The gated delta rule in the dtype of its tensors [B, T, H, ...]."""
    state, out = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None, None].exp() * state
        left = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], left)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[3] ** -0.5)
    return torch.stack(out, 1)


def memory_by_memory(mixer, x, rule):
    """Sections 3.1 and 3.2 of the paper: the sequence of a memory is the tokens that chose it."""
    (row,) = x
    r, heads = mixer.project(x, CallContext(x)), mixer.heads
    q = mixer.conv(mixer.qkv_proj(x), CallContext(x))[..., : mixer.widths[0]].unflatten(-1, (heads, -1))
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    scores, total = (row @ mixer.router.weight.T).softmax(-1), x.new_zeros(1, len(row), heads, mixer.value_size)
    best = scores.topk(mixer.active, -1)
    for m in range(mixer.memories + mixer.shared):
        of_memory = slice(m * heads, (m + 1) * heads)
        if m < mixer.memories:
            at = (best.indices == m).any(-1).nonzero()[:, 0]
            weight = scores[at, m] / best.values[at].sum(-1)
        else:
            at = torch.arange(len(row))
            weight = x.new_ones(len(row))
        beta = (row @ mixer.b_proj.weight[of_memory].T).sigmoid()
        decay = -mixer.A_log.exp() * F.softplus(row @ mixer.a_proj.weight[of_memory].T + mixer.dt_bias)
        if len(at):
            o = rule(*(t[:, at] for t in (q, r.k[:, :, of_memory], r.v[:, :, of_memory], beta[None], decay[None])))
            total = total.index_add(1, at, o * weight[:, None, None])
    return mixer.read(total, x)


SIZES = pytest.mark.parametrize(("memories", "active", "shared"), [(4, 2, True), (3, 1, False), (2, 2, True)])


@SIZES
@torch.no_grad()
def test_fla(memories, active, shared):
    torch.manual_seed(memories)
    mixer = create("mom", dim=32, heads=2, memories=memories, active=active, shared=shared, value_size=12)
    x = torch.randn(1, 60, 32)
    wanted = memory_by_memory(mixer, x, of_fla)
    assert distance(mixer(x), wanted) < 1e-5
    state, pieces = None, []
    for piece in x.split([1, 39, 20], 1):
        o, state = mixer(piece, state, return_state=True)
        pieces.append(o)
    assert distance(torch.cat(pieces, 1), wanted) < 1e-5


@SIZES
def test_one_by_one(memories, active, shared):
    torch.manual_seed(memories)
    mixer = create("mom", dim=32, heads=2, memories=memories, active=active, shared=shared, value_size=12).double()
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    assert_graded(mixer, lambda x: memory_by_memory(mixer, x, one_by_one), x, list(mixer.parameters()), 1e-10)


@torch.no_grad()
def test_a_memory_that_is_not_chosen_stays_as_it_is():
    torch.manual_seed(0)
    mixer, x = create("mom", dim=32, heads=1, memories=4, active=1, shared=False), torch.randn(1, 12, 32)
    _, state = mixer(x[:, :-1], return_state=True)
    _, after = mixer(x[:, -1:], state, return_state=True)
    (chosen,) = mixer.routed(x[:, -1:])[0][0, 0].nonzero()
    same = [torch.equal(state["S"][0, m], after["S"][0, m]) for m in range(4)]
    assert same == [m != chosen for m in range(4)]


@torch.no_grad()
def test_one_memory_is_gated_deltanet():
    torch.manual_seed(1)
    mixer = create("mom", dim=32, heads=2, memories=1, active=1, shared=False, eps=1e-6)
    plain, x = create("gated_deltanet", dim=32, heads=2, value_heads=2), torch.randn(2, 40, 32)
    plain.load_state_dict({name: t for name, t in mixer.state_dict().items() if "router" not in name})
    assert distance(mixer(x), plain(x)) < 1e-5
