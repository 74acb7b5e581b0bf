"""Mamba-3 with several ranks: with one rank it is Mamba-3; step by step it is in test_mamba3.py."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance


def test_one_rank_is_mamba3():
    """Up to the pairing of channels: those of B and C are reordered."""
    torch.manual_seed(0)
    ours, plain = create("mamba3_mimo", dim=32, rank=1, state_size=12).double(), create("mamba3", dim=32, state_size=12).double()
    order = torch.tensor([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11])  # half after half, from pair after pair
    weights = {name: t.clone() for name, t in plain.state_dict().items()}
    for name in ("B_bias", "C_bias", "B_norm.weight", "C_norm.weight"):
        weights[name] = weights[name][..., order]
    x, b, c, rest = weights["in_proj.weight"].split([64, 12, 12, len(weights["in_proj.weight"]) - 88])
    weights["in_proj.weight"] = torch.cat([x, b[order], c[order], rest])
    weights |= {name: torch.ones_like(t) for name, t in ours.state_dict().items() if name.startswith("mimo")}
    ours.load_state_dict(weights)
    tokens = torch.randn(2, 21, 32, dtype=torch.float64)
    assert distance(ours(tokens), plain(tokens)) < 1e-9
