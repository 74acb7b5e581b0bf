"""Image model: patches, blocks of any bidirectional mixer, the mean over tokens, a head."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from linattn import mixers
from linattn.arguments import check_fields
from linattn.mixers.fault import explain_failure
from linattn.mixers.registry import Info
from linattn.mixers.vision.parts import resized, to_image, to_tokens
from linattn.mixers.vision.prepbn import PRepBN, folded
from linattn.models.files import SavedModel
from linattn.models.stack import Misfit, StackConfig, check_whole, from_preset
from linattn.ops.checks import tensor

NORMS = ("layer", "rms", "prepbn", "none")

# Stacks of papers with more settings than the name of a mixer.
PRESETS: dict[str, dict[str, Any]] = {
    "efficientvit": {"mixer": "efficientvit, mbconv", "ffn": "none", "norm": "none"},  # arXiv 2205.14756: a block is two of our layers
    "slab": {"mixer": "slab", "ffn": "mlp", "norm": "prepbn", "norm_eps": 1e-6},  # arXiv 2405.11582, its DeiT
}


@dataclass(kw_only=True)
class ImageConfig(StackConfig):
    """Config of a stack of residual blocks over the patches of an image, each a mixer and a feed-forward per token.

    Args:
        image_size: height and width in pixels of training images. Learned positions are interpolated for other sizes.
        patch_size: side of a patch in pixels; each patch is a token.
        overlap: tokens see windows of 2 patch_size - 1 pixels in place of single patches (PVTv2, arXiv 2106.13797).
        channels: channels of a pixel; 1 for grey, 3 for colours.
        classes: number of classes.
        mixer: a pattern of names such as ``"focused*2, agent"``: grid mixers, and sequence mixers with ``causal=False``, for which the
            tokens are ordered row by row. It repeats until the layers are filled. The model sets the options ``grid`` and ``causal``.
        norm: ``"layer"``, ``"rms"``, ``"none"`` or ``"prepbn"``, which becomes a batch norm during training, so that it can be
            folded into other layers (SLAB, arXiv 2405.11582).
        norm_eps: added to the mean square or the variance in norms.
        norm_steps: training steps over which ``"prepbn"`` becomes a batch norm.
        dim, layers, ffn, mixer_options, ffn_dim, ffn_options: as in :class:`linattn.models.StackConfig`.

    Raises:
        ValueError, TypeError: for names, sizes and options that do not exist.
    """

    image_size: tuple[int, int] = (8, 8)
    patch_size: int = 1
    overlap: bool = False
    channels: int = 1
    classes: int = 10
    layers: int = 4
    mixer: str = "focused"
    ffn: str = "swiglu"
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_steps: int = 1000

    SIZES: ClassVar[tuple[str, ...]] = ("patch_size", "channels", "classes", "norm_steps")

    def __post_init__(self) -> None:
        if not isinstance(self.image_size, tuple | list) or len(self.image_size) != 2:
            raise ValueError(f"image_size must be a height and a width, but came as {self.image_size!r}")
        self.image_size = cast("tuple[int, int]", tuple(self.image_size))  # JSON has lists only
        self.check()

    @classmethod
    def preset(cls, name: str, **fields: Any) -> Self:
        """Build a paper's stack, one of ``PRESETS``: ``ImageConfig.preset("efficientvit", dim=128, layers=8)``; ``fields`` override it.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return from_preset(cls, PRESETS, name, fields)

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width in tokens of an image of ``image_size``."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    def options_of(self, layer: int) -> dict[str, Any]:
        """Options of the mixer of layer number ``layer``, with the grid."""
        grid = {"grid": self.grid} if "grid" in mixers.info(self.mixer_names[layer]).options else {}
        return grid | super().options_of(layer)

    def roles(self) -> dict[str, tuple[str, Misfit]]:
        return {"mixer": ("an image model needs mixers of a grid, or of a sequence both ways", _misfit)}

    def check(self) -> None:
        """Raise ValueError or TypeError for invalid fields."""
        check_fields(self)
        for size in self.image_size:
            check_whole(image_size=size)
        super().check()
        if any(size % self.patch_size for size in self.image_size):
            raise ValueError(f"image_size must be multiples of patch_size {self.patch_size}, but came as {self.image_size}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, but came as {self.norm!r}")
        for name, options in self.mixer_options.items():
            if options.get("causal"):
                raise ValueError(f"mixer_options[{name!r}]: causal must be False for images, but is {options['causal']!r}")


def _misfit(known: Info) -> str | None:
    if known.kind == "grid" or known.bidirectional:
        return None
    return "is causal" if known.kind == "sequence" else f"is of the kind {known.kind}"


