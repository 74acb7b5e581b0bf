"""Text in two languages, and HTML with both, between which a switch in the page chooses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from linattn.atlas.mathml import mathml, pieces
from linattn.report.language import CODES, Both

__all__ = ["CODES", "Both", "fragment", "labelled", "marked", "possessive", "spoken", "unbroken"]


def spoken(words: Both, tag: str = "span") -> str:
    """Render ``words`` as two elements ``tag``, of which the style sheet shows one."""
    if words.en == words.zh:
        return f"<{tag}>{marked(escape(words.en))}</{tag}>"
    return "".join(f'<{tag} lang="{CODES[k]}">{marked(escape(getattr(words, k)))}</{tag}>' for k in CODES)


def unbroken(html: str) -> str:
    """Prevent line breaks between numbers and their units or spreads and in dates; allow them in names of passes."""
    html = re.sub(r"\b\d{4}-\d\d-\d\d\b", r'<span class="kept">\g<0></span>', html)
    return (
        re.sub(r"(?<=\d) (?=(?:%|[KMGT]i?B|ms)(?![\w/]))", "\u00a0", html)
        .replace(" ± ", "\u00a0±\u00a0")
        .replace("+backward", "+<wbr>backward")
        .replace("+ 反向", '+ <span class="kept">反向</span>')
    )


def possessive(name: str) -> str:
    """Chinese for "of ``name``": with a space only after Latin letters."""
    return f"{name} 的" if name[-1].isascii() else f"{name}的"


def labelled(words: Both) -> str:
    """Set ``words`` as an accessible name: attributes of an element, between which the script chooses."""
    return f'aria-label="{escape(words.en)}" data-label-en="{escape(words.en)}" data-label-zh="{escape(words.zh)}"'


def marked(html: str) -> str:
    r"""Replace ``\(...\)`` in ``html`` by inline MathML and ``\[...\]`` by displayed MathML."""
    html = re.sub(r"([“‘（(]?)\\\((.+?)\\\)([,.;:!?，。；：、！？…’”）)]*)", _kept, html, flags=re.S)
    return re.sub(r"\\\[(.+?)\\\]", lambda m: "".join(mathml(p, display=True) for p in pieces(_plain(m[1]))), html, flags=re.S)


def fragment(html: str, numbers: Mapping[str, object] | None = None) -> str:
    """Fill a handwritten part of a page.

    ``{{place}}`` and ``{{place:.2f}}`` become the number in ``numbers`` at that path (names and indices separated by
    points: ``pot.error.3``), so that every figure in prose is computed. LaTeX becomes MathML.

    Raises:
        ValueError: for a missing place, and if English and Chinese differ in their numbers of elements.
    """
    html = re.sub(r"\{\{\s*([\w.-]+)(?::([^}]*))?\s*\}\}", lambda m: escape(_written(_at(numbers or {}, m[1]), m[2])), html)
    counts = [len(re.findall(rf'lang="{code}"', html)) for code in CODES.values()]
    if counts[0] != counts[1]:
        raise ValueError(f"{counts[0]} elements are in English and {counts[1]} in Chinese: {' '.join(html.split())[:80]!r}")
    return marked(html)


def _kept(found: re.Match[str]) -> str:
    """Prevent line breaks between a formula and adjacent punctuation."""
    before, latex, behind = found.groups()
    formula = mathml(_plain(latex))
    return f'<span class="kept">{before}{formula}{behind}</span>' if before or behind else formula


def _plain(html: str) -> str:
    return html.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&#x27;", "'")


def _written(value: object, form: str | None) -> str:
    """Format ``value``, with a minus sign, not a hyphen, before a negative number."""
    return re.sub(r"^-", "−", format(value, (form or "").strip()))


def _at(numbers: object, place: str) -> object:
    found = numbers
    for step in place.split("."):
        try:
            found = found[int(step)] if isinstance(found, list | tuple) else found[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"no number stands at {place!r}: there is no {step!r}") from None
    return found
