"""Mixtures of experts in a stack: losses in training, reports, decoding, compilation, checkpointing, precision."""

import pytest
import torch
import torch.nn.functional as F

from linattn import LanguageModel, LMConfig, ffn
from linattn.ffn.dispatch import slots
from linattn.hf import LinattnForCausalLM
from linattn.hf import LMConfig as HFConfig

NAMES = ("switch", "gshard", "st_moe")
SIZES = {"vocab_size": 11, "dim": 32, "layers": 2, "mixer": "gla"}


def ids(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_added_in_training(name):
    torch.manual_seed(0)
    model = LinattnForCausalLM(HFConfig(**SIZES, ffn=f"{name}, swiglu", ffn_options={name: {"balance": 3.0, "z": 2.0}}))
    x = ids(2, 9)
    with ffn.reports() as told:
        out = model(x, labels=x)
    assert [sorted(r.losses) for r in told] == [["balance", "z"]]
    plain = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    added = sum(told[0].losses.values())
    assert added > 1 and abs(out.loss - plain - added) < 1e-5
    halves = [model(x, labels=labels, num_items_in_batch=16).loss for labels in (x, x)]
    assert abs(sum(halves) / 2 - out.loss) < 1e-5, "several batches share one divisor"
    (gradient,) = torch.autograd.grad(added, model.model.layers[0].ffn.router.weight)
    assert gradient.abs().max() > 1e-3
    model.eval()
    assert abs(model(x, labels=x).loss - F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing(name):
    torch.manual_seed(0)
    model, x, runs = LinattnForCausalLM(HFConfig(**SIZES, ffn=name)).double(), ids(2, 9), []
    for checkpointed in (False, True):
        model.model.gradient_checkpointing = checkpointed
        loss = model(x, labels=x).loss
        runs.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_decoding(name):
    """In evaluation tokens are independent of others' experts: steps equal one pass."""
    torch.manual_seed(0)
    model, x = LanguageModel(LMConfig(**SIZES, ffn=name)).double().eval(), ids(2, 9)
    with ffn.reports() as told:
        whole = model(x)
    assert [int(r.counts["refused"]) for r in told] == [0, 0]
    state, steps = None, []
    for t in range(9):
        y, state = model(x[:, t : t + 1], state, return_state=True)
        steps.append(y)
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_capacity_for_all_is_no_capacity(name):
    """As many slots as tokens equal dispatch token by token, with gradients."""
    torch.manual_seed(0)
    m, x, runs = ffn.create(name, 16, 24, count=5).double(), torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True), []
    for m.capacity in (5.0, None):
        y = m(x)
        runs.append([y, *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])])
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name):
    m = ffn.create(name, 16, 24)
    for shape in ((16,), (0, 16), (3, 16), (2, 0, 16), (0, 3, 16), (2, 3, 4, 16)):
        for m.training in (True, False):
            with ffn.reports() as told:
                assert m(torch.randn(shape)).shape == shape
            assert all(loss.isfinite() for loss in told[0].losses.values())


def test_a_compiled_layer_tells_too():
    m, x = ffn.create("switch", 16, 24), torch.randn(2, 9, 16)
    torch.compiler.reset()
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    compiled(x)  # once without a listener
    with ffn.reports() as told, ffn.reports() as inner:
        compiled(x)
    with ffn.reports() as wanted:
        m(x)
    assert not told and inner[0].counts["dropped"] == wanted[0].counts["dropped"]
    assert torch.equal(inner[0].losses["balance"], wanted[0].losses["balance"])


@pytest.mark.parametrize("name", NAMES)
def test_the_router_is_wide(name):
    """Scores that are equal in bfloat16 are distinguished, under autocast and in a bfloat16 model."""
    m = ffn.create(name, 2, 4, count=4)
    with torch.no_grad():
        m.router.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0**-9], [0.0, 0.0]]))
    x = torch.tensor([[[1.0, 1.0]]])
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.logits(x)
    assert logits.dtype == torch.float32 and logits[0, 0, 2] - logits[0, 0, 1] == 2.0**-9
    logits = m.bfloat16().logits(x.bfloat16())
    assert logits.dtype == torch.float32 and logits[0, 0, 2] - logits[0, 0, 1] == 2.0**-9


def test_slots():
    """First choices first, then by token; unwanted choices take no slots."""
    chosen = torch.tensor([[[0, 1], [0, 1], [1, 0]]])
    wanted = torch.tensor([[[True, True], [True, False], [True, True]]])
    assert slots(chosen, wanted, 2, 2).tolist() == [[[0, 3], [1, 4], [2, 4]]]


def test_counts_add_up():
    m, x = ffn.create("gshard", 16, 24, capacity=0.5), torch.randn(3, 16, 16)
    with ffn.reports() as told:
        m(x), m(x)
    total = ffn.added_counts(told)
    assert total["tokens"] == 96 and 0 < total["dropped"] < total["refused"] < 2 * 96
    assert abs(ffn.added_loss(told) - 2 * told[0].losses["balance"]) < 1e-6 and ffn.added_loss([]) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("switch", {"capacity": 0}, "capacity must be a number above 0, or None for no limit, but came as 0"),
        ("switch", {"eval_capacity": -1.0}, "eval_capacity must be a number above 0"),
        ("switch", {"jitter": -0.1}, "jitter must be at least 0"),
        ("gshard", {"count": 1}, "count must be at least the 2 experts of a token, but came as 1"),
        ("st_moe", {"count": 0}, "count must be at least 1 expert"),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        ffn.create(name, 16, **options)


def test_reversible_blocks_refuse_losses():
    with pytest.raises(ValueError, match="'switch' adds a term to the loss"):
        LMConfig(**SIZES, ffn="switch", block="reversible")
    LMConfig(**SIZES, ffn="experts", block="reversible")
