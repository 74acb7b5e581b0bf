"""The kernels of ``linear_attention`` as operators of torch: schemas and fakes, compiled graphs, clear refusals."""

import pytest
import torch

import linattn
from linattn.ops.cpu import library
from tests.ops.cases import KINDS, Call, gradients, make
from tests.ops.errors import compare, same_bits
from tests.ops.operators import UNSUPPORTED, Seen, check_compiled, check_differentiable_once, check_explained, check_operators, leaves_of
from tests.ops.test_compile import Op

pytestmark = pytest.mark.usefixtures("native")
LENGTHS = (5, 0, 70)


def sample(kind: str, lengths=None, rank: str = "BTHK") -> Call:
    return make(kind, rank, B=1, T=sum(LENGTHS), H=2, Hk=1, K=6, V=5, lengths=lengths).to(torch.float32)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", ["erase", "normalize"])
def test_full_graph(kind, lengths):
    """Forward and backward, without a break."""
    call = sample(kind, lengths)
    check_compiled(torch.compile(Op(call, backend="cpu"), fullgraph=True, backend="aot_eager"), call, gradients(call, backend="cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    """On the arguments from the public function."""
    check_operators(sample(kind, LENGTHS), "cpu", "cpu_linear_attention", "cpu_linear_attention_backward")


@pytest.mark.usefixtures("_fresh")
def test_every_output_of_the_operator_is_written():
    """Two of five possible chunks are used; unwritten memory would differ from call to call."""
    call = make("plain", "BTH", B=1, T=66, H=2, Hk=1, K=6, V=5, lengths=(0, 20, 46, 0)).to(torch.float32)
    with Seen() as seen:
        gradients(call, backend="cpu")
    operator, arguments = seen.calls["linattn::cpu_linear_attention"]
    with library.guarded():
        assert all(not t.isnan().any() for t in operator(*arguments))
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_as_an_operator_and_without_it_the_bits_are_the_same(kind):
    call = sample(kind, LENGTHS)
    with Seen():
        seen = gradients(call, backend="cpu")
    for one, two in zip(seen, gradients(call, backend="cpu"), strict=True):
        same_bits(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_refused(kind):
    check_differentiable_once(sample(kind), "cpu", "differentiable once")


def test_explain_says_that_the_kernels_run(capsys):
    check_explained(sample("beta"), "cpu", "recurrent", lambda: capsys.readouterr().out)


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED)
def test_what_the_kernels_leave_to_others(change, reason):
    """With a reason, and the portable form gives the result."""
    call = change(sample("beta", rank="BTH"))
    (line,) = (x for x in linattn.explain(**call.arguments()).splitlines() if x.strip().startswith("cpu:"))
    assert ": no, " in line and reason in line
    same_bits(call(backend="auto"), call(backend="torch"))
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot run this call: .*{reason}"):
        call(backend="cpu")


def test_without_a_library_the_portable_form_serves(monkeypatch):
    monkeypatch.setattr(library, "reason", lambda: "its kernels are not there")
    call = sample("beta")
    same_bits(call(backend="auto"), call(backend="torch"))
    with pytest.raises(ValueError, match="its kernels are not there"):
        call(backend="cpu")


def test_transforms_go_to_the_portable_form():
    call = sample("plain", rank="BTH")
    q = call.tensors["q"]
    out = torch.vmap(lambda x: call.with_(q=x)(backend="auto")["o"])(torch.stack([q, -q]))
    compare({"o": out[1]}, {"o": -call(backend="cpu")["o"]}, 1e-5)


def test_no_gradients_are_prepared_under_no_grad():
    call = sample("beta")
    with torch.no_grad():
        out = call.with_(**dict(zip(call.tensors, leaves_of(call), strict=True)))(backend="cpu")
    assert not any(t.requires_grad for t in out.values())
    same_bits(out, call(backend="cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_lowers_nothing(dtype):
    call = sample("beta").to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(call, backend="cpu")
    for one, two in zip(inside, gradients(call, backend="cpu"), strict=True):
        same_bits(one, two)
