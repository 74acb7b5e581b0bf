"""Sequential recommendation: a history of items, blocks of any mixer, a score for every next item (SASRec, arXiv 1808.09781)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from linattn.arguments import check_fields
from linattn.mixers.fault import explain_failure
from linattn.models import stack
from linattn.models.files import SavedModel
from linattn.ops.checks import check_mask, check_tokens


@dataclass(kw_only=True)
class RecommendConfig(stack.StackConfig):
    """A stack of blocks over the items of a history, each a mixer along time and a feed-forward per item, around residuals.

    The options of a mixer are the same in all layers; what a language model sets by a layer's number, such as the decays
    of HGRN and Lightning, is the mixer's default.

    Args:
        items: number of items.
        length: longest history; longer ones are cut to their latest items.
        mixer: a pattern of names of sequence mixers such as ``"linrec*3, softmax"``; it repeats until the layers are filled.
        causal: True: an item sees itself and earlier ones; False: the whole history, as in LinRec's official code. Then only the
            item after the end of a history can be learned, because other targets would be visible.
        dropout: share of channels zeroed in training, after the embedding and in every branch.
        dim, layers, ffn, mixer_options, ffn_dim, ffn_options: as in :class:`linattn.models.StackConfig`.

    Raises:
        ValueError, TypeError: for names, sizes and options that do not exist.
    """

    items: int
    length: int = 50
    mixer: str = "linrec"
    causal: bool = True
    dropout: float = 0.0

    SIZES: ClassVar[tuple[str, ...]] = ("items", "length")

    def roles(self) -> dict[str, tuple[str, stack.Misfit]]:
        wanted = f"a model with causal = {self.causal} needs mixers of sequences that are {'' if self.causal else 'not '}causal"
        return {"mixer": (wanted, stack.sequence_misfit(self.causal))}

    def check(self) -> None:
        """Raise ValueError or TypeError for invalid fields."""
        check_fields(self)
        stack.check_dropout(self.dropout)
        super().check()
        for name, options in self.mixer_options.items():
            if options.get("causal", self.causal) != self.causal:
                raise ValueError(f"mixer_options[{name!r}]: causal is {options['causal']!r}, but the model's is {self.causal}")


class RecommendModel(SavedModel):
    """Model ``model(histories)`` -> scores [B, T, items] of the item after each position: products with the item embeddings."""

    MODEL_TYPE = "linattn-recommend"
    CONFIG = RecommendConfig
    config: RecommendConfig

    def __init__(self, config: RecommendConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.items, config.dim)
        self.positions = nn.Embedding(config.length, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, histories: Tensor, mask: Tensor | None = None) -> Tensor:
        """Score every item after each position of ``histories`` [B, T] int64; ``mask`` [B, T] bool, True = a real item.

        Raises:
            ValueError: for histories longer than ``length``.
        """
        return self.hidden(histories, mask) @ self.embedding.weight.T

    @explain_failure
    def hidden(self, histories: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalized output of the last block, [B, T, D]."""
        check_tokens("histories", histories, self.config.items)
        if histories.shape[1] > self.config.length:
            raise ValueError(f"histories must be [B, T] with T at most {self.config.length}, but came with {list(histories.shape)}")
        if mask is not None:
            check_mask("mask", mask, histories)
        places = torch.arange(histories.shape[1], device=histories.device)
        if mask is not None:
            places = (mask.cumsum(1) - 1).clamp(min=0)  # positions count real items, because padding may be anywhere
        x = self.dropout(self.embedding(histories) * self.config.dim**0.5 + self.positions(places))
        for layer in self.layers:
            mixer, feed = cast(nn.ModuleDict, layer).values()
            x = feed(mixer(x, mask=mask))
        return self.norm(x)

    @torch.inference_mode()
    def recommend(self, histories: list[Tensor], count: int = 10) -> Tensor:
        """Return the ``count`` most likely next items of each history [n], [B, count], best first, including earlier items."""
        items, mask = padded(histories, self.config.length)
        last = mask.sum(1) - 1
        hidden = self.hidden(items.to(self.embedding.weight.device), mask.to(self.embedding.weight.device))
        ends = hidden[torch.arange(len(last)), last]
        return (ends @ self.embedding.weight.T).topk(min(count, self.config.items)).indices


def padded(histories: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Stack the latest ``length`` items of each history, [B, T], with padding behind; also the mask of real items, [B, T] bool.

    Raises:
        ValueError: for an empty list, and for a history without items.
    """
    if not histories:
        raise ValueError("histories must hold at least one history, but came empty")
    if any(len(history) == 0 for history in histories):
        raise ValueError("histories must have at least one item each, but one is empty")
    items = nn.utils.rnn.pad_sequence([history[-length:] for history in histories], batch_first=True)
    lengths = torch.tensor([min(len(history), length) for history in histories])
    return items, torch.arange(items.shape[1]) < lengths[:, None]


def _block(config: RecommendConfig, layer: int) -> nn.ModuleDict:
    name = config.mixer_names[layer]
    options = {k: v for k, v in config.mixer_options.get(name, {}).items() if k != "causal"}
    mixer = stack.sequence_mixer(name, dim=config.dim, causal=config.causal, **options)
    branch = stack.Residual(mixer, config.dim, config.dropout)
    return nn.ModuleDict({"mixer": branch, "ffn": stack.residual_ffn(config, layer, config.dropout)})
