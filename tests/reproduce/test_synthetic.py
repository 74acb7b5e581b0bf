import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn import tasks
from linattn.experiment.trainer import Batches
from linattn.reproduce import synthetic
from linattn.tasks import IGNORED, Examples


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _model(**changes):
    return synthetic.build("gla", 0, **{"vocab_size": 12, "dim": 32, "layers": 1, **changes})


def _examples(count=48, tokens=8, pairs=2):
    return tasks.multi_query_recall(count, tokens=tokens, pairs=pairs, vocab_size=12, generator=_generator())


def test_logits_are_those_of_the_language_model_at_the_places():
    model, examples = _model(), _examples(4)
    places, answers = examples.asked()
    every = model.language(examples.ids)
    torch.testing.assert_close(model(examples.ids, places), every.gather(1, places[..., None].expand(-1, -1, 12)))
    picked = F.cross_entropy(model(examples.ids, places).flatten(0, 1), answers.flatten())
    torch.testing.assert_close(picked, F.cross_entropy(every.flatten(0, 1), examples.labels.flatten(), ignore_index=IGNORED))


def test_the_same_seed_is_the_same_model_whatever_was_drawn_before():
    one = _model()
    torch.randn(3)
    for a, b in zip(one.parameters(), _model().parameters(), strict=True):
        assert torch.equal(a, b)
    assert synthetic.build("gla", 1, vocab_size=12, dim=32, layers=1).language.lm_head.weight.ne(one.language.lm_head.weight).any()
    both = synthetic.build("softmax:window=4", 0, before="base_conv", vocab_size=12, dim=32, layers=2).language.config
    assert both.mixer_names == ["base_conv", "softmax"]
    assert both.options_of(1)["window"] == 4


def test_a_training_step_by_step():
    model, reference = _model(), _model()
    examples, recipe = _examples(8), synthetic.Recipe(epochs=3, batch_size=8, learning_rate=1e-2)
    losses = [synthetic.finish(synthetic.train(model, [examples], recipe, seed=0))]
    decayed, plain = ([p for p in reference.parameters() if (p.ndim >= 2) == kind] for kind in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95))
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1.0 if step == 0 else 0.5 * (1 + math.cos(math.pi * (step - 1) / 2)))
        optimizer.zero_grad()
        loss = F.cross_entropy(reference.language(examples.ids).flatten(0, 1), examples.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    assert losses == [pytest.approx(loss.item(), rel=1e-5)]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_example_once_an_epoch_in_batches_of_one_length():
    several = [_examples(n, tokens) for n, tokens in ((48, 8), (20, 10), (3, 12))]
    parts = [Batches((e.ids, *e.asked()), 16, torch.device("cpu")) for e in several]
    order = synthetic._order(parts, _generator())
    assert [sum(part is p for part, _ in order) for p in parts] == [3, 1, 1]
    assert sorted(torch.cat([rows for part, rows in order if part is parts[0]]).tolist()) == list(range(48))
    assert [len(rows) for part, rows in order if part is parts[2]] == [3], "too few for a batch, and still used"
    again, other = synthetic._order(parts, _generator()), synthetic._order(parts, _generator(1))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(order, again, strict=True))
    assert not all(a[1].shape == b[1].shape and torch.equal(a[1], b[1]) for a, b in zip(order, other, strict=True))


def test_it_learns_and_ends_when_it_has_learned():
    examples = tasks.parity(64, tokens=1, generator=_generator())
    model = _model(vocab_size=2)
    steps = iter(synthetic.train(model, [examples], synthetic.Recipe(epochs=50, batch_size=16, learning_rate=1e-2, enough=0.01)))
    count = sum(1 for _ in steps)
    assert 4 <= count < 100
    assert count % 4 == 0, "whole epochs"
    assert synthetic.accuracy(model, examples) == 1.0


def test_accuracy_counts_questions():
    labels = torch.tensor([[1, IGNORED], [1, 1], [0, 1]])
    examples = Examples(torch.zeros(3, 2, dtype=torch.int64), labels, 2)

    class One(synthetic.Asked):
        def forward(self, ids, places):
            return torch.tensor([0.0, 1.0]).expand(*places.shape, 2)

    model = One(_model().language.config)
    assert synthetic.accuracy(model, examples) == pytest.approx(4 / 5)
    assert synthetic.accuracy(model, examples, batch_size=2) == pytest.approx(4 / 5)


@pytest.mark.parametrize("mixer", ["deltanet", "softmax"])
def test_reading_in_segments_gives_the_same_answer(mixer, monkeypatch):
    model = synthetic.build(mixer, 0, before="base_conv", vocab_size=16, dim=32, layers=2)
    examples = tasks.induction_heads(12, tokens=30, generator=_generator())
    places, answers = examples.asked()
    best = model(examples.ids, places).argmax(-1)
    expected = (best == answers).double().mean().item()
    right = Examples(examples.ids, torch.where(examples.labels == IGNORED, IGNORED, best), 16)
    for segment in (7, 30, 64):
        for together in (1, 40, 1 << 16):
            monkeypatch.setattr(synthetic, "TOGETHER", (together, together))
            assert synthetic.last_right(model, examples, segment) == expected
        assert synthetic.last_right(model, right, segment) == 1.0


def test_bytes_are_those_of_the_state():
    model = _model()
    _, state = model.language(torch.zeros(1, 9, dtype=torch.int64), return_state=True)
    assert synthetic.state_bytes(model, 9) == state.nbytes
    window = synthetic.build("softmax:window=4", 0, vocab_size=12, dim=32, layers=1)
    full = synthetic.build("softmax", 0, vocab_size=12, dim=32, layers=1)
    assert synthetic.state_bytes(window, 8) == synthetic.state_bytes(window, 64)
    assert synthetic.state_bytes(full, 64) > 7 * synthetic.state_bytes(full, 8)


def test_a_decoder_sees_the_last_output_alone():
    model = synthetic.build("gla", 0, tokens=8, vocab_size=16, dim=32, layers=1)
    examples = tasks.compression(3, tokens=8, generator=_generator())
    places, _ = examples.asked()
    assert places.tolist() == [list(range(7))] * 3
    hidden, _ = model.language.model(examples.ids)
    place = torch.cat([f(torch.arange(7.0)[:, None] * 1e4 ** (-torch.arange(0, 32, 2) / 32)) for f in (torch.sin, torch.cos)], 1)
    expected = model.language.lm_head(model.layers(hidden[:, -1:] + place))
    torch.testing.assert_close(model(examples.ids, places), expected)
