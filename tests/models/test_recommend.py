"""The recommendation model: causality with every mixer; padding, files, refusals."""

import pytest
import torch

from linattn import mixers
from linattn.models import ImageModel, RecommendConfig, RecommendModel
from linattn.models.recommend import padded
from tests.oracles.compare import distance

TINY = {"items": 30, "length": 12, "dim": 32, "layers": 2, "ffn_dim": 48}


def made(**given) -> RecommendModel:
    torch.manual_seed(1)
    return RecommendModel(RecommendConfig(**TINY | given)).double().eval()


def histories(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(30, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("mixer", ["linrec", "softmax", "gla, linrec", "mamba2"])
def test_no_score_knows_later_items(mixer):
    model, (items,) = made(mixer=mixer), histories(12)
    other = items.clone()
    other[7:] = (other[7:] + 1) % 30
    a, b = model(items[None]), model(other[None])
    assert a.shape == (1, 12, 30)
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.allclose(a[:, 7:], b[:, 7:])


def test_both_ways_every_score_knows_all_items():
    model, (items,) = made(mixer="linrec", causal=False), histories(12)
    other = items.clone()
    other[-1] = (other[-1] + 1) % 30
    assert ((model(items[None]) - model(other[None])).abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mixer", ["linrec", "softmax"])
def test_padding_changes_nothing(mixer, causal):
    model, taken = made(mixer=mixer, causal=causal), histories(3, 12, 1)
    items, mask = padded(taken, 12)
    scores = model(items, mask)
    for row, real, history in zip(scores, mask, taken, strict=True):
        assert distance(row[real], model(history[None])[0]) < 1e-12
    front = model(items[:1].roll(9, 1), mask[:1].roll(9, 1))
    assert distance(front[0, 9:], scores[0, :3]) < 1e-12, "padding may stand in front"


def test_recommend_ranks_by_the_last_score_of_the_latest_items():
    model, (history, short) = made(), histories(40, 2)
    got = model.recommend([history, short], 5)
    for row, taken in zip(got, (history[-12:], short), strict=True):
        assert row.tolist() == model(taken[None])[0, -1].argsort(descending=True)[:5].tolist()
    assert model.recommend([short], 100).shape == (1, 30)
    with pytest.raises(ValueError, match="at least one item each"):
        model.recommend([short[:0]])


def test_every_parameter_learns_and_dropout_is_for_learning_only():
    model, (items,) = made(dropout=0.5), histories(12)
    assert torch.equal(model(items[None]), model(items[None]))
    model.train()
    assert not torch.equal(model(items[None]), model(items[None]))
    model(items[None]).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_files(tmp_path):
    model, taken = made(mixer="linrec, softmax", mixer_options={"linrec": {"key_norm": "column"}}).float(), histories(5)
    model.save(tmp_path)
    again = RecommendModel.load(tmp_path)
    assert again.config == model.config and torch.equal(again(taken[0][None]), model(taken[0][None]))
    with pytest.raises(ValueError, match="not the config of a linattn-image model"):
        ImageModel.load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"items": 0}, "items must be an integer of at least 1"),
        ({"dropout": 1.0}, "dropout must be a share from 0 to below 1"),
        ({"causal": 1}, "causal must be True or False"),
        ({"mixer": "linrek"}, "no mixer is called 'linrek'"),
        ({"mixer": "focused"}, "'focused' is of the kind grid"),
        ({"mixer": "clustered"}, "mixers of sequences that are causal, but 'clustered' is bidirectional"),
        ({"mixer": "gla", "causal": False}, "sequences that are not causal, but 'gla' is causal"),
        ({"mixer_options": {"linrec": {"causal": False}}}, "causal is False, but the model's is True"),
        ({"mixer_options": {"softmax": {}}}, "mixer_options names 'softmax'"),
        ({"mixer_options": {"linrec": {"head": 2}}}, "linrec has no option 'head'"),
        ({"ffn": "mlq"}, "no feed-forward is called 'mlq'"),
        ({"ffn_options": {"swiglu": {}}}, "ffn_options names 'swiglu'"),
    ],
)
def test_what_no_model_can_be_made_of_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RecommendConfig(**TINY | wrong)


def test_no_histories_and_longer_ones_are_refused():
    with pytest.raises(ValueError, match="histories must hold at least one history, but came empty"):
        made().recommend([])
    with pytest.raises(ValueError, match="T at most 12, but came with \\[1, 13\\]"):
        made()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("name", [n for n in mixers.available() if mixers.info(n).resumable][::8])
def test_any_causal_mixer(name):
    if not mixers.info(name).cls.shares:
        assert made(mixer=name, layers=1)(histories(5)[0][None]).isfinite().all()
