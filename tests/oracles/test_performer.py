"""Performer against performer-pytorch with the same weights and random features, and in the limit of many features against softmax."""

import copy
import itertools
from functools import partial

import pytest
import torch

from linattn.mixers import create
from linattn.ops.features import orthogonal_gaussian
from tests.conformance.checks import CHECKS
from tests.oracles import standins
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected


def layer(**options):
    """Theirs and ours with one set of weights."""
    performer = standins.performer()
    theirs = performer.FastAttention(16, **options).double()
    ours = create("performer", dim=64, causal=False, kernel="relu" if options else "softmax").double()
    assert ours.projection.shape == theirs.projection_matrix.shape
    ours.projection.copy_(theirs.projection_matrix)
    return performer, theirs, ours


@pytest.mark.parametrize("options", [{}, {"generalized_attention": True}])
def test_bidirectional(options):
    _, theirs, ours = layer(**options)
    x = 3 * torch.randn(2, 41, 64, dtype=torch.float64)
    assert distance(ours(x), merged(ours, theirs(*projected(ours, x)))) < 1e-9
    assert_bidirectional(ours, x)


def test_layer_with_their_weights():
    theirs = standins.performer().SelfAttention(64, heads=4, dim_head=16).eval()
    ours, x = create("performer", dim=64, causal=False), torch.randn(2, 41, 64)
    names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "o_proj"}
    weights = theirs.state_dict()
    ours.load_state_dict(
        {"projection": weights.pop("fast_attention.projection_matrix")}
        | {names[n.split(".")[0]] + "." + n.split(".")[1]: w for n, w in weights.items()}
    )
    assert distance(ours(x), theirs(x)) < 1e-5


def test_causal_relu():
    performer, theirs, ours = layer(generalized_attention=True)
    x, ours.causal = 3 * torch.randn(2, 75, 64, dtype=torch.float64), True
    q, k, v = projected(ours, x)
    q, k = (performer.generalized_kernel(t, projection_matrix=theirs.projection_matrix) for t in (q, k))
    wanted = performer.causal_linear_attention_noncuda(q, k, v, eps=0.0)
    assert distance(ours(x), merged(ours, wanted)) < 1e-9
    assert_forms(ours, x)


def test_causal_softmax():
    """Without ε any stabiliser cancels: theirs, the maximum of all keys, and ours, the running maximum."""
    performer, theirs, ours = layer()
    x, ours.causal, ours.eps = 3 * torch.randn(2, 75, 64, dtype=torch.float64), True, 0.0
    q, k, v = projected(ours, x)
    q, k = (performer.softmax_kernel(t, projection_matrix=theirs.projection_matrix, is_query=t is q, eps=0.0) for t in (q, k))
    wanted = performer.causal_linear_attention_noncuda(q, k, v, eps=0.0)
    assert distance(ours(x), merged(ours, wanted)) < 1e-9
    assert_forms(ours, x)


def test_the_stabiliser_token_by_token():
    """With ε: the state decays by the growth of the running maximum."""
    ours, x = create("performer", dim=64).double(), 5 * torch.randn(2, 50, 64, dtype=torch.float64)
    q, k, v = projected(ours, x)
    w, m = ours.projection, ours.projection.shape[0]
    q, k = q / 2, k / 2  # 2 = 16^1/4
    wq, wk = q @ w.T, k @ w.T
    fq = ((wq - q.square().sum(-1, keepdim=True) / 2 - wq.amax(-1, keepdim=True)).exp() + 1e-4) / m**0.5
    s, z, top, outputs = 0.0, 0.0, torch.full((2, 4), -torch.inf, dtype=torch.float64), []
    for t in range(50):
        new = torch.maximum(top, wk[:, :, t].amax(-1))
        fade = (top - new).exp()
        fk = ((wk[:, :, t] - k[:, :, t].square().sum(-1, keepdim=True) / 2 - new[..., None]).exp() + 1e-4) / m**0.5
        s, z = fade[..., None, None] * s + fk[..., None] * v[:, :, t, None], fade[..., None] * z + fk
        outputs.append(torch.einsum("bhm,bhmv->bhv", fq[:, :, t], s) / (fq[:, :, t] * z).sum(-1, keepdim=True))
        top = new
    assert distance(ours(x), merged(ours, torch.stack(outputs, 2))) < 1e-9
    assert_forms(ours, x)


def test_keys_that_would_overflow():
    mixer, x = create("performer", dim=32), torch.randn(1, 40, 32)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(300)
    y, state = mixer(x, return_state=True)
    assert y.isfinite().all() and state["log_max"].max() > 89  # whose exponential is infinite in float32


def test_random_features():
    """Blocks of rows at right angles with lengths of Gaussian vectors, and products that are the exponential on average."""
    w = orthogonal_gaussian(40, 16, generator=torch.Generator().manual_seed(0))
    for block in w.split(16):
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-4
    theirs = standins.performer().gaussian_orthogonal_random_matrix(16_000, 16)
    ours = orthogonal_gaussian(160_000, 16, generator=torch.Generator().manual_seed(1))
    for moment in (1, 2, 4):
        assert (ours.norm(dim=1).pow(moment).mean() / theirs.norm(dim=1).pow(moment).mean() - 1).abs() < 0.03
    assert ours.mean(0).abs().max() < 0.05 and (ours.T @ ours / 160_000 - torch.eye(16)).abs().max() < 0.05
    q, k = 0.3 * torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    estimate = ((ours @ q - q.square().sum() / 2) + (ours @ k - k.square().sum() / 2)).exp().mean()
    assert (estimate / (q @ k).exp() - 1).abs() < 0.03


