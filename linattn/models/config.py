"""Configuration of a language model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from linattn import ffn, mixers
from linattn.arguments import described
from linattn.mixers.registry import Info
from linattn.models import pattern
from linattn.models.stack import Misfit, StackConfig, check_known, from_preset

NORMS, BLOCKS = ("rms", "zero_centered_rms", "layer"), ("pre", "post", "normed", "sandwich", "reversible")

# Stacks of papers that need more than the name of a mixer.
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2402.18668: a fifth of the layers each, the rest convolutions; the window is the paper's (its training configs have 129).
    # Their models have dim / 64 heads and ffn_dim = 2 dim.
    "based": {
        "mixer": "base_conv, based, softmax, base_conv*2",
        "mixer_options": {"softmax": {"window": 64}},
    },
    # arXiv 1706.03762: its block, with rotary positions in place of sinusoids added to the embedding.
    "transformer": {
        "mixer": "softmax",
        "mixer_options": {"softmax": {"bias": True, "out_bias": True}},
        "ffn": "mlp",
        "ffn_options": {"mlp": {"activation": "relu"}},
        "norm": "layer",
        "block": "post",
    },
    # arXiv 2406.07522: Mamba, MLP, attention in a window and MLP, in turn.
    "samba": {
        "mixer": "mamba, softmax",
        "mixer_options": {"softmax": {"window": 2048}},
    },
    # arXiv 2405.05254: the second half of the layers attends to one cache, which the first of these layers computes.
    "yoco": {
        "halves": ("gated_retnet", "yoco"),
    },
    "rwkv7": {  # arXiv 2503.14456: a block is two of our layers
        "mixer": "rwkv7, rwkv_channel",
        "mixer_options": {"rwkv_channel": {"gated": False}},
        "ffn": "none",
        "norm": "layer",
        "embedding_norm": True,
    },
}


@dataclass(kw_only=True)
class LMConfig(StackConfig):
    """A stack of blocks, each a mixer along time and a feed-forward per token.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        dim: width D of the model.
        layers: number of blocks.
        mixer: a pattern of mixer names such as ``"gla*3, softmax"``; it repeats until the layers are filled.
        ffn: a pattern of feed-forward names, ``"none"`` among them, repeated likewise.
        mixer_options: for each mixer name the options of its constructor, e.g. ``{"gla": {"heads": 8}}``.
        ffn_dim: inner width of the feed-forwards; None: the default of each (8/3 of dim for SwiGLU).
        ffn_options: for each feed-forward name the options of its constructor, e.g. ``{"experts": {"count": 8}}``; they
            override ``ffn_dim``.
        layer_options: for every layer a dict of options of its mixer, which override ``mixer_options``; None: no such options.
        norm: ``"rms"``, ``"zero_centered_rms"`` (RMS norm that stores its weight's distance from 1) or ``"layer"``.
        norm_eps: added to the mean square or the variance in these norms.
        block: ``"pre"``: x + f(norm(x)) and a norm after the last block; ``"post"``: norm(x + f(x)); ``"normed"``: y + f(y)
            with y = norm(x) and a norm after the last block (MiniMax); ``"sandwich"``: x + norm(f(norm(x))) and a norm after the last
            block (Gemma 3); ``"reversible"``: two streams whose blocks can be run backwards, and the norm of their mean after the
            last one (Reformer): training needs no more memory for more layers.
        residual_scales: for names of mixers and feed-forwards the pair [a, b] where a x + b f(x) replaces x + f(x).
        embedding_norm: a norm after the embedding (RWKV).
        embedding_scale: factor of the embedding's output (Gemma: the root of dim).
        logit_soft_cap: c replaces logits x by c tanh(x / c); None: no cap.
        tie_embeddings: one matrix for embedding and head.

    Raises:
        ValueError, TypeError: for names, patterns, counts and options that do not exist.
    """

    vocab_size: int = 256
    dim: int = 256
    layers: int = 4
    mixer: str = "gla*3, softmax"
    ffn: str = "swiglu"
    layer_options: list[dict[str, Any]] | None = None
    norm: str = "rms"
    norm_eps: float = 1e-5
    block: str = "pre"
    residual_scales: dict[str, list[float]] = field(default_factory=dict)
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    tie_embeddings: bool = False

    SIZES: ClassVar[tuple[str, ...]] = ("vocab_size",)

    @classmethod
    def preset(cls, name: str, **fields: Any) -> Self:
        """Build a paper's stack, one of ``PRESETS``: ``LMConfig.preset("based", dim=1024, layers=25)``.

        ``fields`` override those of the preset; ``mixer_options`` are merged mixer by mixer.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return from_preset(cls, PRESETS, name, fields)

    def options_of(self, layer: int) -> dict[str, Any]:
        """Options of the mixer of layer number ``layer``, with the defaults that its class has for that layer."""
        return super().options_of(layer) | ({} if self.layer_options is None else self.layer_options[layer])

    def roles(self) -> dict[str, tuple[str, Misfit]]:
        return {"mixer": ("a language model needs causal mixers of sequences", _misfit)}

    def check(self) -> None:
        """Raise ValueError or TypeError for invalid fields."""
        super().check()
        for name in ("norm_eps", "embedding_scale") + (() if self.logit_soft_cap is None else ("logit_soft_cap",)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, but came as {value!r}")
        for name in ("embedding_norm", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, but came as {getattr(self, name)!r}")
        for name, choices in (("norm", NORMS), ("block", BLOCKS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:  # arrays compare elementwise
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, but came as {described(value)}")
        names = pattern.parse(self.mixer, "mixer")
        for name, options in self.mixer_options.items():
            _check_causal(f"mixer_options[{name!r}]", options)
        if self.block == "reversible":
            self._check_reversible(names)
        self._check_layers()
        self._check_scales(names)

    def _check_reversible(self, names: list[str]) -> None:
        """Check that a reversible block has both branches, each a function of one stream."""
        if ffn.NONE in pattern.parse(self.ffn, "ffn"):
            raise ValueError(f"ffn must be in every layer if block is 'reversible', but came as {self.ffn!r}")
        if self.residual_scales:
            raise ValueError(f"residual_scales must be empty if block is 'reversible', but came as {self.residual_scales!r}")
        for name in pattern.parse(self.ffn, "ffn"):
            if mixers.info(name).cls.adds_loss:
                raise ValueError(f"ffn: {name!r} adds a term to the loss, which block = 'reversible' cannot differentiate")
        for name in names:
            if mixers.info(name).cls.shares:
                raise ValueError(f"mixer: {name!r} passes a tensor on from layer to layer, which block = 'reversible' cannot do")

    def _check_layers(self) -> None:
        if self.layer_options is None:
            return
        if not isinstance(self.layer_options, list) or len(self.layer_options) != self.layers:
            raise ValueError(f"layer_options must be a list of {self.layers} dicts, one for each layer, but came as {self.layer_options!r}")
        for i, (name, options) in enumerate(zip(self.mixer_names, self.layer_options, strict=True)):
            check_known(f"layer_options[{i}]", name, options, mixers.info(name).options)
            _check_causal(f"layer_options[{i}]", options)

    def _check_scales(self, names: list[str]) -> None:
        if not isinstance(self.residual_scales, dict):
            raise TypeError(f'residual_scales must be a dict such as {{"gla": [1.0, 0.5]}}, but came as {self.residual_scales!r}')
        known = list(dict.fromkeys([*names, *pattern.parse(self.ffn, "ffn")]))
        for name, pair in self.residual_scales.items():
            if name not in known:
                raise ValueError(f"residual_scales names {name!r}, but the model has {', '.join(known)}")
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(n, int | float) for n in pair):
                raise ValueError(f"residual_scales[{name!r}] must be two numbers [a, b], but came as {pair!r}")


def _misfit(known: Info) -> str | None:
    if known.kind != "sequence":
        return f"is of the kind {known.kind}"
    return None if known.causal else "looks ahead"


def _check_causal(argument: str, options: dict[str, Any]) -> None:
    if not options.get("causal", True):
        raise ValueError(f"{argument}: a language model needs causal mixers, but causal is {options['causal']!r}")
