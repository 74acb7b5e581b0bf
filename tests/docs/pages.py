"""Anchors and links of the built pages."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Anchors, links and loaded files of one HTML page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.links if tag == "a" else self.loaded).append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def broken(folder: Path) -> list[str]:
    """Broken links between the pages of ``folder``, and missing files that they load."""
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            whole = not parts.fragment or parts.fragment in getattr(pages.get(target), "anchors", ())
            if not target.exists() or not whole:
                found.append(f"{path.relative_to(folder)}: {link}")
    return found


def foreign(folder: Path) -> list[str]:
    """External resources of the pages."""
    return [f"{path.name}: {url}" for path in folder.rglob("*.html") for url in Page(path).loaded if urlsplit(url).netloc]
