"""Softmax attention against torch's under a dense mask, and against transformers' Llama and Mistral layers with the same weights."""

import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

import linattn
from linattn import State
from linattn.mixers import CallContext, create
from tests.conformance.checks import CHECKS
from tests.ops.errors import EXACT
from tests.oracles.compare import distance

CANCELLED = 1e-6  # relative to the sum of the summands' magnitudes


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_mask(kv_heads):
    mixer = create("softmax", dim=32, heads=4, kv_heads=kv_heads).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    r = mixer.project(x, CallContext(x))
    k, v = (t.repeat_interleave(4 // kv_heads, 2).transpose(1, 2) for t in (r.k, r.v))
    visible = torch.ones(17, 17, dtype=torch.bool).tril()
    o = F.scaled_dot_product_attention(r.q.transpose(1, 2), k, v, attn_mask=visible)
    assert distance(mixer(x), mixer.o_proj(o.transpose(1, 2).flatten(-2))) < 1e-14


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_llama(kv_heads):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1, vocab_size=8)
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, 0).eval()
    ours = create("softmax", dim=32, heads=4, kv_heads=kv_heads)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 40, 32)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(40)[None])
    hidden = torch.full((40, 40), float("-inf")).triu(1)[None, None]
    wanted, _ = theirs(x, position_embeddings=angles, attention_mask=hidden)
    assert distance(ours(x), wanted) < 1e-5


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_mistral(kv_heads, window):
    """Its sliding_window counts the query's own token, as ours does."""
    config = MistralConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1, vocab_size=8, sliding_window=window
    )
    config._attn_implementation = "eager"
    theirs = MistralAttention(config, 0).eval()
    ours = create("softmax", dim=32, heads=4, kv_heads=kv_heads, window=window)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 150, 32)
    hidden = create_sliding_window_causal_mask(config, x, None, None, torch.arange(150)[None])
    wanted, _ = theirs(x, position_embeddings=MistralRotaryEmbedding(config)(x, torch.arange(150)[None]), attention_mask=hidden)
    assert distance(ours(x), wanted) < 1e-5


def banded(r, window):
    """Queries, keys and values [B, H, T, .] of a recurrence of 4 heads, 2 of keys, and the mask of 150 tokens."""
    age = torch.arange(150)[:, None] - torch.arange(150)
    k, v = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (r.k, r.v))
    return r.q.transpose(1, 2), k, v, (age >= 0) & (age < window)


def summands(mixer, x, window):
    """For the projections of queries and keys the norm of the sum of the magnitudes of their gradients' summands.

    Softmax's gradient P (dP - sum P dP) has two parts of similar size, and every token contributes a summand. The first part alone is the
    gradient with a constant denominator.
    """
    maps, mapped = {mixer.q_proj: "q_proj.weight", mixer.k_proj: "k_proj.weight"}, {}
    hooks = [m.register_forward_hook(lambda m, _x, y: mapped.update({maps[m]: y})) for m in maps]
    q, k, v, seen = banded(mixer.project(x, CallContext(x)), window)
    for hook in hooks:
        hook.remove()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = (scores - scores.logsumexp(-1, keepdim=True).detach()).exp()
    y = mixer.o_proj((weights @ v).transpose(1, 2).flatten(-2))
    parts = torch.autograd.grad(y.square().sum(), list(mapped.values()))
    return {name: 2 * torch.einsum("bte,btd->ed", g.abs(), x.abs()).norm().item() for name, g in zip(mapped, parts, strict=True)}


@pytest.mark.parametrize("window", [1, 7, 64, 130])
def test_banded_mask(window):
    """In float64 with gradients, in one pass and after a state; a window as long as the sequence is none.

    A token that sees only itself has the weight 1 for any score: the gradients of queries and keys are cancelled sums.
    """
    mixer, x = create("softmax", dim=32, heads=4, kv_heads=2, window=window).double(), torch.randn(2, 150, 32, dtype=torch.float64)
    x.requires_grad_()
    q, k, v, seen = banded(mixer.project(x, CallContext(x)), window)
    wanted = mixer.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(-2))
    first, state = mixer(x[:, :61], return_state=True)
    pieces = torch.cat([first, mixer(x[:, 61:], state)], 1)
    assert distance(mixer(x), wanted) < 1e-13 and distance(pieces, wanted) < 1e-13
    names, leaves = zip(("x", x), *mixer.named_parameters(), strict=True)
    right, *gradients = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (wanted, mixer(x), pieces)]
    floors = summands(mixer, x, window)
    for ours in gradients:
        for name, a, b in zip(names, ours, right, strict=True):
            assert distance(a, b) < 1e-12 or distance(a, b, CANCELLED * floors[name]) < EXACT[torch.float64], name
    full = create("softmax", dim=32, heads=4, kv_heads=2).double()
    full.load_state_dict(mixer.state_dict())
    assert (distance(full(x), wanted) < 1e-13) == (window >= 150)


# All checks of numbers except "state_bytes", tested below, and "past": tokens beyond the window are not seen.
WINDOWED = ("shape", "empty", "causality", "rows", "finite", "resume", "packed", "padding", "untouched", "saved", "checkpoint")


