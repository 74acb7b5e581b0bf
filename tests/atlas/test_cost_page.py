"""The formulas of the cost page agree with linattn.cost at sizes that they were not fitted to."""

import pytest

import linattn
from linattn.atlas.cost_page import cost_formula, evaluate
from linattn.atlas.inspection import inspect_mixer
from linattn.atlas.measured import recurrence


@pytest.mark.parametrize("name", ["softmax", "gla", "gated_deltanet", "lstm", "rwkv6"])
def test_formulas_are_exact(name):
    p = cost_formula(inspect_mixer(name))
    assert p.error < 1e-12
    for dim, heads, tokens in ((256, 8, 333), (1536, 12, 5000)):
        c = linattn.cost(name, dim=dim, tokens=tokens, **({"heads": heads} if p.heads else {}))
        assert evaluate(p.parameters, dim, heads, tokens) == pytest.approx(c.parameters, rel=1e-12)
        assert tokens * evaluate(p.prefill, dim, heads, tokens) == pytest.approx(c.flops, rel=1e-12)
        assert evaluate(p.step, dim, heads, tokens) == pytest.approx(c.step_flops, rel=1e-12)
        assert evaluate(p.state, dim, heads, tokens) == pytest.approx(c.state_bytes, rel=1e-12)


def test_only_a_system_that_runs_the_kernels_has_their_times():
    kinds = {"gla": "channel", "retnet": "constant", "kda": "kda", "softmax": "softmax"}
    assert {name: recurrence(inspect_mixer(name)) for name in kinds} == kinds
    assert not any(recurrence(inspect_mixer(name)) for name in ("mamba", "rg_lru", "linear_transformer", "mlstm", "lstm")), (
        "scans, quotients, own rules"
    )


def test_a_cost_that_is_no_polynomial_says_how_far_off_it_is():
    p = cost_formula(inspect_mixer("rwkv7"))  # its ranks are rounded
    c = linattn.cost("rwkv7", dim=3072, tokens=2048)
    off = abs(evaluate(p.parameters, 3072, 16, 1) - c.parameters) / c.parameters
    assert 1e-4 < off <= p.error < 0.1
