"""Cells: tenants spread over several databases, each with its own outbox, relays, workers and queues.

    idempotency_cells = {"eu": {"database_url": …, "broker_url": …}, "us": {…}}
    idempotency_cell_of = "yourapp.tenants:cell_of"

A process serves one cell or none. Which cell a tenant is of is the application's to say; nothing here looks into a
database for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ImportString, SecretStr, TypeAdapter
from sqlalchemy.engine import make_url

from .errors import SettingsError, WrongCell
from .setting_values import database_hosts

_IMPORTED = TypeAdapter[Any](ImportString)
# By the tenant's name: a mapping, or a function that returns the cell, or None for a tenant that is in none.
CellOf = Mapping[str, str] | Callable[[str], str | None]


class Cell(BaseModel):
    """What differs in a cell: settings by their names, and Celery's `broker_url`. All other settings are those of every cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: SecretStr
    # On one RabbitMQ each cell has a virtual host, on one Redis a database: then queues have the same names everywhere.
    broker_url: SecretStr
    redis_url: SecretStr | None = None
    # Of calls in this cell that name no tenant, as scheduled tasks are; has to be one of this cell.
    tenant: str | None = None
    large_results_at: Any = None

    def settings(self) -> dict[str, Any]:
        """The settings that this cell gives."""
        return {name: getattr(self, name) for name in self.model_fields_set if name != "broker_url"}

    @property
    def places(self) -> dict[str, object]:
        """What no two cells may share, without users and passwords."""
        database, broker = self.database_url.get_secret_value(), self.broker_url.get_secret_value()
        url = make_url(database)
        # a cluster's addresses in any order, each with its virtual host
        brokers = sorted(
            each.rpartition("@")[2].partition("://")[2] or each.rpartition("@")[2] for each in broker.split(";")
        )
        return {"database_url": (sorted(map(str, database_hosts(database))), url.database), "broker_url": brokers}


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
    names = list(cells)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            mine, others = cells[one].places, cells[other].places
            for what in mine:
                if mine[what] == others[what]:
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
