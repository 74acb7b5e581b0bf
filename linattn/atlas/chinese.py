"""Chinese translations of text that the rest of the library has in English only: studies, tasks, benchmarks and shared phrases of mixers.

The atlas's own texts are in both languages where they are used, and those of one mixer beside its ``@register``. Texts from elsewhere,
such as result files, are looked up here. Names (systems, papers, code, units) are not translated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from linattn.atlas.text import Both
from linattn.report.chinese import NUMBER, TASKS
from linattn.report.chinese_studies import STUDIES

BENCHMARKS = {
    "forward": "前向",
    "forward+backward": "前向 + 反向",
    "decode": "解码",
    "portable": "可移植形式",
    "{} thread": "{} 个线程",
    "{} threads": "{} 个线程",
}
# Texts of several registrations; those of one are translated there, under `chinese`.
SHARED = {
    "the paper's equations as a loop in float64": "float64 循环逐步计算论文公式",
    "the authors' equations as a loop in float64": "float64 循环逐步计算作者的公式",
    "and figures of the authors' code": "以及作者代码算出的数",
    "the authors' modules.py": "作者的 modules.py",
    "in float64": "以 float64 计算",
    "the quadratic formula in float64": "float64 下的平方形式公式",
    "written in the test from the paper's equation": "在测试中按论文公式写出",
    "written in the test with loops": "在测试中用循环写出",
    "loops over hashes, Hamming distances and keys in float64, as idiap/fast-transformers has them in C++":
        "float64 循环计算哈希、汉明距离与键，与 idiap/fast-transformers 的 C++ 实现同法",
    "its whole blocks": "整块比较",
    "the paper's recurrence": "论文的递推",
    "token by token in float64": "float64 下逐 token 计算",
    "step by step in float64": "float64 下逐步计算",
    "torch.autograd of the loss in the paper": "对论文中的损失用 torch.autograd 求导",
    "a float64 loop over tokens: the memory by torch.autograd of the loss in the paper, attention by its definition":
        "float64 逐 token 循环：记忆对论文中的损失用 torch.autograd 求导，注意力按定义计算",
    "in training its batch norm takes the mean over all rows": "训练时它的批归一化对所有行求均值",
    "an expert has a capacity for each row of tokens, and a list of tokens is one row":
        "每个专家对每行 token 有容量上限，而一串 token 就是一行",
    "all for ": "全部，若 ",
}  # fmt: skip
CHINESE = {**STUDIES, **TASKS, **BENCHMARKS, **SHARED}


def both(english: str, own: Mapping[str, str] | None = None) -> Both:
    """Pair ``english`` with its Chinese, using the phrases of a registration, ``own``; text without Chinese stays."""
    return Both(english, _chinese(english, {**CHINESE, **(own or {})}) or english)


def equation(latex: str, own: Mapping[str, str]) -> Both:
    r"""Pair ``latex`` with its Chinese, which differs in the contents of ``\text{...}``, piece by piece."""
    words = {**SHARED, **own}
    return Both(latex, re.sub(r"\\text\{([^}]*)\}", lambda m: rf"\text{{{words.get(m[1], m[1])}}}", latex))


def _chinese(text: str, known: Mapping[str, str]) -> str | None:
    """Translate ``text`` as a whole, with its numbers in place of ``{}``, or clause by clause; None if no part has Chinese."""
    if text in known:
        return known[text]
    if found := known.get(NUMBER.sub("{}", text)):
        return found.format(*NUMBER.findall(text))
    for mark, theirs in (("; ", "；"), (", ", "，")):
        parts = text.split(mark)
        translated = [_chinese(part, known) for part in parts] if len(parts) > 1 else []
        if any(translated):
            return theirs.join(own or part.replace(", ", "，") for own, part in zip(translated, parts, strict=True))
    return None
