"""Tensors shared by layers of one kind (RWKV-7's first values) in all ways of running a model."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn.mixers import CallContext, Mixer, Recurrence, registry
from linattn.models import LanguageModel, LMConfig
from tests.conformance.test_distributed import run


def model(dim=32, layers=5) -> LanguageModel:
    """RWKV-7 with another mixer between its layers, no parameter at a special value."""
    lm = LanguageModel(LMConfig(vocab_size=50, dim=dim, layers=layers, mixer="rwkv7, gla")).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return lm


class Stack(nn.Module):
    """The layers alone, [B, T, D] -> [B, T, D], for DDP and FSDP2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.model = model(dim).model
        del self.model.embedding

    def arguments(self, x):
        return (x,)

    def forward(self, x):
        return self.model(embeddings=x)[0]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_options_follow_from_the_place():
    first, second, third = (model().model.layers[i].mixer for i in (0, 2, 4))
    assert [m.value_residual for m in (first, second, third)] == [False, True, True]
    assert not hasattr(first, "v0")
    plain = LanguageModel(LMConfig(dim=32, layers=2, mixer="rwkv7", mixer_options={"rwkv7": {"value_residual": False}}))
    assert not any(layer.mixer.value_residual for layer in plain.model.layers), "a model's config wins"
    depths = LanguageModel(LMConfig(dim=32, layers=3, mixer="rwkv4")).model.layers
    close(depths[1].mixer.time_mix_key, (torch.arange(32) / 32) ** (1 - 1 / 3))  # from 1 to almost 0: two thirds in the second of three


def test_the_first_values_reach_every_later_layer():
    lm, ids = model(), torch.randint(50, (1, 6))
    seen = []
    for i in (0, 2, 4):
        lm.model.layers[i].register_forward_hook(lambda _, args, out: seen.append((args[2], out[2])))
    lm(ids)
    (none, first), *later = seen
    assert none is None and first.shape == (1, 6, 1, 32)
    assert all(given is first and passed is first for given, passed in later)


def test_pieces_padding_and_packing():
    lm, a, b = model(), torch.randint(50, (1, 5)), torch.randint(50, (1, 8))
    alone = lm(a), lm(b)
    mask = torch.arange(8) >= torch.tensor([[3], [0]])
    padded = lm(torch.cat([F.pad(a, (3, 0), value=7), b]), mask=mask)
    close(padded[:1, 3:], alone[0])
    close(padded[1:], alone[1])
    close(lm(torch.cat([a, b], 1), cu_seqlens=torch.tensor([0, 5, 13])), torch.cat(alone, 1))
    pieces, state = [], None
    for piece in b.split([3, 1, 1, 3], 1):
        logits, state = lm(piece, state, return_state=True)
        pieces.append(logits)
    close(torch.cat(pieces, 1), alone[1])
    assert all(set(layer) == {"S", "last", "position"} for layer in state.layers[::2]), "the state holds no values"


def test_gradient_checkpointing_gives_the_same_bits():
    lm, ids, gradients = model(), torch.randint(50, (2, 7)), []
    for lm.model.gradient_checkpointing in (False, True):
        lm.zero_grad()
        lm(ids).square().sum().backward()
        gradients.append([p.grad.clone() for p in lm.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_compile_and_export():
    lm, ids = model(layers=3), torch.randint(50, (2, 7))

    def prefill_and_step(ids):
        logits, state = lm(ids, return_state=True)
        return torch.cat([logits, lm(ids[:, :1], state)], 1)

    with warnings.catch_warnings():  # Dynamo itself makes an instance of an autograd.Function, which PyTorch deprecates
        warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'> should not be instantiated", DeprecationWarning)
        torch.compiler.reset()
        close(torch.compile(prefill_and_step, fullgraph=True, backend="eager")(ids), prefill_and_step(ids))
        with torch.no_grad():
            close(torch.export.export(lm, (ids,)).module()(ids), lm(ids))


def test_ddp_and_fsdp2(tmp_path: Path, programs):
    assert run(programs, tmp_path, Stack)[Stack] == {"ddp": None, "fsdp2": None}


def test_the_face_for_transformers():
    transformers = pytest.importorskip("transformers")
    import linattn

    config = linattn.LMConfig.preset("rwkv7", vocab_size=50, dim=32, layers=6)
    lm, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.randint(50, (2, 5))
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.3 * torch.randn_like(p))
    want = ids
    for _ in range(4):
        want = torch.cat([want, lm(want, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(lm.generate(ids, max_new_tokens=4, do_sample=False), want)


def test_kinds_do_not_mix(monkeypatch):
    """Another mixer that shares tensors beside RWKV-7: each gets its own."""

    class Counter(Mixer):
        shares = True

        def project(self, x, call: CallContext) -> Recurrence:
            assert call.shared is None or call.shared.ndim == 0
            call.shared = x.new_zeros(()) if call.shared is None else call.shared + 1
            head = x[:, :, None]
            return Recurrence(head, head, head)

        def read(self, o, x):
            return o[:, :, 0]

    entry = registry.info("rwkv7")
    monkeypatch.setitem(registry._registered, "counter", type(entry)(**{**vars(entry), "name": "counter", "cls": Counter}))
    lm, passed = LanguageModel(LMConfig(vocab_size=50, dim=32, layers=6, mixer="rwkv7, counter")), []
    for layer in lm.model.layers[1::2]:
        layer.register_forward_hook(lambda _, args, out: passed.append(out[2].item()))
    lm(torch.randint(50, (1, 4)))
    assert passed == [0, 1, 2]
