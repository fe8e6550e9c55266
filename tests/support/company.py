"""The company's login: an OpenID Connect provider in a process of its own, with people who have groups and tenants."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin

import httpx

from idempotency.identities import Role
from services.server import free_port
from tests.support.processes import eventually

# Who works there: name, role, tenants.
PEOPLE: dict[str, tuple[Role | None, list[str]]] = {
    "rita": ("reader", ["*"]),
    "otto": ("operator", ["*"]),
    "olga": ("operator", ["*"]),
    "anna": ("approver", ["*"]),
    "adam": ("admin", ["*"]),
    "tina": ("operator", ["acme"]),
    "tom": ("approver", ["globex"]),
    "nils": ("operator", []),
    "eve": (None, ["*"]),
}


class Company:
    """The provider's address, and its settings for an application."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def settings(self, page: str) -> dict[str, Any]:
        """What an application whose page has this address is configured with, once it is registered as a client."""
        asked = httpx.post(f"{self.url}/oauth2/clients", json={"redirect_uris": [f"{page}/callback"]})
        client = asked.raise_for_status().json()
        return {
            "oidc_issuer": self.url,
            "oidc_audience": client["client_id"],
            "web_client_secret": client["client_secret"],
            "oidc_keys": f"{self.url}/jwks",
            "oidc_tenants": "tenants",
            "web_url": page,
            "web_secret": "s" * 40,
        }

    def authorize(self, address: str, who: str) -> str:
        """What a person's browser is sent back to, after they have said who they are there."""
        answer = httpx.post(address, data={"sub": who})
        assert answer.status_code in (302, 303), answer.text
        return urljoin(address, answer.headers["location"])


@contextmanager
def running() -> Iterator[Company]:
    """The provider, until the block ends."""
    port = free_port()
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "oidc_provider_mock",
        "--port",
        str(port),
        "--require-nonce",
        "--require-registration",
    ]
    for name, (role, tenants) in PEOPLE.items():
        groups = [] if role is None else [f"idempotency-{role}"]
        command += ["--user-claims", json.dumps({"sub": name, "groups": groups, "tenants": tenants})]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    company = Company(port)
    try:
        eventually(lambda: _answers(company, process), timeout=60, what="the provider")
        yield company
    finally:
        process.kill()
        process.wait()


def _answers(company: Company, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the provider has ended"
    try:
        return httpx.get(f"{company.url}/.well-known/openid-configuration").is_success
    except httpx.TransportError:
        return False
