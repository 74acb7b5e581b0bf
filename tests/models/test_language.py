"""The backbone: states, masks and packing through the stack, variants, initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.models import LanguageModel, LMConfig

VARIANTS = {
    "plain": {},
    "post": {"block": "post"},
    "layer norm": {"norm": "layer", "embedding_norm": True},
    "no feed-forward": {"ffn": "none"},
    "some feed-forwards": {"ffn": "none, swiglu", "block": "post"},
    "tied": {"tie_embeddings": True},
}


def model(**options) -> LanguageModel:
    return LanguageModel(LMConfig(**{"vocab_size": 50, "dim": 32, "layers": 2, "mixer": "gla, softmax", **options})).double()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_with_a_state_equal_the_whole(variant):
    lm, ids = model(**VARIANTS[variant]), torch.randint(50, (3, 11))
    whole = lm(ids)
    pieces, state = [], None
    for piece in ids.split([4, 1, 1, 5], 1):
        logits, state = lm(piece, state, return_state=True)
        pieces.append(logits)
    close(torch.cat(pieces, 1), whole)
    assert state.position.tolist() == [11, 11, 11]


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_and_packing_change_nothing(variant):
    lm = model(**VARIANTS[variant])
    a, b = torch.randint(50, (1, 5)), torch.randint(50, (1, 8))
    alone = lm(a), lm(b)
    padded = torch.cat([F.pad(a, (3, 0), value=7), b])
    mask = torch.arange(8) >= torch.tensor([[3], [0]])
    out = lm(padded, mask=mask)
    close(out[:1, 3:], alone[0])
    close(out[1:], alone[1])
    packed = lm(torch.cat([a, b], 1), cu_seqlens=torch.tensor([0, 5, 13]))
    close(packed, torch.cat(alone, 1))


def test_blocks_follow_their_equations():
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    pre, post = (model(block=b, mixer="gla", layers=1).model for b in ("pre", "post"))
    block = pre.layers[0]
    y = x + block.mixer(block.mixer_norm(x))
    close(pre(embeddings=x)[0], pre.norm(y + block.ffn(block.ffn_norm(y))))
    block = post.layers[0]
    y = block.mixer_norm(x + block.mixer(x))
    close(post(embeddings=x)[0], block.ffn_norm(y + block.ffn(y)))
    bare = model(ffn="none", mixer="gla", layers=1).model
    close(bare(embeddings=x)[0], bare.norm(x + bare.layers[0].mixer(bare.layers[0].mixer_norm(x))))
    assert [type(model(norm=n).model.norm).__name__ for n in ("rms", "layer")] == ["RMSNorm", "LayerNorm"]


def test_rows_of_a_state_can_be_picked():
    lm, ids = model(), torch.randint(50, (3, 6))
    _, state = lm(ids[:, :5], return_state=True)
    close(lm(ids[[2, 0], 5:], state.select([2, 0])), lm(ids)[[2, 0], 5:])


def test_what_is_no_tensor_and_no_state_is_refused():
    model = LanguageModel(LMConfig(vocab_size=16, dim=32, layers=1, mixer="gla"))
    with pytest.raises(ValueError, match=r"ids must be integers of shape \[B, T\], but came as list"):
        model([[1, 2]])
    with pytest.raises(TypeError, match="state must be a linattn.State, as returned by an earlier call, but came as dict"):
        model(torch.tensor([[1, 2]]), {})


def test_a_state_of_another_model_is_refused():
    _, state = model(layers=3)(torch.zeros(1, 2, dtype=torch.long), return_state=True)
    with pytest.raises(ValueError, match="the state has 3 layers, but the model has 2"):
        model()(torch.zeros(1, 1, dtype=torch.long), state)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(3, dtype=torch.int64), r"integers of shape \[B, T\], but came as torch.int64 \[3\]"),
        (torch.zeros(1, 3), r"integers of shape \[B, T\], but came as torch.float32 \[1, 3\]"),
        (torch.tensor([[0, 50]]), "from 0 to 49, but hold 50"),
        (torch.tensor([[0, -1]]), "from 0 to 49, but hold -1"),
    ],
)
def test_what_is_no_token_is_refused(ids, said):
    with pytest.raises(ValueError, match=f"^ids must be {said}$"):
        LanguageModel(LMConfig(vocab_size=50, dim=32, layers=1))(ids)


def test_the_feed_forward_grows_in_steps_of_one():
    sizes = [sum(p.numel() for p in model(ffn_dim=n).parameters()) for n in (63, 64, 65)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * 3 * 32


def test_the_names_of_parameters_are_frozen():
    """Checkpoints depend on them."""
    outside = {name for name in model(embedding_norm=True, layers=1).state_dict() if ".mixer." not in name}
    assert outside == {
        "model.embedding.weight",
        "model.embedding_norm.weight",
        "model.layers.0.mixer_norm.weight",
        "model.layers.0.ffn_norm.weight",
        "model.layers.0.ffn.gate_proj.weight",
        "model.layers.0.ffn.up_proj.weight",
        "model.layers.0.ffn.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_tied_embeddings_are_one_parameter():
    lm = model(tie_embeddings=True)
    assert lm.lm_head.weight is lm.model.embedding.weight
    assert lm.to(torch.bfloat16).lm_head.weight is lm.model.embedding.weight


def test_time_constants_stay_in_float32():
    lm = model(mixer="mamba2, gated_deltanet").to(torch.bfloat16)
    narrow = {name.rsplit(".", 1)[-1] for name, p in lm.named_parameters() if p.dtype != torch.bfloat16}
    assert narrow == {"A_log", "dt_bias"}
    assert all(p.dtype in (torch.bfloat16, torch.float32) for p in lm.parameters())


def test_a_new_model_knows_nothing():
    lm = LanguageModel(LMConfig(vocab_size=200, dim=64, layers=6, mixer="gla, softmax"))
    ids = torch.randint(200, (4, 40))
    loss = F.cross_entropy(lm(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(200)) < 0.1


def test_what_enters_the_residual_stream_shrinks_with_depth():
    def spread(layers):
        block = LanguageModel(LMConfig(dim=64, layers=layers, mixer="gla")).model.layers[0]
        return torch.stack([block.mixer.o_proj.weight.std(), block.ffn.down_proj.weight.std()])

    torch.testing.assert_close(spread(2) / spread(8), torch.full((2,), 2.0), rtol=0.05, atol=0)


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    lm, ids, calls = model(), torch.randint(50, (2, 7)), []
    lm.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))

    def gradients():
        lm.zero_grad()
        calls.clear()
        lm(ids).square().sum().backward()
        return [p.grad.clone() for p in lm.parameters()], len(calls)

    plain, once = gradients()
    lm.model.gradient_checkpointing = True
    again, twice = gradients()
    assert (once, twice) == (1, 2)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_models_need_no_transformers(programs):
    code = """
