"""Log-linear Gated DeltaNet: the paper's products pair by pair in float64, and fla-core's recurrence where all weights are 1."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def make(seed, **options):
    torch.manual_seed(seed)
    mixer = create("log_linear_gdn", dim=32, heads=2, **options)
    torch.nn.init.normal_(mixer.level_scale, std=3.0)
    torch.nn.init.normal_(mixer.dt_bias, mean=-3.0)  # decays with a remainder after 20 tokens
    return mixer


def pairs(mixer, x):
    """Outputs of the recurrence, [B, T, H, V], by the product of all transitions between each pair of tokens."""
    r = mixer.project(x, CallContext(x))
    group = mixer.value_heads // mixer.heads
    q, k = (t.repeat_interleave(group, 2) for t in (r.q, r.k))
    out = []
    for t in range(x.shape[1]):
        read, o = q[:, t] * q.shape[-1] ** -0.5, 0.0
        for s in range(t, -1, -1):  # ``read`` is q_t times the transitions of the tokens after s
            bucket = (t ^ s).bit_length()
            if bucket < mixer.levels:
                met = r.weights[:, t, :, bucket] * r.beta[:, s] * (read * k[:, s]).sum(-1)
                o = o + met[..., None] * r.v[:, s]
            read = read - (r.beta[:, s] * (read * k[:, s]).sum(-1))[..., None] * k[:, s]
            read = r.decay[:, s].exp()[..., None] * read
        out.append(o)
    return torch.stack(out, 1)


@pytest.mark.parametrize("options", [{"levels": 8}, {"levels": 4}, {"levels": 8, "value_heads": 2, "value_size": 12}], ids=str)
def test_the_equation(options):
    mixer, x = make(0, **options).double(), torch.randn(2, 37, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = mixer(x), mixer.read(pairs(mixer, x), x)
    assert distance(y, wanted) < 1e-9
    state, parts = None, []
    for piece in x.split([1, 18, 1, 17], 1):
        o, state = mixer(piece, state, return_state=True)
        parts.append(o)
    assert distance(torch.cat(parts, 1), wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(o.square().sum(), wrt) for o in (y, wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


def test_fla_with_equal_weights():
    """With λ = 1 everywhere the buckets add up to the one state of Gated DeltaNet."""
    mixer, x = make(1), torch.randn(2, 70, 32)
    torch.nn.init.zeros_(mixer.level_scale)  # softplus(0) = ln 2, so the output is scaled
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        q, k = (t.repeat_interleave(2, 2) for t in (r.q, r.k))
        wanted, _ = fla("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, r.v, r.beta, r.decay)
        o = mixer.attend(r, CallContext(x, returning=False)) / torch.log(torch.tensor(2.0))
        assert distance(o, wanted) < 1e-5
