"""Dead letters, for operators: what `idempotency dead-letters` does, by the same functions.

The credential is an operator's token (`idempotency operators add`), which `operators` has checked.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.encoders import jsonable_encoder
from sqlalchemy.exc import DBAPIError

from idempotency.application import runtime_of
from idempotency.errors import IdempotencyError, OperationNotFound
from idempotency.http.problems import Answer, Refused, problem
from idempotency.operate import discard
from idempotency.operate.change import Change, check_service
from idempotency.operate.people import Person
from idempotency.operate.replay import NotConfirmed, replay, to_confirm
from idempotency.store import dead_letters
from idempotency.store.dead_letters import Selection
from idempotency.store.statements import describe
from idempotency.store.sweeps import is_row_error
from tasks import app as celery

from .operators import PATH
from .problems import NOT_FOUND, documented
from .schemas import BIGINT, Letters, Outcome, Refusal, Replayed

# Never in an answer: they may contain customers' data. `idempotency dead-letters show --json` has them.
HIDDEN = ("payload", "headers")

router = APIRouter(prefix=PATH, responses=documented(400, 401, 403, 429, 503))


def operator(request: Request) -> Person:
    """Who `Operators` has let pass."""
    person: Person = request.state.operator
    return person


Operator = Annotated[Person, Depends(operator)]
Filter = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00]*$")]


@router.get("", summary="The newest dead letters")
def list_letters(
    _: Operator,
    status: Annotated[str, Query(pattern="^(open|archived|replayed|discarded|all)$")] = "open",
    task: Filter = None,
    error: Filter = None,
    tenant: Filter = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[dict[str, Any]]:
    """Of this application; without payloads."""
    runtime = runtime_of(celery)
    wanted = {"all": None, "archived": "open"}.get(status, status)
    archived = status == "archived"
    selection = Selection(wanted, task, error, runtime.settings.service, tenant, archived=archived)
    with runtime.autocommit() as connection:
        rows = dead_letters.list_letters(connection, selection, limit=limit)
    return [jsonable_encoder(row._asdict()) for row in rows]


@router.get("/{letter}", summary="One dead letter", responses=documented(404))
def show_letter(_: Operator, letter: int) -> dict[str, Any]:
    """Its operation, its errors and what became of it; without its payload."""
    runtime = runtime_of(celery)
    if not 1 <= letter <= BIGINT:
        raise Refused(NOT_FOUND)
    try:
        check_service(runtime, [letter])
        with runtime.autocommit() as connection:
            fields = dead_letters.show(connection, letter)._asdict()
    except IdempotencyError:
        raise Refused(NOT_FOUND) from None
    found: dict[str, Any] = jsonable_encoder({name: fields[name] for name in fields if name not in HIDDEN})
    return found


@router.post("/replay", summary="Send dead letters again", responses=documented(404, 409, 413, 415))
def replay_letters(person: Operator, letters: Replayed, request: Request) -> Outcome:
    """Each under its own key and in its own transaction. Repeated with the same Idempotency-Key, each once."""

    def replay_one(letter: int) -> None:
        id = _request_id(request, letter)
        change = Change(person.name, letters.reason, id, is_verified=True, check_person=person.check)
        said = {
            "declined": letters.even_if_declined,
            "cancelled": letters.even_if_declined,
            "to_be_edited": letters.unedited,
        }
        with runtime_of(celery).autocommit() as connection:
            confirmed = [each for each in to_confirm(connection, [letter]) if said[each.was]]
        try:
            replay(celery, letter, change, confirmed=confirmed)
        except NotConfirmed as refused:
            field = "unedited" if refused.was == "to_be_edited" else "even_if_declined"
            raise NotConfirmed(f'{refused}. To do so, send "{field}": true') from None

    return _each(letters, replay_one)


@router.post("/discard", summary="Ask for dead letters to be discarded", responses=documented(404, 409, 413, 415))
def discard_letters(person: Operator, letters: Letters, request: Request) -> Outcome:
    """They stay open until another person, an admin, approves: `idempotency dead-letters approve`.

    Repeated with the same Idempotency-Key, it is asked for once.
    """

    def ask(letter: int) -> None:
        with runtime_of(celery).engine.begin() as connection:
            discard.request(connection, person, letter, letters.reason, request_id=_request_id(request, letter))

    return _each(letters, ask)


def _request_id(request: Request, letter: int) -> str | None:
    """What names this change of a letter in the audit table, by the request's key; a long key by its hash."""
    key: str | None = request.state.key
    if key is None:
        return None
    given = f"{key}:{letter}"
    return given if len(given) <= 255 else f"{sha256(key.encode()).hexdigest()}:{letter}"


def _each(letters: Letters, work: Callable[[int], None]) -> Outcome:
    """Do this to each letter; a refusal does not stop the others. Raises `Refused` if all were refused."""
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
        raise Refused(_all_refused(outcome, are_unknown=unknown == len(outcome.refused)))
    return outcome


def _all_refused(outcome: Outcome, *, are_unknown: bool) -> Answer:
    refused = [refusal.model_dump() for refusal in outcome.refused]
    why = outcome.refused[0].why
    if are_unknown:
        return problem(404, "not_found", "There are no such dead letters", why, refused=refused)
    return problem(409, "refused", "All were refused", why, refused=refused)
