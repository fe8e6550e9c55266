"""Errors as problem documents (RFC 9457), and how the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from starlette.exceptions import HTTPException

from idempotency.http.answers import unavailable
from idempotency.http.fastapi import as_response
from idempotency.http.problems import Answer, Refused, problem
from idempotency.observe.logs import log
from idempotency.store import statements

SCHEMA = {
    "type": "object",
    "description": "RFC 9457. `type` ends in a short name that programs compare.",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}
UNAVAILABLE = unavailable("The database did not answer. Send the request again.")
MISCONFIGURED = problem(
    500,
    "misconfigured",
    "The server is not set up",
    "It lacks a table or a right in its database, or a setting is wrong. Its log says which; `python -m tasks.migrate` may not have run.",
)
NOT_FOUND = problem(404, "not_found", "Not found", "There is nothing here for these credentials.")
_MEANINGS = {
    400: "The request is malformed; nothing was written. Names the field and the limit",
    401: "The credentials are missing, not valid or expired",
    403: "The credentials do not allow this",
    404: "There is nothing here for these credentials",
    409: "The request is being carried out, or contradicts an earlier one",
    413: "The body is too large",
    415: "The media type or the coding of the body is not supported",
    422: "The Idempotency-Key came with another request before",
    429: "Too many requests, or the tenant's quota is used up; Retry-After says when to try again",
    500: "The request ended without success, or the server is not set up; a person has to look at it",
    503: "The database did not answer; send the request again, with the same key",
}


def failure(error: SQLAlchemyError) -> Answer:
    """What a client is told: to send it again, unless a table, a column or a right is missing, which repeating cannot mend."""
    if not isinstance(error, ProgrammingError):
        return UNAVAILABLE
    log.error("database_refused", error=statements.describe(error))
    return MISCONFIGURED


def unauthenticated(title: str, detail: str) -> Answer:
    """401, asking for a bearer token."""
    return problem(401, "unauthenticated", title, detail, headers=((b"www-authenticate", b"Bearer"),))


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer with, for its `responses`."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    """Answer with problem documents only."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Refused, lambda _, error: as_response(error.answer))
    app.add_exception_handler(SQLAlchemyError, _failed)


def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, SQLAlchemyError)
    return as_response(failure(error))


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [{"field": field, "detail": detail} for field, detail in map(_field_and_detail, error.errors())]
    detail = "; ".join(f"{each['field']}: {each['detail']}" for each in found[:5])
    return as_response(problem(400, "invalid", "The request is not valid", detail, errors=found[:20]))


def _field_and_detail(error: Any) -> tuple[str, str]:
    """The field and the rule, never what was sent: its values, or the names of members that do not exist."""
    if error["type"] == "extra_forbidden":
        return ".".join(_names(error["loc"][:-1])) or "body", "has a member that does not exist"
    if error["type"] == "json_invalid":
        return "body", "not JSON"
    field = ".".join(_names(error["loc"])) or "body"
    raised = error.get("ctx", {}).get("error")
    if not isinstance(raised, ValueError):
        return field, error["msg"]
    name, _, rule = str(raised).partition(": ")  # of ours, which name the field first
    return (field if field != "body" else name), rule


def _names(loc: tuple[Any, ...]) -> Iterator[str]:
    yield from (str(part) for part in loc[1:])


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    match error.status_code:
        case 404:
            answer = NOT_FOUND
        case 405:
            answer = problem(405, "method", "Method not allowed", "Allow: lists the methods that are", headers=headers)
        case status:
            answer = problem(status, "refused", "Refused", str(error.detail), headers=headers)
    return as_response(answer)


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with our problems in place of FastAPI's validation errors."""
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    schemas["Problem"] = SCHEMA
    for each in [operation for path in document["paths"].values() for operation in path.values()]:
        if "HTTPValidationError" in str(each["responses"].get("422")):
            del each["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
