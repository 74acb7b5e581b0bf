"""DeltaProduct without a decay: with one substep it is DeltaNet; fla-core's recurrence is in test_gated_deltaproduct.py."""

import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def test_one_substep_is_the_delta_rule():
    torch.manual_seed(0)
    mixer, x = create("deltaproduct", dim=64, substeps=1), 2 * torch.randn(2, 40, 64)
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        q, k, v, beta = (t.transpose(1, 2) for t in (r.q, r.k, r.v, r.beta))
        o = fla("delta_rule").delta_rule_recurrence(q, k, v, beta)[0].transpose(1, 2)
        assert distance(mixer(x), mixer.read(o, x)) < 1e-5
