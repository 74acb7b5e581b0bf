"""Trained language model of about twenty thousand parameters that ships with the site and runs in its pages, on words of two languages.

Its texts are clauses such as "Ann loves tea", repeated for a name unless "now" states a change. To predict the last word of a clause
the model must recall the latest statement about that name. ``python -m linattn.atlas.tiny`` trains it anew.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linattn.atlas.text import Both
from linattn.models import LanguageModel, LMConfig
from linattn.report.folder import write_text

NAMES = (Both("Ann", "小安"), Both("Ben", "小本"), Both("Eva", "小怡"), Both("Tom", "小童"), Both("Mia", "小米"), Both("Leo", "小雷"))
VERBS = (Both("loves", "爱"), Both("fears", "怕"))
THINGS = (
    Both("tea", "茶"), Both("milk", "奶"), Both("rice", "饭"), Both("fish", "鱼"), Both("soup", "汤"), Both("eggs", "蛋"),
)  # fmt: skip
OTHER = (Both("…", "…"), Both(",", "，"), Both(".", "。"), Both("now", "现在"))  # the first represents unknown words
VOCABULARY = (*OTHER, *NAMES, *VERBS, *THINGS)
COMMA, STOP, NOW = 1, 2, 3
LENGTH, CLAUSES = 40, (3, 9)  # tokens of a text, and clauses before its full stop
WEIGHTS = Path(__file__).with_name("tiny.json")
LEVELS = 32767  # quantisation levels of a weight on each side of zero
CONFIG = LMConfig(
    vocab_size=len(VOCABULARY), dim=32, layers=2, mixer="deltanet", ffn="swiglu", ffn_dim=64, mixer_options={"deltanet": {"heads": 2}}
)


def text(generator: torch.Generator) -> list[int]:
    """Draw a text by the module's rule: token numbers, with a full stop last."""

    def pick(words: Sequence[object], start: int) -> int:
        return start + int(torch.randint(len(words), (), generator=generator))

    names = len(OTHER)
    verbs, things = names + len(NAMES), names + len(NAMES) + len(VERBS)
    known: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    for _ in range(int(torch.randint(*CLAUSES, (), generator=generator))):
        if known and torch.rand((), generator=generator) < 0.6:
            subject = list(known)[int(torch.randint(len(known), (), generator=generator))]
        else:
            subject = pick(NAMES, names), pick(VERBS, verbs)
        fresh = subject in known and torch.rand((), generator=generator) < 0.35
        if fresh or subject not in known:
            known[subject] = pick(THINGS, things)
        tokens += [*([NOW] if fresh else []), *subject, known[subject], COMMA]
    return [*tokens[:-1], STOP]


def recalls(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Positions whose next word follows from the text, with that word: repetitions in clauses without "now"."""
    known: dict[tuple[int, int], int] = {}
    found = []
    things = len(VOCABULARY) - len(THINGS)
    for i in range(2, len(tokens)):
        if tokens[i] >= things:
            subject = (tokens[i - 2], tokens[i - 1])
            if subject in known and (i < 3 or tokens[i - 3] != NOW):
                found.append((i - 1, known[subject]))
            known[subject] = tokens[i]
    return found


def accuracy(model: LanguageModel, texts: int = 300, seed: int = 1) -> tuple[int, int]:
    """Number of recalled words that are the model's first choice in new texts, and number of all."""
    generator = torch.Generator().manual_seed(seed)
    right = count = 0
    for _ in range(texts):
        tokens = text(generator)
        with torch.no_grad():
            chosen = model(torch.tensor([tokens], device=model.device))[0].argmax(-1).tolist()
        places = recalls(tokens)
        right += sum(chosen[place] == word for place, word in places)
        count += len(places)
    return right, count


def train(steps: int = 2500, batch: int = 64, seed: int = 0) -> LanguageModel:
    """Train the model on drawn texts, with Adam and a linearly falling rate."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    model = LanguageModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(steps):
        rows = [(text(generator) + [STOP] * LENGTH)[: LENGTH + 1] for _ in range(batch)]
        ids = torch.tensor(rows)
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 100) * (1 - step / steps)
        optimizer.step()
    return model.eval()


def packed(model: LanguageModel) -> dict[str, dict[str, object]]:
    """Weights by name: shape, scale and base64 of little-endian 16-bit integers, to be multiplied by the scale."""
    made: dict[str, dict[str, object]] = {}
    for name, weight in model.state_dict().items():
        largest = weight.abs().max().item() or 1.0
        levels = (weight / largest * LEVELS).round().numpy().astype("<i2")
        made[name] = {"shape": list(weight.shape), "scale": largest / LEVELS, "data": base64.b64encode(levels.tobytes()).decode()}
    return made


@cache
def weights() -> dict[str, dict[str, object]]:
    """Packed weights of the file that ships."""
    return json.loads(WEIGHTS.read_text(encoding="utf-8"))


def unpacked(packed: dict[str, dict[str, object]]) -> dict[str, Tensor]:
    """Float64 tensors of :func:`packed` weights."""
    made = {}
    for name, entry in packed.items():
        levels = np.frombuffer(base64.b64decode(str(entry["data"])), "<i2").astype("f8")
        made[name] = torch.from_numpy(levels * float(str(entry["scale"]))).view(entry["shape"])  # type: ignore[call-overload]
    return made


@cache
def model() -> LanguageModel:
    """Trained model in float64."""
    made = LanguageModel(CONFIG).double()
    made.load_state_dict(unpacked(weights()))
    return made.eval()


if __name__ == "__main__":
    trained = train()
    print(sum(p.numel() for p in trained.parameters()), "parameters; recalled", accuracy(trained))
    write_text(WEIGHTS, json.dumps(packed(trained)) + "\n")
