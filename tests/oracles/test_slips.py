"""Errors in implementations that we compare with and that no other test shows, one test each.

docs/oracles.rst lists all of them, including those in the mixers' own tests. Tests are skipped for packages that have fixed them.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import FalconMambaConfig, RwkvConfig, RwkvModel
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

from tests.oracles import standins, wheels
from tests.oracles.compare import distance, fla

ROOT = Path(__file__).parents[2]


def test_conjugate_gradients_of_fla_stop_early():
    """naive_mesa_net_CG adds 1e-5 to its denominators, so small queries stay unsolved after any number of steps: the solution is
    linear in the query, and theirs is not."""
    torch.manual_seed(0)
    shape = (1, 32, 2, 16)
    k, v = torch.nn.functional.normalize(torch.randn(shape), dim=-1), torch.randn(shape)
    g, lamb, beta = -torch.rand(shape[:3]) / 10, torch.ones(2, 16), torch.rand(shape[:3])
    errors = []
    for size in (1.0, 1e-2):
        q = size * torch.nn.functional.normalize(torch.randn(shape), dim=-1)
        exact = fla("mesa_net").naive_mesa_net_exact(q, k, v, g, lamb, beta)[0]
        errors.append([distance(fla("mesa_net").naive_mesa_net_CG(q, k, v, g, lamb, beta, 16, n)[0], exact) for n in (30, 300)])
    assert all(error > 1e-5 for row in errors for error in row), errors
    assert errors[1][0] > 1e-2, errors


def test_decoding_by_transformers_mixes_the_rows_of_rwkv4():
    """A step of RwkvModel adds the shifted token [B, D] to [B, 1, D], which is [B, B, D]: so that rows depend on each other."""
    torch.manual_seed(0)
    model = RwkvModel(RwkvConfig(vocab_size=50, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)).eval()
    torch.nn.init.normal_(model.blocks[0].attention.time_mix_key)
    ids = torch.randint(50, (2, 6))

    def step(ids):
        state = model(ids[:, :5], use_cache=True).state
        return model(ids[:, 5:], state=state, use_cache=True).last_hidden_state

    with torch.no_grad():
        together, alone = step(ids), step(ids[:1])
    if together.shape == (2, 1, 32) and distance(together[:1], alone) < 1e-5:
        pytest.skip("this transformers keeps them apart")
    assert together.shape != (2, 1, 32) or distance(together[:1], alone) > 1e-2


def test_falcon_mamba_mixer_of_transformers_needs_its_model():
    config = FalconMambaConfig(hidden_size=32, state_size=12, time_step_rank=5, num_hidden_layers=1, vocab_size=8)
    try:
        FalconMambaMixer(config, 0)
    except AttributeError as error:
        assert "rms" in str(error) or "norm" in str(error)
    else:
        pytest.skip("this transformers makes the mixer alone")


def test_the_stabiliser_of_performer_looks_ahead():
    """Keys are divided by the exponential of the maximum over all keys, including later ones, before ε is added, so it does not cancel."""
    performer = standins.performer()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 20, 16, dtype=torch.float64)
    w = performer.gaussian_orthogonal_random_matrix(44, 16).double()
    outputs = []
    for last in (k[..., -1:, :], 5 * k[..., -1:, :]):
        keys = performer.softmax_kernel(torch.cat([k[..., :-1, :], last], -2), projection_matrix=w, is_query=False)
        queries = performer.softmax_kernel(q, projection_matrix=w, is_query=True)
        outputs.append(performer.causal_linear_attention_noncuda(queries, keys, v)[..., :-1, :])
    assert distance(*outputs) > 1e-2, "the last key has changed what earlier tokens read"


def test_gradients_of_compiled_complex_products():
    """TorchScript's, by which s5-pytorch compiles its discretisation: the same code in Python has other gradients."""
    text = (wheels.path("s5-pytorch==0.1.7") / "s5/s5_model.py").read_text(encoding="utf-8")
    assert "@torch.jit.script\ndef discretize_zoh" in text

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a[:, None] * b

    torch.manual_seed(0)
    a, (b, weight) = torch.randn(8, dtype=torch.complex128), torch.randn(2, 8, 4, dtype=torch.complex128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # TorchScript is deprecated
        compiled = torch.jit.script(product)
    found = []
    for function in (product, compiled):
        leaf = b.clone().requires_grad_()
        for _ in range(3):  # it compiles gradients after some profiling runs
            (gradient,) = torch.autograd.grad(function(a, leaf), leaf, weight)
        found.append(gradient)
    assert distance(found[0], weight * a.conj()[:, None]) < 1e-12
    if distance(found[1], found[0]) < 1e-12:
        pytest.skip("this TorchScript conjugates")
    assert distance(found[1], weight * a[:, None]) < 1e-12


def test_gate_names_of_slstm():
    """The cell expects its inputs in the order i, f, z, o, but the layer passes those of ``fgate`` first."""
    cell, layer = (
        (wheels.path("xlstm==2.0.6") / "xlstm/blocks/slstm" / name).read_text(encoding="utf-8")
        for name in ("src/vanilla/slstm.py", "layer.py")
    )
    assert "iraw, fraw, zraw, oraw = torch.unbind(" in cell
    assert re.search(r"self\.fgate\(x_conv\),\s+self\.igate\(x_conv\),\s+self\.zgate\(x\),\s+self\.ogate\(x\),", layer)


def test_the_page_names_tests_that_there_are():
    page = (ROOT / "docs" / "oracles.rst").read_text(encoding="utf-8")
    named = re.findall(r"``tests/oracles/(\w+\.py)(?:::(\w+))?``", page)
    assert len(named) >= 8
    for file, test in named:
        source = (ROOT / "tests" / "oracles" / file).read_text(encoding="utf-8")
        assert f"def {test}(" in source or not test, (file, test)
