"""The kernels as operators of torch: schemas and fakes, compiled and captured graphs, no waiting for the device, clear refusals."""

import sys

import pytest
import torch
import triton
from torch.autograd import forward_ad

import linattn
from tests.ops import cases
from tests.ops.cases import KINDS, Call, cotangent, make
from tests.ops.errors import compare, error, same_bits
from tests.ops.operators import UNSUPPORTED, check_compiled, check_differentiable_once, check_explained, check_operators, leaves_of
from tests.ops.test_compile import Op
from tests.ops.triton.device import DEVICE, INTERPRETED, SIZE, check, gradients, here, values

needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
LENGTHS = (3, 0, 17) if INTERPRETED else (5, 0, 640, 130)
PACKED = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])


def sample(kind: str, lengths=None, rank: str = "BTHK", seed: int = 0) -> Call:
    return here(make(kind, rank, B=1, T=sum(LENGTHS), lengths=lengths, H=1, **SIZE, seed=seed)).to(torch.float32)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@PACKED
@pytest.mark.parametrize("kind", ["beta", "normalize"] if INTERPRETED else KINDS)
def test_full_graph(kind, lengths):
    """Forward and backward, without a break."""
    call = sample(kind, lengths)
    check_compiled(torch.compile(Op(call, backend="triton"), fullgraph=True, backend="aot_eager"), call, gradients(call))


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["beta", "normalize"] if INTERPRETED else KINDS)
def test_full_graph_where_every_size_is_a_symbol(kind):
    call = sample(kind, LENGTHS)
    check_compiled(torch.compile(Op(call, backend="triton"), fullgraph=True, backend="aot_eager", dynamic=True), call, gradients(call))


@needs_gpu
@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # inductor's own
def test_inductor():
    call = sample("erase")
    check_compiled(torch.compile(Op(call), fullgraph=True), call, gradients(call))


@pytest.mark.parametrize("kind", ["beta", "bonus"] if INTERPRETED else KINDS)
def test_opcheck(kind):
    """On the arguments from the public function."""
    check_operators(sample(kind, LENGTHS), "triton", "chunk_forward", "chunk_backward")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_refused(kind):
    check_differentiable_once(sample(kind), "triton", 'no gradients of gradients: ask for backend="torch"')


@needs_gpu
def test_explain_says_that_the_kernels_run(capsys):
    check_explained(sample("beta"), "triton", "chunk", lambda: capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *UNSUPPORTED,
        (lambda c: here(make("beta", "none", T=40, H=1, K=257)).to(torch.float32), "up to 256"),
        (lambda c: here(make("plain", "none", T=40, H=1, K=513)).to(torch.float32), "up to 512"),
    ],
)  # fmt: skip
def test_what_the_kernels_leave_to_others(change, reason):
    """With a reason; the next backend gives the result: on a GPU the portable form."""
    call = change(sample("beta", rank="BTH"))
    if not INTERPRETED:
        said = linattn.explain(**call.arguments())
        (line,) = (x for x in said.splitlines() if x.strip().startswith("triton:"))
        assert ": no, " in line and reason in line
    out, portable = call(backend="auto"), call(backend="torch")
    if DEVICE == "cuda":
        same_bits(out, portable)
    else:  # a CPU has its own kernels
        assert all(error(out[name], wanted) < 1e-5 for name, wanted in portable.items())
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run this call: .*{reason}"):
        call(backend="triton")


def test_transforms_go_to_the_portable_form():
    call = sample("plain", rank="BTH")
    q = call.tensors["q"]
    stacked = torch.stack([q, -q])
    out = torch.vmap(lambda x: call.with_(q=x)(backend="auto")["o"])(stacked)
    compare({"o": out[1]}, {"o": -values(call)["o"]}, 1e-5)


BATCHED = {
    "linear_attention": (
        lambda *t: linattn.linear_attention(*t[:3], decay=-t[3].abs(), form="chunk", backend="triton"),
        [(1, 5, 1, 3)] * 4,
    ),
    "diagonal_scan": (lambda d, b: linattn.diagonal_scan(-d.abs(), b, backend="triton"), [(2, 5, 3)] * 2),
    "running_max": (lambda d, x: linattn.running_max(-d.abs(), x, backend="triton"), [(2, 5, 3)] * 2),
    "selective_scan": (
        lambda x, a, b, c: linattn.selective_scan(x, x.abs(), -a.abs(), b, c, backend="triton"),
        [(2, 5, 3), (3, 4), (2, 5, 4), (2, 5, 4)],
    ),
}


