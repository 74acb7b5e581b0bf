"""Sequence to sequence: decoding token by token equals one pass with all mixers; visibility; padding, files, refusals."""

import pytest
import torch

from linattn import mixers
from linattn.models import Seq2SeqConfig, Seq2SeqModel
from linattn.models.seq2seq import STOP
from tests.oracles.compare import distance

TINY = {"source_vocab": 9, "target_vocab": 7, "length": 12, "dim": 32, "layers": 2, "ffn_dim": 48}
CROSS = [name for name in mixers.available() if mixers.info(name).kind == "cross"]


def made(**given) -> Seq2SeqModel:
    torch.manual_seed(1)
    return Seq2SeqModel(Seq2SeqConfig(**TINY | given)).double().eval()


def pair(rows=2, source=6, target=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 9, (rows, source), generator=generator), torch.randint(1, 7, (rows, target), generator=generator)


def written(model, source, mask=None, count=5):
    """Greedy decoding without a state: the whole target again for every token."""
    target = torch.full((len(source), 1), STOP)
    for _ in range(count):
        target = torch.cat([target, model(source, target, mask)[:, -1:].argmax(-1)], 1)
    rows = [row[1:].tolist() for row in target]
    return [row[: row.index(STOP)] if STOP in row else row for row in rows]


ROLES = [
    {"encoder": "softmax", "decoder": "softmax", "cross": "cross_softmax"},
    {"encoder": "cosformer", "decoder": "cosformer", "cross": "cross_cosformer", "ratio": 0.8},
    {"encoder": "linear_transformer, gla", "decoder": "gla, lstm", "cross": "cross_relu_attention, cross_linear_transformer"},
]


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("roles", ROLES, ids=["softmax", "cosformer", "one for each block"])
def test_writing_token_by_token_is_the_whole_at_once(roles, spread):
    model, (source, _) = made(**roles, spread=spread), pair(4)
    mask = torch.arange(6) < torch.tensor([6, 3, 5, 1])[:, None]
    got = model.decode(source, mask, max_tokens=5)
    assert [row.tolist() for row in got] == written(model, source, mask)
    assert len({tuple(row.tolist()) for row in got}) > 1


@pytest.mark.parametrize("cross", CROSS)
def test_any_cross_mixer(cross):
    model, (source, _) = made(cross=cross), pair()
    assert [row.tolist() for row in model.decode(source, max_tokens=4)] == written(model, source, count=4)


@pytest.mark.parametrize("roles", ROLES, ids=["softmax", "cosformer", "one for each block"])
def test_who_sees_what(roles):
    """A target's token sees the earlier ones and all of the source except padding."""
    model, (source, target) = made(**roles), pair(1)
    later, other = target.clone(), source.clone()
    later[:, 3:], other[:, -1] = 1 + target[:, 3:] % 6, 1 + source[:, -1] % 8
    y = model(source, target)
    assert y.shape == (1, 5, 7)
    assert torch.equal(model(source, later)[:, :3], y[:, :3])
    assert ((model(other, target) - y).abs().amax(-1) > 1e-9).all()
    padded = torch.nn.functional.pad(source, (0, 3))
    assert distance(model(padded, target, torch.arange(9)[None] < 6), y) < 1e-12


@pytest.mark.parametrize("spread", [True, False])
def test_padding_of_a_source_may_stand_anywhere(spread):
    """Padding before and between tokens does not change their positions."""
    model, (source, target) = made(spread=spread), pair(1)
    mask = torch.tensor([[False, False, True, True, True, False, True, True, True]])
    padded = torch.zeros(1, 9, dtype=torch.int64).masked_scatter(mask, source)
    assert distance(model(padded, target, mask), model(source, target)) < 1e-12


def test_each_blocks_mixer_is_its_own():
    model = made(**ROLES[2], mixer_options={"gla": {"heads": 2}})
    names = [[type(b.branch).info.name for b in part] for part in (model.encoder.mixers, model.decoder.mixers, model.decoder.crosses)]
    assert names == [["linear_transformer", "gla"], ["gla", "lstm"], ["cross_relu_attention", "cross_linear_transformer"]]
    assert not model.encoder.mixers[0].branch.causal and model.encoder.mixers[1].branch.causal, "gla cannot read both ways"
    assert made(cross="cross_cosformer", ratio=0.6).decoder.crosses[0].branch.ratio == 0.6


def test_spread_places_are_all_learned_and_always_in_order():
    model = made(spread=True).train()
    source, _ = pair(200)
    places = model._drawn(source)
    assert (places.diff(dim=1) > 0).all() and places.unique().tolist() == list(range(12))
    assert torch.equal(model._spread(torch.arange(6), torch.tensor([6]))[0], torch.tensor([1, 3, 5, 7, 9, 11]))
    assert model._spread(torch.arange(9), torch.tensor([6, 0])).max() == 11, "beyond what is expected is the last place"


def test_rows_end_where_they_stop():
    model, (source, _) = made(), pair(3)
    with torch.no_grad():
        model.head.weight.zero_(), model.head.bias.copy_(torch.arange(7.0).flip(0))
    assert [len(row) for row in model.decode(source)] == [0, 0, 0]
    with torch.no_grad():
        model.head.bias[STOP] = -1.0
    assert [len(row) for row in model.decode(source)] == [11, 11, 11]
    assert [len(row) for row in model.decode(source, max_tokens=0)] == [0, 0, 0]
    assert model.decode(source[:0]) == []


@pytest.mark.parametrize("roles", ROLES)
def test_a_source_without_tokens_is_one_of_padding_alone(roles):
    model, (source, _) = made(**roles), pair(2)
    nothing = torch.zeros_like(source, dtype=torch.bool)
    assert all(torch.equal(a, b) for a, b in zip(model.decode(source[:, :0]), model.decode(source, nothing), strict=True))


def test_every_parameter_learns():
    model, (source, target) = made(dropout=0.1, spread=True).train(), pair(16)
    model(source, target).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_files(tmp_path):
    model, (source, target) = made(**ROLES[1]).float(), pair()
    model.save(tmp_path)
    again = Seq2SeqModel.load(tmp_path)
    assert again.config == model.config and torch.equal(again(source, target), model(source, target))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_vocab": 0}, "target_vocab must be an integer of at least 1"),
        ({"ratio": 0}, "ratio must be a number above 0"),
        ({"encoder": "focused"}, "encoder: mixers of sequences are wanted, but 'focused' is of the kind grid"),
        ({"decoder": "clustered"}, "decoder: causal mixers of sequences are wanted, but 'clustered' is bidirectional"),
        ({"cross": "softmax"}, "cross: cross mixers are wanted, but 'softmax' is of the kind sequence"),
        ({"mixer_options": {"gla": {}}}, "mixer_options names 'gla'"),
        ({"mixer_options": {"softmax": {"causal": True}}}, "causal follows from the role"),
        ({"ffn": "mlq"}, "no feed-forward is called 'mlq'"),
    ],
)
def test_what_no_model_can_be_made_of_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Seq2SeqConfig(**TINY | wrong)


def test_longer_sequences_are_refused():
    model, (source, target) = made(), pair(1, 13, 5)
    with pytest.raises(ValueError, match="may have at most 12 tokens, but came with 13"):
        model(source, target)
    with pytest.raises(ValueError, match="max_tokens must be from 0 to length - 1, 11, but came as 12"):
        model.decode(source[:, :3], max_tokens=12)