import sys
sys.modules["transformers"] = None
import linattn, torch
model = linattn.LanguageModel(linattn.LMConfig(vocab_size=9, dim=32, layers=1, mixer="gla"))
print(list(model(torch.zeros(1, 3, dtype=torch.long)).shape), linattn.LMConfig.__module__)
"""
    assert programs.python("-c", code).stdout.split("] ") == ["[1, 3, 9", "linattn.models.config\n"]


def test_a_transformers_that_is_too_old_is_told_and_survived(programs):
    code = """
import sys, types
sys.modules["transformers"] = types.ModuleType("transformers")
import linattn
print(linattn.LanguageModel.__name__)
"""
    done = programs.python("-c", code)
    assert done.stdout == "LanguageModel\n"
    assert "linattn.hf does not work with this version of transformers: cannot import name" in done.stderr


def test_blocks_norms_and_scales():
    """Each against explicit formulas from the model's parts."""
    ids = torch.randint(20, (2, 7))
    how = {"vocab_size": 20, "dim": 32, "layers": 2, "mixer": "gla", "norm_eps": 1e-3}
    scales = {"gla": [1.5, 0.5], "swiglu": [1.0, 2.0]}
    for block in ("pre", "post", "normed", "sandwich"):
        for norm in ("rms", "zero_centered_rms", "layer"):
            config = LMConfig(**how, block=block, norm=norm, residual_scales=scales, embedding_scale=3.0, logit_soft_cap=0.1)
            model = LanguageModel(config).eval()
            x = model.model.embedding(ids) * 3
            for layer in model.model.layers:
                for f, n, after, (a, b) in (
                    (layer.mixer, layer.mixer_norm, layer.mixer_post_norm, scales["gla"]),
                    (layer.ffn, layer.ffn_norm, layer.ffn_post_norm, scales["swiglu"]),
                ):
                    assert n.eps == 1e-3
                    for i, m in enumerate([n] if after is None else [n, after]):
                        torch.nn.init.uniform_(m.weight, 0.2 + i, 0.7 + i)
                    assert (after is None) == (block != "sandwich")
                    y = f(x if block == "post" else n(x))
                    past = n(x) if block == "normed" else x
                    x = a * past + b * (y if after is None else after(y))
                    x = n(x) if block == "post" else x
            x = x if block == "post" else model.model.norm(x)
            wanted = 0.1 * torch.tanh(x @ model.lm_head.weight.T / 0.1)
            torch.testing.assert_close(model(ids), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_block_is_that_of_torch(dtype):
    """Its kernel runs with gradients, torch's operations without: both have torch's bits."""
    from linattn.mixers.norms import RMSNorm
    from linattn.ops.cpu import library

    norm, x = RMSNorm(48, eps=1e-6).to(dtype), torch.randn(2, 5, 48, dtype=dtype, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    ours, wanted = norm(x), torch.nn.RMSNorm.forward(norm, x)
    assert ours.dtype == dtype and ("KernelsBackward" in type(ours.grad_fn).__name__) == (library.reason() is None)
    torch.testing.assert_close(ours, wanted)
    d_y, given = torch.randn_like(x), (x, norm.weight)
    for one, two in zip(torch.autograd.grad(ours, given, d_y), torch.autograd.grad(wanted, given, d_y), strict=True):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        assert torch.equal(norm(x), torch.nn.RMSNorm.forward(norm, x))


def test_a_zero_centred_norm():
    from linattn.mixers.norms import ZeroCenteredRMSNorm

    norm, x = ZeroCenteredRMSNorm(8), torch.randn(3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), 1 + norm.weight, eps=1e-6))


def test_options_of_single_layers():
    config = LMConfig(dim=32, layers=2, mixer="gla", mixer_options={"gla": {"heads": 2, "tau": 8.0}}, layer_options=[{}, {"heads": 4}])
    first, second = LanguageModel(config).model.layers
    assert (first.mixer.heads, second.mixer.heads, second.mixer.tau) == (2, 4, 8.0)


@pytest.mark.parametrize("norm", ["rms", "layer", "zero_centered_rms"])
def test_under_autocast_the_residual_stream_has_its_dtype(norm):
    """Parameters and their gradients stay float32; without autocast nothing changes."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(vocab_size=50, dim=32, layers=2, mixer="gla, softmax", norm=norm)).train()
    ids, seen = torch.randint(50, (2, 9)), []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        low = model(ids)
    assert seen == [torch.bfloat16] * 2
    low.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model(ids)
    assert seen[2:] == [torch.float32] * 2 and exact.dtype == torch.float32
    assert 0 < (low - exact).norm() < 0.05 * exact.norm()
