"""The decode kernel against the float64 reference: every rule, every rank of decay, packed rows, strides, states in place."""

import os
from dataclasses import replace

import pytest
import torch

import linattn
from linattn.ops import checks
from linattn.ops.inputs import Delta, Given, Inputs
from linattn.ops.reference.linear_attention import linear_attention as reference
from tests.ops.cases import KINDS, RANKS, Call, make
from tests.ops.errors import compare, same_bits

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

from linattn.ops.triton import decode  # noqa: E402  only once it is known that triton is there

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # of o; states are always float32


def inputs(call: Call, dtype: torch.dtype = torch.float32) -> Inputs:
    """The checked arguments, rounded, on the device."""
    call = call.to(dtype)
    options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in call.options.items()}
    call = Call({n: t.to(DEVICE) for n, t in call.tensors.items()}, options)
    return checks.call(Given(**call.arguments()))[0]


def named(out) -> dict[str, torch.Tensor]:
    return {n: t for n, t in vars(out).items() if t is not None}


def exact(x: Inputs) -> dict[str, torch.Tensor]:
    def double(t):
        return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    rule = type(x.rule)(*map(double, x.rule))
    wide = Inputs(**{n: rule if n == "rule" else double(t) for n, t in vars(x).items()})
    return {n: t for n, t in named(reference(wide)).items() if x.return_state or n in ("o", "denominator")}


def check(x: Inputs, limit: float = 2e-6) -> None:
    out, ref = named(decode.recurrent(x)), exact(x)
    assert all(t.dtype == torch.float32 for n, t in out.items() if n != "o")
    assert out["o"].dtype == (torch.float32 if x.denominator else x.v.dtype)
    compare({"o": out.pop("o")}, {"o": ref.pop("o")}, limit)
    compare(out, ref, 2e-6)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_and_decay(kind, rank):
    check(inputs(make(kind, rank, T=2, H=2, Hk=1, K=6, V=5)))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_every_dtype(kind, dtype):
    check(inputs(make(kind, "BTHK", T=1, H=1, K=8, V=16), dtype), LIMIT[dtype])


@pytest.mark.parametrize("kind", ["beta", "erase", "normalize"])
def test_packed_sequences(kind):
    check(inputs(make(kind, "BTH", lengths=(2, 0, 1, 3), H=1)))


def test_the_ends_of_sequences_may_lie_apart():
    """Every second entry of a longer tensor, whose other entries are different ends."""
    x = inputs(make("beta", "BTH", lengths=(2, 0, 1, 3), H=1))
    apart = torch.stack([x.cu_seqlens, torch.zeros_like(x.cu_seqlens)], -1).flatten()[::2]
    assert not apart.is_contiguous()
    same_bits(named(decode.recurrent(replace(x, cu_seqlens=apart))), named(decode.recurrent(x)))


@pytest.mark.parametrize("kind", ["erase", "normalize"])
def test_without_states(kind):
    x = inputs(make(kind, "HK", T=2, H=1, initial=False))
    check(x)
    x = replace(x, return_state=False)
    check(x)
    assert decode.recurrent(x).state is None


def test_columns_in_several_blocks():
    check(inputs(make("normalize", "BTHK", T=2, B=1, H=1, K=3, V=37)))


def test_no_tokens_and_no_rows():
    x = inputs(make("normalize", "BTH", H=1))
    empty = Inputs(**{**vars(x), "q": x.q[:, :0], "k": x.k[:, :0], "v": x.v[:, :0], "decay": x.decay[:, :0]})
    out = decode.recurrent(empty)
    same_bits({"S": out.state, "z": out.z}, {"S": x.initial, "z": x.initial_z})
    nobody = inputs(make("beta", "BTH", B=0))
    assert decode.recurrent(nobody).state.shape == nobody.initial.shape


