"""Who looks at the page: what a session says, and what it allows.

A session is a signed cookie: name, role and tenants as the issuer has said at the login, for `web_session` seconds. So a person
who loses a role keeps it here until then; that is not shortened by logging out elsewhere. Without a login, on this machine's own
addresses, everyone is a reader, or whoever's token the process was given, for as long as that counts.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from itsdangerous import BadData, URLSafeTimedSerializer
from sqlalchemy import Connection

from ..errors import NotAllowed, NotAuthenticated
from ..identities import ROLES, Role, may
from ..operate.people import Person, check_tenant
from ..wire.keys import OperationId

# The name of one who has not logged in.
NOBODY = "reader"
# Seconds: for a login from its beginning to its end, and for what the page says after a change.
LOGIN, SAID = 600, 60


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks, until when (seconds since 1970), and the text without which nothing is changed in their name."""

    person: Person
    until: float
    csrf: str
    is_verified: bool

    @property
    def tenants(self) -> list[str] | None:
        """The tenants that are shown; None: all."""
        return None if self.person.tenants is None else sorted(self.person.tenants)

    def may(self, role: Role) -> bool:
        """Whether this visitor may do what needs this role."""
        return may(self.person.role, role)

    def require(self, role: Role, action: str) -> None:
        """Raise `NotAllowed` unless the visitor has this role or one above it."""
        if not self.may(role):
            raise NotAllowed(f"{action}: needs the role {role}, {self.person.name!r} is {self.person.role}")

    def sees(self, tenant: str | None) -> bool:
        """Whether operations of this tenant are shown. What belongs to none is for those who see all."""
        return self.person.tenants is None or tenant in self.person.tenants


class Sessions:
    """Makes and reads signed cookies. `issuer`: where people log in; None: they do not, and all are `person`.

    Once that person's token has ended, if it says when, all are readers, who see no more than that person did.
    """

    def __init__(self, secret: str, *, lasts: float, issuer: str | None, person: Person | None = None) -> None:
        self._signer = URLSafeTimedSerializer(secret, salt="idempotency.web")
        self._lasts, self._issuer, self._person = lasts, issuer, person

    @property
    def everyone(self) -> str:
        """Who everyone is where nobody logs in, as its start says it."""
        return NOBODY if self._person is None else f"{self._person.name!r}, {self._person.role}"

    def begin(self, person: Person | None) -> str:
        """The cookie of a new session. `person`: who has logged in; None where nobody does."""
        given: dict[str, Any] = {"csrf": secrets.token_urlsafe(24), "until": time.time() + self._lasts}
        if person is not None:
            tenants = None if person.tenants is None else sorted(person.tenants)
            given |= {"name": person.name, "role": person.role, "tenants": tenants, "known_by": person.known_by}
        return self.sign("session", given)

    def visitor(self, cookie: str | None) -> Visitor | None:
        """Whose session a cookie is; None if it is none, is over, or another issuer's."""
        found = None if cookie is None else self.read("session", cookie, age=self._lasts)
        if found is None or found["until"] <= time.time():
            return None
        if self._issuer is None:
            person = self._person
            if person is None or (person.ends_at is not None and person.ends_at <= time.time()):
                nobody = Person(NOBODY, "reader", tenants=None if person is None else person.tenants)
                return Visitor(nobody, found["until"], found["csrf"], is_verified=False)
            return Visitor(person, found["until"], found["csrf"], is_verified=True)
        if found.get("known_by") != self._issuer or found.get("role") not in ROLES:
            return None
        return Visitor(_person(found), found["until"], found["csrf"], is_verified=True)

    def sign(self, what: str, value: Any) -> str:
        """A text that only this secret makes. One that is signed as `what` is not read as anything else."""
        return self._signer.dumps([what, value])

    def read(self, what: str, text: str, *, age: float) -> Any | None:
        """What was signed, at most `age` seconds ago; None for anything else."""
        try:
            kind, value = self._signer.loads(text, max_age=int(age))
        except (BadData, TypeError, ValueError):
            return None
        return value if kind == what else None


def _person(found: dict[str, Any]) -> Person:
    """Who has logged in, with what each of their changes asks in its transaction."""
    tenants = None if found["tenants"] is None else frozenset(found["tenants"])
    name, until = found["name"], found["until"]

    def check(connection: Connection, id: OperationId | None) -> None:
        if until <= time.time():
            raise NotAuthenticated(f"the session of {name!r} is over: log in again")
        check_tenant(person, id)

    person = Person(name, found["role"], found["known_by"], check, tenants)
    return person
