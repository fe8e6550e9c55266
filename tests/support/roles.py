"""The roles of `migrate --roles` in tests: their passwords, and a database's address for each."""

from __future__ import annotations

from sqlalchemy import make_url

from idempotency.store.rights import ROLES

# All databases of a server share its roles, so every test gives them the same ones.
PASSWORDS = {role: f"of the {role} 100%'\\" for role in ROLES}


def url_of(role: str, url: str) -> str:
    """The same database, for one of the roles."""
    return make_url(url).set(username=role, password=PASSWORDS[role]).render_as_string(hide_password=False)
