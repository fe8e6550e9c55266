"""A database that belongs to an ordinary login, and its addresses for the roles of `migrate --roles`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import create_engine, make_url, text

import services
from idempotency.store.rights import ROLES

PASSWORDS = {role: f"of the {role} 100%'\\" for role in ROLES}


@contextmanager
def database_of_a_deployer(servers: services.Services) -> Iterator[str]:
    """The address of an empty database, for its owner: a login that may make roles and is no superuser."""
    name = f"roles_{uuid4().hex[:8]}"
    url = make_url(servers.create_database(name)).set(username=name, password="p")
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN CREATEROLE PASSWORD 'p'"))
        connection.execute(text(f"ALTER DATABASE {name} OWNER TO {name}"))
        # made by another deployer before: of the server's roles there is one each
        for role in ROLES:
            if (
                connection.execute(text("SELECT FROM pg_roles WHERE rolname = :role"), {"role": role}).first()
                is not None
            ):
                connection.execute(text(f"GRANT {role} TO {name} WITH ADMIN OPTION"))
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        servers.drop_database(name)
        with admin.connect() as connection:
            connection.execute(text(f"DROP ROLE {name}"))
        admin.dispose()


def url_of(role: str, url: str) -> str:
    """The same database, for one of the roles."""
    return make_url(url).set(username=role, password=PASSWORDS[role]).render_as_string(hide_password=False)