class ImageBlock(nn.Module):
    """Block x + mixer(norm(x)), then x + ffn(norm(x)), of tokens [B, height * width, D]."""

    def __init__(self, config: ImageConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = _norm(config)
        self.mixer = mixers.create_bidirectional(config.mixer_names[layer], dim=config.dim, **config.options_of(layer))
        self.ffn = config.feed_forward(layer)
        self.ffn_norm = None if self.ffn is None else _norm(config)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        x = x + mixers.over_grid(self.mixer, self.mixer_norm(x), height, width)
        return x if self.ffn is None or self.ffn_norm is None else x + self.ffn(self.ffn_norm(x))


class ImageModel(SavedModel):
    """Model ``model(images)`` -> logits [B, classes] for images [B, channels, height, width]."""

    MODEL_TYPE = "linattn-image"
    CONFIG = ImageConfig
    config: ImageConfig

    def __init__(self, config: ImageConfig) -> None:
        super().__init__(config)
        size, border = config.patch_size, config.patch_size - 1 if config.overlap else 0
        self.patches = nn.Conv2d(config.channels, config.dim, size + border, stride=size, padding=border)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, config.dim, *config.grid), std=0.02))
        self.layers = nn.ModuleList(ImageBlock(config, layer) for layer in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits [B, classes].

        Raises:
            ValueError: for images with other channels than the config's, or with sides that are not multiples of its patch size.
        """
        return self.head(self.norm(self.features(images)).mean(1))

    @explain_failure
    def features(self, images: Tensor) -> Tensor:
        """Output of the last block, [B, tokens, D], the patches row by row."""
        size = self.config.patch_size
        if not tensor("images", images).is_floating_point():
            raise ValueError(f"images must be floating point, but came as {images.dtype}")
        if images.ndim != 4 or images.shape[1] != self.config.channels or any(n % size or not n for n in images.shape[2:]):
            raise ValueError(
                f"images must have shape [B, {self.config.channels}, height, width] with sides that are multiples of {size}, "
                f"but came with {list(images.shape)}"
            )
        x = self.patches(images)
        height, width = x.shape[2:]
        x = to_tokens(x + resized(self.positions, height, width))
        for layer in self.layers:
            x = layer(x, height, width)
        return x

    def folded(self) -> ImageModel:
        """Copy without norms, equal in evaluation mode: every ``"prepbn"`` is folded into the linear maps after it.

        Raises:
            ValueError: for another norm, and if a mixer or feed-forward does not begin with linear maps.
        """
        if self.config.norm != "prepbn":
            raise ValueError(f"norm must be 'prepbn' to be folded away, but is {self.config.norm!r}")
        model = copy.deepcopy(self).eval()
        x = torch.randn(2, self.positions[0, 0].numel(), self.config.dim, dtype=self.positions.dtype, device=self.positions.device)
        for layer in cast("list[ImageBlock]", model.layers):
            mix = partial(mixers.over_grid, layer.mixer, height=self.config.grid[0], width=self.config.grid[1])
            layer.mixer_norm = _fold(layer.mixer_norm, layer.mixer, mix, x)
            if layer.ffn is not None:
                layer.ffn_norm = _fold(layer.ffn_norm, layer.ffn, layer.ffn, x)
        model.head, model.norm = folded(cast(PRepBN, model.norm), model.head), nn.Identity()  # the mean between them is affine as well
        return model

    def load_deit(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a vision transformer of the same sizes by their published names (``patch_embed``, ``blocks``, ``head``).

        These are the names of DeiT and of the models derived from it. The class token is ignored, because this model takes the mean of
        all tokens, as SLAB's does. The feed-forward must be ``"mlp"``.

        Raises:
            RuntimeError: for weights that do not fit, with their names.
        """
        ours = {_by_our_name(name): t for name, t in weights.items() if name != "cls_token"}
        if "positions" in ours:
            ours["positions"] = to_image(ours["positions"], *self.config.grid)
        self.load_state_dict(ours)


# Prefixes of published names, with the names here.
_BLOCK = {"norm1": "mixer_norm", "attn": "mixer", "norm2": "ffn_norm", "mlp": "ffn"}
_NAMES = {r"^patch_embed\.proj\.": "patches.", "^pos_embed$": "positions"}
_NAMES |= {rf"^blocks\.(\d+)\.{theirs}\.": rf"layers.\1.{ours}." for theirs, ours in _BLOCK.items()}


def _by_our_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def _norm(config: ImageConfig) -> nn.Module:
    if config.norm == "prepbn":
        return PRepBN(config.dim, steps=config.norm_steps, eps=config.norm_eps)
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity}
    return kinds[config.norm](config.dim, eps=config.norm_eps)


_FIRST = (*"qkv q_proj k_proj v_proj query_projection key_projection value_projection gate_proj up_proj fc1".split(),)


@torch.no_grad()
def _fold(norm: nn.Module | None, reader: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> nn.Module:
    """Fold ``norm`` into the first linear maps of ``reader``, which ``call`` runs on tokens such as ``x``."""
    wanted = call(cast(PRepBN, norm)(x))
    for name in _FIRST:
        if isinstance(linear := getattr(reader, name, None), nn.Linear):
            setattr(reader, name, folded(cast(PRepBN, norm), linear))
    if not torch.allclose(call(x), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().amax())):
        raise ValueError(
            f"{type(reader).__name__} must apply only linear maps before it mixes tokens, so that a norm can be folded into them"
        )
    return nn.Identity()
