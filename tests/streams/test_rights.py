"""Streams with the least rights: the application's role behind the wall between tenants, and the broker's user for streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from kombu import Connection
from sqlalchemy import text

import services
from idempotency import PermanentError, streams
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.store import roles
from idempotency.store.rights import APPLICATION
from idempotency.streams import Handling, declaring
from idempotency.streams.declaring import Stream
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.broker_users import make_users, virtual_host
from tests.support.commands import runner
from tests.support.crashing import KILL_CHILD
from tests.support.processes import eventually
from tests.support.roles import PASSWORDS, url_of
from tests.support.streaming import Handler, Streaming, configure, until_gone

WRITE = text("INSERT INTO things (tenant, account) VALUES (:tenant, :account)")
OTHERS = text("SELECT count(*) FROM things WHERE tenant <> :tenant")


def walled(stream: Handling, event: Mapping[str, Any]) -> str:
    """Writes for its tenant, or tries to reach another's rows."""
    other = {"a": "b", "b": "a"}[stream.tenant]
    tenant = other if event.get("how") == "reach" else stream.tenant
    stream.session.execute(WRITE, {"tenant": tenant, "account": event["account"]})
    if event.get("how") == "effect":
        stream.session.rollback()
        stream.effect("call", lambda idempotency_key: 1)
        stream.session.execute(WRITE, {"tenant": tenant, "account": event["account"]})
    if event.get("how") == "unless told" and not Path(event["told"]).exists():
        raise PermanentError("not yet", "not_yet")
    if stream.session.execute(OTHERS, {"tenant": stream.tenant}).scalar_one():
        raise PermanentError("sees others", "sees_others")
    return ""


@dataclass(frozen=True)
class Walled(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", "tenant": "{event[tenant]}", "max_attempts": 1, **self.options}
        return streams.stream(self.name, source=self.source, **options)(walled)


@pytest.fixture
def vhost(servers: services.Services) -> Iterator[str]:
    """A virtual host for the test, which outlives its streams."""
    with virtual_host(servers) as url:
        yield url


@pytest.fixture
def rabbit_of_least_rights(
    vhost: str,
    make_streaming: Make,
    servers: services.Services,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Streaming]:
    """Its processes connect as the application's role, and as the user for streams. The test itself may do everything."""
    monkeypatch.setattr(declaring, "_declared", {})
    streaming = make_streaming("rabbitmq", partitions=2, apart=True, broker_url=vhost)
    roles.create(streaming.engine, PASSWORDS)
    with streaming.engine.begin() as connection:
        connection.execute(text("CREATE TABLE things (tenant text NOT NULL, account text)"))
        connection.execute(text(f"GRANT SELECT, INSERT ON things TO {APPLICATION}"))
        roles.protect(connection, "things")
    streaming.environment |= {"BROKER_URL": vhost}
    configure(streaming.environment)
    Walled(streaming.broker.source()).declared()
    users = make_users(runner(monkeypatch, capsys), servers, environment | {"BROKER_URL": vhost}, tmp_path, monkeypatch)
    streaming.environment |= {
        "BROKER_URL": users.url("stream"),
        "DATABASE_URL": url_of(APPLICATION, streaming.environment["DATABASE_URL"]),
    }
    yield streaming
    for process in streaming._processes:
        process.kill()


def test_a_handler_sees_the_rows_of_its_tenant_alone(rabbit_of_least_rights: Streaming) -> None:
    streaming = rabbit_of_least_rights
    told = streaming.directory / "told"
    for number, tenant in enumerate("aabbab"):
        streaming.broker.publish({"account": f"{tenant}{number}", "tenant": tenant})
    streaming.broker.publish({"account": "a-reach", "tenant": "a", "how": "reach"})
    streaming.broker.publish({"account": "b-effect", "tenant": "b", "how": "effect"})
    streaming.broker.publish({"account": "a-told", "tenant": "a", "how": "unless told", "told": str(told)})
    streaming.broker.publish({"account": "b-last", "tenant": "b"}, 1)
    process = streaming.start(Walled(streaming.broker.source()))
    streaming.wait_until_handled()
    rows = streaming.query("SELECT tenant, account FROM things ORDER BY account")
    assert [row.account for row in rows] == ["a0", "a1", "a4", "b-effect", "b-last", "b2", "b3", "b5"]
    assert all(row.account.startswith(row.tenant) for row in rows)
    letters = streaming.query("SELECT id, tenant, key, reason FROM idempotency.dead_letters ORDER BY id")
    assert [(row.tenant, row.key, row.reason) for row in letters] == [
        ("a", "a-reach", "attempts_exhausted"),
        ("a", "a-told", "not_yet"),
    ]
    # what a person opens again is found behind the wall, by a process that has handled messages of that tenant
    told.touch()
    configure(streaming.environment | {"DATABASE_URL": streaming.engine.url.render_as_string(hide_password=False)})
    replay(bank.app, letters[1].id, Change("ann", "tested", is_verified=True))
    reopened = "SELECT count(*) AS many FROM things WHERE account = 'a-told'"
    eventually(lambda: streaming.query(reopened)[0].many == 1, what=process.log)
    assert process.end() == 0


@pytest.mark.long
def test_the_claim_of_a_process_that_has_died_is_freed_with_the_applications_rights(
    rabbit_of_least_rights: Streaming,
) -> None:
    streaming = rabbit_of_least_rights
    streaming.environment["LEASE"] = "120"
    streaming.broker.publish({"account": "b-effect", "tenant": "b", "how": "effect"})
    streaming.broker.publish({"account": "b1", "tenant": "b"})
    handler = Walled(streaming.broker.source(), options={"max_attempts": 3})
    planned = streaming.plan("effect.called", KILL_CHILD)
    process = streaming.start(handler)
    until_gone(planned, process)
    process.kill()
    process = streaming.start(handler)
    eventually(lambda: streaming.positions().get(0) == 2, what=process.log)
    assert "stream_claim_freed" in process.log
    rows = streaming.query("SELECT account FROM things ORDER BY account")
    assert [row.account for row in rows] == ["b-effect", "b1"]
    assert process.end() == 0


@pytest.mark.long
def test_the_user_for_streams_reads_them_and_nothing_else(rabbit_of_least_rights: Streaming) -> None:
    streaming = rabbit_of_least_rights
    queue = f"{streaming.broker.topic}-0"
    with Connection(streaming.environment["BROKER_URL"]) as connection:
        for forbidden in (
            lambda channel: channel.queue_declare("other", durable=True, auto_delete=False),
            lambda channel: channel.queue_delete(queue),
            lambda channel: channel.queue_bind(queue, "amq.topic", "#"),
            lambda channel: channel.exchange_declare("other", "topic"),
        ):
            with pytest.raises(AccessRefused):
                forbidden(connection.channel())  # type: ignore[no-untyped-call]
