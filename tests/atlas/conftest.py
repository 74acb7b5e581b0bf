import os

import pytest
from filelock import FileLock

from linattn.atlas import build
from tests.atlas import browser
from tests.atlas.pages import SYSTEMS


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The whole site with a few systems, built once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "atlas"
    with FileLock(f"{folder}.lock"):
        if not (folder / "index.html").exists():  # the first page is written last
            build(folder, names=SYSTEMS)
    return folder


@pytest.fixture(scope="session")
def chromium():
    browser.needed()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser.CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def tabs(chromium):
    """A tab for each language of a browser: opening a page in one takes a fraction of what a new one takes."""
    return {language: chromium.new_context(locale=locale).new_page() for language, locale in browser.LOCALES.items()}


@pytest.fixture
def open_page(tabs, site):
    """``open_page("systems/gla.html", language="zh", width=390, scheme="dark")`` -> a Reader, checked at the end; one is open at a time."""
    readers = []

    def opened(path, language="en", **options):
        if readers:
            readers[-1].leave()
        readers.append(browser.Reader(tabs[language], (site / path).as_uri(), **options))
        return readers[-1]

    yield opened
    if readers:
        readers[-1].leave()
    for reader in readers:
        reader.check(site)
