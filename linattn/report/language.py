"""Text in English and Chinese: HTML and SVG contain both, and the page's script shows one."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from linattn.report.chinese import chinese

CODES = {"en": "en", "zh": "zh-Hans"}  # field -> HTML attribute lang


class Both(NamedTuple):
    r"""Text in English and in Chinese: plain text, in which the atlas reads ``\(...\)`` as LaTeX."""

    en: str
    zh: str


Words = Both | str  # a string has its Chinese in linattn.report.chinese, or is the same in both languages


def both(words: Words) -> Both:
    """``words`` in both languages."""
    return words if isinstance(words, Both) else Both(words, chinese(words) or words)


def spoken(words: Words, tag: str = "span") -> str:
    """Render ``words`` as HTML: text that is the same in both languages unchanged, other text as an element ``tag`` for each language."""
    said = both(words)
    if said.en == said.zh:
        return escape(said.en) if tag == "span" else f"<{tag}>{escape(said.en)}</{tag}>"
    return "".join(f'<{tag} lang="{CODES[k]}">{escape(getattr(said, k))}</{tag}>' for k in CODES)


def markup(words: Both, tag: str = "p", kind: str = "") -> str:
    """Set ``words``, which are HTML already, as an element ``tag`` of the class ``kind`` for each language."""
    named = f' class="{kind}"' if kind else ""
    return "".join(f'<{tag}{named} lang="{CODES[k]}">{getattr(words, k)}</{tag}>' for k in CODES)


def labelled(words: Words) -> str:
    """Set ``words`` as an accessible name: attributes of an element, between which the script chooses."""
    said = both(words)
    return f'aria-label="{escape(said.en)}" data-label-en="{escape(said.en)}" data-label-zh="{escape(said.zh)}"'


def drawn(place: str, words: Words) -> str:
    """Set ``words`` as SVG text with the attributes ``place``: one element, or one for each language of :class:`Both`."""
    if isinstance(words, str) or words.en == words.zh:
        return f"<text {place}>{escape(words if isinstance(words, str) else words.en)}</text>"
    return "".join(f'<text {place} lang="{CODES[k]}">{escape(getattr(words, k))}</text>' for k in CODES)


def listing(parts: Iterable[str]) -> Both:
    """List ``parts``, which are the same in both languages, with the separator of each."""
    found = list(parts)
    return Both(", ".join(found), "、".join(found))


def sentence(*parts: Words) -> Both:
    """Join ``parts``: in English with spaces, in Chinese without."""
    said = [both(part) for part in parts if part]
    return Both(" ".join(p.en for p in said), "".join(p.zh for p in said))


HIDES = ':root[lang="en"] [lang="zh-Hans"]:not([data-switch]), :root[lang="zh-Hans"] [lang="en"]:not([data-switch]) { display: none; }'
SWITCH = '<button type="button" data-switch="language" data-other="zh" lang="zh-Hans" aria-label="中文">中文</button>'


@cache
def script() -> str:
    """Script of the language switch of every page."""
    return Path(__file__).with_name("page.js").read_text(encoding="utf-8")


def policy() -> str:
    """Content security policy of a page that loads nothing and runs only :func:`script`."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
