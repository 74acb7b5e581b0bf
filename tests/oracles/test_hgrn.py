"""HGRN against fla-core's recurrence, between the paper's gates and read-out."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.mixers.decay.hgrn2 import forget
from tests.oracles.compare import distance, fla


@pytest.mark.parametrize("lower_bound", [0.0, 0.7])
def test_fla(lower_bound):
    mixer = create("hgrn", dim=64, lower_bound=lower_bound)
    torch.nn.init.normal_(mixer.norm.weight)
    x = 4 * torch.randn(2, 75, 64)
    gate = lower_bound + (1 - lower_bound) * torch.sigmoid((x @ mixer.f_proj.weight.T).double())
    new = (1 - gate).float() * F.silu(x @ mixer.v_proj.weight.T)
    h, last = fla("hgrn").naive_recurrent_hgrn(new, gate.log().float(), output_final_state=True)
    o = F.rms_norm(h, (64,), mixer.norm.weight, 1e-5) * F.silu(x @ mixer.g_proj.weight.T)
    y, state = mixer(x, return_state=True)
    assert distance(y, o @ mixer.o_proj.weight.T) < 1e-5
    assert distance(state["h"], last) < 1e-5


def test_gates_near_zero_and_one():
    """In float32 against float64, each number by itself."""
    x = torch.tensor([-8000.0, -80.0, -20.0, -3.0, 0.0, 3.0, 15.0, 18.0, 25.0, 60.0])
    for lower in (0.0, 0.3, 0.99):
        wide, bound = x.double(), torch.tensor(lower, dtype=torch.float32).double()
        kept = 1 - bound
        wanted = torch.log1p(-kept * torch.sigmoid(-wide)) if lower else F.logsigmoid(wide)
        decay, key = forget(x, torch.tensor(lower))
        assert ((decay - wanted).abs() <= 1e-6 * wanted.abs()).all(), (lower, decay, wanted)
        assert (decay <= 0).all()
        assert ((key - kept * torch.sigmoid(-wide)).abs() <= 1e-6 * key.abs()).all()
