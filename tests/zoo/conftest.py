"""Shared by all tests of the zoo."""

import pytest

from svdcompress.prune._operators import bugs_raised


@pytest.fixture(scope="session", autouse=True)
def bugs_of_handlers_are_raised():
    """A bug in a handler fails the tests; for users, its units stay, with a note."""
    with bugs_raised():
        yield
