"""Dead letters over HTTP, readiness, and the OpenAPI document: in this process, where a socket adds nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from starlette.concurrency import run_in_threadpool

import services
from api.callers import Callers
from api.operators import SUMMARY, Refusals, network_of
from idempotency.application import close_runtime
from idempotency.operate.change import Change
from idempotency.operate.people import Role, add_operator
from idempotency.store import schema as tables
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.integration.test_identities import AUDIENCE, ISSUER, KEYS, id_token
from tests.support import operations as op
from tests.support.server import api_key

LETTERS = "/admin/dead-letters"
PAYMENT = {"customer_id": "c1", "amount": 1000, "currency": "EUR"}


@dataclass
class Admin:
    """The application in this process, and a request to it."""

    app: FastAPI
    engine: Engine
    tokens: dict[str, str]

    def ask(self, method: str, path: str, who: str | None = "ann", **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if path.endswith("/replay") and isinstance(options.get("json"), dict) and "ids" in options["json"]:
            options["json"] = {"even_if_declined": True, **options["json"]}
        if who is not None:
            headers["Authorization"] = f"Bearer {self.tokens.get(who, who)}"

        async def send() -> httpx.Response:
            async with started(self.app) as client:
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(send())

    def letter(self, status: str = "failed") -> tuple[int, OperationId]:
        """A failed payment with its open dead letter."""
        id = op.new_id("acme", "payments.capture_payment")
        with self.engine.connect() as connection:
            claimed = op.failed(connection, id)
            connection.execute(text("UPDATE idempotency.records SET service = 'tasks'"))
            number = connection.execute(
                text(DEAD_LETTER),
                {"key": id.key, "fingerprint": claimed.fingerprint or op.FINGERPRINT, "payload": PAYLOAD},
            ).scalar_one()
        return number, id

    def audited(self, action: str) -> list[Any]:
        with self.engine.connect() as connection:
            found = connection.execute(
                text("SELECT * FROM idempotency.audit WHERE action = :action ORDER BY id"), {"action": action}
            )
            return list(found)


PAYLOAD = Message({"task": "payments.capture_payment"}, '[[], {"secret": "of a customer"}, null]', {}, {}).to_text()
DEAD_LETTER = """
INSERT INTO idempotency.dead_letters
    (source, tenant, task, key, generation, queue, consumer_service, reason, attempts, last_error, fingerprint, payload)
VALUES ('operation', 'acme', 'payments.capture_payment', :key, 1, 'payments', 'tasks', 'card_declined', 1,
        '{"code": "card_declined", "message": "declined"}', :fingerprint, :payload)
RETURNING id
"""
EDIT = """INSERT INTO idempotency.letter_edits (letter, tenant, task, key, edited_by, reason, before, after, fingerprint_after)
SELECT id, tenant, task, key, 'ben', 'x', payload, payload, 'v1:x' FROM idempotency.dead_letters WHERE id = :id"""


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def admin(servers: services.Services) -> Iterator[Admin]:
    name = f"admin_{uuid4().hex[:8]}"
    database = servers.create_database(name)
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    addresses = {**servers.environment(), "DATABASE_URL": database}
    before = {name: os.environ.get(name) for name in addresses}
    os.environ.update(addresses)
    with ExitStack() as stack:
        stack.callback(servers.drop_database, name)
        stack.callback(engine.dispose)
        stack.callback(
            lambda: [
                os.environ.pop(name) if old is None else os.environ.update({name: old}) for name, old in before.items()
            ]
        )
        import tasks
        from api.application import create_app
        from tasks import migrate

        tasks.app.conf.update(
            broker_url=addresses["BROKER_URL"],
            idempotency_database_url=database,
            idempotency_redis_url=addresses["REDIS_URL"],
        )
        close_runtime(tasks.app)
        stack.callback(close_runtime, tasks.app)
        tables.migrate(engine)
        migrate.migrate(engine)
        tokens = {"tenant": api_key(engine, "acme")}
        roles: dict[str, Role] = {"ann": "operator", "eve": "operator"}
        for person, role in roles.items():
            with engine.connect() as connection:
                tokens[person] = add_operator(connection, Change("setup", "tests"), person, role, days=1)
        with engine.connect() as connection:
            connection.execute(text("UPDATE idempotency.operators SET expires_at = now() WHERE name = 'eve'"))
        yield Admin(create_app(), engine, tokens)


@pytest.fixture
def configure(admin: Admin) -> Iterator[Callable[..., None]]:
    """Sets the application's settings until the end of the test."""
    import tasks

    with ExitStack() as stack:

        def change(**settings: str) -> None:
            for name, value in settings.items():
                tasks.app.conf[f"idempotency_{name}"] = value
                stack.callback(tasks.app.conf.changes.pop, f"idempotency_{name}", None)
                stack.callback(tasks.app.conf.pop, f"idempotency_{name}", None)
            close_runtime(tasks.app)

        yield change
        stack.close()
        close_runtime(tasks.app)


