"""The application that `idempotency web` serves, and what a set-up must have before it starts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..application import runtime_of
from ..errors import IdempotencyError, InvalidResult, NotAllowed, OperationNotFound, SettingsError
from ..hosts import is_loopback
from ..http.asgi import Application, Message, Receive, Scope, Send
from ..observe.logs import log
from ..operate.people import Person, authenticate
from ..settings import Settings
from ..store import schema
from . import approvals, archive, bulk, doubts, edits, failures, flow, letters, live, operations, sagas, tenants
from .access import Sessions
from .desk import Desk
from .gate import PLAIN, Gate, Site
from .login import Login
from .sessions import routes as of_sessions
from .shown import environment, page

# The revision of the schema whose columns the pages read.
NEEDS = "0021"

# Pages that take a thread at the same time, of the 40 that there are; and seconds for which another one waits for its turn.
AT_ONCE, LONGEST_WAIT = {"login": 6, "page": 24}, 15.0


def create_app(celery: Celery, *, host: str = "127.0.0.1", port: int = 8500, token: str | None = None) -> Starlette:
    """The application for a server that listens on this host and port.

    Raises `SettingsError` where people would have to log in and cannot, and `NotAuthenticated` for a `token` that counts for
    nothing.
    """
    runtime = runtime_of(celery)
    settings = runtime.settings
    logs_in = settings.web_secret is not None
    _check(settings, host, logs_in=logs_in)
    with runtime.autocommit() as connection:
        schema.require_compatible(connection)
        if (found := schema.current_revision(connection) or "") < NEEDS:
            raise SettingsError(f"database schema: at {found}, the page needs {NEEDS}; migrate it")
    person: Person | None = None
    if token is not None and not logs_in:
        person = authenticate(runtime, token, role="reader", action="web")
    site = _site(settings, host, port)
    secret = secrets.token_urlsafe(32) if settings.web_secret is None else settings.web_secret.get_secret_value()
    issuer = settings.oidc_issuer if logs_in else None
    sessions = Sessions(secret, lasts=settings.web_session, issuer=issuer, person=person)
    desk = Desk(celery, sessions, site, Login(celery, settings) if logs_in else None)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        desk.close()

    app = Starlette(
        routes=_routes(),
        lifespan=lifespan,
        middleware=[
            Middleware(Gate, site=site, sessions=sessions, logs_in=logs_in),
            Middleware(Failures),
            Middleware(Crowd),
        ],
        exception_handlers={
            IdempotencyError: _refused,
            SQLAlchemyError: _unavailable,
            404: _not_found,
        },
    )
    # behind a proxy the server sees plain http, and its redirect would lead there
    app.router.redirect_slashes = False
    app.state.desk, app.state.templates = desk, environment()
    return app


class Crowd:
    """Has pages wait for each other before they take a thread, so that some are left for what asks no server.

    Those who log in wait apart from those who have: the first wait for the issuer, and may be anybody.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._places = {name: asyncio.Semaphore(number) for name, number in AT_ONCE.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path.startswith(("/static/", "/health", "/live")):
            await self._app(scope, receive, send)
            return
        places = self._places["login" if path in ("/login", "/callback") else "page"]
        try:
            await asyncio.wait_for(places.acquire(), LONGEST_WAIT)
        except TimeoutError:
            answer = PlainTextResponse("too many pages wait for an answer; look again later\n", 503)
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            places.release()


class Failures:
    """Answers for a page that fails, within the gate: Starlette would answer outside of it, and have the server log what failed."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            log.exception("web_page_failed", path=scope.get("path"))
            if not begun:
                request = Request(scope, receive)
                answer = page(
                    request, "error.html", status=500, title="This page has failed", why="a defect; the log has it"
                )
                await answer(scope, receive, send)


def _check(settings: Settings, host: str, *, logs_in: bool) -> None:
    if is_loopback(host):
        return
    if not logs_in:
        raise SettingsError(
            f"--host {host}: others reach it, so people have to log in: set idempotency_web_url and idempotency_web_secret, and "
            "idempotency_oidc_issuer, idempotency_oidc_audience and idempotency_oidc_keys"
        )
    if not (settings.web_url or "").startswith("https://"):
        raise SettingsError(
            f"--host {host}: others reach it, so idempotency_web_url has to begin with https://, by a proxy that speaks TLS"
        )


def _site(settings: Settings, host: str, port: int) -> Site:
    if settings.web_url is not None:
        return Site.of(settings.web_url)
    names = dict.fromkeys([f"[{host}]" if ":" in host else host, "127.0.0.1", "localhost", "[::1]"])
    return Site.of(*(f"http://{name}" + ("" if port == PLAIN["http"] else f":{port}") for name in names))


def _routes() -> list[BaseRoute]:
    static = StaticFiles(directory=Path(__file__).parent / "static")
    modules: list[Any] = [
        flow,
        live,
        failures,
        archive,
        edits,
        letters,
        bulk,
        doubts,
        operations,
        approvals,
        sagas,
        tenants,
    ]
    return [
        *of_sessions,
        Route("/health", _health),
        Mount("/static", static),
        *(route for module in modules for route in module.routes),
    ]


async def _health(request: Request) -> Response:
    """Whether the process answers, also while all its threads wait for a server. It says nothing of the database."""
    return PlainTextResponse("ok\n")


# ---------------------------------------------------------------- what is said instead of a page


def _refused(request: Request, error: Exception) -> Response:
    status = {OperationNotFound: 404, InvalidResult: 422}.get(
        type(error), 403 if isinstance(error, NotAllowed) else 409
    )
    return page(request, "error.html", status=status, title=_TITLES.get(status, "Refused"), why=str(error))


_TITLES = {403: "Not allowed", 404: "Not found", 409: "Refused: nothing was changed", 422: "Not a result of this call"}


def _not_found(request: Request, error: Exception) -> Response:
    return page(request, "error.html", status=404, title="Not found", why="there is no such page")


def _unavailable(request: Request, error: Exception) -> Response:
    log.warning("web_database_failed", path=request.url.path, error=type(error).__name__)
    why = "the database did not answer in time, or refused the question; ask for less, or look again"
    return page(request, "error.html", status=503, title="No answer from the database", why=why)
