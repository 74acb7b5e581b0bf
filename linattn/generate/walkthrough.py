"""Record of one generation step from text to next token: the output of every stage, and the loop behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.data.codec import REPLACEMENT, ByteCodec
from linattn.generate.sampling import Sampling, draw, probabilities

if TYPE_CHECKING:
    from linattn.data.codec import Codec
    from linattn.models import LanguageModel

LARGEST, LIKELIEST = 3, 8  # entries of a vector, and tokens, that are shown


@dataclass(frozen=True)
class Token:
    """Token with its decoded text (a byte's code if it is part of a character), logit and probability, both 0 for prompt tokens."""

    number: int
    text: str
    logit: float = 0.0
    probability: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Output of one part of the model, and its output for the last token.

    Args:
        part: "embedding", "mixer", "ffn", "norm" or "classifier".
        layer: number of the block, from 1; 0 outside of blocks.
        name: mixer or feed-forward.
        shape: shape of the output.
        vector: output for the last token, [D] or [vocab] float32.
        state: for a mixer the shape of each tensor of its state.
        state_bytes: bytes of that state.
        experts: for a mixture of experts those of the last token, with their weights.
    """

    part: str
    layer: int
    name: str
    shape: tuple[int, ...]
    vector: Tensor
    state: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state_bytes: int = 0
    experts: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rms(self) -> float:
        """Root mean square of ``vector``."""
        return self.vector.square().mean().sqrt().item()

    @property
    def largest(self) -> list[tuple[int, float]]:
        """Channels of ``vector`` of largest magnitude, with their values."""
        places = self.vector.abs().topk(min(LARGEST, len(self.vector))).indices.tolist()
        return [(place, self.vector[place].item()) for place in places]


@dataclass(frozen=True)
class Walkthrough:
    """Record of one generation step and of the tokens after it.

    Args:
        prompt: text of the prompt.
        tokens: tokens of the prompt.
        stages: stages in the order in which they ran.
        likeliest: candidates for the next token, the most likely first.
        sampling: parameters by which the token was chosen.
        written: the chosen tokens, this step's first.
        text: the decoded text of ``written`` up to the stop text.
        ended: reason why the loop ended.
    """

    prompt: str
    tokens: list[Token]
    stages: list[Stage]
    likeliest: list[Token]
    sampling: Sampling
    written: list[Token]
    text: str
    ended: str

    @property
    def candidates(self) -> list[Token]:
        """Most likely tokens, and the chosen one last if it is not among them."""
        first = self.written[0]
        return self.likeliest if any(t.number == first.number for t in self.likeliest) else [*self.likeliest, first]


@torch.inference_mode()
def walkthrough(
    model: LanguageModel,
    codec: Codec,
    prompt: str,
    *,
    max_new_tokens: int = 16,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> Walkthrough:
    """Read ``prompt`` in one pass, record every stage, choose the next token, and continue until a stop.

    Args:
        model: a :class:`linattn.LanguageModel`, in ``eval``.
        codec: turns text into its tokens and back.
        prompt: the text to continue, at least one token.
        max_new_tokens: tokens to write at most, at least 1.
        sampling: parameters of the choice; None: the model's own probabilities.
        stop: the loop ends before the first of these texts.
        generator: for the random numbers; None: torch's default.

    Raises:
        ValueError: for an empty prompt and a number out of range.
    """
    sampling = Sampling() if sampling is None else sampling
    ids = codec.encode(prompt)
    if not ids:
        raise ValueError("prompt must be a text of at least one token, but came empty")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, but came as {max_new_tokens}")
    with _watched(model) as stages:
        logits, state = model(torch.tensor([ids], device=model.device), return_state=True)
    likeliest = _likeliest(logits[:, -1], sampling, codec)
    written: list[Token] = []
    while True:
        written.append(_chosen(logits[:, -1], sampling, codec, generator))
        text = codec.decode([token.number for token in written])
        found = [(text.find(s), s) for s in stop if s in text]
        if found:
            at, s = min(found)
            return Walkthrough(prompt, _tokens(ids, codec), stages, likeliest, sampling, written, text[:at], f"at the stop text {s!r}")
        if len(written) == max_new_tokens:
            ended = f"after {max_new_tokens} {'token' if max_new_tokens == 1 else 'tokens'}, as asked"
            return Walkthrough(prompt, _tokens(ids, codec), stages, likeliest, sampling, written, text, ended)
        token = torch.tensor([[written[-1].number]], device=logits.device)
        logits, state = model(token, state, return_state=True)


def _tokens(ids: Sequence[int], codec: Codec) -> list[Token]:
    return [Token(number, _text(codec, number)) for number in ids]


def _text(codec: Codec, number: int) -> str:
    text = codec.decode([number])
    return f"\\x{number:02x}" if isinstance(codec, ByteCodec) and REPLACEMENT in text else text


def _probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [1, V]; for greedy decoding those of the model itself."""
    return logits.float().softmax(-1) if sampling.temperature == 0 else probabilities(logits, sampling)


def _likeliest(logits: Tensor, sampling: Sampling, codec: Codec) -> list[Token]:
    p = _probabilities(logits, sampling)[0]
    best = p.topk(min(LIKELIEST, len(p))).indices.tolist()
    return [Token(n, _text(codec, n), logits[0, n].item(), p[n].item()) for n in best]


def _chosen(logits: Tensor, sampling: Sampling, codec: Codec, generator: torch.Generator | None) -> Token:
    p = _probabilities(logits, sampling)
    n = int(logits.argmax() if sampling.temperature == 0 else draw(p, generator))
    return Token(n, _text(codec, n), logits[0, n].item(), p[0, n].item())


@contextmanager
def _watched(model: LanguageModel) -> Iterator[list[Stage]]:
    """Record a stage for every part of ``model`` that runs in the context."""
    stages: list[Stage] = []
    handles = []

    def watch(module: nn.Module | None, part: str, name: str, layer: int = 0) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            y, *others = output if isinstance(output, tuple) else (output,)
            kept = next((other for other in others if isinstance(other, dict)), {})
            stages.append(Stage(
                part, layer, name, tuple(y.shape), y[0, -1].float().clone(),
                {key: tuple(t.shape) for key, t in kept.items()}, sum(t.numel() * t.element_size() for t in kept.values()),
                experts_of(module, args[0][:, -1]) if part == "ffn" else [],
            ))  # fmt: skip

        if module is not None:
            handles.append(module.register_forward_hook(hook))

    backbone, config = model.model, model.config
    watch(backbone.embedding, "embedding", "embedding")
    for i, (block, mixer, ffn) in enumerate(zip(backbone.layers, config.mixer_names, config.ffn_names, strict=True)):
        watch(getattr(block, "mixer"), "mixer", mixer, i + 1)  # noqa: B009  (a module list's modules are of no known class)
        watch(getattr(block, "ffn"), "ffn", ffn, i + 1)  # noqa: B009
    watch(backbone.norm, "norm", config.norm)
    watch(model.lm_head, "classifier", "classifier")
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


def experts_of(ffn: nn.Module, x: Tensor) -> list[tuple[int, float]]:
    """Experts that a mixture chooses for the token x [1, D], with their weights; empty for other feed-forwards."""
    router, active = getattr(ffn, "router", None), getattr(ffn, "active", None)
    if router is None or active is None:
        return []
    if callable(route := getattr(ffn, "route", None)):
        weights, chosen = route(x)
    else:
        weights, chosen = router(x.to(router.weight.dtype)).softmax(-1).topk(active, -1)
    return list(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
