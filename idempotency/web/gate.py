"""What every request passes before a page sees it, and what every answer has.

Its host is one that the page is reached by, which no name that an attacker points at this machine is. What changes something is a
form of this page: sent by it (Origin), with the session's own text (CSRF), of bounded length. Answers run no script and load
nothing but what this package has.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ..http.asgi import Application, Message, Receive, Scope, Send
from .access import Sessions, Visitor
from .login import to_log_in

# Bytes and fields of a form.
FORM, FIELDS = 256 * 1024, 100
# Ports that a browser leaves out of an origin.
PLAIN = {"http": 80, "https": 443}
# Paths that are answered without a session.
OPEN = ("/login", "/callback", "/static/", "/health")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # with no-referrer, a browser would not say where a form comes from
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where the page is reached: the origins that it has. `is_secure`: over https. `port`: of the first address."""

    origins: frozenset[str]
    is_secure: bool
    port: int

    @classmethod
    def of(cls, *urls: str) -> Site:
        """Of addresses of the page, the first being the one that people use."""
        split = [urlsplit(url) for url in urls]
        origins = frozenset(f"{each.scheme}://{each.netloc}".lower() for each in split)
        return cls(origins, split[0].scheme == "https", split[0].port or PLAIN[split[0].scheme])

    @property
    def cookie(self) -> str:
        """The session's cookie: over https, one that no other host and no plain http can set; else one of this port."""
        return "__Host-idempotency" if self.is_secure else f"idempotency-{self.port}"

    def has_host(self, host: str) -> bool:
        """Whether a request's Host is one of these."""
        return host.lower() in {urlsplit(origin).netloc for origin in self.origins}


class Gate:
    """The outermost part of the application."""

    def __init__(self, app: Application, *, site: Site, sessions: Sessions, logs_in: bool) -> None:
        self._app, self._site, self._sessions, self._logs_in = app, site, sessions, logs_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            named, given = name.decode("latin-1"), value.decode("latin-1")
            # HTTP/2 may send a cookie in each header
            headers[named] = f"{headers[named]}; {given}" if named == "cookie" and named in headers else given
        state = scope.setdefault("state", {})
        send = _with_headers(send, self._site, state, scope["path"])
        answer: Response | None
        if not self._site.has_host(headers.get("host", "")):
            answer = PlainTextResponse("this page is not reached by that name\n", 421)
        elif scope["method"] not in ("GET", "HEAD", "POST"):
            answer = PlainTextResponse("GET and POST only\n", 405)
        else:
            answer = await self._admit(scope, state, receive, headers)
        await (self._app if answer is None else answer)(scope, receive, send)

    async def _admit(
        self, scope: Scope, state: dict[str, Any], receive: Receive, headers: dict[str, str]
    ) -> Response | None:
        """Put the visitor and the form into the request's state; or the answer, if it goes no further."""
        visitor = self._sessions.visitor(cookie_of(headers, self._site.cookie))
        begins = None
        if visitor is None and not self._logs_in:
            begins = self._sessions.begin(None)
            visitor = self._sessions.visitor(begins)
        state["visitor"], state["begins"], state["form"] = visitor, begins, {}
        is_open = scope["path"].startswith(OPEN)
        if visitor is None and not is_open:
            if scope["method"] == "POST":
                return PlainTextResponse("the session is over: log in again; nothing was changed\n", 401)
            query = scope["query_string"].decode("latin-1")
            return RedirectResponse(to_log_in(scope["path"] + (f"?{query}" if query else "")), 303)
        if scope["method"] != "POST":
            return None
        return await self._read_form(state, receive, headers, visitor)

    async def _read_form(
        self, state: dict[str, Any], receive: Receive, headers: dict[str, str], visitor: Visitor | None
    ) -> Response | None:
        if headers.get("origin", "").lower() not in self._site.origins:
            return PlainTextResponse("the form is not one of this page (Origin); nothing was changed\n", 403)
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
            return PlainTextResponse("not a form\n", 415)
        body = await _body(receive)
        if body is None:
            return PlainTextResponse(f"a form has at most {FORM} bytes\n", 413)
        try:
            fields = parse_qsl(
                body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=FIELDS, errors="strict"
            )
        except ValueError:
            return PlainTextResponse("not a form\n", 400)
        form = dict(fields)
        if visitor is None or not hmac.compare_digest(form.pop("csrf", "").encode(), visitor.csrf.encode()):
            return PlainTextResponse("the form is of another session: load the page again; nothing was changed\n", 403)
        state["form"] = form
        return None


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too long, or its client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += bytes(message.get("body", b""))
        if len(body) > FORM:
            return None
        if not message.get("more_body"):
            return body


def cookie_of(headers: dict[str, str], name: str) -> str | None:
    """The value of a request's cookie, whatever else other applications of its domain have set."""
    return cookie_parser(headers.get("cookie", "")).get(name)


def _with_headers(send: Send, site: Site, state: dict[str, Any], path: str) -> Callable[[Message], Any]:
    """Sends what the application sends, with our headers, and the cookie of a session that begins without a login."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = HEADERS | ({"strict-transport-security": "max-age=31536000"} if site.is_secure else {})
            if path.startswith("/static/"):
                added = added | {"cache-control": "no-cache"}
            headers = [
                (name, value) for name, value in message["headers"] if name.decode("latin-1").lower() not in added
            ]
            headers += [(name.encode(), value.encode()) for name, value in added.items()]
            if (begins := state.get("begins")) is not None and not path.startswith(OPEN):
                secure = "; Secure" if site.is_secure else ""
                headers.append(
                    (b"set-cookie", f"{site.cookie}={begins}; Path=/; HttpOnly; SameSite=Strict{secure}".encode())
                )
            message = {**message, "headers": headers}
        await send(message)

    return sending
