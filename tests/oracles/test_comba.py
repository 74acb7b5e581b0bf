"""Comba against fla-core's chunkwise form, and the one of its references that differs from it."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def pieces(mixer, x):
    """fla's arguments from a mixer's: its v is not yet scaled by β."""
    r = mixer.project(x, CallContext(x))
    beta = mixer.b_proj(x).sigmoid()
    return {"q": r.q, "k": r.k, "v": r.v / beta[..., None], "p": r.erase[0], "g": r.decay, "beta": beta}


@pytest.mark.parametrize("correction", [1.0, 0.02])
def test_fla(correction):
    torch.manual_seed(0)
    mixer, x = create("comba", dim=64, correction=correction), 2 * torch.randn(2, 75, 64)
    torch.nn.init.normal_(mixer.feedback)
    with torch.no_grad():
        o, s = fla("comba").naive_chunk_comba(**pieces(mixer, x), output_final_state=True)
        y, state = mixer(x, return_state=True)
        assert distance(y, mixer.read(o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5


def test_the_feedback_reads_the_state_before_it_fades():
    """fla's naive_recurrent_comba is not what its own chunkwise reference and both of its kernels compute: it lets p read the / decayed
    state. With p / α in place of p it agrees.
    """
    torch.manual_seed(1)
    mixer, x = create("comba", dim=64), torch.randn(2, 40, 64)
    with torch.no_grad():
        arguments = pieces(mixer, x)
        chunk, _ = fla("comba").naive_chunk_comba(**arguments)
        odd, _ = fla("comba").naive_recurrent_comba(**arguments)
        mended, _ = fla("comba").naive_recurrent_comba(**arguments | {"p": arguments["p"] / arguments["g"].exp()[..., None]})
    assert distance(odd, chunk) > 1e-2
    assert distance(mended, chunk) < 1e-5
    assert distance(mixer(x), mixer.read(mended, x)) < 1e-5


def test_projections():
    """k of unit length, p weaker than k, and d subtracted from the query."""
    torch.manual_seed(2)
    mixer, x = create("comba", dim=32, correction=0.3), torch.randn(1, 9, 32)
    r = mixer.project(x, CallContext(x))
    q, k, _ = mixer.conv(mixer.qkv_proj(x), CallContext(x)).split((32, 32, 64), -1)
    q, k = (torch.nn.functional.normalize(t.unflatten(-1, (4, 8)), dim=-1) for t in (q, k))
    torch.testing.assert_close(r.q, q - 0.3 * k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(r.erase[0], torch.sigmoid(torch.tensor(1.0)) * k, atol=1e-4, rtol=1e-4)
