"""Lab: a sentence, a system's update rule, and the effect of each token on the state, computed in the page by a small recurrence.

Every word is a vector derived from its letters, so that any sentence can be typed. A token's key is the word before it and its value the
word itself; its query is the word itself. The output after a word is thus what has followed it so far, which shows the words that a
state still holds. ``script/lab.js`` computes the same in the page; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import linattn
from linattn.atlas import sentence
from linattn.atlas.mathml import spread
from linattn.atlas.page import Entry, Page, figure
from linattn.atlas.text import Both, spoken

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "lab.html",
    Both("Lab", "实验台"),
    Both(
        "Type a sentence, choose a system and step through the tokens to see what decays, what is erased, written and read.",
        "输入一句话，选一种方法，逐个 token 单步执行，看每一步的衰减、擦除、写入与读出。",
    ),
)
SIZE = 8  # of keys and values
SALT = 3823530  # of four million, the one with the least similar words of the running sentence
HEADS = (1, 2, 4)  # choices in the page
DECAY, BETA = 0.9, 1.0  # initial values of the sliders
EPS = 1e-6


@dataclass(frozen=True)
class Rule:
    """Update rule of the state, by the arguments of :func:`linattn.linear_attention` that it uses.

    Args:
        key: name in the page's data.
        name: the system with this recurrence.
        equation: LaTeX.
        decay: "none", "constant", "head" or "channel".
        erase: "none", "delta" or "pair" (a read and a write direction, with a rate for every channel).
        normalize: divides the output by q z, with positive keys and queries.
    """

    key: str
    name: Both
    equation: str
    decay: str = "none"
    erase: str = "none"
    normalize: bool = False


RULES = (
    Rule("none", Both("plain sum", "纯求和"), r"S_t = S_{t-1} + k_t^\top v_t"),
    Rule("constant", Both("RetNet", "RetNet"), r"S_t = \gamma\, S_{t-1} + k_t^\top v_t", "constant"),
    Rule("head", Both("Mamba-2", "Mamba-2"), r"S_t = \alpha_t\, S_{t-1} + k_t^\top v_t", "head"),
    Rule("channel", Both("GLA", "GLA"), r"S_t = \mathrm{Diag}(\alpha_t)\, S_{t-1} + k_t^\top v_t", "channel"),
    Rule("delta", Both("DeltaNet", "DeltaNet"), r"S_t = S_{t-1} + \beta\, k_t^\top (v_t - k_t S_{t-1})", "none", "delta"),
    Rule(
        "gated_delta",
        Both("Gated DeltaNet", "Gated DeltaNet"),
        r"S_t = \alpha_t S_{t-1} + \beta\, k_t^\top (v_t - k_t\, \alpha_t S_{t-1})",
        "head",
        "delta",
    ),
    Rule(
        "kda",
        Both("KDA", "KDA"),
        r"D_t = \mathrm{Diag}(\alpha_t)\, S_{t-1}, \quad S_t = D_t + \beta\, k_t^\top (v_t - k_t D_t)",
        "channel",
        "delta",
    ),
    Rule(
        "rwkv7",
        Both("RWKV-7", "RWKV-7"),
        r"S_t = \mathrm{Diag}(\alpha_t)\, S_{t-1} - (a_t \odot k_t)^\top (k_t S_{t-1}) + (a_t \odot k_t)^\top v_t",
        "channel",
        "pair",
    ),
    Rule(
        "normalize",
        Both("Linear Transformer", "Linear Transformer"),
        r"o_t = \frac{\phi(q_t)\, S_t}{\phi(q_t)\, z_t}, \quad z_t = z_{t-1} + \phi(k_t)",
        normalize=True,
    ),
)


def numbers(word: str, count: int) -> list[float]:
    """Derive ``count`` numbers in [-1, 1) from the letters of ``word``: FNV-1a, then a bit mixer for each number."""
    h = (2166136261 ^ SALT) & 0xFFFFFFFF
    for byte in word.encode():
        h = ((h ^ byte) * 16777619) & 0xFFFFFFFF
    return [_mixed((h + (i + 1) * 0x9E3779B9) & 0xFFFFFFFF) / 2**31 - 1 for i in range(count)]


def _mixed(h: int) -> int:
    """Finaliser of MurmurHash3: every bit of ``h`` reaches every bit of the result."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def vector(word: str) -> list[float]:
    """Vector of the word: :data:`SIZE` numbers of length 1."""
    raw = numbers(word, SIZE)
    length = math.sqrt(sum(x * x for x in raw))
    return [x / length for x in raw]


