"""Cells: tenants spread over several databases, each with its own outbox, relays, workers and queues.

    idempotency_cells = {"eu": {"database_url": …, "broker_url": …}, "us": {…}}
    idempotency_cell_of = "yourapp.tenants:cell_of"

A process serves one cell or none. Which cell a tenant is of is the application's to say; nothing here looks into a
database for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ImportString, SecretStr, TypeAdapter
from sqlalchemy.engine import make_url

from .errors import SettingsError, WrongCell
from .setting_values import NOT_AN_ADDRESS, database_address, database_hosts

_IMPORTED = TypeAdapter[Any](ImportString)
# By the tenant's name: a mapping, or a function that returns the cell, or None for a tenant that is in none.
CellOf = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Endpoint:
    """What is of one name on any of these servers, each with its port."""

    name: str
    servers: frozenset[tuple[str, int]]

    def is_also(self, other: Endpoint) -> bool:
        """Whether both are the same, as far as their addresses say: a host may have two names."""
        return self.name == other.name and bool(self.servers & other.servers)


def _endpoint_of_broker(address: str) -> Endpoint:
    """A virtual host of a broker, or of a cluster of them, as kombu reads its address."""
    from kombu.utils.url import url_to_parts  # not every process that reads settings has a broker

    every = [url_to_parts(each) for each in address.split(";")]
    servers = {
        (each.hostname or "localhost", each.port or (5671 if each.scheme == "amqps" else 5672)) for each in every
    }
    return Endpoint(every[0].path or "/", frozenset((host.lower(), port) for host, port in servers))


def _endpoint_of_database(address: str) -> Endpoint:
    servers = {((host or "localhost").lower(), port) for host, port in database_hosts(address)}
    return Endpoint(str(make_url(address).database), frozenset(servers))


def _broker_address(value: SecretStr) -> SecretStr:
    try:
        _endpoint_of_broker(value.get_secret_value())
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None  # the original message contains parts of the address
    return value


class Cell(BaseModel):
    """What differs in a cell: settings by their names, and Celery's `broker_url`. All other settings are those of every cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: Annotated[SecretStr, AfterValidator(database_address)]
    # On one RabbitMQ each cell has a virtual host, on one Redis a database: then queues have the same names everywhere.
    broker_url: Annotated[SecretStr, AfterValidator(_broker_address)]
    redis_url: SecretStr | None = None
    # Of calls in this cell that name no tenant, as scheduled tasks are; has to be one of this cell.
    tenant: str | None = None
    large_results_at: Any = None

    def settings(self) -> dict[str, Any]:
        """The settings that this cell gives."""
        return {name: getattr(self, name) for name in self.model_fields_set if name != "broker_url"}

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What no two cells may share."""
        return {
            "database_url": _endpoint_of_database(self.database_url.get_secret_value()),
            "broker_url": _endpoint_of_broker(self.broker_url.get_secret_value()),
        }


def _cell_of(value: Any) -> Any:
    found = _IMPORTED.validate_python(value) if isinstance(value, str) else value
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
    if isinstance(cell_of, Mapping) and (unknown := sorted(set(cell_of.values()) - set(cells), key=str)):
        raise ValueError(f"cell_of: {unknown[0]!r} is none of {', '.join(cells)}")
    endpoints = {name: cell.endpoints for name, cell in cells.items()}
    for one, other in combinations(endpoints, 2):
        for what, endpoint in endpoints[one].items():
            if endpoint.is_also(endpoints[other][what]):
                raise ValueError(f"cells: {one} and {other} have the same {what}")


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
    if cell not in cells:
        raise SettingsError(f"idempotency_cell_of: {cell!r} is none of {', '.join(cells)}")
    return cell
