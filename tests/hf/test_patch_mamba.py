"""transformers' Mamba, Falcon-Mamba and Jamba on our selective scan."""

from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.hf.patch import patch_transformers
from tests.hf.agreement import Agreement
from tests.hf.patched import TOKENS, VOCABULARY, distance, logits_of, model_of, pieces


@pytest.fixture(params=["mamba", "falcon_mamba", "jamba"])
def family(request):
    return request.param


class TestPatch(Agreement):
    op = "selective_scan"
    step = "selective_step_"
    pieces_of_theirs: ClassVar = {"mamba": 0.01, "falcon_mamba": 0.01, "jamba": 0.01}  # their scan starts from zeros in every call
    left_of_theirs = ("mamba",)  # the projection's bias is added to padding, which the convolution reads


class Copies(TorchDispatchMode):
    """Records shapes of copied tensors."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def test_time_steps_are_not_copied_for_gradients_that_nobody_records(family):
    """torch multiplies a weight that requires gradients and a batch in another order, and transposes the product."""
    model, ids = model_of(family), torch.randint(3, VOCABULARY, (1, 13))
    with patch_transformers([family]), torch.no_grad(), Copies() as copies:
        model(input_ids=ids, use_cache=False)
    assert (1, 64, 13) not in copies.shapes
    with Copies() as copies:
        wanted = logits_of(model, ids)
    assert (1, 64, 13) in copies.shapes
    with patch_transformers([family]):
        assert all(p.requires_grad for p in model.parameters())
        assert distance(logits_of(model, ids), wanted) < 1e-5


def test_a_convolution_that_sees_no_token_before():
    model, ids = model_of("mamba", conv_kernel=1), torch.randint(3, VOCABULARY, (2, TOKENS))
    whole = logits_of(model, ids)
    with patch_transformers(["mamba"]):
        assert distance(pieces(model, ids), whole) < 2e-5
