"""Tenants: what their HTTP requests keep beside their quotas, and their API keys."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..store import operation_pages, tenants
from .desk import desk_of, text_of, visitor_of
from .shown import page

# Tenants of a page: what each keeps is counted.
FEW = 20


def show(request: Request) -> Response:
    """The page."""
    desk, visitor = desk_of(request), visitor_of(request)
    after = text_of(dict(request.query_params), "after")
    keys_limit, bytes_limit = desk.settings.tenant_keys_limit, desk.settings.tenant_bytes_limit
    is_limited = keys_limit is not None or bytes_limit is not None
    with desk.reading() as connection:
        names = operation_pages.names_of_tenants(connection, desk.service, visitor.tenants, after=after, limit=FEW + 1)
        if visitor.tenants is not None and after is None:
            names = sorted({*names, *visitor.tenants})
        rows = [
            {
                "name": name,
                "usage": tenants.usage(connection, name, keys_limit=keys_limit, bytes_limit=bytes_limit)
                if is_limited
                else None,
                "keys": tenants.api_keys(connection, name),
            }
            for name in names[:FEW]
        ]
    more = names[FEW - 1] if len(names) > FEW else None
    return page(
        request, "tenants.html", title="Tenants", rows=rows, more=more, keys_limit=keys_limit, bytes_limit=bytes_limit
    )


routes = [Route("/tenants", show)]
