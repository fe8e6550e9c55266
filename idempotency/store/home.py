"""The library's database, told from others: a message in another one's outbox would never be sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import InvalidArguments, WrongCell
from ..setting_values import addresses_named

# Host, port and database, as a client names them.
Address: TypeAlias = tuple[str | None, int, str | None]
# The same for all connections to one database at one time, however they are reached, and however they write times.
IDENTITY = """SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint || ' ' || oid FROM pg_database
WHERE datname = current_database()"""


class Home:
    """The library's database. A caller's is compared by name, and asked only where the names differ."""

    def __init__(self, address: str, identity: Callable[[], str]) -> None:
        self._identity = identity
        self._cell: tuple[str, str] | None = None
        self._known = {address_of(*each) for each in addresses_named(address)}

    def of_cell(self, cell: str, tenant: str) -> Home:
        """The same database, whose refusals name the cell, and the tenant that is of it."""
        home = copy.copy(self)
        home._cell = cell, tenant
        return home

    def knows(self, address: Address) -> bool:
        """Whether an address is known to be this database."""
        return address in self._known

    def compare(self, address: Address, identity: Any) -> None:
        """Note that an address is this database, by what its server answers.

        Raises `InvalidArguments` if it is not, and `WrongCell` if it is not that of a tenant's cell.
        """
        if str(identity) != self._identity():
            if self._cell is not None:
                cell, tenant = self._cell
                raise WrongCell(
                    f"session: is connected to another database ({address[0]}:{address[1]}/{address[2]}) than that of cell {cell!r}, "
                    f"which tenant {tenant!r} is of"
                )
            raise InvalidArguments(
                f"session: is connected to another database ({address[0]}:{address[1]}/{address[2]}) than "
                "idempotency_database_url, so no relay would send the message"
            )
        self._known.add(address)


def address_of(host: Any, port: Any, database: Any) -> Address:
    """What the attributes of a connection, or of a URL, name."""
    return (str(host) if host else None, int(port or 5432), database)
