"""Reversible stacks: the gradients of the plain pass without saved activations between layers; states and decoding."""

import pytest
import torch

from linattn.models import LanguageModel, LMConfig


def model(**fields) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        LMConfig(**{"vocab_size": 30, "dim": 32, "layers": 4, "mixer": "gla, local", "block": "reversible"} | fields)
    ).double()


def plain(lm: LanguageModel, ids, **how):
    """The same sums with all activations saved."""
    first = second = lm.model.embedding(ids)
    for layer in lm.model.layers:
        first = first + layer.mixer(layer.mixer_norm(second), **how)
        second = second + layer.ffn(layer.ffn_norm(first))
    return lm.lm_head(lm.model.norm((first + second) / 2))


@pytest.mark.parametrize("how", [{}, {"mask": torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()}])
def test_gradients(how):
    lm, ids = model(), torch.randint(30, (2, 6))
    runs = []
    for logits in (lm(ids, **how), plain(lm, ids, **how)):
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
        runs.append([logits, *torch.autograd.grad((logits * weight).sum(), list(lm.parameters()))])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_frozen_parameters_and_autocast():
    lm, ids = model().float(), torch.randint(30, (2, 6))
    lm.model.layers[1].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(ids).float().square().mean()
    loss.backward()
    got = {n for n, p in lm.named_parameters() if p.grad is not None}
    assert got == {n for n, p in lm.named_parameters() if p.requires_grad}
    with torch.autocast("cpu", torch.bfloat16):  # rounding errors are equal on both sides
        loss = plain(lm, ids).float().square().mean()
    reference = torch.autograd.grad(loss, lm.model.embedding.weight)[0]
    assert (lm.model.embedding.weight.grad - reference).norm() < 0.01 * reference.norm()


def test_steps_are_the_whole():
    lm, ids = model().eval(), torch.randint(30, (2, 9))
    with torch.no_grad():
        whole, (first, state) = lm(ids), lm(ids[:, :4], return_state=True)
        parts = [first]
        for t in range(4, 9):
            y, state = lm(ids[:, t : t + 1], state, return_state=True)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_memory_does_not_grow_with_depth():
    """Memory saved by autograd for backward."""

    def kept(**fields):
        lm, bytes_kept = model(**fields), 0
        own = {p.untyped_storage().data_ptr() for p in lm.parameters()}

        def pack(t):
            nonlocal bytes_kept
            bytes_kept += 0 if t.untyped_storage().data_ptr() in own else t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            lm(torch.randint(30, (2, 50)))
        return bytes_kept

    assert kept(layers=8) == kept(layers=2)
    assert kept(layers=8, block="pre") > 3 * kept(layers=2, block="pre")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ffn": "none"}, "ffn must be in every layer if block is 'reversible'"),
        ({"residual_scales": {"gla": [1.0, 0.5]}}, "residual_scales must be empty"),
        ({"mixer": "rwkv7"}, "passes a tensor on from layer to layer"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)
