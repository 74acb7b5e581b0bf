"""Steps as CUDA graphs have the bits of eager steps."""

import pytest
import torch

pytest.importorskip("transformers")
from linattn.distill.job import job_of, source_of
from linattn.distill.options import ConvertOptions
from linattn.distill.stages import trained
from linattn.distill.step import WARM_UP, Step, optimizer_of
from tests.convert.models import softmax_model


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet, softmax", "kda", "mamba2", "rwkv7"])
def test_captured_steps_have_the_bits_of_eager_ones(mixer, number, text):
    options = ConvertOptions(
        mixer=mixer, text=(str(text),), tokens1=4096, tokens2=4096, tokens3=4096, context=64, context3=64, batch_size=8, device="cuda"
    )
    found = []
    for capture in (False, True):
        torch.manual_seed(0)  # of the student's new weights
        job = job_of(source_of(softmax_model()), options)
        stage = job.stages[number - 1]
        step = Step(job, stage, optimizer_of(trained(job.student, stage), stage, job.device), capture=capture)
        packed = job.packed(stage)
        losses = [step(i, job.batch(packed, range(8 * i, 8 * i + 8))) for i in range(WARM_UP + 4)]
        assert (step._graph is not None) == capture
        found.append((torch.stack(losses), job.student.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(t, found[1][1][name]) for name, t in found[0][1].items())