# ---------------------------------------------------------------- who may


@pytest.mark.parametrize(
    ("who", "status"), [(None, 401), ("nobody's", 401), ("eve", 401), ("ik_a_" + "x" * 43, 401), ("tenant", 403)]
)
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/1"), ("POST", "/replay"), ("POST", "/discard")])
def test_who_may_not_is_told_so_and_leaves_an_audit_row(
    admin: Admin, who: str | None, status: int, method: str, path: str
) -> None:
    """Row 32."""
    before = len(admin.audited("refused"))
    body = {"ids": [1], "reason": "r"} if method == "POST" else None
    answer = admin.ask(method, LETTERS + path, who, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    row = admin.audited("refused")[before:][0]
    assert row.details["attempted"].startswith(method)
    assert not any(token in str(row) + answer.text for token in admin.tokens.values())


# ---------------------------------------------------------------- what they may


def test_a_dead_letter_is_listed_shown_without_its_payload_and_replayed_once(admin: Admin) -> None:
    number, id = admin.letter()
    listed = admin.ask("GET", LETTERS, params={"task": id.task}).json()
    assert listed[0]["id"] == number
    shown = admin.ask("GET", f"{LETTERS}/{number}")
    assert (shown.json()["key"], shown.json()["reason"]) == (id.key, "card_declined")
    assert "of a customer" not in shown.text + json.dumps(listed)
    asked, once = {"ids": [number], "reason": "ticket 42"}, {"Idempotency-Key": "once"}
    for _ in range(2):
        replayed = admin.ask("POST", f"{LETTERS}/replay", json=asked, headers=once)
        assert (replayed.status_code, replayed.json()) == (200, {"done": [number], "refused": []})
    (row,) = [row for row in admin.audited("replay") if row.key == id.key]
    assert (row.actor, row.reason) == ("ann", "ticket 42")
    with admin.engine.connect() as connection:
        assert [row.origin for row in op.outbox(connection, id)] == ["replay"]


@pytest.mark.long
def test_a_replay_that_cannot_be_is_refused_with_its_reason_one_by_one(admin: Admin) -> None:
    """Row 31: unknown, already replayed, running, completed; and a million."""
    cases: dict[str, int] = {"not found": 10**15}
    with admin.engine.connect() as connection:
        for name, make in {"started": op.started, "completed": op.completed}.items():
            number, id = admin.letter()
            connection.execute(text("DELETE FROM idempotency.records WHERE key = :key"), {"key": id.key})
            make(connection, id)
            connection.execute(text("UPDATE idempotency.records SET service = 'tasks'"))
            cases[f"the operation is {name}"] = number
    cases["already replayed"], _ = admin.letter()
    fresh, _ = admin.letter()
    assert (
        admin.ask("POST", f"{LETTERS}/replay", json={"ids": [cases["already replayed"]], "reason": "r"}).status_code
        == 200
    )
    outcome = admin.ask("POST", f"{LETTERS}/replay", json={"ids": [*cases.values(), fresh], "reason": "r"}).json()
    assert outcome["done"] == [fresh]
    assert [why in refused["why"] for why, refused in zip(cases, outcome["refused"], strict=True)] == [True] * 4
    for ids, status in (
        ([10**15], 404),
        ([fresh], 409),
        ([], 400),
        (list(range(1, 1002)), 400),
        ([0], 400),
        (["1"], 400),
        (list(range(10**6)), 413),
    ):
        refused = admin.ask("POST", f"{LETTERS}/replay", json={"ids": ids, "reason": "r"})
        assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json"), (
            refused.text[:300]
        )
    assert (
        "at most 1000 items"
        in admin.ask("POST", f"{LETTERS}/replay", json={"ids": list(range(1, 1002)), "reason": "r"}).text
    )


