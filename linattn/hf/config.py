"""Config of the model for transformers: the same fields, saved and found by its Auto classes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from linattn import models
from linattn.arguments import closest
from linattn.hf.cache import CACHE


class LMConfig(models.LMConfig, PreTrainedConfig):
    """Config with the fields of :class:`linattn.models.LMConfig` and those of every transformers config.

    ``hidden_size``, ``num_hidden_layers`` and ``tie_word_embeddings`` are other names of ``dim``, ``layers`` and ``tie_embeddings``.
    """

    model_type: ClassVar[str] = "linattn"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "tie_word_embeddings": "tie_embeddings",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saved folders name the classes by :mod:`linattn.hf.remote`."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Raise TypeError for keywords that resemble our fields; transformers itself admits any keyword."""
        ours = [*(f.name for f in fields(models.LMConfig)), *self.attribute_map]
        for name in kwargs:
            close = closest(name, ours, 0.75)
            if close and name not in self.attribute_map:
                raise TypeError(f"LMConfig has no field {name!r}; did you mean {close!r}?")
        PreTrainedConfig.__post_init__(self, **kwargs)
        self.check()
