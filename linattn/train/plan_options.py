"""Options of the plan of a training. Imports nothing heavy: the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linattn.arguments import check_fields, option
from linattn.train.options import CHOICES

# Dense bfloat16 operations a second and bytes of memory of a card, from the vendor's data sheets; a "cpu" has the given values.
DEVICES = {"h200": (989e12, 141e9), "h100": (989e12, 80e9), "b200": (2250e12, 180e9), "a100": (312e12, 80e9)}
MOST_LAYERS = 100_000  # limit, since a plan visits each layer


@dataclass(frozen=True)
class PlanOptions:
    """A model, the cards that train it, and their links.

    Args:
        mixer, heads, mixer_options, dim, layers, ffn, ffn_dim, ffn_options, norm: as of :class:`linattn.train.TrainOptions`.
        vocab_size: tokens of the vocabulary.
        tie_embeddings: whether embedding and head are one matrix.
        context: tokens of one sequence.
        batch_size: sequences of one forward pass of each group of ``cp`` x ``tp`` cards.
        accumulate: passes of a step.
        dp, cp, tp: groups with sequences of their own, cards that share a sequence, cards that share the heads; their product is the number
            of cards.
        fsdp: shard parameters, gradients and optimizer over dp x cp cards; more than one ``tp`` implies it.
        checkpoint_activations: save only the blocks' inputs.
        optimizer: ``"adamw"`` or ``"muon"``.
        dtype: of products of matrices; weights, gradients and moments are float32.
        device: one of h200, h100, b200, a100.
        mfu: share of the device's peak that computation reaches on one card.
        node: cards of a node.
        link: bytes a second, in GB, that a card sends to others of its node.
        network: the same to other nodes.
        latency: microseconds of one collective.
    """

    mixer: str = option("gla", 'Mixer of each layer, e.g. "gla*3, softmax".', "PATTERN")
    heads: int | None = option(None, "Heads of each mixer that has heads.", "H", shown="each mixer's own", least=1)
    mixer_options: dict[str, dict[str, Any]] = option({}, "An option of a mixer's constructor, such as gla.heads=8.", "NAME.OPTION=VALUE")
    dim: int = option(2048, "Model width.", "D", least=1)
    layers: int = option(24, "Number of blocks.", "L", least=1)
    ffn: str = option("swiglu", 'Feed-forward of each layer, or "none".', "PATTERN")
    ffn_dim: int | None = option(None, "Inner width of the feed-forwards.", "D", shown="8/3 of the model width", least=1)
    ffn_options: dict[str, dict[str, Any]] = option({}, "An option of a feed-forward's constructor.", "NAME.OPTION=VALUE")
    norm: str = option("rms", "rms, zero_centered_rms or layer.", "NAME")
    vocab_size: int = option(32768, "Tokens of the vocabulary.", "V", least=1)
    tie_embeddings: bool = option(False, "One matrix as embedding and head.")
    context: int = option(4096, "Tokens of one sequence.", "T", least=2)
    batch_size: int = option(8, "Sequences of a forward pass, for each group of cp x tp GPUs.", "B", least=1)
    accumulate: int = option(1, "Forward and backward passes of a step.", "N", least=1)
    dp: int = option(1, "Data-parallel groups: each reads its own sequences.", "N", least=1)
    cp: int = option(1, "GPUs that share a sequence.", "N", least=1)
    tp: int = option(1, "GPUs that share the heads; implies --fsdp.", "N", least=1)
    fsdp: bool = option(False, "Shard parameters, gradients and optimizer over dp x cp GPUs.")
    checkpoint_activations: bool = option(False, "Save only block inputs; recompute activations.")
    optimizer: str = option("adamw", "adamw or muon.", "NAME")
    dtype: str = option("bf16", "bf16 or fp32; weights stay float32.", "TYPE")
    device: str = option("h200", "h200, h100, b200 or a100.", "NAME")
    mfu: float = option(0.4, "Share of its peak speed that a GPU reaches.", "R")
    node: int = option(8, "GPUs of a node.", "N", least=1)
    link: float = option(390.0, "GB/s that a GPU sends within its node.", "G")
    network: float = option(50.0, "GB/s that a GPU sends to other nodes.", "G")
    latency: float = option(30.0, "Latency of one collective operation, in microseconds.", "U", least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("link", "network", "mfu"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, but came as {getattr(self, name)!r}")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers must be at most {MOST_LAYERS}, but came as {self.layers}")
        if self.mfu > 1:
            raise ValueError(f"mfu must be at most 1, but came as {self.mfu!r}")
        for name, choices in (("device", tuple(DEVICES)), *((name, CHOICES[name]) for name in ("norm", "dtype", "optimizer"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, but came as {getattr(self, name)!r}")

    @property
    def cards(self) -> int:
        """Number of cards."""
        return self.dp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Cards among which the parameters of each are cut."""
        return self.dp * self.cp if self.fsdp or self.tp > 1 else 1