def test_a_discard_is_asked_for_and_waits_for_another_admin(admin: Admin) -> None:
    number, _ = admin.letter()
    asked = admin.ask("POST", f"{LETTERS}/discard", json={"ids": [number], "reason": "a duplicate"})
    assert asked.json() == {"done": [number], "refused": []}
    assert admin.ask("GET", f"{LETTERS}/{number}").json()["status"] == "open"
    again = admin.ask("POST", f"{LETTERS}/discard", json={"ids": [number], "reason": "a duplicate"})
    assert (again.status_code, "has asked already" in again.json()["detail"]) == (409, True)


def test_a_caller_that_asks_too_often_has_to_wait(admin: Admin) -> None:
    async def hurry() -> list[httpx.Response]:
        async with started(admin.app) as client:
            headers = {"Authorization": f"Bearer {admin.tokens['ann']}"}
            return [await client.get(LETTERS, headers=headers) for _ in range(40)]

    first, *_, last = asyncio.run(hurry())
    assert (first.status_code, last.status_code, last.headers["retry-after"]) == (200, 429, "1")


def test_guesses_from_one_network_have_to_wait_fill_no_table_and_stop_no_operator(admin: Admin) -> None:
    """One computer has 2**64 addresses of IPv6, and a proxy is one address for many people."""
    before = len(admin.audited("refused"))

    async def ask(number: int, token: str) -> int:
        transport = httpx.ASGITransport(admin.app, client=(f"2001:db8::{number % 16:x}", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return (await client.get(LETTERS, headers={"Authorization": f"Bearer {token}"})).status_code

    async def guess() -> tuple[set[int], int]:
        async with started(admin.app):
            statuses = {await ask(number, "guess") for number in range(100)}
            return statuses, await ask(0, admin.tokens["ann"])

    assert asyncio.run(guess()) == ({401, 429}, 200)
    assert 60 <= len(admin.audited("refused")) - before < 100


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_addresses_that_one_computer_may_choose_from_are_one_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_person_of_any_name_without_a_group_is_refused_and_noted(
    admin: Admin, configure: Callable[..., None], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(KEYS)
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=str(keys))
    before = len(admin.audited("refused"))
    assert admin.ask("GET", f"{LETTERS}/%00", id_token(sub="\\" * 255)).status_code == httpx.codes.UNAUTHORIZED
    assert len(admin.audited("refused")) == before + 1


def test_who_only_looks_or_has_some_tenants_has_no_list_of_all(
    admin: Admin, configure: Callable[..., None], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(KEYS)
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=str(keys), oidc_tenants="tenants")
    operator: dict[str, Any] = {"groups": ["idempotency-operator"]}
    assert admin.ask("GET", LETTERS, id_token(**operator, tenants="*")).status_code == 200
    for refused in (operator | {"tenants": ["acme"]}, operator, {"groups": ["idempotency-reader"], "tenants": "*"}):
        assert admin.ask("GET", LETTERS, id_token(**refused)).status_code == 403


def test_a_file_of_people_that_cannot_be_read_is_a_problem_without_its_reason(
    admin: Admin, configure: Callable[..., None], tmp_path: Path
) -> None:
    configure(people_file=str(tmp_path / "people.toml"))
    answer = admin.ask("GET", LETTERS)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.json()["type"].endswith("misconfigured")
    assert "people" not in answer.text


def test_beyond_what_is_recorded_one_row_sums_up_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    refusals = Refusals()
    taken = [refusals.take(f"192.0.2.{number % 250}", "why") for number in range(600)]
    assert [row for _, row in taken] == ["why"] * 500 + [None] * 100
    assert not any(seconds for seconds, _ in taken)
    now = SUMMARY
    assert [refusals.take("192.0.2.1", "why")[1] for _ in range(4)] == [
        "why",
        "why",
        "why; the last of 101 refusals without a row each",
        None,
    ]


def test_guesses_of_api_keys_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    callers, answered = Callers(lambda: pytest.fail("asks Postgres")), threading.Event()
    monkeypatch.setattr(callers, "_ask", lambda _: answered.wait(20) and None)

    async def guess() -> str:
        guesses = [asyncio.create_task(callers.of(f"ik_{number}")) for number in range(100)]
        async with asyncio.timeout(10):
            other = await run_in_threadpool(lambda: "answered")
        answered.set()
        await asyncio.gather(*guesses)
        return other

    assert asyncio.run(guess()) == "answered"


# ---------------------------------------------------------------- the body and the key of a change


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"ids": [1], "reason": "a\\u0000b"}', "U+0000"),
        (b'{"ids": [1], "reason": "r", "ids": [2]}', "twice"),
        (b'{"ids": [1], "reason": "', "JSON"),
    ],
)
def test_a_body_that_readers_read_differently_is_refused_once_it_is_known_who_asks(
    admin: Admin, body: bytes, named: str
) -> None:
    headers = {"Content-Type": "application/json"}
    for action in ("replay", "discard"):
        refused = admin.ask("POST", f"{LETTERS}/{action}", content=body, headers=headers)
        assert (refused.status_code, named in refused.json()["detail"]) == (400, True)
        assert admin.ask("POST", f"{LETTERS}/{action}", "guess", content=body, headers=headers).status_code == 401


