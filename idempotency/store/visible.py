"""Which rows a page shows to a person: this application's, and of that person's tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of records and outbox rows, as `o`. A row without a name was written by code of schema 0011.
VISIBLE = "(o.service = %(service)s) IS NOT FALSE AND (%(tenants)s::text[] IS NULL OR o.tenant = ANY(%(tenants)s))"


def parameters(service: str, tenants: Sequence[str] | None, **more: Any) -> dict[str, Any]:
    """The parameters of a page's statement. `tenants`: those that the person may see; None: all."""
    return {"service": service, "tenants": None if tenants is None else list(tenants), **more}
