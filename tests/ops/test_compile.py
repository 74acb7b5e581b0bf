"""Graphs: ``torch.compile(fullgraph=True)``, ``torch.export``, functional transforms. No break, no data-dependent shape."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from linattn.ops.compilers import constant_result
from tests.ops import cases
from tests.ops.cases import FORMS, KINDS, Call, cotangent, gradients, make
from tests.ops.errors import compare, error

LENGTHS = (5, 0, 64, 1)
# Dynamo instantiates every torch.autograd.Function that it traces, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Op(torch.nn.Module):
    """The op as a module whose inputs are only tensors, for compile and export."""

    def __init__(self, call: Call, form: str = "auto", backend: str = "auto") -> None:
        super().__init__()
        self.names, self.how = list(call.tensors), {"form": form, "backend": backend}
        self.options = {n: x for n, x in call.options.items() if n != "cu_seqlens"}

    def forward(self, tensors: list[Tensor], cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        options = {**self.options, "cu_seqlens": cu_seqlens, **self.how}  # no Call here: dynamo of torch 2.11 cannot make one
        out = linattn.linear_attention(**cases.arguments(dict(zip(self.names, tensors, strict=True)), options))
        return tuple(cases.results(out, options).values())


@pytest.fixture(autouse=True)
def fresh():
    """Reset compiled graphs before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(call: Call, requires_grad: bool = False) -> tuple[list[Tensor], Tensor | None]:
    return [t.detach().clone().requires_grad_(requires_grad) for t in call.tensors.values()], call.options.get("cu_seqlens")


def compiled(call: Call, backend: str = "aot_eager", form: str = "auto", **options: object):
    return torch.compile(Op(call, form), fullgraph=True, backend=backend, **options)


def check(function, call: Call, limit: float = 1e-11) -> None:
    """Values and gradients of the compiled function are those of the op."""
    leaves, cu = arguments(call, requires_grad=True)
    out = function(leaves, cu)
    grads = torch.autograd.grad(out, leaves, [cotangent(o) for o in out], allow_unused=True, materialize_grads=True)
    ref, wanted = gradients(call, form="chunk")
    compare(dict(zip(ref, out, strict=True)), ref, limit)
    compare(dict(zip(wanted, grads, strict=True)), wanted, limit)


def layouts(packed: list[str]) -> list:
    """Every kind, dense and packed; slow are the dense kinds of ``packed``, and the packed other kinds."""
    slow = {True: pytest.mark.slow, False: ()}
    return [
        pytest.param(kind, lengths, id=f"{kind}-{'packed' if lengths else 'dense'}", marks=slow[(kind in packed) != bool(lengths)])
        for kind in KINDS
        for lengths in (None, LENGTHS)
    ]


@pytest.mark.parametrize(("kind", "lengths"), layouts(packed=[]))  # packed: test_another_packing_is_no_new_graph
def test_full_graph(kind, lengths):
    call = make(kind, "BTHK", T=70, lengths=lengths)
    check(compiled(call), call)


@pytest.mark.parametrize("rank", ["none", "H", "HK", "BTH"])
def test_full_graph_of_every_rank(rank):
    call = make("plain", rank, T=70, H=4, Hk=2)
    check(compiled(call), call)


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
def test_full_graph_of_the_other_forms(form):
    call = make("beta", "BTH", T=5)
    check(compiled(call, form=form), call)


def test_full_graph_without_causality():
    call = make("normalize", "none", T=70).set(causal=False)
    check(compiled(call), call)


def test_full_graph_of_a_step():
    call = make("beta", "BTH", T=1)
    check(compiled(call), call)


@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_another_packing_is_no_new_graph(kind):
    """The content of cu_seqlens is data: other lengths of as many sequences."""
    first, other = make(kind, "BTH", lengths=LENGTHS), make(kind, "BTH", lengths=(0, 33, 0, 37), seed=1)
    function = compiled(first)
    check(function, first)
    with torch.compiler.set_stance("fail_on_recompile"):
        check(function, other)


