import pytest

from linattn.atlas import build
from tests.atlas import browser
from tests.atlas.pages import SYSTEMS


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The whole site with a few systems."""
    folder = tmp_path_factory.mktemp("atlas")
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


@pytest.fixture
def open_page(chromium, site):
    """``open_page("systems/gla.html", language="zh", width=390, scheme="dark")`` -> a Reader, checked at the end."""
    readers = []

    def opened(path, **options):
        readers.append(browser.Reader(chromium, (site / path).as_uri(), **options))
        return readers[-1]

    yield opened
    for reader in readers:
        reader.check(site)
        reader.context.close()
