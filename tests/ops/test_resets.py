"""A NaN or an infinity in a state does not reach later packed sequences; effect of a decay of -inf on it.

``0 · inf`` is NaN, in the definition too: a decay of -inf resets only finite states. Later results are right or not finite, never
wrong finite numbers.
"""

import pytest
import torch

import linattn
from linattn.ops.cpu import library
from tests.ops.cases import FORMS, KINDS, Call, gradients, make

WAYS = [("reference", "auto"), *(("torch", form) for form in FORMS), ("cpu", "auto")]
SPOILED, RESET, TOKENS = 57, 70, 150  # the first two in one chunk
BAD = (torch.nan, torch.inf)


@pytest.fixture(params=WAYS, ids="-".join)
def way(request):
    if request.param[0] == "cpu" and library.reason():
        pytest.skip(library.reason())
    return dict(zip(("backend", "form"), request.param, strict=True))


def spoiled(call: Call, name: str, bad: float) -> Call:
    tensor = call.tensors[name].clone()
    tensor[0, SPOILED, 1] = bad
    return call.with_(**{name: tensor})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_no_packed_sequence_sees_what_spoiled_the_one_before(way, kind, dtype):
    call = make(kind, "BTHK", lengths=(RESET, 0, TOKENS - RESET), H=2).to(dtype)
    call = call.set(normalize=1e-6) if kind == "normalize" else call
    clean = call(**way)
    for name in ("k", "v", *(n for n in ("beta", "write") if n in call.tensors)):
        for bad in BAD:
            out = spoiled(call, name, bad)(**way)
            assert not out["o"][0, SPOILED:RESET, 1].isfinite().all(), name
            assert torch.equal(out["o"][:, RESET:], clean["o"][:, RESET:]) and torch.equal(out["S"][1:], clean["S"][1:]), name


@pytest.mark.parametrize("kind", KINDS)
def test_nor_do_its_gradients(way, kind):
    call = make(kind, "BTHK", lengths=(RESET, 0, TOKENS - RESET), H=2).to(torch.float32)
    clean, grads = (gradients(c, **way)[1] for c in (call, spoiled(call, "v", torch.nan)))
    for name in call.timed:
        assert torch.equal(grads[name][:, RESET:], clean[name][:, RESET:]), name
    assert torch.equal(grads["S"][1:], clean["S"][1:])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "erase"])  # erase reads the state before its decay
def test_behind_a_reset_all_is_right_or_not_finite(way, kind, rank, bad):
    call = make(kind, rank, B=2, T=TOKENS, H=2).to(torch.float32)
    decay = call.tensors["decay"].clone()
    decay[:, RESET] = -torch.inf
    call = call.with_(decay=decay)
    clean = call(**way)
    for name in ("k", "v"):
        out = spoiled(call, name, bad)(**way)
        for n, t in out.items():
            got, wanted = (x[:, RESET:].transpose(1, 2) if n in ("o", "denominator") else x for x in (t, clean[n]))
            right = got == wanted  # [B, H, ...]
            assert (right | ~got.isfinite()).all(), n
            assert right[1].all() and right[0, 0].all(), n


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("scan", [linattn.diagonal_scan, linattn.running_max])
def test_scans(scan, backend, bad):
    if backend == "cpu" and library.reason():
        pytest.skip(library.reason())
    decay, x = -torch.rand(2, TOKENS, 5), torch.randn(2, TOKENS, 5)
    decay[:, RESET] = -torch.inf
    wrong = x.clone()
    wrong[0, SPOILED, 3] = bad
    got, wanted = (scan(decay, t, backend=backend)[:, RESET:] for t in (wrong, x))
    right = got == wanted
    assert (right | ~got.isfinite()).all() and right[1].all() and right[0, :, :3].all()
    ends = torch.tensor([0, RESET, RESET, TOKENS])
    got, wanted = (scan(decay[:1], t[:1], cu_seqlens=ends, return_state=True, backend=backend) for t in (wrong, x))
    assert torch.equal(got[0][:, RESET:], wanted[0][:, RESET:]) and torch.equal(got[1][2:], wanted[1][2:])


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_an_infinity_in_a_sum_stays_in_its_channel_and_row(backend, bad):
    """The definition keeps it; weighting a state by 1 and exp(decay) − 1 gives inf − inf. Neither becomes finite again."""
    if backend == "cpu" and library.reason():
        pytest.skip(library.reason())
    decay, b = -torch.rand(2, TOKENS, 5), torch.randn(2, TOKENS, 5)
    wrong = b.clone()
    wrong[0, SPOILED, 3] = bad
    clean, got = (linattn.diagonal_scan(decay, t, backend=backend) for t in (b, wrong))
    behind = torch.zeros_like(b, dtype=torch.bool)
    behind[0, SPOILED:, 3] = True
    assert torch.equal(got[~behind], clean[~behind])
    assert not got[behind].isfinite().any()
    if backend == "reference":
        assert (got[behind] == bad).all()
