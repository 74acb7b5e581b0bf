"""DeltaFormer against fla-core's, and in float64 against its equations, token by token."""

from functools import partial

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.conformance.checks import states
from tests.oracles.compare import assert_graded, assert_pieces, fla


@pytest.mark.parametrize("piece", [256, 16])  # queries at a time
@torch.no_grad()
def test_fla(piece):
    """Its first similarity is between queries and keys, ours between keys, so queries equal keys here."""
    torch.manual_seed(0)
    mixer, x = create("deltaformer", dim=64), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    mixer.q_proj.weight.copy_(mixer.k_proj.weight)
    r = mixer.project(x, CallContext(x))
    wanted = mixer.read(fla("deltaformer").naive_deltaformer_attn(r.k, r.k, r.v, r.beta), x)
    assert_pieces(mixer, x, wanted, [30, 1, 1, 43])


def one_by_one(mixer, x):
    r = mixer.project(x, CallContext(x))
    left, out = [], []
    for t in range(x.shape[1]):
        u = r.v[:, t]
        if t:
            similar = torch.einsum("bhk,bshk->bsh", r.k[:, t], r.k[:, :t]) * mixer.size**-0.5
            u = u - r.beta[:, t, :, None] * (similar.softmax(1)[..., None] * torch.stack(left, 1)).sum(1)
        left.append(u)
        similar = torch.einsum("bhk,bshk->bsh", r.q[:, t], r.k[:, : t + 1]) * mixer.size**-0.5
        out.append((similar.softmax(1)[..., None] * torch.stack(left, 1)).sum(1))
    return mixer.read(torch.stack(out, 1), x)


@pytest.mark.parametrize("piece", [256, 5])
def test_one_by_one(piece):
    torch.manual_seed(1)
    mixer, x = create("deltaformer", dim=32, heads=2).double(), 2 * torch.randn(2, 18, 32, dtype=torch.float64)
    mixer.piece = piece
    assert_graded(mixer, lambda x: one_by_one(mixer, x), x, list(mixer.parameters()))


@torch.no_grad()
def test_the_state_holds_what_is_left_of_values():
    mixer, x = create("deltaformer", dim=32, heads=2), torch.randn(1, 9, 32)
    _, state = mixer(x, return_state=True)
    r = mixer.project(x, CallContext(x))
    first, second = r.v[:, 0], r.v[:, 1] - r.beta[:, 1, :, None] * r.v[:, 0]
    torch.testing.assert_close(state["u"][:, :2], torch.stack([first, second], 1))


@pytest.mark.parametrize("check", [states.check_resume, states.check_packed, states.check_padding])
def test_states_of_small_pieces(check):
    def make(**options):
        mixer = create("deltaformer", **options)
        mixer.piece = 3
        return mixer

    check(partial(make))
