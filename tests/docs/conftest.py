"""Programs of the pages and examples share the time that importing torch takes."""

import pytest

from tests.programs import Programs


@pytest.fixture(scope="session")
def programs():
    """Runs programs, each in a process of its own."""
    found = Programs()
    yield found
    found.close()
