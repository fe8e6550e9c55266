"""Dead letters, for operators: what `idempotency dead-letters` does, by the same functions.

The credential is an operator's token (`idempotency operators add`). Refusals are audited; the rate limit comes first, so
guessing tokens cannot fill the audit table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.encoders import jsonable_encoder
from sqlalchemy.exc import DBAPIError

from idempotency.application import runtime_of
from idempotency.errors import IdempotencyError, NotAllowed, NotAuthenticated, OperationNotFound
from idempotency.http.problems import Answer, problem
from idempotency.operate import discard, people
from idempotency.operate.change import Change, check_service
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.store import dead_letters, tenants
from idempotency.store.dead_letters import Selection
from idempotency.store.statements import describe
from idempotency.store.sweeps import is_row_error
from tasks import app as celery

from .callers import bearer
from .limits import RateLimit
from .problems import NOT_FOUND, Problem, documented, unauthenticated
from .schemas import BIGINT, Letters, Outcome, Refusal

PATH = "/admin/dead-letters"
UNAUTHENTICATED = unauthenticated(
    "Operator's token missing or not valid",
    "Authorization: Bearer with the token of an operator; `idempotency operators add` makes one",
)
NOT_ALLOWED = problem(403, "not_allowed", "Not allowed", "Needs the token of an operator whose role may do this.")
# Never in an answer: they may contain customers' data. `idempotency dead-letters show --json` has them.
HIDDEN = ("payload", "headers")

router = APIRouter(prefix=PATH, responses=documented(400, 401, 403, 429, 503))


def operator(request: Request) -> Person:
    """Authenticate the operator. Raises `Problem`: 401, 403 or 429."""
    action, runtime = f"{request.method} {request.scope['route'].path}", runtime_of(celery)
    limits: RateLimits = request.app.state.admin_limits
    _check(limits.by_address, request.client.host if request.client else "")
    token = bearer(request.headers.raw)
    try:
        person = people.authenticate(runtime, token, role="operator", action=action)
    except NotAuthenticated:
        with runtime.autocommit() as connection:
            caller = None if token is None else tenants.authenticate(connection, token)
        raise Problem(UNAUTHENTICATED if caller is None else NOT_ALLOWED) from None
    except NotAllowed:
        raise Problem(NOT_ALLOWED) from None
    _check(limits.by_operator, person.name)
    return person


class RateLimits:
    """How often each address may ask, with any token or none, and how often each operator."""

    def __init__(self) -> None:
        self.by_address = RateLimit(burst=60, per_second=2.0)
        self.by_operator = RateLimit(burst=30, per_second=1.0)


def _check(limit: RateLimit, caller: str) -> None:
    if seconds := limit.take(caller):
        detail = "Retry-After says when to try again."
        raise Problem(problem(429, "too_many_requests", "Too many requests", detail, retry_after=seconds))


Operator = Annotated[Person, Depends(operator)]
Filter = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00]*$")]


@router.get("", summary="The newest dead letters")
def list_letters(
    _: Operator,
    status: Annotated[str, Query(pattern="^(open|replayed|discarded|all)$")] = "open",
    task: Filter = None,
    error: Filter = None,
    tenant: Filter = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[dict[str, Any]]:
    """Of this application; without payloads."""
    runtime = runtime_of(celery)
    selection = Selection(None if status == "all" else status, task, error, runtime.settings.service, tenant)
    with runtime.autocommit() as connection:
        rows = dead_letters.list_letters(connection, selection, limit=limit)
    return [jsonable_encoder(row._asdict()) for row in rows]


@router.get("/{letter}", summary="One dead letter", responses=documented(404))
def show_letter(_: Operator, letter: int) -> dict[str, Any]:
    """Its operation, its errors and what became of it; without its payload."""
    runtime = runtime_of(celery)
    if not 1 <= letter <= BIGINT:
        raise Problem(NOT_FOUND)
    try:
        check_service(runtime, [letter])
        with runtime.autocommit() as connection:
            fields = dead_letters.show(connection, letter)._asdict()
    except IdempotencyError:
        raise Problem(NOT_FOUND) from None
    found: dict[str, Any] = jsonable_encoder({name: fields[name] for name in fields if name not in HIDDEN})
    return found


@router.post("/replay", summary="Send dead letters again", responses=documented(404, 409, 413, 415))
def replay_letters(person: Operator, letters: Letters, request: Request) -> Outcome:
    """Each under its own key and in its own transaction. Repeated with the same Idempotency-Key, each once."""
    given = request.headers.get("idempotency-key")

    def replay_one(letter: int) -> None:
        change = Change(person.name, letters.reason, None if given is None else f"{given}:{letter}")
        replay(celery, letter, change)

    return _each(letters, replay_one)


@router.post("/discard", summary="Ask for dead letters to be discarded", responses=documented(404, 409, 413, 415))
def discard_letters(person: Operator, letters: Letters) -> Outcome:
    """They stay open until another person, an admin, approves: `idempotency dead-letters approve`."""

    def ask(letter: int) -> None:
        with runtime_of(celery).engine.begin() as connection:
            discard.request(connection, person, letter, letters.reason)

    return _each(letters, ask)


def _each(letters: Letters, work: Callable[[int], None]) -> Outcome:
    """Do this to each letter; a refusal does not stop the others. Raises `Problem` if all were refused."""
    outcome, unknown = Outcome(done=[], refused=[]), 0
    for letter in letters.ids:
        try:
            check_service(runtime_of(celery), [letter])
            work(letter)
            outcome.done.append(letter)
        except (IdempotencyError, DBAPIError) as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            unknown += isinstance(error, OperationNotFound)
            why = describe(error) if isinstance(error, DBAPIError) else str(error)
            outcome.refused.append(Refusal(letter=letter, why=why))
    if not outcome.done:
        raise Problem(_all_refused(outcome, are_unknown=unknown == len(outcome.refused)))
    return outcome


def _all_refused(outcome: Outcome, *, are_unknown: bool) -> Answer:
    refused = [refusal.model_dump() for refusal in outcome.refused]
    why = outcome.refused[0].why
    if are_unknown:
        return problem(404, "not_found", "There are no such dead letters", why, refused=refused)
    return problem(409, "refused", "All were refused", why, refused=refused)
