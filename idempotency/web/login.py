"""Logging in by the company's OpenID Connect: the authorization code with PKCE, and the ID token that it brings.

The ID token is believed as commands believe one (`identities`). Not promised: that a person who logs out is logged out at the
issuer.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from typing import Any, cast
from urllib.parse import urlencode

from ..application import runtime_of
from ..errors import NotAuthenticated
from ..extras import extra
from ..observe.logs import log
from ..operate.people import Person, authenticate
from ..setting_values import web_address
from ..settings import Settings

# Seconds: for an answer of the issuer, and for which what it says about itself is kept.
PATIENCE, KEPT = 5.0, 300.0
# Seconds after which an issuer that has not answered is asked again.
AGAIN = 2.0
UNUSABLE = "login: idempotency_oidc_issuer does not say where to log in"
ENDPOINTS = ("authorization_endpoint", "token_endpoint")


class Login:
    """The client of the issuer that the settings name."""

    def __init__(self, celery: Any, settings: Settings) -> None:
        with extra("web"):
            import authlib.integrations.requests_client  # noqa: F401
        self._celery, self._settings = celery, settings
        self._about: tuple[float, dict[str, Any]] | None = None
        self._failed_at: float | None = None
        self._lock = threading.Lock()

    @property
    def callback(self) -> str:
        """Where the issuer sends people back to."""
        return f"{cast(str, self._settings.web_url).rstrip('/')}/callback"

    def begin(self) -> tuple[str, dict[str, str]]:
        """Where to send a person, and what only their browser keeps until they come back. Raises `NotAuthenticated`."""
        kept = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
        with self._client() as client:
            url, _ = client.create_authorization_url(
                self._endpoint("authorization_endpoint"),
                state=kept["state"],
                nonce=kept["nonce"],
                code_verifier=kept["verifier"],
            )
        return url, kept

    def end(self, kept: dict[str, str], answered: dict[str, str]) -> Person:
        """Who has come back, by what the issuer's redirect says. Raises `NotAllowed`; the refusal of an ID token is audited."""
        import jwt
        import requests
        from authlib.common.errors import AuthlibBaseError

        if not hmac.compare_digest(kept["state"].encode(), answered.get("state", "").encode()):
            raise NotAuthenticated(
                "login: it was begun in another browser, or another one was begun since; log in again"
            )
        if "code" not in answered:
            raise NotAuthenticated("login: the issuer has refused it")
        try:
            with self._client() as client:
                token = client.fetch_token(
                    self._endpoint("token_endpoint"),
                    code=answered["code"],
                    code_verifier=kept["verifier"],
                    timeout=PATIENCE,
                    allow_redirects=False,
                ).get("id_token")
        except (requests.RequestException, AuthlibBaseError, ValueError) as error:
            log.warning("web_login_failed", error=type(error).__name__, said=getattr(error, "error", None))
            raise NotAuthenticated("login: the issuer did not take the code; log in again") from None
        person = authenticate(runtime_of(self._celery), token, role="reader", action="web login", called="login")
        nonce = jwt.decode(token, options={"verify_signature": False}).get("nonce")  # it was verified
        if not isinstance(nonce, str) or not hmac.compare_digest(nonce.encode(), kept["nonce"].encode()):
            raise NotAuthenticated("login: the ID token was made for another login")
        return person

    def _client(self) -> Any:
        from authlib.integrations.requests_client import OAuth2Session

        secret = self._settings.web_client_secret
        return OAuth2Session(
            self._settings.oidc_audience,
            None if secret is None else secret.get_secret_value(),
            scope=self._settings.web_scope,
            redirect_uri=self.callback,
            code_challenge_method="S256",
            token_endpoint_auth_method="none" if secret is None else "client_secret_basic",
        )

    def _endpoint(self, name: str) -> str:
        """An address that the issuer names for itself. Raises `NotAuthenticated` if it does not answer, or is another one."""
        import requests

        began = time.monotonic()
        with self._lock:
            if self._about is not None and time.monotonic() - self._about[0] < KEPT:
                return str(self._about[1][name])
            if self._failed_at is not None and self._failed_at >= began - AGAIN:
                raise NotAuthenticated(UNUSABLE)  # nobody waits for one who is silent after another who has
            issuer = cast(str, self._settings.oidc_issuer)
            try:
                about = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
                answer = requests.get(about, timeout=PATIENCE, allow_redirects=False)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                if found["issuer"] != issuer:
                    raise ValueError("another issuer")
                for each in ENDPOINTS:
                    web_address(str(found[each]))
            except (requests.RequestException, ValueError, KeyError, TypeError) as error:
                self._failed_at = time.monotonic()
                log.warning("web_issuer_unusable", error=type(error).__name__)
                raise NotAuthenticated(UNUSABLE) from None
            self._about = (time.monotonic(), found)
            return str(found[name])


def to_log_in(path: str) -> str:
    """The address at which a login begins that ends at `path`."""
    return f"/login?{urlencode({'next': path})}"
