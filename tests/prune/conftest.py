"""Makes the zoo and its masks in tests/zoo importable."""

import sys
from pathlib import Path

import pytest

from svdcompress.prune._operators import bugs_raised

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))


@pytest.fixture(scope="session", autouse=True)
def bugs_of_handlers_are_raised():
    """A bug in a handler fails the tests; for users, its units stay, with a note."""
    with bugs_raised():
        yield
