"""Ask an advisory service about all pinned versions: `make audit`, apart from `make check` because it needs the network.

pip-audit skips what its service does not answer for, and then finds nothing wrong. So a version that is known to be vulnerable
is asked about first: if that is not found, nothing else would be either. What is given goes on to pip-audit
(`make audit ARGS='-s osv'`). Exit status 0: nothing is known, or no service answers, which is said. 1: something is, or the
service sees nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "pinned.txt"
# Known for years, under several numbers.
VULNERABLE = "jinja2==2.4.1"


def main() -> int:
    """Prove that the service sees, and ask it."""
    given = sys.argv[1:]
    found = proof(given)
    if found is None:
        _say("no advisory service answers: nothing was audited")
        return 0
    if not found:
        _say(f"the service answers, and does not know that {VULNERABLE} is vulnerable: the audit sees nothing")
        return 1
    _say(f"the service sees: {found} advisories about {VULNERABLE}")
    return subprocess.run([*_command(given), "--strict", "--requirement", PINS], check=False).returncode


def proof(given: list[str]) -> int | None:
    """How many advisories the service has about a version that is known to be vulnerable; None: it does not answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as scratch:
        scratch.write(f"{VULNERABLE}\n")
        scratch.flush()
        asked = [*_command(given), "--format", "json", "--progress-spinner", "off", "--requirement", scratch.name]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    try:
        (dependency,) = json.loads(done.stdout)["dependencies"]
    except ValueError:
        return None  # it ended before it had a result
    return None if "skip_reason" in dependency else len(dependency["vulns"])


def _command(given: list[str]) -> list[str]:
    # everything is pinned: nothing has to be resolved, and so nothing of it is downloaded
    return [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", *given]


def _say(line: str) -> None:
    sys.stdout.write(f"audit: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
