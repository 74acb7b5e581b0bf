"""Running sentence on which every system is shown: twelve tokens, word for word the same in English and in Chinese.

A fact is stated and later replaced, to show what decays, what is erased and what is still read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.atlas.text import Both

SENTENCE = (
    Both("Ann", "小安"), Both("loves", "爱"), Both("tea", "茶"), Both(",", "，"), Both("Ben", "小本"), Both("loves", "爱"),
    Both("milk", "奶"), Both(",", "，"), Both("now", "现在"), Both("Ann", "小安"), Both("loves", "爱"), Both("milk", "奶"),
)  # fmt: skip
DIM = 32  # width of all mixers shown, possible for each
SEED = 0


def tokens() -> list[dict[str, str]]:
    """Sentence in the script's form: one {en, zh} for each token."""
    return [word._asdict() for word in SENTENCE]


def embedded(dim: int = DIM) -> Tensor:
    """Sentence as numbers [1, 12, dim], float64: a normal vector for each word, equal at all of its positions."""
    known = list(dict.fromkeys(word.en for word in SENTENCE))
    table = torch.randn(len(known), dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return table[[known.index(word.en) for word in SENTENCE]][None]