@pytest.mark.parametrize("action", ["replay", "discard"])
def test_a_key_names_one_change_of_one_person_for_one_reason(admin: Admin, action: str) -> None:
    number, _ = admin.letter()
    key = f"{action}-{number}-"

    def ask(key: str, reason: str = "r") -> httpx.Response:
        body = {"ids": [number], "reason": reason}
        return admin.ask("POST", f"{LETTERS}/{action}", json=body, headers={"Idempotency-Key": key})

    long = key + "k" * (255 - len(key))
    assert [ask(each).status_code for each in (long, long, f'"{long}"')] == [200] * 3
    assert (ask(long, "quite another").status_code, ask(key).status_code) == (409, 409)
    assert [ask(each).status_code for each in ("k" * 256, "a,b", "")] == [400] * 3


# ---------------------------------------------------------------- readiness


@pytest.mark.parametrize(
    ("setting", "part", "status"),
    [
        ("idempotency_redis_url", "redis", 200),
        ("broker_url", "broker", 200),
        ("idempotency_database_url", "postgres", 503),
    ],
)
def test_only_without_postgres_no_request_can_be_accepted(
    admin: Admin, setting: str, part: str, status: int, unreachable: Callable[[str], None]
) -> None:
    unreachable(setting)
    answer = admin.ask("GET", "/readyz", None)
    assert answer.status_code == status
    parts = answer.json()["parts"]
    assert (parts[part]["ok"], parts[part]["needed"]) == (False, part == "postgres")
    assert all(parts[name]["ok"] for name in {"postgres", "redis", "broker"} - {part})
    assert "secret" not in answer.text
    assert admin.ask("GET", "/livez", None).status_code == 200


