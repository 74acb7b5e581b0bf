"""Sentence pairs in two languages, from a file with a tab in each line or from the installed Debian handbook."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from linattn.data.sources import left_out

HANDBOOK = Path("/usr/share/doc/debian-handbook/html")  # where Debian's package debian-handbook is installed
SHOWN = 5  # malformed lines whose numbers are reported
_TEXTS = {"p", "h1", "h2", "h3", "h4", "h5"}
_END = {"en": re.compile(r"(?<=[.!?])\s+(?=[A-Z])"), "zh": re.compile(r"(?<=[。！？])")}


@dataclass(frozen=True)
class Pairs:
    """Pairs of source and target, without duplicates.

    Args:
        pairs: the pairs in their order.
        sha256: hash of all pairs.
        bad: number of lines that are not a pair.
        bad_lines: the first of their numbers, from 1.
    """

    pairs: list[tuple[str, str]]
    sha256: str
    bad: int = 0
    bad_lines: list[int] = field(default_factory=list)

    def told(self) -> str:
        """Message about lines left out; empty if there are none."""
        return left_out(self.bad, self.bad_lines, "a line is a source, a tab and its target")


def read_pairs(path: str | os.PathLike[str]) -> Pairs:
    """Read the pairs in a UTF-8 file, a source, a tab and its target in each line; other lines are skipped and counted.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if no line of it is a pair.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file with a source, a tab and its target in each line")
    found, bad = [], []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        cells = [cell.strip() for cell in line.decode(errors="replace").split("\t")]
        if len(cells) == 2 and all(cells) and "\ufffd" not in line.decode(errors="replace"):
            found.append((cells[0], cells[1]))
        elif any(cells):
            bad.append(number)
    if not found:
        raise ValueError(f"{path} has no line with a source, a tab and its target")
    return _pairs(found, len(bad), bad[:SHOWN])


def handbook(folder: str | os.PathLike[str] = HANDBOOK) -> Pairs:
    """Read the Debian Administrator's Handbook, sentence by sentence in English and Chinese.

    Its pages are the same in all languages, paragraph by paragraph; paragraphs that are not translated are left out. Where both
    have as many sentences these are paired, else the whole paragraphs are.

    Raises:
        FileNotFoundError: if it is not installed.
    """
    english, chinese = Path(folder) / "en-US", Path(folder) / "zh-CN"
    found = []
    for page in sorted(english.glob("*.html")):
        if not (other := chinese / page.name).is_file():
            continue
        ours, theirs = _paragraphs(page), _paragraphs(other)
        for en, zh in zip(ours, theirs, strict=True) if len(ours) == len(theirs) else ():
            if re.search("[\u4e00-\u9fff]", zh):
                found += _sentences(en, zh)
    if not found:
        raise FileNotFoundError(f"{folder} holds no Debian handbook in English and Chinese: apt install debian-handbook, or name a file")
    return _pairs(found, 0, [])


def _sentences(en: str, zh: str) -> list[tuple[str, str]]:
    ours, theirs = ([s.strip() for s in _END[language].split(text) if s.strip()] for language, text in (("en", en), ("zh", zh)))
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else [(en, zh)]


def _pairs(found: list[tuple[str, str]], bad: int, bad_lines: list[int]) -> Pairs:
    once = list(dict.fromkeys(found))
    digest = hashlib.sha256("\n".join(f"{source}\t{target}" for source, target in once).encode())
    return Pairs(once, digest.hexdigest(), bad, bad_lines)


def _paragraphs(page: Path) -> list[str]:
    reader = _Paragraphs()
    reader.feed(page.read_text(encoding="utf-8", errors="replace"))
    return reader.found


class _Paragraphs(HTMLParser):
    """Parser for a page's headings and paragraphs, div elements of the class "para" in the handbook's pages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._words: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _TEXTS or (tag == "div" and dict(attrs).get("class") == "para"):
            self._words = []

    def handle_endtag(self, tag: str) -> None:
        if self._words is not None and (tag == "div" or tag in _TEXTS):
            if text := " ".join("".join(self._words).split()):
                self.found.append(text)
            self._words = None

    def handle_data(self, data: str) -> None:
        if self._words is not None:
            self._words.append(data)
