"""What all tests of the zoo have in common."""

import pytest

from svdcompress.prune._operators import bugs_raised


@pytest.fixture(scope="session", autouse=True)
def bugs_of_handlers_are_raised():
    """A handler's own mistake fails the tests; for users its units stay, with a note."""
    with bugs_raised():
        yield