def gates(word: str) -> list[float]:
    """Factors on the decay of each channel at this word: :data:`SIZE` numbers in [0, 5], of mean 1, most of them small."""
    return [5 * x**4 for x in numbers(word, 2 * SIZE)[SIZE:]]


def shares(word: str) -> list[float]:
    """Share of β for each channel at this word: :data:`SIZE` numbers in [0, 1)."""
    return [(1 + x) / 2 for x in numbers(word, 3 * SIZE)[2 * SIZE :]]


def inputs(words: Sequence[str], rule: Rule, decay: float = DECAY, beta: float = BETA, heads: int = 1) -> dict[str, Any]:
    """Arguments of :func:`linattn.linear_attention` for ``words`` under ``rule``, float64.

    Each of ``heads`` has an equal share of the channels. A data-dependent decay per head is that of the head's first channel; the
    logarithm of a constant one is halved from head to head. The first token has no word before it: its key is 0, and it writes nothing.
    """
    now = torch.tensor([vector(word) for word in words], dtype=torch.float64)
    before = torch.cat([torch.zeros_like(now[:1]), now[:-1]])
    q, k, v = now, before, now
    if rule.normalize:
        q, k = torch.nn.functional.elu(now) + 1, torch.nn.functional.elu(before) + 1
        k[0] = 0
    made: dict[str, Any] = {"q": _split(q, heads), "k": _split(k, heads), "v": _split(v, heads), "scale": 1.0}
    logs = _split(math.log(decay) * torch.tensor([gates(word) for word in words], dtype=torch.float64), heads)
    constant = torch.tensor([math.log(decay) / 2**h for h in range(heads)], dtype=torch.float64)
    decays = {"constant": constant, "head": logs[..., 0], "channel": logs}
    if rule.decay != "none":
        made["decay"] = decays[rule.decay]
    if rule.erase == "delta":
        made["beta"] = torch.full((1, len(words), heads), beta, dtype=torch.float64)
    if rule.erase == "pair":
        rate = beta * torch.tensor([shares(word) for word in words], dtype=torch.float64)
        made |= {"k": _split(rate * k, heads), "erase": (_split(-k, heads), _split(rate * k, heads))}
    if rule.normalize:
        made["normalize"] = EPS
    return made


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))[None]  # [1, T, H, K]


@dataclass(frozen=True)
class Run:
    """Result of a rule on a sentence: outputs [T, H * V], and the states [T, H * K, H * V] after each token, a block for each head."""

    outputs: Tensor
    states: Tensor


def run(made: dict[str, Any]) -> Run:
    """Run the library's op on ``made``, the arguments from :func:`inputs`, in one pass and token by token."""
    length = made["q"].shape[1]
    whole = linattn.linear_attention(**made)
    states, state = [], None
    for t in range(length):
        _, state = linattn.linear_attention(**_only(made, t), initial_state=state, return_state=True)
        states.append(torch.block_diag(*(state[0] if isinstance(state, tuple) else state)[0]))
    return Run(whole[0].flatten(1), torch.stack(states))


