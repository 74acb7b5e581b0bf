"""On a GPU: a captured training step equals the eager one, and concurrent trainings on streams equal single ones."""

import pytest
import torch

from linattn import tasks
from linattn.experiment import trainer, workers
from linattn.reproduce import ledger, synthetic

pytestmark = pytest.mark.gpu


def _parts():
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 2), (32, 4))
    return [tasks.multi_query_recall(256, tokens=t, pairs=p, vocab_size=32, generator=generator).to("cuda") for t, p in shapes]


def _trained(mixer, steps_before_capture, monkeypatch):
    monkeypatch.setattr(trainer, "EAGER", steps_before_capture)
    model = synthetic.build(mixer, 0, before="base_conv", vocab_size=32, dim=64, layers=2).cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = synthetic.finish(synthetic.train(model, _parts(), synthetic.Recipe(4, 32, 3e-3), seed=0))
    torch.cuda.synchronize()
    return loss, model


@pytest.mark.parametrize("mixer", ["softmax", "gla", "deltanet", "rwkv7", "mamba2:state_size=16:head_dim=16"])
def test_captured_steps_are_eager_ones(mixer, monkeypatch):
    (eager, a), (captured, b) = (_trained(mixer, n, monkeypatch) for n in (10_000, 3))
    assert captured == pytest.approx(eager, rel=1e-3)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)


def test_trainings_side_by_side_are_those_alone():
    study = ledger.load("recall")
    recall = pytest.importorskip("linattn.reproduce.recall")
    part = recall.Part("multi_query_recall", {"tokens": 16, "pairs": 2, "vocab_size": 32}, 256)
    recall.TASKS["test"] = recall.Task((part,), {"mqar": {"2 pairs": part}}, (32,), (3e-3,), 2, 32)
    try:
        settings = recall.Settings(("gla", "deltanet", "softmax"), 1, ("test",))
        runs = [{**run, "device": "cuda"} for run in recall.runs(settings, [])]
        alone = [workers.measured(study.measure, run).result["accuracy"] for run in runs]
        taking = [(workers.steps(study.measure, run), torch.cuda.stream(torch.cuda.Stream())) for run in runs]
        together = [None] * len(runs)
        while None in together:
            for i, (steps, stream) in enumerate(taking):
                if together[i] is None:
                    with stream:
                        one = next(steps)
                    together[i] = one and one.result["accuracy"]
        assert together == pytest.approx(alone, abs=0.02)
    finally:
        del recall.TASKS["test"]
