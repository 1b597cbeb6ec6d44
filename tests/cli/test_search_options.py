"""Options of the search that would do nothing are refused."""

import pytest
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.errors import UsageError


@pytest.mark.parametrize("option", [("--objective", "macs"), ("--latency-command", "./ask.sh")])
def test_what_goes_with_a_search_alone(option):
    result = CliRunner().invoke(app, ["sparsify", "digits", *option], env={"COLUMNS": "200"})
    assert result.exit_code == UsageError.exit_code and "go with --max-drop" in result.output
