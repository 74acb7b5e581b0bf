"""Based against fla-core's quadratic form and against taylor-series-linear-attention's layer with the same weights."""

import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected


def test_fla():
    """Its ε is 1e-6 where the authors' code has 1e-12, so its sums are divided here too."""
    mixer, x, naive = create("based", dim=64).double(), 3 * torch.randn(2, 75, 64, dtype=torch.float64), fla("based").naive_parallel_based
    q, k, v = projected(mixer, x)
    assert distance(mixer(x), merged(mixer, naive(q, k, v))) < 1e-5
    sums, total = naive(q, k, v, use_norm=False), naive(q, k, torch.ones_like(v), use_norm=False)
    assert distance(mixer(x), merged(mixer, sums / total)) < 1e-9
    assert_forms(mixer, x)


def test_taylor_series_layer():
    theirs = standins.taylor_series().TaylorSeriesLinearAttn(64, dim_head=16, heads=4).double()
    mixer, x = create("based", dim=64, causal=False).double(), 3 * torch.randn(2, 41, 64, dtype=torch.float64)
    k, v = theirs.to_kv[0].weight.chunk(2)
    weights = {"q_proj": theirs.to_q[0].weight, "k_proj": k, "v_proj": v, "o_proj": theirs.to_out[0].weight}
    mixer.load_state_dict({f"{name}.weight": w for name, w in weights.items()})
    assert distance(mixer(x), theirs(x)) < 1e-9
    assert_bidirectional(mixer, x)


def test_features_are_those_of_the_paper():
    """273 with every pair twice, 153 with each once."""
    expand = standins.taylor_series().second_taylor_expansion
    q, k = torch.randn(2, 5, 16, dtype=torch.float64)
    from linattn.ops.features import taylor2

    assert expand(q).shape[-1] == 273 and taylor2(q).shape[-1] == expand(q, remove_even_power_dups=True).shape[-1] == 153
    torch.testing.assert_close(taylor2(q) @ taylor2(k).T, expand(q) @ expand(k).T)