def test_without_postgres_a_request_is_answered_503_and_nothing_is_known(
    admin: Admin, unreachable: Callable[[str], None]
) -> None:
    unreachable("idempotency_database_url")
    for method, path in (("POST", "/payments"), ("GET", "/operations/payments.capture_payment/x"), ("GET", LETTERS)):
        answer = admin.ask(method, path, "tenant", json={} if method == "POST" else None)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.fixture
def unreachable(admin: Admin) -> Iterator[Callable[[str], None]]:
    """Lets a setting name a server at a port where nothing listens, until the end of the test."""
    import tasks

    before = {}

    def set_unreachable(setting: str) -> None:
        before[setting] = tasks.app.conf[setting]
        url = str(
            before[setting].get_secret_value() if hasattr(before[setting], "get_secret_value") else before[setting]
        )
        gone = make_url(url).set(host="127.0.0.1", port=9, username="u", password="secret")
        tasks.app.conf[setting] = gone.render_as_string(hide_password=False)
        close_runtime(tasks.app)

    yield set_unreachable
    for setting, value in before.items():
        tasks.app.conf[setting] = value
    close_runtime(tasks.app)


@pytest.mark.long
@pytest.mark.parametrize("why", ["takes no writes", "payments"])
def test_a_server_whose_database_takes_no_payments_is_not_ready(admin: Admin, why: str) -> None:
    """A standby after a failover, and a deploy half way: `python -m tasks.migrate` has not run."""
    import tasks

    name = admin.engine.url.database
    breaks, mends = {
        "takes no writes": (
            f"ALTER DATABASE {name} SET default_transaction_read_only = on",
            f"SET default_transaction_read_only = off; ALTER DATABASE {name} RESET default_transaction_read_only",
        ),
        "payments": ("ALTER TABLE payments RENAME TO later", "ALTER TABLE later RENAME TO payments"),
    }[why]
    with admin.engine.connect() as connection:
        for statement in breaks.split("; "):
            connection.execute(text(statement))
    close_runtime(tasks.app)
    try:
        answer = admin.ask("GET", "/readyz", None)
        paid = admin.ask("POST", "/payments", "tenant", json=PAYMENT, headers={"Idempotency-Key": uuid4().hex})
    finally:
        with admin.engine.connect() as connection:
            for statement in mends.split("; "):
                connection.execute(text(statement))
        close_runtime(tasks.app)
    part = answer.json()["parts"]["postgres"]
    assert (answer.status_code, part["ok"], why in part["detail"]) == (503, False, True)
    assert paid.status_code == (503 if why == "takes no writes" else 500)
    assert admin.ask("GET", "/readyz", None).json()["parts"]["postgres"]["ok"]


# ---------------------------------------------------------------- behind a proxy, and hanging up


def test_behind_a_proxy_that_strips_a_prefix_everything_works_and_locations_have_the_prefix(admin: Admin) -> None:
    """`uvicorn --root-path /shop`: the scope's path has the prefix, those of the routes do not."""
    requests = [
        ("POST", "/payments", "tenant", 202),
        ("GET", "/operations/payments.capture_payment/none", "tenant", 404),
        ("GET", "/operations/payments.capture_payment/none", None, 401),
        ("GET", LETTERS, "ann", 200),
        ("GET", LETTERS, "tenant", 403),
    ]

    async def ask() -> list[httpx.Response]:
        async with started(admin.app):
            transport = httpx.ASGITransport(admin.app, raise_app_exceptions=False, root_path="/shop")
            async with httpx.AsyncClient(transport=transport, base_url="http://shop/shop") as client:
                answers: list[httpx.Response] = []
                for method, path, who, _ in requests:
                    headers = {"Idempotency-Key": uuid4().hex, "Prefer": "wait=0"}
                    headers |= {} if who is None else {"Authorization": f"Bearer {admin.tokens[who]}"}
                    body = PAYMENT if method == "POST" else None
                    answers.append(await client.request(method, path, json=body, headers=headers))
                return answers

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [status for *_, status in requests], answers[0].text
    where = answers[0].headers["location"]
    assert where.startswith("/shop/operations/payments.capture_payment/")
    assert answers[0].json()["operation"] == where