def _only(made: dict[str, Any], t: int) -> dict[str, Any]:
    """Arguments of token ``t`` alone."""

    def one(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(one(x) for x in value)
        return value[:, t : t + 1] if isinstance(value, Tensor) and value.ndim > 2 else value

    return {name: one(value) for name, value in made.items()}


def recalled(outputs: Tensor, words: Sequence[str]) -> Tensor:
    """Projection of each output [T, V] on each of ``words``: [T, W], 1 where it equals that word's value."""
    return outputs @ torch.tensor([vector(word) for word in words], dtype=torch.float64).T


def vocabulary() -> list[Both]:
    """Words of the running sentence, each once."""
    return list(dict.fromkeys(sentence.SENTENCE))


def data() -> dict[str, object]:
    """Data of the figure "lab", and what the op gives on the running sentence, for the page's self-check."""
    words = [word.en for word in sentence.SENTENCE]
    rules = []
    for rule in RULES:
        runs = {heads: run(inputs(words, rule, heads=heads)) for heads in HEADS}
        own = {  # only the last output for several heads, to limit the site's size
            "outputs": {heads: found.outputs[0 if heads == 1 else -1 :].tolist() for heads, found in runs.items()},
            "states": {heads: found.states[-1].tolist() for heads, found in runs.items()},
        }
        rules.append(
            {"key": rule.key, "name": rule.name._asdict(), "decay": rule.decay, "erase": rule.erase, "normalize": rule.normalize, **own}
        )
    return {
        "tokens": sentence.tokens(),
        "size": SIZE,
        "heads": HEADS,
        "salt": SALT,
        "decay": DECAY,
        "beta": BETA,
        "eps": EPS,
        "rules": rules,
    }


TEXT = (
    Both(
        "Every word here is eight numbers derived from its letters; Chinese is cut into words by the browser's dictionary. A token's key is the "
        "word before it, its value is the word itself: the state learns what follows what. Its query is again the word itself, so the output "
        "is a guess at the next word, without any training.",
        "这里每个词是由它的字符决定的八个数；中文由浏览器自带的词典分词。一个 token 的键是它前面的词，值是它自己：状态学到的是“什么后面接什么”。"
        "查询也是这个词自己，所以输出就是对下一个词的猜测，完全不用训练。",
    ),
    Both(
        "Try this: stop at the last “loves” and change the system. The plain sum answers tea and milk at once; with RetNet’s decay the later one "
        "is stronger; DeltaNet has erased the first. Then type a sentence with more words than the key has channels. Each system is reduced "
        "to its recurrence: all get the same queries, keys and values, and nothing is projected or trained. With several heads each has its "
        "share of the channels and a block of its own on the diagonal: the state holds fewer numbers.",
        "试试看：停在最后一个“爱”上，换不同的方法。纯求和同时答“茶”和“奶”；有了 RetNet 的衰减，后出现的更强；DeltaNet 则已擦除前一个。"
        "再输入一句不同的词多于键通道数的话。这里的每种方法都只留下递推：查询、键、值完全相同，没有投影，也没有训练。"
        "有多个头时，每个头分得一部分通道，在对角线上各占一块：头越多，状态里的数越少。",
    ),
)
CAPTION = Both(
    "Computed in this page, in double precision, by about thirty lines that follow the library's reference; on the running sentence the page compares "
    "itself with the numbers that the library computed.",
    "由本页用双精度计算，代码约三十行，与库的参考实现一致；对这句例句，页面会拿自己的结果与库算出的数字对照。",
)


def pages(atlas: Atlas) -> Iterator[Page]:  # noqa: ARG001 - as every part's
    """Make the page."""
    rows = "".join(f'<dt>{spoken(rule.name)}</dt><dd tabindex="0">{spread(rule.equation)}</dd>' for rule in RULES)
    rules = f'<h2>{spoken(Both("Their recurrences", "各自的递推"))}</h2><dl class="facts equations">{rows}</dl>'
    body = "".join(spoken(text, "p") for text in TEXT) + figure("lab", "lab", caption=CAPTION) + rules
    yield Page(ENTRY.path, ENTRY.name, body, {"lab": data()}, lead=ENTRY.summary)
