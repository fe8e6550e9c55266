"""Cells: tenants spread over several databases, each with its own outbox, relays, workers and queues.

    idempotency_cells = {"eu": {"database_url": …, "broker_url": …}, "us": {…}}
    idempotency_cell_of = "yourapp.tenants:cell_of"

A process serves one cell or none. Which cell a tenant is of is the application's to say; nothing here looks into a
database for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, InstanceOf, SecretStr

from . import setting_values as values
from .errors import SettingsError, WrongCell
from .hosts import one_name
from .objects import ObjectStore, are_one_place
from .setting_values import NOT_AN_ADDRESS, SEVERAL_VIRTUAL_HOSTS

# By the tenant's name: a mapping, or a function that returns the cell, or None for a tenant that is in none.
CellOf = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Endpoint:
    """A database, or what is of one name at a broker, at one of the servers that lead there."""

    kind: str
    name: str
    host: str
    port: int
    is_encrypted: bool = False

    def is_also(self, other: Endpoint) -> bool:
        """Whether both are the same, as far as their addresses say: a host may have two names.

        RabbitMQ takes TLS on another port, which may be any.
        """
        return (self.kind, self.name, self.host) == (other.kind, other.name, other.host) and (
            self.port == other.port or (self.kind == "amqp" and self.is_encrypted != other.is_encrypted)
        )


# Where kombu looks for a broker whose address names no port.
_PORTS = {"amqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379}


def _endpoints_of_broker(address: str) -> list[Endpoint]:
    """The virtual host of a broker, or of each node of a cluster, as kombu reads its address. Raises `ValueError`."""
    from kombu.utils.url import url_to_parts  # not every process that reads settings has a broker

    found = []
    for each in map(url_to_parts, filter(None, address.split(";"))):
        scheme = each.scheme.removeprefix("py").replace("librabbitmq", "amqp")
        kind = scheme if scheme not in ("amqps", "rediss") else scheme[:-1]
        name = each.path or ("/" if kind == "amqp" else "0")
        port = each.port or _PORTS.get(scheme, 0)
        found.append(Endpoint(kind, name, one_name(each.hostname or "localhost"), port, scheme != kind))
    return found


def _endpoints_of_database(address: str) -> list[Endpoint]:
    name, servers = values.database_at(address)
    return [Endpoint("postgresql", name, one_name(host or "localhost"), port) for host, port in servers]


def _broker_address(value: SecretStr) -> SecretStr:
    try:
        found = _endpoints_of_broker(value.get_secret_value())
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None  # the original message contains parts of the address
    if len({each.name for each in found if each.kind == "amqp"}) > 1:
        raise ValueError(SEVERAL_VIRTUAL_HOSTS)
    return value


class Cell(BaseModel):
    """What differs in a cell: settings by their names, and Celery's `broker_url`. All other settings are those of every cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: Annotated[SecretStr, AfterValidator(values.database_address)]
    # On one RabbitMQ each cell has a virtual host, on one Redis a database: then queues have the same names everywhere.
    broker_url: Annotated[SecretStr, AfterValidator(_broker_address)]
    redis_url: Annotated[SecretStr, AfterValidator(values.redis_address)] | None = None
    # Of calls in this cell that name no tenant, as scheduled tasks are; has to be one of this cell.
    tenant: Annotated[str, AfterValidator(values.tenant)] | None = None
    # Each its own: a relay deletes there what its own database does not refer to.
    large_results_at: Annotated[InstanceOf[ObjectStore] | None, BeforeValidator(values.object_store)] = None

    @property
    def endpoints(self) -> dict[str, list[Endpoint]]:
        """What no two cells may share."""
        return {
            "database_url": _endpoints_of_database(self.database_url.get_secret_value()),
            "broker_url": _endpoints_of_broker(self.broker_url.get_secret_value()),
        }


def cells_given(value: Any) -> Mapping[str, Any]:
    """What is given of each cell, by its name; from the environment it is JSON. Raises `SettingsError`."""
    given = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # neither says that it is not, which is said below
            given = json.loads(value)
    if not isinstance(given, Mapping) or not given:
        raise SettingsError(
            "idempotency_cells: must be a mapping from each cell's name to its settings, or JSON of one"
        )
    return given


def _cell_of(value: Any) -> Any:
    found = values.imported(value)
    if found is not None and not isinstance(found, Mapping) and not callable(found):
        raise ValueError("must be a mapping from tenants to cells, a function of the tenant, or the name of one")
    return found


CellOfSetting = Annotated[Any, BeforeValidator(_cell_of)]


def check_agree(cells: Mapping[str, Cell], cell_of: CellOf | None, cell: str | None) -> None:
    """Raise `ValueError` for settings of cells that do not fit each other."""
    if not cells:
        if cell_of is not None or cell is not None:
            raise ValueError("cells must be set, too, where cell or cell_of is")
        return
    if cell_of is None:
        raise ValueError("cell_of must be set, too, where cells is: it says which cell a tenant is of")
    if any(not name.isprintable() or not name for name in cells):
        raise ValueError("cells: the name of each must be printable text")
    if cell is not None and cell not in cells:
        raise ValueError(f"cell: {cell!r} is none of {', '.join(cells)}")
    names = list(cells)  # a list: `in` must not hash what `cell_of` maps to
    if isinstance(cell_of, Mapping) and (unknown := [each for each in cell_of.values() if each not in names]):
        raise ValueError(f"cell_of: {min(unknown, key=str)!r} is none of {', '.join(cells)}")
    endpoints = {name: cell.endpoints for name, cell in cells.items()}
    for one, other in combinations(endpoints, 2):
        for what in endpoints[one]:
            if any(mine.is_also(theirs) for mine, theirs in product(endpoints[one][what], endpoints[other][what])):
                raise ValueError(f"cells: {one} and {other} have the same {what}")
        if are_one_place(cells[one].large_results_at, cells[other].large_results_at):
            raise ValueError(
                f"cells: {one} and {other} have the same large_results_at, or one in the other's: a relay deletes there what its "
                "database does not refer to"
            )


def which(cells: Mapping[str, Cell], cell_of: CellOf, tenant: str) -> str:
    """The cell that a tenant is of. Raises `WrongCell` for one that is in none, and `SettingsError` for an answer that is no cell."""
    try:
        cell = cell_of.get(tenant) if isinstance(cell_of, Mapping) else cell_of(tenant)
    except LookupError:
        cell = None
    except Exception as error:  # the application's function; nothing may be done under a guess
        raise SettingsError(f"idempotency_cell_of: raised {type(error).__name__}") from error
    if cell is None:
        raise WrongCell(f"tenant {tenant!r} is in no cell")
    if not isinstance(cell, str):  # of what cannot be hashed, the next line would make a defect of the message
        raise SettingsError(f"idempotency_cell_of: must return a cell's name or None, got a {type(cell).__name__}")
    if cell not in cells:
        raise SettingsError(f"idempotency_cell_of: {cell!r} is none of {', '.join(cells)}")
    return cell