def test_many_features_are_softmax_attention():
    mixer = create("performer", dim=32, heads=2, random_features=40_000, eps=0.0).double()
    mixer.redraw(torch.Generator().manual_seed(0))
    x = torch.randn(1, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = projected(mixer, x)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert distance(mixer(x) - mixer.o_proj.bias, merged(mixer, wanted) - mixer.o_proj.bias) < 0.02


def test_redrawing():
    mixer = create("performer", dim=32)
    old = mixer.projection.clone()
    mixer.redraw(torch.Generator().manual_seed(3))
    drawn = mixer.projection.clone()
    mixer.redraw(torch.Generator().manual_seed(3))
    assert torch.equal(mixer.projection, drawn) and not torch.equal(drawn, old)
    assert mixer.bfloat16().projection.dtype == torch.float32


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="kernel must be 'softmax' or 'relu', but came as 'exp'"):
        create("performer", dim=32, kernel="exp")
    with pytest.raises(ValueError, match="random_features must be at least 1"):
        create("performer", dim=32, random_features=0)
    with pytest.raises(ValueError, match="redraw_every must be at least 1 step of training, but came as 0"):
        create("performer", dim=32, redraw_every=0)


def trained(mixer, steps, *, seed=0, passes=1):
    """Train ``mixer`` for some steps; returns its random features after each."""
    optimizer, seen = torch.optim.SGD(mixer.parameters(), lr=0.1), []
    batches = torch.randn(30, passes, 2, 7, 32, generator=torch.Generator().manual_seed(seed))
    for step in range(*steps):
        optimizer.zero_grad()
        for x in batches[step]:
            mixer(x).square().mean().backward()
        optimizer.step()
        seen.append(mixer.projection.clone())
    return seen


def redrawing(seed=0, every=3):
    torch.manual_seed(seed)
    return create("performer", dim=32, redraw_every=every)


def test_redrawing_while_training():
    mixer = redrawing()
    start, seen = mixer.projection.clone(), trained(mixer, (8,), passes=2)
    assert all(torch.equal(w, start) for w in seen[:2]), "steps are counted, not passes"
    assert [torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [True, False, True, True, False, True, True]
    assert mixer.steps == 8
    again = redrawing()
    assert all(torch.equal(a, b) for a, b in zip(trained(again, (8,), passes=2), seen, strict=True)), "the same seed, the same features"
    other = trained(redrawing(seed=1), (8,))
    assert not torch.equal(other[3], seen[3])
    drawn = orthogonal_gaussian(*start.shape, generator=torch.Generator().manual_seed(int(mixer.redraw_seed) + 6))
    assert torch.equal(seen[-1], drawn)


def test_redrawing_in_training_that_is_resumed():
    """In a new mixer with another seed, from a state_dict; and in a copy."""
    whole, first, second = redrawing(), redrawing(), redrawing(seed=5)
    trained(whole, (10,))
    trained(first, (4,))
    copied = copy.deepcopy(first)
    trained(second, (1,))  # and it has counted already
    second.load_state_dict(first.state_dict())
    for mixer in (second, copied, first):
        trained(mixer, (4, 10))
        for name, t in whole.state_dict().items():
            assert torch.equal(mixer.state_dict()[name], t), name


def test_only_training_redraws():
    mixer, other, start = redrawing(every=1), redrawing(seed=2, every=1), None
    start = mixer.projection.clone()
    trained(other, (2,))
    mixer(torch.randn(1, 4, 32))
    assert mixer.steps == 0, "another's optimizer"
    trained(mixer.eval(), (2,))
    assert mixer.steps == 0 and torch.equal(mixer.projection, start), "not in training"
    mixer.train().q_proj.requires_grad_(False)
    trained(mixer, (2,))
    assert mixer.steps == 2 and not torch.equal(mixer.projection, start), "some of its parameters are frozen"
    plain = create("performer", dim=32)
    assert "steps" not in plain.state_dict() and "redraw_seed" not in plain.state_dict()
    before = trained(plain, (2,))
    assert torch.equal(*before)


def test_checkpointing_and_saving_of_a_model_that_redraws(tmp_path):
    """Recomputation uses the features of the first pass; save_pretrained keeps the seed of the next ones."""
    import linattn
    from linattn.hf import LinattnForCausalLM

    def model():
        torch.manual_seed(0)
        options = {"performer": {"redraw_every": 2}}
        return LinattnForCausalLM(linattn.LMConfig(vocab_size=20, dim=32, layers=2, mixer="performer", mixer_options=options))

    def steps(lm, count, checkpointing=False):
        lm.train().model.gradient_checkpointing = checkpointing
        optimizer, ids = torch.optim.SGD(lm.parameters(), lr=0.1), torch.arange(14).view(2, 7)
        for _ in range(count):
            optimizer.zero_grad()
            lm(ids, labels=ids).loss.backward()
            optimizer.step()
        return lm

    plain, recomputed = steps(model(), 5), steps(model(), 5, checkpointing=True)
    steps(model(), 3).save_pretrained(tmp_path)
    resumed = steps(LinattnForCausalLM.from_pretrained(tmp_path), 2)
    for lm in (recomputed, resumed):
        for name, t in plain.state_dict().items():
            assert torch.equal(lm.state_dict()[name], t), name


@pytest.mark.parametrize("check", ["seed", "compile", "checkpoint", "saved", "untouched"])
def test_conformance_while_redrawing(check):
    CHECKS[check](partial(create, "performer", redraw_every=3))
