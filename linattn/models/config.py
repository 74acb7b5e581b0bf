"""What a language model is made of, as data."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from linattn import ffn, mixers
from linattn.models import pattern

NORMS, BLOCKS = ("rms", "layer"), ("pre", "post")


@dataclass(kw_only=True)
class LMConfig:
    """A stack of blocks, each a mixer along time and a feed-forward per token.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        dim: width D of the model.
        layers: number of blocks.
        mixer: a pattern of mixer names such as ``"gla*3, softmax"``; it repeats until the layers are filled.
        ffn: a pattern of feed-forward names, ``"none"`` among them, repeated likewise.
        mixer_options: for each mixer name the options of its constructor, e.g. ``{"gla": {"heads": 8}}``.
        ffn_dim: inner width of the feed-forwards; None leaves it to each (8/3 of dim for SwiGLU).
        norm: ``"rms"`` or ``"layer"``.
        block: ``"pre"``: x + f(norm(x)) and a norm after the last block; ``"post"``: norm(x + f(x)).
        embedding_norm: a norm after the embedding (RWKV).
        tie_embeddings: one matrix for embedding and head.

    Raises:
        ValueError, TypeError: for names, patterns, counts and options that do not exist.
    """

    vocab_size: int = 256
    dim: int = 256
    layers: int = 4
    mixer: str = "gla*3, softmax"
    ffn: str = "swiglu"
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    ffn_dim: int | None = None
    norm: str = "rms"
    block: str = "pre"
    embedding_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        self.check()

    @property
    def mixer_names(self) -> list[str]:
        """The mixer of each layer."""
        return pattern.fill(pattern.parse(self.mixer, "mixer"), self.layers)

    @property
    def ffn_names(self) -> list[str]:
        """The feed-forward of each layer."""
        return pattern.fill(pattern.parse(self.ffn, "ffn"), self.layers)

    def check(self) -> None:
        """Refuse what no model can be made of."""
        for name in ("vocab_size", "dim", "layers") + (() if self.ffn_dim is None else ("ffn_dim",)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, but came as {value!r}")
        for name, options in (("norm", NORMS), ("block", BLOCKS)):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, but came as {getattr(self, name)!r}")
        for name in pattern.parse(self.ffn, "ffn"):
            if name not in ffn.available():
                raise ValueError(f"ffn: no feed-forward is called {name!r}. There are: {', '.join(ffn.available())}")
        names = pattern.parse(self.mixer, "mixer")
        for name in names:
            if (kind := mixers.info(name).kind) != "sequence":
                raise ValueError(f"mixer: {name!r} is a {kind} mixer, and a language model is made of sequence mixers")
        if any(not mixers.info(name).causal for name in names):
            raise ValueError(f"mixer: a language model needs causal mixers, but {self.mixer!r} looks ahead")
        self._check_options(names)

    def _check_options(self, names: list[str]) -> None:
        if not isinstance(self.mixer_options, dict):
            raise TypeError(f'mixer_options must be a dict such as {{"gla": {{"heads": 8}}}}, but came as {self.mixer_options!r}')
        for name, options in self.mixer_options.items():
            if name not in names:
                raise ValueError(f"mixer_options speaks of {name!r}, but the mixers are {', '.join(dict.fromkeys(names))}")
            if not isinstance(options, dict):
                raise TypeError(f"mixer_options[{name!r}] must be a dict of options, but came as {options!r}")
            known = inspect.signature(mixers.info(name).cls).parameters
            for option in options:
                if option not in known or option == "dim":
                    there = ", ".join(k for k in known if k != "dim")
                    raise ValueError(f"mixer_options[{name!r}]: {name} has no option {option!r}. There are: {there}")
            if not options.get("causal", True):
                raise ValueError(f"mixer_options[{name!r}]: a language model needs causal mixers, but causal is {options['causal']!r}")
