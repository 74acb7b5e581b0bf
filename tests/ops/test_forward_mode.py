"""Derivatives in forward mode and derivatives of derivatives: right on the portable form, refused by the kernels with a reason."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp

import linattn
from tests.conformance import tools

B, T, H, K, V = 1, 4, 2, 2, 3  # small, since the cost of gradgradcheck is quadratic


def random(*shape, low=-1.0, high=1.0, seed=0, dtype=torch.float64):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64) * (high - low) + low).to(
        dtype
    )


def tensors(dtype):
    qkv = {name: random(B, T, H, V if name == "v" else K, seed=i, dtype=dtype) for i, name in enumerate("qkv")}
    decay = random(B, T, H, K, low=-2.0, high=-0.1, dtype=dtype)
    per_head = random(B, T, H, low=-2.0, high=-0.1, dtype=dtype)
    x = random(B, T, 3, dtype=dtype)
    maps = [random(3, 2, seed=i, dtype=dtype) for i in range(2)]
    fade = random(B, T, 3, low=-2.0, high=-0.1, dtype=dtype)
    return {
        "plain": (linattn.linear_attention, qkv),
        "decay per head": (linattn.linear_attention, qkv | {"decay": per_head}),
        "decay per channel": (linattn.linear_attention, qkv | {"decay": decay}),
        "beta": (linattn.linear_attention, qkv | {"decay": per_head, "beta": random(B, T, H, low=0.1, high=0.5, dtype=dtype)}),
        "bonus": (linattn.linear_attention, qkv | {"decay": decay, "bonus": random(H, K, dtype=dtype)}),
        "state": (linattn.linear_attention, qkv | {"initial_state": random(B, H, K, V, dtype=dtype)}),
        "diagonal_scan": (linattn.diagonal_scan, {"decay": fade, "b": x}),
        "running_max": (linattn.running_max, {"decay": fade, "gate": x}),
        "selective_scan": (
            linattn.selective_scan,
            {
                "x": x, "dt": random(B, T, 3, low=0.1, dtype=dtype), "A": random(3, 2, low=-1.0, high=-0.1, dtype=dtype),
                "B": random(B, T, 2, dtype=dtype), "C": random(B, T, 2, seed=5, dtype=dtype), "D": random(3, dtype=dtype),
            },
        ),
        "long_conv": (linattn.long_conv, {"u": x, "kernel": random(T, 3, dtype=dtype)}),
        "lti, diagonal": (linattn.lti, {"u": x, "A": random(3, 2, low=-2.0, high=-0.1, dtype=dtype), "B": maps[0], "C": maps[1]}),
        "lti, dense": (linattn.lti, {"u": x, "A": 0.3 * random(3, 2, 2, dtype=dtype), "B": maps[0], "C": maps[1]}),
    }  # fmt: skip


CALLS = list(tensors(torch.float64))
KERNELS = [name for name in CALLS if name.partition(",")[0] not in ("long_conv", "lti")]


def called(name, dtype=torch.float64, **options):
    op, given = tensors(dtype)[name]
    return (lambda *values: op(**dict(zip(given, values, strict=True)), **options)), tuple(given.values())


def erased(dtype, **options):
    """Call with ``erase``, a pair."""
    q, k, v, read, write = (random(B, T, H, V if i == 2 else K, seed=i, dtype=dtype) for i in range(5))

    def run(q, k, v, read, write):
        return linattn.linear_attention(q, k, v, erase=(0.5 * read, 0.5 * write), **options)

    return run, (q, k, v, read, write)


def case(name, dtype=torch.float64, **options):
    return erased(dtype, **options) if name == "erase" else called(name, dtype, **options)


def slope(function, values, tangents, step=1e-6):
    ahead, behind = (function(*(v + s * step * t for v, t in zip(values, tangents, strict=True))) for s in (1, -1))
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("name", [*CALLS, "erase"])
def test_forward_mode(name):
    """Against central differences, whose own error here is about step² + eps / step = 1e-10."""
    function, values = case(name)
    tangents = tuple(random(*v.shape, seed=9) for v in values)
    wanted = slope(function, values, tangents)
    _, by_jvp = jvp(function, values, tangents)
    torch.testing.assert_close(by_jvp, wanted, rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        out = function(*(forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [*CALLS, "erase"])
def test_forward_mode_in_float32(name):
    """ "auto" avoids kernels, which would lose the tangent."""
    function, values = case(name, torch.float32)
    exact, wide = case(name)
    tangents = tuple(random(*v.shape, seed=9) for v in values)
    _, wanted = jvp(exact, wide, tangents)
    _, got = jvp(function, values, tuple(t.float() for t in tangents))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*KERNELS, "erase"])
@pytest.mark.parametrize("how", ["jvp", "dual"])
def test_kernels_refuse_forward_mode(name, how):
    function, values = case(name, torch.float32, backend="cpu")
    tangents = tuple(torch.ones_like(v) for v in values)
    with pytest.raises(ValueError, match="backend 'cpu' cannot run this call: it"):
        if how == "jvp":
            jvp(function, values, tangents)
        else:
            with forward_ad.dual_level():
                function(*map(forward_ad.make_dual, values, tangents))


@pytest.mark.parametrize("name", [*CALLS, "erase"])
def test_double_backward(name):
    function, values = case(name, **({} if name in ("long_conv",) or name.startswith("lti") else {"backend": "torch"}))
    assert torch.autograd.gradgradcheck(function, tuple(v.clone().requires_grad_() for v in values))


@pytest.mark.parametrize("name", [*KERNELS, "erase"])
def test_kernels_refuse_double_backward(name):
    from linattn.ops.cpu import library

    if library.reason() is not None:
        pytest.skip(library.reason())
    function, values = case(name, torch.float32, backend="cpu")
    leaves = [v.clone().requires_grad_() for v in values]
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(differentiable once|no gradients of gradients).*backend=.torch"):
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True, allow_unused=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads if g is not None), leaves, allow_unused=True)


@pytest.mark.parametrize("name", ["decay per channel", "beta", "erase", "selective_scan"])
def test_forward_over_reverse(name):
    """A Hessian times a vector: jvp of a gradient, against the gradient of a gradient."""
    function, values = case(name)
    tangents = tuple(random(*v.shape, seed=9) for v in values)

    def gradients(*values):
        return torch.func.grad(lambda *v: function(*v).square().sum(), tuple(range(len(values))))(*values)

    _, got = jvp(gradients, values, tangents)
    leaves = [v.clone().requires_grad_() for v in values]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    wanted = torch.autograd.grad(sum((g * t).sum() for g, t in zip(first, tangents, strict=True)), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "mamba2", "mamba", "hgrn", "s4d", "local", "perceiver"])
def test_forward_mode_through_a_mixer(name):
    """Short convolutions, norms, gates and attention by torch's kernels too."""
    torch.manual_seed(0)
    mixer = linattn.mixers.create(name, dim=32)
    x, t = random(1, 6, 32, dtype=torch.float32), random(1, 6, 32, seed=3, dtype=torch.float32)

    def run(x):
        return tools.called(mixer, x)

    _, got = jvp(run, (x,), (t,))
    mixer.double()
    _, wanted = jvp(run, (x.double(),), (t.double(),))
    torch.testing.assert_close(wanted, slope(run, (x.double(),), (t.double(),)), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-5)
