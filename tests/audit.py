"""`make lint`: runs pip-audit on pinned versions and says plainly when it found no data to check: audit.py [FILE].

pip-audit also reports "no known vulnerabilities" for packages that it has no data on; behind a mirror that is all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 300


def audited(file: str) -> subprocess.CompletedProcess[str]:
    """pip-audit's JSON answer for the versions in a file."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "-r",
        file,
        "--no-deps",
        "--disable-pip",
        "-f",
        "json",
        "--progress-spinner=off",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def main(file: str, ask: Callable[[str], Any] = audited, say: Callable[[str], None] = print) -> int:
    """Return the exit code: 1 if a version has a known vulnerability or if pip-audit itself fails."""
    try:
        answer = ask(file)
        packages = json.loads(answer.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        errors = "" if isinstance(error, subprocess.TimeoutExpired) else answer.stderr.strip()
        if errors and "ConnectionError" not in errors and "HTTP" not in errors and "ServiceError" not in errors:
            say(errors)
            return 1
        say("pip-audit: SKIPPED: its data could not be reached; nothing was audited")
        return 0
    known = [package for package in packages if "skip_reason" not in package]
    for package in known:
        for hole in package["vulns"]:
            fixed = ", ".join(hole.get("fix_versions") or ()) or "no version yet"
            say(f"{package['name']} {package['version']}: {hole['id']} (mended in {fixed})")
    bad = sum(bool(package["vulns"]) for package in known)
    if not known:
        say(f"pip-audit: SKIPPED: its data has none of the {len(packages)} packages (a mirror?); nothing was audited")
    else:
        say(f"pip-audit: {len(known)} of {len(packages)} packages audited, {bad} with known vulnerabilities")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or ["constraints.txt"]))
