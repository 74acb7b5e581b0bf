"""EfficientViT against timm's: its attention with its own weights, training included, and the blocks of a whole model."""

import pytest
import torch

from linattn.mixers import create
from linattn.mixers.vision.parts import to_image, to_tokens
from tests.oracles.compare import distance
from tests.oracles.images import compared, shaken, timm


@pytest.mark.parametrize("scales", [(5,), (3, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_attention(scales, training):
    theirs = shaken(timm().LiteMLA(64, 64, dim=16, scales=scales))
    theirs.float()  # they compute in float32 in any case
    theirs(torch.randn(4, 64, 9, 9))
    ours = create("efficientvit", dim=64, head_dim=16, scales=scales)
    values, gradients = compared(theirs.train(training), ours.train(training), torch.randn(2, 30, 64), 5, 6)
    assert values < 1e-5 and gradients < 1e-5


def test_blocks_of_a_whole_model():
    """The names and weights of every attention block of EfficientViT-B0; its two halves are two mixers, each with a residual."""
    model = timm().efficientvit_b0().eval()
    blocks = [block for stage in model.stages for block in stage.blocks if isinstance(block, timm().EfficientVitBlock)]
    assert len(blocks) == 4
    for block in blocks:
        dim = block.context_module.main.qkv.conv.in_channels
        attention, feed_forward = create("efficientvit", dim=dim, head_dim=16).eval(), create("mbconv", dim=dim).eval()
        attention.load_state_dict(block.context_module.main.state_dict())
        feed_forward.load_state_dict(block.local_module.main.state_dict())
        x = torch.randn(2, 35, dim)
        with torch.no_grad():
            y = x + attention(x, 5, 7)
            assert distance(y + feed_forward(y, 5, 7), to_tokens(block(to_image(x, 5, 7)))) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"), [({"head_dim": 12}, "dim must be a multiple of head_dim"), ({"scales": (4,)}, "an odd number")]
)
def test_what_there_is_not_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create("efficientvit", dim=64, **options)
