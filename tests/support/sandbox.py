"""The provider's sandbox under test: what it is told to do wrong."""

from __future__ import annotations

from typing import Any

import requests

from sandbox.process import Sandbox


def faults(sandbox: Sandbox, **plan: Any) -> None:
    requests.post(sandbox.url + "/_sandbox/faults", json=plan, timeout=30).raise_for_status()
