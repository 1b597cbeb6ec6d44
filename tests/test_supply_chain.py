"""The dependencies of the package: each has its reason, and an audit that saw no data does not pass as a good one."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from audit import main

ROOT = Path(__file__).parent.parent


def declared():
    """Names in `dependencies` and in the extras of pyproject.toml, except those for tests."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = []
    for name in ("dependencies", "recipes", "train", "hf", "hub", "torchvision", "timm", "torch-pruning", "docs", "pack"):
        section = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        assert section, name
        found += re.findall(r'"([A-Za-z0-9_.-]+)', section[1])
    return found


def test_every_dependency_has_its_reason():
    rows = re.findall(
        r"^\| `([^`]+)` \| (.+) \|$", (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    reasons = dict(rows)
    assert set(reasons) == set(declared()) and all(len(reason) > 15 for reason in reasons.values())


def answer(packages, code=0, errors=""):
    return lambda file: SimpleNamespace(stdout=json.dumps({"dependencies": packages}), stderr=errors, returncode=code)


SKIPPED = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
GOOD = {"name": "b", "version": "2", "vulns": []}
BAD = {"name": "c", "version": "3", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1"]}]}


@pytest.mark.parametrize(
    ("ask", "code", "words"),
    [
        (answer([SKIPPED, SKIPPED]), 0, "SKIPPED: its data has none of the 2 packages"),
        (answer([SKIPPED, GOOD]), 0, "1 of 2 packages audited, 0 with"),
        (answer([GOOD, BAD]), 1, "c 3: CVE-1 (mended in 3.1)"),
        (
            lambda file: SimpleNamespace(stdout="", stderr="requests.exceptions.ConnectionError: none"),
            0,
            "could not be reached",
        ),
        (lambda file: SimpleNamespace(stdout="", stderr="unrecognized arguments"), 1, "unrecognized arguments"),
    ],
    ids=["no data", "some", "vulnerable", "no network", "wrong call"],
)
def test_an_audit_says_what_it_saw(ask, code, words):
    said = []
    assert main("constraints.txt", ask, said.append) == code
    assert words in "\n".join(said)