def test_a_client_that_hangs_up_gives_its_place_to_another(admin: Admin) -> None:
    async def hang_up() -> None:
        async with started(admin.app) as client:
            ends = admin.app.state.ends
            headers = {"Authorization": f"Bearer {admin.tokens['tenant']}", "Prefer": "wait=30"}
            for method, path in (("POST", "/payments"), ("GET", "")):
                key = {"Idempotency-Key": uuid4().hex}
                if method == "GET":
                    path = (
                        await client.post("/payments", json=PAYMENT, headers={**headers, **key, "Prefer": ""})
                    ).headers["location"]
                scope = scope_of(method, path, headers | key)
                gone = asyncio.Event()
                body = [{"type": "http.request", "body": json.dumps(PAYMENT).encode() if method == "POST" else b""}]

                async def receive(body: list[Any] = body, gone: asyncio.Event = gone) -> Any:
                    if body:
                        return body.pop()
                    await gone.wait()
                    return {"type": "http.disconnect"}

                async def send(_: Any) -> None: ...

                answering = asyncio.create_task(admin.app(scope, receive, send))
                async with asyncio.timeout(20):
                    while not ends._waiting:
                        await asyncio.sleep(0.01)
                    gone.set()
                    await answering
                assert not ends._waiting

    asyncio.run(hang_up())


def scope_of(method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    given = {"Content-Type": "application/json"} | headers
    encoded = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": encoded,
        "client": ("192.0.2.1", 1),
        "server": ("shop", 80),
    }


# ---------------------------------------------------------------- the OpenAPI document


def test_every_problem_is_documented_as_one(admin: Admin) -> None:
    document = admin.ask("GET", "/openapi.json", None).json()
    assert "HTTPValidationError" not in json.dumps(document)
    responses = document["paths"]["/payments"]["post"]["responses"]
    assert {"202", "400", "401", "403", "409", "413", "415", "422", "429", "503"} <= set(responses)
    problems = [response for status, response in responses.items() if int(status) >= 400]
    assert all(list(response["content"]) == ["application/problem+json"] for response in problems)
    names = {parameter["name"] for parameter in document["paths"]["/payments"]["post"]["parameters"]}
    assert names == {"Idempotency-Key", "Prefer"}


def test_what_was_declined_is_replayed_only_if_that_is_asked_for(admin: Admin) -> None:
    number, id = admin.letter()
    asked = {"ids": [number], "reason": "r", "even_if_declined": False}
    refused = admin.ask("POST", f"{LETTERS}/replay", json=asked)
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")
    detail = refused.json()["detail"]
    assert f"{id.key}: was refused for good as no_account at " in detail
    assert detail.endswith('. To do so, send "even_if_declined": true')
    answer = admin.ask("POST", f"{LETTERS}/replay", json=asked | {"even_if_declined": True})
    assert answer.status_code == 200, answer.text
    (row,) = [row for row in admin.audited("replay") if row.key == id.key]
    assert row.actor == "ann"


def test_what_somebody_has_asked_to_edit_is_replayed_only_if_that_is_asked_for(admin: Admin) -> None:
    number, _ = admin.letter()
    with admin.engine.connect() as connection:
        connection.execute(text(EDIT), {"id": number})
    asked = {"ids": [number], "reason": "r", "even_if_declined": True}
    refused = admin.ask("POST", f"{LETTERS}/replay", json=asked)
    assert refused.status_code == 409
    assert refused.json()["detail"].endswith('. To do so, send "unedited": true')
    assert admin.ask("POST", f"{LETTERS}/replay", json=asked | {"unedited": True}).status_code == 200
