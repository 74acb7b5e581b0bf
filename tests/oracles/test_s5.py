"""S5 against s5-pytorch with the same weights, by its scan and by its steps; it keeps no conjugate pairs, so its C is doubled."""

import importlib.util
import sys
from functools import cache
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree

from linattn.mixers import create
from linattn.ops import hippo
from tests.oracles import wheels
from tests.oracles.compare import distance
from tests.oracles.ssm import decoded


@cache
def package():
    """The wheel's package under a private name; torch's pytrees replace jax's, and scipy.linalg, which is not called, is a stub.

    Its functions are not compiled by TorchScript, whose gradients of complex products lack the conjugate: compiled, the gradient of B
    differs by 0.6 from that of the same Python code, and from ours.
    """
    trees, jax, scipy, linalg = (ModuleType(n) for n in ("jax.tree_util", "jax", "scipy", "scipy.linalg"))
    trees.tree_flatten = _pytree.tree_flatten
    trees.tree_unflatten = lambda structure, leaves: _pytree.tree_unflatten(leaves, structure)
    file = wheels.path("s5-pytorch==0.1.7") / "s5" / "__init__.py"
    spec = importlib.util.spec_from_file_location("_linattn_oracle_s5", file, submodule_search_locations=[str(file.parent)])
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    plain = mock.patch.object(torch.jit, "script", lambda function: function)
    with plain, mock.patch.dict(sys.modules, {"jax": jax, "jax.tree_util": trees, "scipy": scipy, "scipy.linalg": linalg}):
        spec.loader.exec_module(loaded)
    loaded.s5_model.functorch = loaded.jax_compat.functorch = torch  # the new place of vmap
    return loaded


def pair():
    torch.manual_seed(0)
    ours = create("s5", dim=32, state_size=64, blocks=4).double()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.05 * torch.randn_like(p))
    eigenvalues = torch.complex(ours.Lambda_re, ours.Lambda_im).detach()
    eye = torch.eye(32, dtype=torch.complex64)
    theirs = package().s5_model.S5SSM(eigenvalues, eye, eye, 32, 32, 1e-3, 0.1, bcInit="complex_normal")
    theirs.log_step = torch.nn.Parameter(ours.log_step.detach()[:, 0].clone())
    theirs.D = torch.nn.Parameter(ours.D.detach().clone())
    theirs.get_BC_tilde = lambda: (torch.view_as_complex(ours.B), 2 * torch.view_as_complex(ours.C))  # its own goes through complex64
    return ours, theirs


def block(mixer, y):
    """half_glu1 of the authors' s5/layers.py."""
    y = F.gelu(y)
    return y * torch.sigmoid(mixer.gate_proj(y))


def stepped(theirs, x):
    """Their discretisation and step, outputs and the last state of one row of tokens [T, D]."""
    (b, c), h, outputs = theirs.get_BC_tilde(), torch.zeros(32, dtype=torch.complex128), []
    a, b = theirs.discretize(theirs.Lambda, b, torch.exp(theirs.log_step))
    for token in x:
        h = a * h + b @ token.to(b.dtype)
        outputs.append((c @ h).real + theirs.D * token)
    return torch.stack(outputs), h


@pytest.mark.parametrize("tokens", [1, 37, 100])
def test_values_and_gradients(tokens):
    ours, theirs = pair()
    x = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), block(ours, torch.stack([theirs(row) for row in x]))
    assert distance(y, wanted) < 1e-9
    got, asked = (torch.autograd.grad(o.square().sum(), [x, ours.B, ours.C], retain_graph=True) for o in (y, wanted))
    for a, b in zip(got, asked, strict=True):
        assert distance(a, b) < 1e-9
    got = torch.autograd.grad(y.square().sum(), [ours.Lambda_re, ours.Lambda_im, ours.log_step])
    eigenvalues, steps = torch.autograd.grad(wanted.square().sum(), [theirs.Lambda, theirs.log_step])
    for a, b in zip(got, (eigenvalues.real, eigenvalues.imag, steps[:, None]), strict=True):
        assert distance(a, b) < 1e-9


def test_decoding():
    ours, theirs = pair()
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    outputs, h = stepped(theirs, x[0])
    wanted = block(ours, outputs[None])
    y, state = ours(x, return_state=True)
    assert distance(y, wanted) < 1e-9 and distance(decoded(ours, x), wanted) < 1e-9
    assert distance(torch.view_as_complex(state["h"])[0], h) < 1e-9


def test_where_it_starts():
    """Without the eigenvectors B and C are real with variance 1 / state_size; each block is the normal part of HiPPO-LegS."""
    torch.manual_seed(0)
    ours = create("s5", dim=512, state_size=64, blocks=2)
    eigenvalues, _, _, v = hippo.nplr(32)
    assert distance(torch.complex(ours.Lambda_re, ours.Lambda_im).detach(), eigenvalues.repeat(2).to(torch.complex64)) < 1e-6
    v = torch.block_diag(v, v).to(torch.complex64)
    b = 2 * (v @ torch.view_as_complex(ours.B.detach())).real  # [64, 512]
    assert abs(b.var().item() * 64 - 1) < 0.05 and b.abs().max() < 2.3 / 8
    assert abs(torch.view_as_complex(ours.C.detach()).abs().square().mean().item() * 32 - 1) < 0.05


def test_real_parts_stay_negative():
    ours = create("s5", dim=32)
    torch.nn.init.constant_(ours.Lambda_re, 0.5)
    assert ours(torch.randn(1, 2000, 32)).isfinite().all()


def test_refusals():
    with pytest.raises(ValueError, match="state_size"):
        create("s5", dim=32, state_size=30, blocks=4)
    with pytest.raises(ValueError, match="size must be even"):
        create("s5", dim=32, state_size=12, blocks=4)
