"""First steps: a small trained model runs in the page, from a typed sentence to the next word."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from linattn.atlas import tiny
from linattn.atlas.page import Entry, Page
from linattn.atlas.story import written
from linattn.atlas.text import Both

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "begin.html",
    Both("First steps", "入门"),
    Both(
        "From a sentence that you type to the next word: tokens, embeddings, mixer, feed-forward, logits, sampling, and the loop.",
        "从你输入的一句话到下一个词：分词、嵌入、混合层、前馈层、logits、采样与循环。",
    ),
)
PROMPT = (4, 10, 12, 1, 5, 10, 13, 1, 3, 4, 10, 13, 1, 4, 10)  # Ann loves tea, Ben loves milk, now Ann loves milk, Ann loves


def data() -> dict[str, object]:
    """Data of the figure "begin": weights and vocabulary, and the library's logits for the first sentence."""
    with torch.no_grad():
        logits = tiny.model()(torch.tensor([PROMPT]))[0]
    config = tiny.CONFIG
    return {
        "weights": tiny.weights(),
        "layers": config.layers,
        "heads": config.mixer_options["deltanet"]["heads"],
        "eps": config.norm_eps,
        "words": [word._asdict() for word in tiny.VOCABULARY],
        "prompt": list(PROMPT),
        "stop": tiny.STOP,
        "logits": logits.tolist(),
    }


@cache
def numbers() -> dict[str, object]:
    """Numbers in the text of the page."""
    model, (right, count) = tiny.model(), tiny.accuracy(tiny.model())
    heads = tiny.CONFIG.mixer_options["deltanet"]["heads"]
    size = tiny.CONFIG.dim // heads
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tiny.VOCABULARY),
        "dim": tiny.CONFIG.dim,
        "layers": tiny.CONFIG.layers,
        "heads": heads,
        "size": size,
        "state": tiny.CONFIG.layers * heads * size * size,
        "right": right,
        "count": count,
    }


def pages(atlas: Atlas) -> Iterator[Page]:  # noqa: ARG001 - as every part's
    """Make the page."""
    html = written(Path(__file__).with_name("begin.html"), {"model": numbers()})
    yield Page(ENTRY.path, ENTRY.name, html, {"begin": data()}, lead=ENTRY.summary)
