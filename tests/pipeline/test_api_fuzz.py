"""Whatever fits the OpenAPI document, and what nearly does, is answered as documented, and never by a 5xx.

`make fuzz EXAMPLES=1000` tries more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from sqlalchemy import create_engine

import services
from idempotency.operate.change import Change
from idempotency.operate.people import add_operator
from idempotency.store import schema as tables
from tasks import migrate
from tests.support.processes import PYTHONPATH
from tests.support.server import api_key, serving

EXAMPLES = int(os.environ.get("EXAMPLES", "3"))
ROUTES = [
    ("POST", "/payments"),
    ("POST", "/refunds"),
    ("POST", "/orders"),
    ("POST", "/returns"),
    ("GET", "/operations/{task}/{key}"),
    ("GET", "/admin/dead-letters"),
    ("GET", "/admin/dead-letters/{letter}"),
    ("POST", "/admin/dead-letters/replay"),
    ("POST", "/admin/dead-letters/discard"),
    ("GET", "/readyz"),
]
# What at least one of the requests that fit the document is answered with, where nothing else is needed for it.
ACCEPTED = {"/payments": 202, "/refunds": 202, "/orders": 202, "/admin/dead-letters": 200}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@dataclass(frozen=True)
class Described:
    """A server, its document, and the credentials of a tenant and of an operator."""

    url: str
    document: Any
    tenant: str
    operator: str


@pytest.fixture(scope="module")
def described(servers: services.Services) -> Iterator[Described]:
    name = f"fuzz_{uuid4().hex[:8]}"
    environment = {**os.environ, **servers.environment(), "DATABASE_URL": servers.create_database(name)}
    engine = create_engine(environment["DATABASE_URL"])
    tables.migrate(engine)
    migrate.migrate(engine)
    with engine.begin() as connection:
        operator = add_operator(connection, Change("setup", "tests"), "ann", "operator", days=1)
    with serving(
        environment | {"PYTHONPATH": PYTHONPATH}, factory="tests.support.server:create_unlimited_app"
    ) as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        yield Described(server.url, document, api_key(engine, "acme"), operator)
    engine.dispose()
    servers.drop_database(name)


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_whatever_is_sent_is_answered_as_documented(
    described: Described, method: str, path: str, mode: GenerationMode
) -> None:
    operation = described.document[path][method]
    if mode is GenerationMode.NEGATIVE and path == "/readyz":
        return  # takes nothing that could be wrong
    seen: set[int] = set()
    token = described.operator if path.startswith("/admin") else described.tenant

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(mode))
    def answered(case: Any) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        if mode is GenerationMode.POSITIVE:
            headers["Idempotency-Key"] = uuid4().hex  # few keys would be few operations
        response = case.call(base_url=described.url, headers=headers, timeout=20)
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    answered()
    if mode is GenerationMode.POSITIVE and path in ACCEPTED:
        assert ACCEPTED[path] in seen
