"""The image model: any bidirectional mixer, any resolution, files, and folding of norms."""

import json
import math

import pytest
import torch

from linattn import mixers
from linattn.models import ImageConfig, ImageModel, LanguageModel, LMConfig
from linattn.models.vision import PRESETS
from tests.oracles.compare import distance
from tests.oracles.images import timm, tokens

OURS = ("focused", "agent", "mobile", "efficientvit", "slab")
TINY = {"dim": 32, "layers": 1, "image_size": (8, 8), "patch_size": 2, "ffn_dim": 48}


def images(count: int = 3, height: int = 8, width: int = 8, channels: int = 1) -> torch.Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mixer", [*OURS, "performer", "softmax", "efficient_attention, focused"])
def test_every_mixer_that_reads_both_ways(mixer):
    """Logits for any image size; each depends on every pixel, and every parameter gets a gradient."""
    model = ImageModel(ImageConfig(mixer=mixer, classes=7, **TINY | {"layers": 2}))
    for height, width in ((8, 8), (12, 6), (2, 2)):
        assert model(images(2, height, width)).shape == (2, 7)
    x = images().requires_grad_()
    logits = model(x)
    assert (torch.autograd.grad(logits[:, 0].sum(), x, retain_graph=True)[0] != 0).all()
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_overlapping_patches_are_as_many_and_see_their_neighbours():
    apart, overlapping = (ImageModel(ImageConfig(overlap=overlap, **TINY)) for overlap in (False, True))
    for model, seen in ((apart, 4), (overlapping, 9)):
        x = images(1).requires_grad_()
        model.layers = torch.nn.ModuleList()
        y = model.features(x)
        assert y.shape == (1, 16, 32)
        (gradient,) = torch.autograd.grad(y[0, 5].sum(), x)
        assert gradient.count_nonzero() == seen


def test_what_a_model_can_be_made_of_is_what_the_registry_says():
    config = ImageConfig(mixer="performer, agent*2", layers=4, dim=32, mixer_options={"agent": {"agents": 4}})
    blocks = ImageModel(config).layers
    assert [type(b.mixer).info.name for b in blocks] == ["performer", "agent", "agent", "performer"]
    assert not blocks[0].mixer.causal and blocks[1].mixer.side == 2
    assert blocks[1].mixer.ah_bias.shape[3] == config.grid[0] == 8, "positions are learned for the model's own grid"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mixer": "gla"}, "an image model needs mixers of a grid, or of a sequence both ways, but 'gla' is causal"),
        ({"mixer": "focussed"}, "no mixer is called 'focussed'; did you mean 'focused'"),
        ({"ffn": "swigloo"}, "no feed-forward is called 'swigloo'"),
        ({"mixer_options": {"agent": {}}}, "mixer_options names 'agent', but the mixers are focused"),
        ({"mixer_options": {"focused": {"agents": 4}}}, "focused has no option 'agents'"),
        ({"mixer": "performer", "mixer_options": {"performer": {"causal": True}}}, "causal must be False for images, but is True"),
        ({"ffn_options": {"geglu": {}}}, "ffn_options names 'geglu'"),
        ({"image_size": (8, 9), "patch_size": 2}, "image_size must be multiples of patch_size 2"),
        ({"image_size": (None, 8)}, "image_size must be an integer of at least 1, but came as None"),
        ({"image_size": (0, 8)}, "image_size must be an integer of at least 1, but came as 0"),
        ({"image_size": 8}, "image_size must be a height and a width, but came as 8"),
        ({"image_size": (8, 8, 8)}, "image_size must be a height and a width"),
        ({"classes": 0}, "classes must be an integer of at least 1"),
        ({"patch_size": 0}, "patch_size must be an integer of at least 1"),
        ({"norm": "batch"}, "norm must be one of"),
    ],
)
def test_what_no_model_can_be_made_of_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**wrong)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (2, 1, 9, 8), (2, 1, 0, 8)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must have shape \[B, 1, height, width\] with sides that are multiples of 2"):
        ImageModel(ImageConfig(**TINY))(torch.zeros(shape))


def test_positions_of_another_resolution_lie_between_those_learned():
    model = ImageModel(ImageConfig(**TINY)).eval()
    with torch.no_grad():
        model.layers = torch.nn.ModuleList()
        model.patches.weight.zero_(), model.patches.bias.zero_()
        model.positions.copy_(torch.arange(4.0).expand(1, 32, 4, 4))  # a token's column
        columns = model.features(images(1, 8, 16)).view(4, 8, 32)
        assert torch.equal(columns, torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])[:, None].expand(4, 8, 32))
        assert torch.equal(model.features(images(1)), model.positions.flatten(2).mT)


@pytest.mark.parametrize("mixer", OURS)
def test_save_and_load(tmp_path, mixer):
    config = ImageConfig(mixer=mixer, norm="prepbn", **TINY)
    model = ImageModel(config)
    model(images())  # batch norms have seen something
    model.save(tmp_path / "model")
    again = ImageModel.load(tmp_path / "model")
    assert again.config == config and not again.training
    assert torch.equal(again(images()), model.eval()(images()))
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_files_that_do_not_fit_are_refused(tmp_path):
    ImageModel(ImageConfig(**TINY)).save(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"classes": 11}))
    with pytest.raises(ValueError, match=r"head.bias has \[10\], wanted \[11\]"):
        ImageModel.load(tmp_path)
    for content in (json.dumps(good | {"model_type": "linattn"}), "[]", "{"):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not the config of a linattn-image model"):
            ImageModel.load(tmp_path)
    path.write_text(json.dumps(good))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        ImageModel.load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        ImageModel.load(tmp_path)