def test_strides_are_taken_as_they_come():
    """Slices of one projection, heads before time, a slice of a longer sequence, an expanded batch."""
    x = inputs(make("beta", "BTHK", T=3, K=4, V=4))
    fused = torch.cat([x.q, x.k, x.v], -1)
    q, k, v = fused.split(4, -1)
    check(replace(x, q=q, k=k, v=v))
    check(
        replace(
            x,
            q=x.q.transpose(1, 2).contiguous().transpose(1, 2),
            decay=x.decay.mT.contiguous().mT,
            rule=Delta(x.rule.beta.mT.contiguous().mT),
        )
    )
    one = {n: getattr(x, n)[:, 1:2] for n in ("q", "k", "v", "decay")}
    check(replace(x, **one, rule=Delta(x.rule.beta[:, 1:2])))
    check(replace(x, q=x.q[:1].expand(2, -1, -1, -1), decay=x.decay[..., :1].expand(-1, -1, -1, 4), initial=x.initial.mT.contiguous().mT))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the token before the reset reads infinities
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
def test_a_reset_clears_the_state(rank):
    x = inputs(make("normalize", rank, T=2))
    x.decay[:, 1] = -torch.inf
    broken = replace(x, initial=torch.full_like(x.initial, torch.inf), initial_z=torch.full_like(x.initial_z, torch.inf))
    wanted, out = decode.recurrent(x), decode.recurrent(broken)
    same_bits({"o": out.o[:, 1], "S": out.state, "z": out.z}, {"o": wanted.o[:, 1], "S": wanted.state, "z": wanted.z})
    check(replace(x, decay=torch.where(x.decay < -1, x.decay, -800.0)))


def test_a_slow_decay_does_not_drift():
    """A factor rounded to float32 errs by 3e-8: 9e-6 of the state after 300 steps."""
    call = make("plain", "H", T=300, B=1, H=1, K=2, V=2).with_(decay=torch.tensor([-9e-8], dtype=torch.float64))
    check(inputs(call.with_(k=call.tensors["k"] * 1e-3)))


def test_a_step_in_place_is_the_step():
    for kind in ("erase", "normalize"):
        x = inputs(make(kind, "BTHK", T=1, V=20))
        wanted = decode.recurrent(x)
        out = decode.step_(x)
        assert out.state is x.initial and out.z is x.initial_z
        same_bits(named(out), named(wanted))
    with pytest.raises(ValueError, match="needs initial states"):
        decode.step_(replace(x, initial=None))
    with pytest.raises(ValueError, match="contiguous"):
        decode.step_(replace(x, initial=x.initial.mT))


def test_what_it_refuses():
    x = inputs(make("plain", "none", T=1))
    assert decode.refusal(x) is None
    assert "causal" in decode.refusal(replace(x, causal=False))
    assert "float64" in decode.refusal(replace(x, v=x.v.double()))
    assert "512" in decode.refusal(replace(x, k=x.k.new_zeros(2, 1, 2, 513)))
    needs = replace(x, q=x.q.clone().requires_grad_())
    with torch.no_grad():
        check(needs)
    for run in (decode.recurrent, decode.step_):
        with pytest.raises(NotImplementedError, match="no gradients"):
            run(needs)


def test_op():
    """opcheck, and no graph break."""
    for kind in ("normalize", "erase"):
        x = inputs(make(kind, "BTHK", T=1))
        torch.library.opcheck(torch.ops.linattn.recurrent.default, (*x.flat, True))

    def outputs(q, k, v, s):
        out = decode.recurrent(Inputs(q, k, v, 1.0, initial=s, return_state=True))
        return out.o, out.state

    arguments = (x.q, x.k, x.v, x.initial)
    out = torch.compile(outputs, fullgraph=True, backend="aot_eager")(*arguments)
    same_bits(dict(enumerate(out)), dict(enumerate(outputs(*arguments))))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter captures nothing")
def test_captured_steps():
    x = inputs(make("beta", "BTH", T=1, K=32, V=32))
    wanted = x.initial.clone()
    decode.step_(replace(x, initial=wanted.clone()))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.step_(x)
    for _ in range(3):
        graph.replay()
        ref = decode.recurrent(replace(x, initial=wanted))
        wanted = ref.state
    same_bits({"o": out.o, "S": x.initial}, {"o": ref.o, "S": wanted})


def test_no_recompilation_for_other_lengths_and_batches():
    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")

    def compiled() -> int:
        return sum(len(cache[0]) for cache in decode.recurrence.device_caches.values())

    check(inputs(make("beta", "BTHK", B=2, T=2)))
    before = compiled()
    for B, T in ((1, 1), (3, 5), (16, 1), (4, 16)):
        check(inputs(make("beta", "BTHK", B=B, T=T)))
    assert compiled() == before


def test_agrees_with_the_public_op():
    """The kernel agrees with the public op's portable form."""
    x = inputs(make("bonus", "HK", T=3))
    o, state = linattn.linear_attention(
        x.q, x.k, x.v, decay=x.decay, bonus=x.rule.u, initial_state=x.initial, return_state=True, backend="torch"
    )
    compare({"o": decode.recurrent(x).o, "S": decode.recurrent(x).state}, {"o": o, "S": state}, 4e-6)
