"""Sequence-to-sequence models: an encoder, a decoder and cross attention, each of any mixer.

Choosing the mixer of each part separately is modular linearized attention (arXiv 2304.08453).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linattn import mixers
from linattn.arguments import check_fields
from linattn.mixers.context import State
from linattn.mixers.fault import explain_failure
from linattn.mixers.registry import Info
from linattn.models import stack
from linattn.models.files import SavedModel
from linattn.ops.checks import check_mask, check_tokens

STOP = 0  # the token that begins a target and ends it


@dataclass(kw_only=True)
class Seq2SeqConfig(stack.StackConfig):
    """Config of an encoder of the source and a decoder of the target, whose blocks attend to the encoder's output.

    The options of a mixer are the same in all layers; what a language model sets by a layer's number, such as the decays
    of HGRN and Lightning, is the mixer's default.

    Args:
        source_vocab, target_vocab: numbers of tokens; token 0 begins and ends a target and is the padding of both.
        length: longest source and longest target, stop token included.
        layers: blocks of the encoder, and of the decoder.
        encoder: a pattern of sequence mixers, bidirectional ones if they support it.
        decoder: a pattern of causal sequence mixers.
        cross: a pattern of cross mixers, one for each of the decoder's blocks.
        ffn: a pattern of feed-forward names, which may include ``"none"``, of both.
        ratio: expected number of target tokens per source token: the target's length is unknown during decoding, but cosFormer and
            positions spread over ``length`` need it.
        spread: draw sorted random positions below ``length`` in training and space them evenly in evaluation, so that new lengths
            have no new positions (arXiv 2305.16843); False: count positions from 0.
        dropout: share of channels zeroed in training, after the embeddings and in every branch.
        dim, mixer_options, ffn_dim, ffn_options: as in :class:`linattn.models.StackConfig`.

    Raises:
        ValueError, TypeError: for names, sizes and options that do not exist.
    """

    source_vocab: int
    target_vocab: int
    length: int = 64
    encoder: str = "softmax"
    decoder: str = "softmax"
    cross: str = "cross_softmax"
    ratio: float = 1.0
    spread: bool = False
    dropout: float = 0.0

    SIZES: ClassVar[tuple[str, ...]] = ("source_vocab", "target_vocab", "length")

    def roles(self) -> dict[str, tuple[str, stack.Misfit]]:
        return _ROLES

    def check(self) -> None:
        """Raise ValueError or TypeError for invalid fields."""
        check_fields(self)
        stack.check_dropout(self.dropout)
        if not isinstance(self.ratio, int | float) or isinstance(self.ratio, bool) or not 0 < self.ratio < math.inf:
            raise ValueError(f"ratio must be a number above 0, target tokens per source token, but came as {self.ratio!r}")
        super().check()
        for name, options in self.mixer_options.items():
            if "causal" in options:
                raise ValueError(f"mixer_options[{name!r}]: causal follows from the role and must be omitted, but is {options['causal']!r}")


def _encodes(known: Info) -> str | None:
    return None if stack.sequence_misfit(causal=False)(known) is None else stack.sequence_misfit(causal=True)(known)


def _crosses(known: Info) -> str | None:
    return None if known.kind == "cross" else f"is of the kind {known.kind}"


_ROLES: dict[str, tuple[str, stack.Misfit]] = {
    "encoder": ("mixers of sequences are wanted", _encodes),
    "decoder": ("causal mixers of sequences are wanted", stack.sequence_misfit(causal=True)),
    "cross": ("cross mixers are wanted", _crosses),
}


class Encoder(nn.Module):
    """Stack of blocks, each a mixer and a feed-forward, [B, T, D] -> [B, T, D]."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(_branch(config, "encoder", layer) for layer in range(config.layers))
        self.ffns = nn.ModuleList(stack.residual_ffn(config, layer, config.dropout) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for mixer, feed in zip(self.mixers, self.ffns, strict=True):
            x = feed(mixer(x, mask=mask))
        return self.norm(x)


class Decoder(nn.Module):
    """Causal stack from x [B, Tt, D] and the encoded source [B, Ts, D] to [B, Tt, D]; continues from a state that holds the source."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(_branch(config, "decoder", layer) for layer in range(config.layers))
        self.crosses = nn.ModuleList(_branch(config, "cross", layer) for layer in range(config.layers))
        self.ffns = nn.ModuleList(stack.residual_ffn(config, layer, config.dropout) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, encoded: Tensor, mask: Tensor | None = None) -> Tensor:
        for mixer, cross, feed in zip(self.mixers, self.crosses, self.ffns, strict=True):
            x = feed(cross(mixer(x), encoded, context_mask=mask))
        return self.norm(x)

    def step(self, x: Tensor, known: list[tuple[State, State]] | tuple[Tensor, Tensor | None]) -> tuple[Tensor, list[tuple[State, State]]]:
        """Decode the next tokens. ``known``: states from the previous step; at first the encoded source and its mask."""
        states: list[tuple[State, State]] = []
        for i, (mixer, cross, feed) in enumerate(zip(self.mixers, self.crosses, self.ffns, strict=True)):
            if isinstance(known, list):
                x, own = mixer(x, known[i][0], return_state=True)
                x, across = cross(x, state=known[i][1], return_state=True)
            else:
                x, own = mixer(x, return_state=True)
                x, across = cross(x, known[0], context_mask=known[1], return_state=True)
            x = feed(x)
            states.append((own, across))
        return self.norm(x), states


class Seq2SeqModel(SavedModel):
    """Model ``model(source, target)`` -> logits [B, Tt, target_vocab]; :meth:`decode` generates a target token by token."""

    MODEL_TYPE = "linattn-seq2seq"
    CONFIG = Seq2SeqConfig
    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.source, self.target = (nn.Embedding(n, config.dim) for n in (config.source_vocab, config.target_vocab))
        self.source_places, self.target_places = (nn.Embedding(config.length, config.dim) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.head = nn.Linear(config.dim, config.target_vocab)

    @explain_failure
    def forward(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute logits of the token after each of ``target`` [B, Tt], which begins with the stop token.

        Args:
            source: tokens [B, Ts] int64.
            target: tokens [B, Tt] int64, with padding behind them.
            mask: [B, Ts] bool, True = a real token of the source; padding may be anywhere.

        Raises:
            ValueError: for sources and targets longer than ``length``.
        """
        check_tokens("target", target, self.config.target_vocab)
        encoded = self.encode(source, mask)
        if len(target) != len(source):
            raise ValueError(f"target must have as many rows as source, {len(source)}, but came with {len(target)}")
        counts = _counts(source, mask)
        x = self._embedded(target, self.target, self.target_places, self._expected(counts))
        return self.head(self.decoder(x, encoded, mask))

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode the source for the decoder, [B, Ts, D]."""
        check_tokens("source", source, self.config.source_vocab)
        if mask is not None:
            check_mask("mask", mask, source)
        return self.encoder(self._embedded(source, self.source, self.source_places, _counts(source, mask), mask=mask), mask)

    @torch.inference_mode()
    def decode(self, source: Tensor, mask: Tensor | None = None, *, max_tokens: int | None = None) -> list[Tensor]:
        """Decode the target of each source greedily, with a state of constant size if the mixers are recurrent.

        ``source`` [B, Ts] and ``mask`` are as in a call. Returns the tokens of each row, at most ``max_tokens`` (``length`` - 1 if
        None), without the stop token.
        """
        most = self.config.length - 1 if max_tokens is None else max_tokens
        if not 0 <= most < self.config.length:
            raise ValueError(f"max_tokens must be from 0 to length - 1, {self.config.length - 1}, but came as {max_tokens!r}")
        known: Any = (self.encode(source, mask), mask)
        expected = self._expected(_counts(source, mask))
        token = source.new_full((len(source), 1), STOP)
        written, going = [], torch.ones(len(source), dtype=torch.bool, device=source.device)
        for place in range(most):
            x = self._embedded(token, self.target, self.target_places, expected, start=place)
            x, known = self.decoder.step(x, known)
            token = self.head(x).argmax(-1)
            written.append(token[:, 0])
            going = going & (token[:, 0] != STOP)
            if not going.any():
                break
        rows = torch.stack(written, 1) if written else source[:, :0]
        stops = (rows == STOP).int().argmax(1) if rows.shape[1] else rows.new_zeros(len(rows))
        ends = torch.where((rows == STOP).any(1), stops, rows.shape[1])
        return [row[:end] for row, end in zip(rows, ends.tolist(), strict=True)]

    def _expected(self, counts: Tensor) -> Tensor:
        """Expected number of target tokens, stop token included, for sources of ``counts`` [B] tokens."""
        return counts * self.config.ratio + 1

    def _embedded(
        self, tokens: Tensor, table: nn.Embedding, places: nn.Embedding, counts: Tensor, start: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        """Embed ``tokens`` [B, T], the first real one at position ``start`` of ``counts`` [B]."""
        if start + tokens.shape[1] > self.config.length:
            raise ValueError(f"a source or target may have at most {self.config.length} tokens, but came with {start + tokens.shape[1]}")
        at = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if mask is not None:
            at = start + (mask.cumsum(1) - 1).clamp(min=0)  # positions count real tokens
        if self.config.spread:
            at = self._drawn(tokens) if self.training else self._spread(at, counts)
        return self.dropout(table(tokens) + places(at))

    def _drawn(self, tokens: Tensor) -> Tensor:
        """Draw sorted positions for each row, uniformly: [B, T]."""
        order = torch.rand(len(tokens), self.config.length, device=tokens.device).argsort(1)
        return order[:, : tokens.shape[1]].sort(1).values

    def _spread(self, at: Tensor, counts: Tensor) -> Tensor:
        """Spread positions ``at`` [T] or [B, T] of ``counts`` [B] tokens evenly over ``length``: [B, T]."""
        share = (at + 0.5) / counts.clamp(min=1)[:, None]
        return (share * self.config.length).long().clamp(max=self.config.length - 1)


def _counts(source: Tensor, mask: Tensor | None) -> Tensor:
    """Count the real tokens of each row, [B]."""
    return torch.full((len(source),), source.shape[1], device=source.device) if mask is None else mask.sum(1)


def _branch(config: Seq2SeqConfig, role: str, layer: int) -> stack.Residual:
    name = config.names(role)[layer]
    options = dict(config.mixer_options.get(name, {}))
    known = mixers.info(name)
    if role == "cross":
        given = {"ratio": config.ratio} if "ratio" in known.options else {}
        mixer = mixers.create(name, dim=config.dim, **(given | options))
    else:
        mixer = stack.sequence_mixer(name, dim=config.dim, causal=role == "decoder" or not known.bidirectional, **options)
    return stack.Residual(mixer, config.dim, config.dropout)
