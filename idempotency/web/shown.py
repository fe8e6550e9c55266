"""How values are shown: ages, numbers, what is masked; and pages made from them.

Everything that a template writes is escaped. Nothing of a message's arguments or results is shown but their names and kinds,
unless a person asks for it (`reveal`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ..extras import installed_version
from ..text import attempts_made, masked, number_of, one_line
from ..wire.keys import OperationId
from .access import SAID
from .desk import desk_of

# Characters of an id in a list; the page about it has the whole.
SHORT = 24
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def age(seconds: float | None) -> str:
    """A duration by its largest unit: `4 min`; with the next one from an hour on: `2 h 5 min`."""
    if seconds is None:
        return "–"
    left = int(max(seconds, 0))
    for place, (size, name) in enumerate(_UNITS):
        if left >= size:
            more = left % size // _UNITS[place + 1][0] if size >= 3600 else 0
            return f"{left // size} {name}" + (f" {more} {_UNITS[place + 1][1]}" if more else "")
    return "0 s"


def since(at: datetime | float | None) -> str:
    """How long ago a time is."""
    if at is None:
        return "–"
    moment = datetime.fromtimestamp(at, UTC) if isinstance(at, int | float) else at
    return age((datetime.now(UTC) - moment).total_seconds())


def moment(at: Any) -> str:
    """A time, in UTC, to the second."""
    if at is None:
        return "–"
    if isinstance(at, int | float):
        at = datetime.fromtimestamp(at, UTC)
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def count(number: Any) -> str:
    """A number with its thousands apart."""
    return "?" if number is None else f"{number:,}".replace(",", "\u202f")


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its word, in this page's writing: `1 letter`, `2 letters`."""
    return number_of(number, one, many).replace(",", "\u202f")


def short(text: Any) -> str:
    """An id in a list: its beginning and end."""
    text = one_line(str(text))
    return text if len(text) <= SHORT else f"{text[: SHORT - 7]}…{text[-6:]}"


def error_of(error: Any) -> dict[str, str]:
    """The code and message of a stored error, whatever it is."""
    if isinstance(error, str):
        try:
            error = json.loads(error)
        except ValueError:
            return {"code": "", "message": one_line(error)}
    if not isinstance(error, dict):
        return {"code": "", "message": ""}
    return {name: one_line(str(error.get(name) or "")) for name in ("code", "message")}


def pretty(value: Any) -> str:
    """JSON as text for a person; a text that is JSON is read first."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def path_of(id: Any, page: str = "/operation") -> str:
    """The address of the page about an operation, a row or a mapping that names one."""
    named = (
        id if isinstance(id, OperationId) else OperationId(*(_field(id, name) for name in ("tenant", "task", "key")))
    )
    return f"{page}?{urlencode({'tenant': named.tenant, 'task': named.task, 'key': named.key})}"


def _field(row: Any, name: str) -> Any:
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def query(fields: Mapping[str, Any], **changed: Any) -> str:
    """A query with these fields, those without a value left out."""
    given = {**fields, **changed}
    return "?" + urlencode({name: value for name, value in given.items() if value not in (None, "")})


def environment() -> Environment:
    """The templates of this package."""
    made = Environment(
        loader=PackageLoader("idempotency.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        age=age, since=since, moment=moment, count=count, short=short, error_of=error_of, masked=masked, pretty=pretty,
        path_of=path_of, attempts=attempts_made, counted=counted, word=lambda text: shlex.quote(one_line(str(text))), line=lambda text: one_line(str(text)), slug=lambda text: re.sub(r"[^a-z0-9]+", "-", str(text).lower()),
    )  # fmt: skip
    made.globals.update(query=query)
    return made


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A whole page."""
    return HTMLResponse(render(request, template, **values), status)


def render(request: Request, template: str, **values: Any) -> str:
    """A template with what every page has."""
    desk, visitor = desk_of(request), getattr(request.state, "visitor", None)
    said = request.query_params.get("said")
    given = {
        "visitor": visitor,
        "desk": desk,
        "here": request.url.path,
        "asked": dict(request.query_params),
        "said": None if said is None else desk.sessions.read("said", said, age=SAID),
        "request_id": uuid4().hex,
        "version": installed_version(),
        "now": datetime.now(UTC),
        "logs_in": desk.login is not None,
    }
    found: str = request.app.state.templates.get_template(template).render(given | values)
    # half a pair of surrogates, which JSON may have and UTF-8 has not
    return found.encode("utf-8", "backslashreplace").decode()


def done(request: Request, path: str, text: str) -> Response:
    """After a change: to the page that shows it, which says once what was done."""
    said = desk_of(request).sessions.sign("said", text)
    return RedirectResponse(f"{path}{'&' if '?' in path else '?'}{urlencode({'said': said})}", 303)
