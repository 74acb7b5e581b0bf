"""The chunked loss: cross entropy and z-loss of torch's own operations, with their gradients."""

import pytest
import torch
import torch.nn.functional as F

from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models import loss as module
from linattn.models.language import Head
from linattn.models.loss import CHUNK_BYTES, TokenLoss, chunk_of

B, T, D, V = 2, 7, 8, 11


def plain(hidden, head, labels, z):
    """The definition, on all logits at once."""
    logits = head(hidden)[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100)
    return loss + z * (logits.logsumexp(-1) ** 2)[targets != -100].mean()


def inputs(cap):
    torch.manual_seed(0)
    head = Head(LMConfig(dim=D, vocab_size=V, logit_soft_cap=cap, layers=1)).double()
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (B, T))
    labels[0, 3] = labels[1, -1] = -100
    return hidden, head, labels


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("z", "cap"), [(0.0, None), (0.3, None), (0.3, 1.5)])
def test_it_is_the_plain_loss(chunk, z, cap):
    hidden, head, labels = inputs(cap)
    found = TokenLoss(chunk, z)(hidden, head, labels)
    wanted = plain(hidden, head, labels, z)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(3 * loss, (hidden, head.weight)) for loss in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_z_loss_is_for_training_alone():
    hidden, head, labels = inputs(None)
    with torch.no_grad():
        torch.testing.assert_close(TokenLoss(4, 0.3)(hidden, head.eval(), labels), plain(hidden, head, labels, 0.0))


def test_a_batch_of_several_is_divided_by_all_labels():
    hidden, head, labels = inputs(None)
    count = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(TokenLoss(4)(hidden, head, labels, 3 * count) * 3, TokenLoss(4)(hidden, head, labels))


def test_in_bfloat16_it_stays_as_near_as_the_products_are():
    """Products in bfloat16, sums in float32: the error is that of the operands, two roundings of 2**-9 each."""
    hidden, head, labels = inputs(None)
    wanted = plain(hidden, head, labels, 0.0)
    (exact,) = torch.autograd.grad(wanted, hidden)
    hidden32, head32 = hidden.detach().float().requires_grad_(), head.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = TokenLoss(4)(hidden32, head32, labels)
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found, hidden32)
    assert gradient.dtype == torch.float32
    assert (gradient - exact).norm() < 8 * 2**-9 * exact.norm()


def test_the_model_takes_it():
    torch.manual_seed(0)
    model = LinattnForCausalLM(LMConfig(dim=32, layers=1, vocab_size=50, mixer="gla")).double()
    ids = torch.randint(50, (B, T))
    wanted = model(ids, labels=ids)
    model.token_loss = TokenLoss(5)
    found = model(ids, labels=ids)
    torch.testing.assert_close(found.loss.float(), wanted.loss)  # which transformers computes in float32
    assert found.logits is None and model(ids).logits.shape == (B, T, 50)


def test_packed_sequences_predict_nothing_across_their_borders():
    torch.manual_seed(0)
    model = LinattnForCausalLM(LMConfig(dim=32, layers=1, vocab_size=50, mixer="gla")).double()
    ids, cu = torch.randint(50, (1, 9)), torch.tensor([0, 4, 9])
    wanted = model(ids, labels=ids, cu_seqlens=cu).loss
    model.token_loss = TokenLoss(5)
    torch.testing.assert_close(model(ids, labels=ids, cu_seqlens=cu).loss.float(), wanted)


def test_chunks_keep_to_their_bytes():
    assert chunk_of(100, 256) == 100
    chunk = chunk_of(1 << 20, 32000)
    assert chunk == 2048 and 4 * 32000 * chunk <= CHUNK_BYTES < 4 * 32000 * 2 * chunk
    assert chunk_of(5, 10**12) == 1


def test_compiled_it_has_the_same_gradients():
    torch.manual_seed(0)
    model = LinattnForCausalLM(LMConfig(dim=32, layers=1, vocab_size=50, mixer="gla")).train()
    model.token_loss = TokenLoss(5, 0.1)
    ids, gradients = torch.randint(50, (2, 9)), []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        run(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(("z", "cap"), [(0.0, None), (0.3, 1.5)])
def test_a_compiled_chunk_is_the_plain_loss(z, cap, monkeypatch):
    """Its gradient compares tokens with targets, while the other scatters."""
    through = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: through(function, backend="aot_eager", **how))
    module._compiled.cache_clear()
    hidden, head, labels = inputs(cap)
    found, wanted = TokenLoss(4, z, compile=True)(hidden, head, labels), plain(hidden, head, labels, z)
    module._compiled.cache_clear()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(each, (hidden, head.weight)) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
