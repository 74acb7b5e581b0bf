"""float32 and half precision against the float64 reference on the same rounded inputs, and bit-for-bit invariances."""

import pytest
import torch

from tests.ops.cases import FORMS, KINDS, RANKS, Call, cotangent, gradients, make
from tests.ops.errors import HALF_GRADIENT, admitted, check_gradients, check_values, error, same_bits

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind, rank):
    """Real head sizes, four chunks, every gradient: 1e-5."""
    call = make(kind, rank, B=1, T=200, H=2, Hk=1, K=32, V=24)
    assert admitted(call.to(torch.float32))
    check_values(call, torch.float32, form="chunk")
    check_gradients(call, torch.float32, form="chunk")


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_in_the_other_forms(kind, form):
    check_gradients(make(kind, "BTHK", B=1, T=80, K=20, V=12), torch.float32, form=form)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_halves(kind, rank, dtype):
    call = make(kind, rank, B=1, T=150, H=2, Hk=1, K=32, V=24)
    assert admitted(call.to(dtype))
    check_values(call, dtype, form="chunk")
    check_gradients(call, dtype, form="chunk")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", ["parallel", "recurrent"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_in_the_other_forms(kind, form, dtype):
    call = make(kind, "BTH", B=1, T=70, K=20, V=12)
    check_values(call, dtype, form=form)
    check_gradients(call, dtype, form=form)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_decay_may_be_half_too(dtype, form):
    call = make("plain", "BTHK", B=1, T=70, K=16, V=8)
    check_values(call, dtype, decay=dtype, form=form)
    check_gradients(call, dtype, decay=dtype, form=form)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["beta", "erase", "bonus"])
@pytest.mark.parametrize("form", FORMS)
def test_beta_erase_and_bonus_may_be_float32_beside_halves(kind, dtype, form):
    """They are not rounded: the result is that of their float32 values."""
    call = make(kind, "BTH", B=1, T=70, K=16, V=8)
    mixed = call.to(dtype)
    mixed = mixed.with_(**{n: call.tensors[n].float() for n in ("beta", "read", "write", "bonus") if n in call.tensors})
    out, grads = gradients(mixed, form=form)
    ref, wanted = gradients(mixed.double(), backend="reference")
    assert out["o"].dtype == dtype and error(out["o"], ref["o"]) < (0.006 if dtype == torch.bfloat16 else 0.003)
    for name, grad in grads.items():
        assert grad.dtype == mixed.tensors[name].dtype
        assert error(grad, wanted[name]) < (0.025 if name in ("decay", "beta", "read", "write") else 0.015), name


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_state_of_halves_is_exact_in_the_rounded_inputs(form):
    """States are float32, and only inputs are rounded to half precision: the error is e_in."""
    call = make("plain", "none", B=1, T=512, K=16, V=8)
    check_values(call, torch.bfloat16, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["plain", "bonus", "normalize"])
def test_float16_states_may_pass_65504(kind, form):
    call = make(kind, "none", B=1, T=600, H=1, K=8, V=4, initial=False)
    t = {"k": call.tensors["k"].abs() * 15, "v": call.tensors["v"].abs() * 15, "q": call.tensors["q"].abs() * 1e-3}
    call = call.with_(**t).set(normalize="return") if kind == "normalize" else call.with_(**t)
    assert call()["S"].max() > 65504
    check_values(call, torch.float16, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_float16_normalizes_before_it_rounds(form):
    """An undivided output of 1e6 over a denominator of 1e6 is 1, not inf / inf."""
    call = make("normalize", "none", B=1, T=300, H=1, K=8, V=4, initial=False)
    call = call.with_(**{n: call.tensors[n] * 40 for n in "qk"})
    check_values(call, torch.float16, form=form)


@pytest.mark.parametrize(
    ("kind", "rank"), [("plain", "none"), ("plain", "BTHK"), ("beta", "BTH"), ("erase", "HK"), ("bonus", "BTHK"), ("normalize", "BTH")]
)
def test_long_float32(kind, rank):
    check_values(long(kind, rank, 2048), torch.float32, at_any_length=True, form="chunk")


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_longer_float32(kind, rank):
    check_values(long(kind, rank, 32768), torch.float32, at_any_length=True, form="chunk")


def test_8192_tokens_and_their_gradients():
    check_gradients(long("plain", "BTH", 8192), torch.float32, limit=1e-4, form="chunk")


def long(kind: str, rank: str, T: int) -> Call:
    return make(kind, rank, B=1, T=T, H=1, K=16, V=8, strength=(1e-4, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("T", [1000, 4097])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_sweep_of_real_sizes(kind, rank, T, dtype):
    call = make(kind, rank, B=1, T=T, H=2, K=64, V=64, strength=(1e-4, 5.0), seed=T)
    check_values(call, dtype, at_any_length=True, form="chunk")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_do_not_depend_on_their_company(kind):
    """Up to rounding: matrix products may sum in another order for another batch size."""
    call = make(kind, "BTHK", B=3, T=100).to(torch.float32)
    whole, alone = call("chunk"), call.rows(slice(1, 2))("chunk")
    for name, t in alone.items():
        assert error(whole[name][1:2], t) < 1e-6


def test_the_number_of_threads_changes_no_bit(programs):
    """In a separate process, since the number of threads is per process."""
    code = """
import hashlib, torch
from tests.ops.cases import KINDS, gradients, make
def digest():
    h = hashlib.sha256()
    for kind in KINDS:
        out, grads = gradients(make(kind, "BTHK", B=1, T=300, H=3, K=32, V=32).to(torch.float32), form="chunk")
        for t in (*out.values(), *grads.values()):
            h.update(t.contiguous().numpy().tobytes())
    return h.hexdigest()
torch.set_num_threads(1); one = digest()
torch.set_num_threads(2); two = digest()
print(one == two == digest())
"""
    done = programs.python("-c", code)
    assert done.stdout.strip() == "True", done.stderr + done.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_lowers_nothing(kind, form):
    """Nor the gradients, with backward outside of it, as torch recommends."""
    call = make(kind, "BTHK", T=70).to(torch.float32)
    out, grads = gradients(call, form=form)
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    with torch.autocast("cpu", torch.bfloat16):
        inside = call.with_(**leaves)(form)
    same_bits(inside, out)
    mine = torch.autograd.grad(list(inside.values()), list(leaves.values()), [cotangent(t) for t in inside.values()])
    same_bits(dict(zip(leaves, mine, strict=True)), grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_backward_inside_autocast(kind, form):
    """Torch advises against it, since it lowers its own backward formulas; the gradients still have bfloat16's precision."""
    call = make(kind, "BTHK", T=70).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        grads = gradients(call, form=form)[1]
    for name, wanted in gradients(call.double(), backend="reference")[1].items():
        assert grads[name].dtype == torch.float32 and error(grads[name], wanted) < HALF_GRADIENT.get(name, 0.015), name


def test_autocast_beside_halves_leaves_decay_and_state_wide():
    call = make("plain", "BTHK", T=70).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = gradients(call, form="chunk")
    same_bits(out, call("chunk"))
    assert out["S"].dtype == grads["decay"].dtype == grads["S"].dtype == torch.float32
