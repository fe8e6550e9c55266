"""The beginning and the end of a session: to the issuer and back, and logging out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..errors import NotAllowed
from ..observe.logs import log
from .access import LOGIN
from .desk import desk_of, visitor_of
from .shown import page

# Kept by the browser while a person is at the issuer. Lax: the issuer's redirect comes from another site.
KEPT = "idempotency-login"
# Browsers drop a longer cookie, name and value together, and say nothing.
LONGEST_COOKIE = 4096
# Characters of the address that a login ends at: they are in that cookie.
LONGEST_NEXT = 3_200


def begin(request: Request) -> Response:
    """To the issuer."""
    desk = desk_of(request)
    if desk.login is None:
        return RedirectResponse("/", 303)
    url, kept = desk.login.begin()
    path = local(request.query_params.get("next"))
    kept["next"] = path if len(path) <= LONGEST_NEXT else "/"
    answer = RedirectResponse(url, 303)
    answer.set_cookie(
        KEPT,
        desk.sessions.sign("login", kept),
        max_age=LOGIN,
        path="/callback",
        secure=desk.site.is_secure,
        httponly=True,
        samesite="lax",
    )
    return answer


def end(request: Request) -> Response:
    """Back from the issuer. A page and no redirect: what another site began, a browser follows without the session's cookie."""
    desk = desk_of(request)
    kept = desk.sessions.read("login", request.cookies.get(KEPT, ""), age=LOGIN)
    if desk.login is None or kept is None:
        return page(
            request,
            "error.html",
            status=403,
            title="Not logged in",
            why="the login was not begun here, or took too long",
        )
    try:
        person = desk.login.end(kept, dict(request.query_params))
    except NotAllowed as refusal:
        return page(request, "error.html", status=403, title="Not logged in", why=str(refusal))
    session = desk.sessions.begin(person)
    if len(desk.site.cookie) + 1 + len(session) > LONGEST_COOKIE:
        why = f'the session of someone with {len(person.tenants or ())} tenants is too long for a browser; give them "*", or fewer'
        return page(request, "error.html", status=403, title="Not logged in", why=why)
    log.info("web_login", person=person.name, role=person.role)
    answer = page(request, "arrived.html", next=local(kept["next"]), person=person)
    set_session(request, answer, session)
    answer.delete_cookie(KEPT, path="/callback")
    return answer


def log_out(request: Request) -> Response:
    """Forget the session in this browser."""
    desk = desk_of(request)
    log.info("web_logout", person=visitor_of(request).person.name)
    answer = page(request, "error.html", title="Logged out", why="the session of this browser is over")
    answer.delete_cookie(desk.site.cookie, path="/", secure=desk.site.is_secure, httponly=True, samesite="strict")
    return answer


def set_session(request: Request, answer: Response, session: str) -> None:
    """Give the browser its session. Over plain http, which only this machine reaches, some browsers keep no Secure cookie."""
    desk = desk_of(request)
    answer.set_cookie(desk.site.cookie, session, path="/", secure=desk.site.is_secure, httponly=True, samesite="strict")


def local(path: str | None) -> str:
    """A path of this page, and of no other site."""
    if not path or not path.startswith("/") or path.startswith(("//", "/\\")) or not path.isprintable():
        return "/"
    return path


routes = [
    Route("/login", begin),
    Route("/callback", end),
    Route("/logout", log_out, methods=["POST"]),
]