@pytest.mark.parametrize("mixer", ["slab", "focused", "agent", "mobile", "linear_transformer"])
def test_norms_fold_away(mixer):
    """After training SLAB's norms fold into the linear maps after them: equal logits at any resolution."""
    torch.manual_seed(0)
    model = ImageModel(ImageConfig(mixer=mixer, norm="prepbn", norm_steps=3, **TINY | {"layers": 2}))
    for _ in range(5):
        model(2 * images(8) + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    folded = model.folded()
    assert not any("norm" in name for name, _ in folded.named_parameters())
    for shape in ((4, 8, 8), (2, 12, 10)):
        assert distance(folded(images(*shape)), model.eval()(images(*shape))) < 1e-5


def test_norms_that_do_not_fold():
    with pytest.raises(ValueError, match="norm must be 'prepbn' to be folded away, but is 'layer'"):
        ImageModel(ImageConfig(**TINY)).folded()
    model = ImageModel(ImageConfig(mixer="efficientvit", norm="prepbn", **TINY))
    model(images())
    with pytest.raises(ValueError, match="EfficientViT must apply only linear maps"):
        model.folded()


def test_blocks_of_timm_are_layers_of_the_preset():
    """The blocks of a stage of EfficientViT-B0, loaded by their names: two layers of ours for each."""
    blocks = [block for block in timm().efficientvit_b0().eval().stages[2].blocks if isinstance(block, timm().EfficientVitBlock)]
    config = ImageConfig.preset("efficientvit", dim=64, layers=2 * len(blocks), mixer_options={"efficientvit": {"head_dim": 16}})
    model = ImageModel(config).eval()
    for i, block in enumerate(blocks):
        model.layers[2 * i].mixer.load_state_dict(block.context_module.main.state_dict())
        model.layers[2 * i + 1].mixer.load_state_dict(block.local_module.main.state_dict())
    with torch.no_grad():
        wanted = model.patches(images()) + model.positions
        for block in blocks:
            wanted = block(wanted)
        assert distance(model.features(images()), wanted.flatten(2).mT) < 1e-5


# Logits of the authors' DeiT with SLAB, its float32 block in float64, its parameters, by name, filled as in tests/oracles/images.py:
# in training, and not.
LOGITS = [[0.391827630806, 0.0342357070309, -0.494681931523], [0.391816940875, 0.0341966872149, -0.494695651625]]
LATER = [[1.72887859459, 0.725388668165, -1.39935612972], [1.72631673351, 0.722520841189, -1.39858834933]]
THEIRS = {"layers": "blocks", "mixer_norm": "norm1", "mixer": "attn", "ffn_norm": "norm2", "ffn": "mlp", "patches": "patch_embed.proj"}
BLOCK = (
    "attn.dwc.bias attn.dwc.weight attn.positional_encoding attn.proj.bias attn.proj.weight attn.qkv.bias attn.qkv.weight "
    "mlp.fc1.bias mlp.fc1.weight mlp.fc2.bias mlp.fc2.weight norm1.iter norm1.norm1.bias norm1.norm1.weight norm1.norm2.alpha "
    "norm1.norm2.bn.bias norm1.norm2.bn.num_batches_tracked norm1.norm2.bn.running_mean norm1.norm2.bn.running_var norm1.norm2.bn.weight "
    "norm1.total_step norm1.warm"
)


def test_a_whole_model_of_the_authors_of_slab():
    """By their weights' names, including an unused class token; norms become batch norms and fold."""
    tiny = {"image_size": (14, 14), "classes": 3, "dim": 8, "layers": 2, "norm_steps": 6, "mixer_options": {"slab": {"heads": 2}}}
    model = ImageModel(ImageConfig.preset("slab", **tiny)).double()
    weights = {".".join(THEIRS.get(word, word) for word in name.split(".")): t.clone() for name, t in model.state_dict().items()}
    weights |= {"pos_embed": weights.pop("positions").flatten(2).mT, "cls_token": torch.zeros(1, 1, 8)}
    assert [n[9:] for n in sorted(weights) if n.startswith("blocks.0.") and "norm2." not in n[:15]] == BLOCK.split()
    counters = ("running_mean", "running_var", "num_batches_tracked", "iter", "warm", "total_step")
    for place, name in enumerate(sorted(name for name in weights if not name.endswith(counters))):
        wave = 0.4 * torch.sin(1.0 + place + math.sqrt(2.0) * torch.arange(weights[name].numel()))
        weights[name] = wave.double().view(weights[name].shape)
    model.load_deit(weights)
    x = tokens(14, 14, 1).mT.unflatten(2, (14, 14))
    with torch.no_grad():
        assert distance(model(x), torch.tensor(LOGITS, dtype=torch.float64)) < 1e-9
        assert distance(model.eval()(x), torch.tensor(LATER, dtype=torch.float64)) < 1e-9
        assert distance(model.folded()(x), torch.tensor(LATER, dtype=torch.float64)) < 1e-9
    with pytest.raises(RuntimeError, match="gate_proj"):
        ImageModel(ImageConfig.preset("slab", ffn="swiglu", **tiny)).load_deit(weights)


def test_presets():
    for name in PRESETS:
        assert ImageModel(ImageConfig.preset(name, dim=32, layers=2))(images()).shape == (3, 10)
    with pytest.raises(ValueError, match="no preset is called 'vit'; there are efficientvit, slab"):
        ImageConfig.preset("vit")


def test_a_language_model_refuses_what_looks_around():
    for name in OURS:
        assert mixers.info(name).kind == "grid" or mixers.info(name).bidirectional
        with pytest.raises(ValueError, match="mixer"):
            LanguageModel(LMConfig(mixer=name, dim=32, layers=1))
