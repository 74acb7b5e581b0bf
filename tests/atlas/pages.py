"""Content of a built site."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

SYSTEMS = ("softmax", "gla", "gated_deltanet", "lstm", "s4", "agent")


class Elements(HTMLParser):
    """Elements with their attributes; refuses improper nesting."""

    VOID = ("meta", "link", "input", "br", "img", "wbr")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.found = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"


class Chinese(HTMLParser):
    """Chinese text of a page, without code, LaTeX of formulas and titles of papers."""

    OTHER = ("head", "script", "style", "code", "pre", "cite", "annotation")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.hidden, self.words = [False], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in Elements.VOID:
            english = tag != "html" and dict(attrs).get("lang") == "en"
            self.hidden.append(self.hidden[-1] or english or tag in self.OTHER)

    def handle_endtag(self, tag):
        self.hidden.pop()

    def handle_data(self, data):
        if not self.hidden[-1]:
            self.words.append(data)


def data(site: Path, path: str) -> dict[str, object]:
    """The data sets of one page."""
    html = (site / path).read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="data-([^"]+)">(.*?)</script>', html, re.S)
    return {name: json.loads(text) for name, text in found}


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))