@pytest.mark.parametrize("op", BATCHED)
def test_many_gradients_at_once(op):
    """``is_grads_batched``, of ``torch.autograd.functional.jacobian(vectorize=True)``: each equals the single gradient."""
    function, shapes = BATCHED[op]
    leaves = [torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes]
    y = function(*leaves)
    weights = torch.randn(3, *y.shape, device=DEVICE)
    together = torch.autograd.grad(y, leaves, weights, retain_graph=True, is_grads_batched=True)
    for i, w in enumerate(weights):
        alone = torch.autograd.grad(y, leaves, w, retain_graph=True)
        same_bits(dict(enumerate(mine[i] for mine in together)), dict(enumerate(alone)))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_forward_mode_is_refused(form):
    """Kernels would silently treat tensors with tangents as constants."""
    call = sample("plain", rank="BTH")
    with forward_ad.dual_level():
        dual = call.with_(q=forward_ad.make_dual(call.tensors["q"], torch.ones_like(call.tensors["q"])))
        with pytest.raises(ValueError, match="backend 'triton' cannot run this call: it has no derivatives in forward mode"):
            dual(form, "triton")
        assert forward_ad.unpack_dual(dual("recurrent")["o"]).tangent is not None
        x = torch.randn(1, 20, 3, device=DEVICE)
        for scan in (linattn.diagonal_scan, linattn.running_max):
            with pytest.raises(ValueError, match="forward mode"):
                scan(-x.abs(), forward_ad.make_dual(x, x), backend="triton")


def test_no_gradients_are_prepared_under_no_grad():
    call = sample("beta")
    with torch.no_grad():
        out = call.with_(**dict(zip(call.tensors, leaves_of(call), strict=True)))(backend="triton")
    assert not any(t.requires_grad for t in out.values())
    same_bits(out, values(call))


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@PACKED
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind, lengths):
    call = sample(kind, lengths)
    leaves = leaves_of(call)
    weights = [cotangent(t) for t in gradients(call)[0].values()]  # compiles, too
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = call.with_(**dict(zip(call.tensors, leaves, strict=True)))(backend="auto")
        torch.autograd.grad(list(out.values()), leaves, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@PACKED
@pytest.mark.parametrize("kind", KINDS)
def test_captured_forward_and_backward(kind, lengths):
    """A graph replayed on other numbers, and for other lengths of as many sequences."""
    call, other = sample(kind, lengths), sample(kind, lengths and (0, 130, 5, 640), seed=1)
    (out, grads) = gradients(call)  # compiles
    leaves = dict(zip(call.tensors, leaves_of(call), strict=True))
    static = call.with_(**leaves)
    weights = [cotangent(t) for t in out.values()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static(backend="triton")
        found = torch.autograd.grad(list(results.values()), list(leaves.values()), weights)
    for given in (call, other):
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(given.tensors[name])
            if lengths:
                static.options["cu_seqlens"].copy_(given.options["cu_seqlens"])
        graph.replay()
        out, grads = gradients(given)
        same_bits({n: t.detach() for n, t in results.items()}, out)
        same_bits(dict(zip(leaves, found, strict=True)), grads)


@needs_gpu
def test_another_stream():
    """Kernels go to the current stream."""
    call = sample("beta")
    wanted = values(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = call(backend="triton")
    stream.synchronize()
    same_bits(out, wanted)


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "beta", "erase"])
def test_no_recompilation_for_other_lengths_and_batches(kind):
    def compiled() -> int:
        modules = [module for name, module in sys.modules.items() if name.startswith("linattn.ops.triton.")]
        kernels = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)}
        return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())

    def run(B: int, T: int) -> None:
        gradients(here(make(kind, "BTHK", B=B, T=T, H=2, **SIZE)).to(torch.float32))

    run(2, 128)
    run(1, 1100)
    before = compiled()
    assert before > 0
    for B, T in ((1, 1), (1, 17), (2, 129), (3, 640), (1, 2077), (16, 64)):
        run(B, T)
    assert compiled() == before


@needs_gpu
def test_autocast_lowers_nothing():
    call = sample("beta")
    with torch.autocast("cuda", torch.bfloat16):
        same_bits(call(backend="triton"), values(call))


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    call = sample("beta")
    leaves = leaves_of(call)
    out = checkpoint(Op(call, backend="triton"), leaves, use_reentrant=False)
    grads = torch.autograd.grad(out, leaves, [cotangent(o) for o in out])
    same_bits(dict(zip(call.tensors, grads, strict=True)), gradients(call)[1])


def test_a_float64_call_on_the_device_takes_the_portable_form():
    check(make("beta", "BTH", B=1, T=20, H=1, **SIZE), torch.float64, run=lambda call, _: cases.gradients(call, backend="auto"))
    assert DEVICE in str(sample("plain").tensors["v"].device)


@needs_gpu
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
def test_the_forward_pass_compiles_for_the_backward_pass(rank, monkeypatch):
    """All kernels at once, on all cores."""
    from triton import knobs

    call = here(make("plain", rank, B=1, T=70, H=1, K=48, V=80)).to(torch.float32)  # sizes that no other test compiles for
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    out = call.with_(**leaves)(backend="triton")
    forward = len(compiled)
    torch.autograd.grad(out["o"].sum(), list(leaves.values()))
    assert compiled[forward:] == [] and forward > 2