@pytest.mark.parametrize("late", ["decay", "beta", "initial_state"])
def test_an_argument_that_comes_late_to_sizes_that_change(late):
    """The sizes of q, k and v are symbolic by then, those of the new argument numbers until they change."""

    def run(q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Tensor:
        return linattn.linear_attention(q, k, v, **more)

    function = torch.compile(run, fullgraph=True, backend="aot_eager")
    for batch, tokens, given in ((2, 5, False), (3, 7, False), (2, 5, True), (4, 9, True)):
        q, k, v = torch.randn(3, batch, tokens, 2, 4).unbind()
        sizes = {"decay": (batch, tokens, 2), "beta": (batch, tokens, 2), "initial_state": (batch, 2, 4, 4)}
        more = {late: -torch.rand(sizes[late])} if given else {}
        torch.testing.assert_close(function(q, k, v, **more), run(q, k, v, **more))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_another_length_with_dynamic_shapes(kind):
    """Compiled at 70 tokens and run at others, with more chunks."""
    function = compiled(make(kind, "BTH", T=70), dynamic=True)
    for T in (70, 71, 130):
        check(function, make(kind, "BTH", T=T))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_inductor(kind, lengths):
    call = make(kind, "BTHK", T=70, lengths=lengths)
    check(compiled(call, "inductor"), call, 1e-9)


@pytest.mark.parametrize(("kind", "lengths"), layouts(packed=["erase", "bonus", "normalize"]))  # those that are dense in test_full_graph
def test_export(kind, lengths):
    call = make(kind, "BTHK", T=70, lengths=lengths)
    leaves, cu = arguments(call)
    program = torch.export.export(Op(call), (leaves, cu))
    other = make(kind, "BTHK", T=70, lengths=lengths and (0, 33, 0, 37), seed=5)
    out = program.module()(*arguments(other))
    for name, mine in zip(other("chunk"), out, strict=True):
        assert error(mine, other(backend="reference")[name]) < 1e-11


def test_a_constant_result_is_marked_as_torch_marks_it():
    marked, ours = torch.compiler.assume_constant_result(lambda: 1), constant_result(lambda: 1)
    assert vars(ours) == vars(marked) != {}


def test_the_value_checks_do_not_break_a_graph():
    """A positive decay is not checked under compilation; eager mode still refuses it."""
    call = make("plain", "BTH", lengths=LENGTHS)
    function = compiled(call)
    check(function, call)
    bad = call.with_(decay=-call.tensors["decay"])
    function(*arguments(bad))
    with pytest.raises(ValueError, match="decay"):
        bad()


def clear(error_: Exception) -> bool:
    """True if a refusal names the unsupported transform."""
    return any(word in str(error_).lower() for word in ("vmap", "transform", "functorch", "forward ad", "jvp", "forward-mode"))


def works_or_is_refused(transformed, wanted) -> None:
    """A functional transform gives the right numbers or raises a clear error."""
    try:
        mine = transformed()
    except (RuntimeError, NotImplementedError, ValueError) as refusal:
        assert clear(refusal), refusal
        return
    for a, b in zip(mine, wanted(), strict=True):
        assert error(a, b) < 1e-11


@pytest.mark.parametrize("lengths", [None, (2, 0, 3)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_make_fx_writes_down(dtype, lengths):
    """It passes real tensors, but raises when their values are read."""
    call, other = (make("beta", "BTH", B=1, T=5, lengths=lengths, seed=s).to(dtype) for s in (0, 1))
    (given, cu), op = arguments(call), Op(call)
    graph = make_fx(op)(given, cu)
    for same, wanted in zip(graph(arguments(other)[0], cu), op(arguments(other)[0], cu), strict=True):
        torch.testing.assert_close(same, wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind, form):
    """Over a dimension in front of the batch."""
    calls = [make(kind, "BTHK", T=70, seed=s) for s in range(3)]
    names = list(calls[0].tensors)

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(Call(dict(zip(names, tensors, strict=True)), calls[0].options)(form).values())

    stacked = [torch.stack([c.tensors[n] for c in calls]) for n in names]
    works_or_is_refused(lambda: vmap(one)(*stacked), lambda: [torch.stack(o) for o in zip(*(c(form).values() for c in calls), strict=True)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_func_grad(kind, form):
    call = make(kind, "BTHK", T=70)

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        return sum((o * cotangent(o)).sum() for o in call.with_(**tensors)(form).values())

    works_or_is_refused(lambda: list(grad(loss)(call.tensors).values()), lambda: list(gradients(call, form=form)[1].values()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_gradients(kind, form):
    """vmap over grad, a common pattern."""
    call = make(kind, "BTHK", T=66, B=3, initial=False)
    weights = cotangent(call.tensors["v"][:1])

    def loss(v: Tensor, q: Tensor) -> Tensor:
        one = call.rows(slice(0, 1)).with_(v=v[None], q=q[None])
        return (one(form)["o"] * weights).sum()

    def wanted() -> list[Tensor]:
        out = [torch.func.grad(loss)(call.tensors["v"][i], call.tensors["q"][i]) for i in range(3)]
        return [torch.stack(out)]

    works_or_is_refused(lambda: [vmap(grad(loss))(call.tensors["v"], call.tensors["q"])], wanted)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own tables of derivatives
@pytest.mark.parametrize("form", FORMS)
def test_forward_mode(form):
    """The derivative along a direction, against the gradient in that direction."""
    call = make("beta", "BTHK", T=70)
    tangents = {n: cotangent(t, seed=3) for n, t in call.tensors.items()}

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        return sum((o * cotangent(o)).sum() for o in call.with_(**tensors)(form).values())

    def wanted() -> list[Tensor]:
        grads = gradients(call, form=form)[1]
        return [sum((grads[n] * tangents[n]).sum() for n in grads)]

    works_or_is_refused(lambda: [jvp(loss, (call.tensors,), (tangents,))[1]], wanted)


def test_functional_call_with_parameters():
    """A module whose decay is a parameter, differentiated by functional_call."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = torch.nn.Parameter(torch.tensor([-0.1, -0.5], dtype=torch.float64))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linattn.linear_attention(q, k, v, decay=-self.decay.abs()).sum()

    t, model = make("plain", "none", T=70).tensors, Model()
    model(t["q"], t["k"], t["v"]).backward()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    mine = grad(lambda p: functional_call(model, p, (t["q"], t["k"], t["v"])))(parameters)
    assert error(mine["decay"], model.decay.grad) < 1e-12


def test_gradient_checkpointing_and_saved_tensor_hooks():
    from torch.utils.checkpoint import checkpoint

    call = make("beta", "BTHK", T=70)
    op = Op(call, "chunk")
    leaves, _ = arguments(call, requires_grad=True)
    out = checkpoint(op, leaves, use_reentrant=False)
    grads = torch.autograd.grad(out, leaves, [cotangent(o) for o in out])
    compare(dict(zip(call.tensors, grads, strict=True)), gradients(call, form="chunk")[1], 1e-14)


def test_inference_mode_and_no_grad():
    call = make("beta", "BTHK", T=70)
    ref = call("chunk")
    with torch.inference_mode():
        compare(call("chunk"), ref, 1e-15)
    with torch.no_grad():
        leaves, _ = arguments(call, requires_grad=True)
        assert not any(o.requires_grad for o in Op(call, "chunk")(leaves))
