"""Training shared by several studies: stacks of equal size on text and on multi-query associative recall."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from linattn.experiment.sizing import equal_sizes, parameters
from linattn.models import LanguageModel, LMConfig, pattern
from linattn.reproduce import synthetic, variants
from linattn.tasks import Examples, multi_query_recall

VOCABULARY = 256  # bytes
CONVOLUTION = "base_conv"
UNSEEN = 512  # test examples of recall
_REFERENCE = "softmax with the feed-forward asked for"


@dataclass(frozen=True)
class Stack:
    """Pattern of mixers with options by name, in which otherwise equal models differ."""

    pattern: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, mixer: str) -> Stack:
        """Stack whose layers are all of one variant."""
        variant = variants.parse(mixer)
        return cls(variant.name, {variant.name: variant.options} if variant.options else {})

    def config(self, *, dim: int, layers: int, ffn_dim: int | None, vocab_size: int = VOCABULARY, tie_embeddings: bool = False) -> LMConfig:
        """Configuration of a model of this stack."""
        return LMConfig(
            vocab_size=vocab_size, dim=dim, layers=layers, mixer=self.pattern, mixer_options=self.options, ffn_dim=ffn_dim,
            tie_embeddings=tie_embeddings,
        )  # fmt: skip


def widths(stacks: Mapping[str, Stack], *, dim: int, layers: int, ffn_dim: int) -> dict[str, int]:
    """Feed-forward width at which each of ``stacks`` has as many parameters as softmax with ``ffn_dim``.

    The models are thus independent of the other stacks.

    Raises:
        linattn.experiment.sizing.Unequal: for models that differ by more than 2 %, stating the numbers.
    """
    everyone = {_REFERENCE: Stack("softmax"), **stacks}

    def count(name: str, width: int) -> int:
        return parameters(lambda: LanguageModel(everyone[name].config(dim=dim, layers=layers, ffn_dim=width)))

    sizes = equal_sizes(list(everyone), count(_REFERENCE, ffn_dim), count)
    return {name: sizes[name].ffn_dim for name in stacks}


def on_text(stack: Stack, run: Mapping[str, Any]) -> tuple[LanguageModel, float]:
    """Train a model on the source of Python's standard library by :mod:`linattn.train`; also returns its validation bits per byte.

    Args:
        stack: its mixers.
        run: its dim, layers, ffn_dim, context, batch_size, steps, learning_rate, seed and device.
    """
    from linattn.train import TrainOptions, load_run, train

    same = {k: run[k] for k in ("dim", "layers", "ffn_dim", "context", "batch_size", "steps", "learning_rate", "seed")}
    with TemporaryDirectory() as folder:
        options = TrainOptions(
            mixer=stack.pattern, mixer_options=stack.options, eval_every=run["steps"], dtype="fp32", out=Path(folder) / "run",
            **same,
        )  # fmt: skip
        result = train(options, progress=False)
        model, _ = load_run(result.run, device=run["device"])
    return model, result.validation_bits_per_byte


def on_recall(stack: Stack, run: Mapping[str, Any]) -> Generator[None, None, tuple[synthetic.Asked, Examples]]:
    """Train a model on :func:`linattn.tasks.multi_query_recall`; also returns test examples, and yields after every step.

    As in Zoology (arXiv 2312.04927) a layer of gated short convolution precedes the stack: it combines each value with its key,
    which takes softmax much longer to learn.

    Args:
        stack: its mixers.
        run: its dim, layers, ffn_dim, vocab_size, epochs, batch_size, learning_rate, seed and device, and lengths: pairs of tokens and of
            pairs among them. It learns from ``examples`` of each; test examples have the last length. ``tie_embeddings``
            as in Zoology: with two matrices nothing is recalled of 8192 words after 12,500 steps, while of 64 words two learn sooner.
    """
    generator = torch.Generator().manual_seed(run["seed"])
    kinds = [*((run["examples"], *length) for length in run["lengths"]), (UNSEEN, *run["lengths"][-1])]
    *seen, unseen = (
        multi_query_recall(count, tokens=tokens, pairs=pairs, vocab_size=run["vocab_size"], generator=generator)
        for count, tokens, pairs in kinds
    )
    torch.manual_seed(run["seed"])
    layers = [CONVOLUTION, *pattern.fill(pattern.parse(stack.pattern, "mixer"), run["layers"])]
    sizes = {name: run[name] for name in ("dim", "ffn_dim", "vocab_size")}
    config = Stack(", ".join(layers), stack.options).config(layers=len(layers), tie_embeddings=run.get("tie_embeddings", False), **sizes)
    model = synthetic.Asked(config).to(run["device"])
    yield from synthetic.train(model, seen, synthetic.Recipe(run["epochs"], run["batch_size"], run["learning_rate"]), seed=run["seed"])
    return model, unseen
