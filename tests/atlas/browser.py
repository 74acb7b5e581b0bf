"""Chromium on pages from disk; records errors and requests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

MISSING = "NO BROWSER: the atlas was NOT tested as a reader sees it. `make browser` installs Chromium and playwright"
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def needed() -> None:
    """Skip loudly where there is no browser; fail instead where one must be (LINATTN_BROWSER=1, as in CI)."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        here = False
    else:
        here = CHROMIUM is not None
    if not here:
        (pytest.fail if os.environ.get("LINATTN_BROWSER") == "1" else pytest.skip)(MISSING)


AXE = {"preload": False, "resultTypes": ["violations"]}  # options of axe: no preloading, details only of violations
LOCALES = {"en": "en-GB", "zh": "zh-CN"}


class Reader:
    """A page in a tab reused by many tests; :meth:`check` asserts that no errors occurred."""

    def __init__(self, tab, url: str, *, width: int = 1280, scheme: str = "light", motion: str = "no-preference"):
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page = tab
        self.heard = {
            "console": lambda m: self.wrong.append(f"{m.type}: {m.text}"),
            "pageerror": lambda e: self.wrong.append(str(e)),
            "request": lambda r: self.requests.append(r.url),
        }
        for event, note in self.heard.items():
            tab.on(event, note)
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme, reduced_motion=motion)
        tab.goto(url)

    def leave(self) -> None:
        """Restore the tab's state."""
        self.page.evaluate("localStorage.clear()")
        for event, note in self.heard.items():
            self.page.remove_listener(event, note)

    def check(self, root: Path) -> None:
        assert not self.wrong, self.wrong
        away = [url for url in self.requests if not url.startswith(root.as_uri())]
        assert not away, away

    def slide(self, name: str, value: int) -> None:
        """Move a slider by pointer events."""
        slider = self.page.locator(f"[data-slider={name}]")
        slider.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", value)

    def cells(self, place: str) -> dict[tuple[int, int], float]:
        """The numbers that a grid shows, by row and column."""
        script = "nodes => nodes.map(n => [+n.dataset.row, +n.dataset.col, +n.dataset.value])"
        return {(r, c): v for r, c, v in self.page.locator(f"{place} rect[data-value]").evaluate_all(script)}


def cells(values) -> dict[tuple[int, int], float]:
    """The same of a matrix of the data, whose empty cells are None."""
    return {(r, c): v for r, row in enumerate(values) for c, v in enumerate(row) if v is not None}