@pytest.mark.parametrize(("check", "window"), [*product(WINDOWED, (1, 3, 7)), ("compile", 3), ("mixing_matrix", 3)])
def test_conformance_with_a_window(check, window):
    CHECKS[check](partial(create, "softmax", window=window))


def test_the_cache_is_bounded_by_the_window():
    mixer, sizes = create("softmax", dim=32, window=6), []
    for tokens in (1, 4, 6, 300):
        _, state = mixer(torch.randn(2, tokens, 32), return_state=True)
        sizes.append(State([state]).nbytes)
        assert sizes[-1] == linattn.cost("softmax", dim=32, tokens=tokens, batch=2, dtype=torch.float32, window=6).state_bytes
        assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}.values()) == sizes[-1]
    assert set(sizes) == {2 * (2 * 5 * 32 * 4 + 8)}


def test_flops_count_the_pairs_that_are_seen():
    mixer = create("softmax", dim=32, heads=2, window=5)
    maps = 2 * 4 * 32 * 32
    for tokens, past in ((3, 0), (12, 0), (4, 3), (1, 2), (1, 100)):
        pairs = sum(min(past + t + 1, 5) for t in range(tokens))
        assert mixer.flops(torch.empty(1, tokens, 32), past) == tokens * maps + 4 * 32 * pairs


def test_a_bad_window():
    with pytest.raises(ValueError, match="window must be at least 1 token, the query's own, but came as 0"):
        create("softmax", dim=32, window=0)


@pytest.mark.parametrize("window", [None, 5])
def test_options_of_published_models(window):
    """Head sizes, partial rotation, norms, gate and biases: against explicit formulas, and in steps and pieces."""
    options = {"head_dim": 12, "rotated": 4, "norm_eps": 1e-6, "gated": True, "bias": True, "out_bias": True}
    ours = create("softmax", dim=32, heads=4, kv_heads=2, window=window, **options).double()
    for norm in (ours.q_norm, ours.k_norm):
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (-1, 12)) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    q, k = (t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * (1 + n.weight) for t, n in ((q, ours.q_norm), (k, ours.k_norm)))
    angle = torch.arange(17.0, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    q, k = (
        torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], -1)
        for a, b, rest in (t.split((2, 2, 8), -1) for t in (q, k))
    )
    scores = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) / 12**0.5
    age = torch.arange(17)[:, None] - torch.arange(17)
    seen = (age >= 0) & (age < (window or 17))
    o = torch.einsum("bhts,bshv->bthv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(2, 2)).flatten(-2)
    wanted = ours.o_proj(o * ours.g_proj(x).sigmoid())
    assert distance(ours(x), wanted) < 1e-12
    assert linattn.check_forms(ours).agree
    with pytest.raises(ValueError, match="rotated must be an even number from 0 to a head's 12 channels, but came as 13"):
        create("softmax", dim=32, head_dim=12, rotated=13)


def test_scale_and_plain_norms():
    """Gemma's scale of the scores and Qwen3's norms, against explicit formulas."""
    ours = create("softmax", dim=32, heads=4, rotated=0, norm_eps=1e-3, norm="rms", scale=0.7).double()
    for norm in (ours.q_norm, ours.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (4, 8)) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    q, k = (t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-3) * n.weight for t, n in ((q, ours.q_norm), (k, ours.k_norm)))
    scores = 0.7 * torch.einsum("bthk,bshk->bhts", q, k)
    later = torch.ones(17, 17, dtype=torch.bool).triu(1)
    o = torch.einsum("bhts,bshv->bthv", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    assert distance(ours(x), ours.o_proj(o.flatten(-2))) < 1e-13


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "layer"}, "norm must be one of 'zero_centered_rms', 'rms', but came as 'layer'"),
        ({"scale": 0.0}, "scale must be positive, but came as 0.0"),
        ({"scaling": {"factor": 2.0}}, "scaling must have a rope_type among 'linear', 'llama3', 'yarn', but it came as None"),
        ({"scaling": {"rope_type": "linear"}}, "scaling 'linear' must have factor, but came with rope_type"),
        ({"scaling": {"rope_type": "linear", "factor": -1}}, "scaling: factor must be a positive number, but came as -1"),
        (
            {
                "scaling": {
                    "rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 9
                }
            },
            "scaling: high_freq_factor must exceed low_freq_factor",
        ),
    ],
)  # fmt: skip
def test_bad_options_of_published_models(options, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        create("softmax", dim=32, **options)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"kv_heads": 2}], ids=str)
def test_a_short_convolution_on_queries_keys_and_values(options):
    """Equal to torch's convolution before attention, for any split of the sequence."""
    mixer = create("softmax", dim=32, heads=4, conv_width=4, **options).double()
    x = torch.randn(2, 17, 32, dtype=torch.float64)
    together = torch.cat([p(x) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)
    convolved = F.silu(F.conv1d(F.pad(together.mT, (3, 0)), mixer.short_conv.weight, groups=together.shape[-1])).mT
    wanted = convolved.split([p.out_features for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], -1)[2]
    assert distance(mixer.project(x, CallContext(x)).v.flatten(2), wanted) < 1e-14
    linattn.check_forms(mixer)
    with pytest.raises(ValueError, match="conv_width"):
        create("softmax", dim=32, conv_width=4, causal=False)
