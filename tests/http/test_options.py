"""The middleware's options: wrong ones are refused at start, and the others mean what they say."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from idempotency.errors import SettingsError
from idempotency.http import Rule
from tests.http.test_handlers import post
from tests.support.edge import Edge, Handler, new_key, within


async def later(_: Any) -> Any:
    raise AssertionError("nobody awaits it")


class Later:
    async def __call__(self, _: Any) -> Any:
        raise AssertionError("nobody awaits it")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one method": ({"methods": "POST"}, "methods: must be a collection of texts"),
    "one header": ({"kept_headers": "x-payment"}, "kept_headers: must be a collection of texts"),
    "bytes": ({"kept_headers": [b"x-payment"]}, "kept_headers: must be a collection of texts"),
    "one media type": ({"media_types": "application/json"}, "media_types: must be a collection of texts"),
    "another word": ({"server_errors": "keep"}, "server_errors: must be one of release, store"),
    "a coroutine function": ({"tenant": later}, "tenant: must be an ordinary function"),
    "a coroutine function, bound": ({"required": partial(later, None)}, "required: must be an ordinary function"),
    "an object with an async call": ({"decide": Later()}, "decide: must be an ordinary function"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_an_option_that_would_have_no_effect_is_refused_at_start(
    edge: Edge, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        edge.middleware(Handler(), **options)


def test_options_are_compared_without_case_and_parameters(edge: Edge) -> None:
    options: dict[str, Any] = {
        "methods": ["post"],
        "media_types": ["Application/JSON; charset=utf-8"],
        "required": True,
    }

    async def send(client: httpx.AsyncClient) -> list[int]:
        key = {"idempotency-key": new_key()}
        sent = [key | {"content-type": "application/json"}, key | {"content-type": "text/plain"}, {}]
        return [(await client.post("/pay", headers=headers, content=b"{}")).status_code for headers in sent]

    assert edge.use(Handler(), send, **options) == [201, 415, 400]


# ---------------------------------------------------------------- whose keys these are

NO_TENANTS: dict[str, Any] = {"an empty header": "", "a name that is not ASCII": "Müller", "a number": 7}


@pytest.mark.parametrize("tenant", NO_TENANTS.values(), ids=NO_TENANTS)
def test_a_tenant_that_cannot_be_one_is_the_requests_fault(edge: Edge, tenant: Any) -> None:
    key, handler = new_key(), Handler()
    (answer,) = post(edge.middleware(handler, tenant=lambda scope: tenant), key)
    assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (400, "tenant_invalid")
    assert "Müller" not in answer.text
    assert (handler.runs, edge.record(key)) == (0, None)


def test_a_function_that_knows_no_tenant_is_an_error_and_shares_no_keys(edge: Edge) -> None:
    handler = Handler()

    async def send() -> None:
        app = edge.middleware(handler, tenant=lambda scope: scope.get("user"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            await client.post("/pay", headers={"idempotency-key": new_key()})

    with pytest.raises(SettingsError, match="tenant: the function has returned None"):
        asyncio.run(send())
    assert handler.runs == 0


# ---------------------------------------------------------------- what an answer means

DECISIONS: dict[str, Any] = {
    "a status that it forgot": lambda status: Rule.COMMIT if status < 400 else None,
    "the rule's name": lambda status: "refuse",
    "an error": lambda status: {200: Rule.COMMIT}[status],
}


@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_a_decision_that_is_no_rule_is_an_error_that_releases(edge: Edge, decide: Any) -> None:
    key, handler = new_key(), Handler(402)
    first, second = post(edge.middleware(handler, decide=decide), key, times=2)
    assert (first.status_code, second.status_code, handler.runs) == (500, 500, 2)
    record: Any = edge.record(key)
    assert (record.status, edge.entries(key)) == ("released", 0)


# ---------------------------------------------------------------- between two other middlewares


def test_what_the_application_says_about_its_route_reaches_the_middleware_outside(edge: Edge) -> None:
    """Prometheus' and OpenTelemetry's read the route after the call, and users what they have put into the state."""
    seen: list[tuple[Any, Any, bool]] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        scope["route"], scope["state"]["user"] = "/pay", "alice"
        await Handler().answer(send)

    middleware = edge.middleware(inside)

    async def outside(scope: Any, receive: Any, send: Any) -> None:
        before = list(scope["headers"])
        await middleware(scope, receive, send)
        seen.append((scope["route"], scope["state"], scope["headers"] == before))

    asyncio.run(within(outside, lambda client: client.post("/pay", headers={"idempotency-key": new_key()})))
    assert seen == [("/pay", {"user": "alice"}, True)]
