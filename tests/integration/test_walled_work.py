"""Work behind the wall: with the role of an application everything that tasks do works, for several tenants at once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from idempotency import DidNotHappen, EffectUnknown, IdempotentTask, OperationId, PermanentError, cli, publish
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.checks.findings import Level
from idempotency.checks.postgres import check_database
from idempotency.checks.processes import check_processes
from idempotency.checks.sagas import check_sagas
from idempotency.checks.startup import require_safe_setup
from idempotency.errors import CallFailed, ChangeRefused
from idempotency.handle import Handle
from idempotency.http import IdempotencyMiddleware
from idempotency.letters.consumer import consume_once
from idempotency.operate import saga as operate
from idempotency.operate.archive import archive, restore
from idempotency.operate.change import Change
from idempotency.operate.edit import edit
from idempotency.operate.erase import erase
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect_of_saga
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.sagas import saga
from idempotency.store import roles, saga_reading
from idempotency.store.answers import Claimed, Renewal
from idempotency.store.driver import SET_TENANTS
from idempotency.store.rights import APPLICATION, OPERATOR, RELAY
from idempotency.upkeep import alarms, alerts, maintenance
from idempotency.upkeep.presence import SignOfLife
from idempotency.wire.headers import TENANT_HEADER
from tests.sagas.conftest import Stage
from tests.support import bank as b
from tests.support import operations as op
from tests.support.batches import message, run, states, together
from tests.support.deliveries import Deliveries
from tests.support.dump import holding
from tests.support.edge import Handler, within
from tests.support.outside import OutsideWorld
from tests.support.roles import PASSWORDS, url_of
from tests.support.tasks import make_task

Under = Callable[[str], Any]


@pytest.fixture
def walled(database: str, engine: Engine) -> str:
    """The test's database with its roles; the bank's own tables are for web servers, workers and relays."""
    roles.create(engine.execution_options(isolation_level="READ COMMITTED"), PASSWORDS)
    with engine.connect() as connection:
        connection.execute(text(f"GRANT ALL ON entries, failures TO {APPLICATION}, {RELAY}"))
        connection.execute(text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {APPLICATION}, {RELAY}"))
    return database


@pytest.fixture
def under(walled: str, application_database: str, configured: Celery) -> Iterator[Under]:
    """Let the bank's application log in as a role, until the block ends."""

    @contextmanager
    def under(role: str) -> Iterator[Celery]:
        configured.conf.idempotency_database_url = url_of(role, application_database)
        close_runtime(configured)
        yield configured
        close_runtime(configured)

    yield under
    close_runtime(configured)


def enqueue(app: Celery, task: Any, *args: Any, tenant: str, **options: Any) -> Handle[Any]:
    with Session(runtime_of(app).engine) as session:
        handle: Handle[Any] = task.enqueue(session, *args, tenant=tenant, **options)
        session.commit()
    return handle


def test_a_request_that_has_done_nothing_is_forgotten_and_one_that_has_is_kept(
    under: Under, connection: Connection
) -> None:
    with under(APPLICATION) as app:
        for status, kept in ((404, []), (500, ["released"]), (201, ["completed"])):
            middleware = IdempotencyMiddleware(
                Handler(status), runtime=runtime_of(app), tenant=lambda scope, status=status: f"t{status}"
            )

            async def send(client: httpx.AsyncClient) -> int:
                return (await client.post("/pay", headers={"idempotency-key": "k"})).status_code

            assert asyncio.run(within(middleware, send)) == status
            query = text("SELECT status FROM idempotency.records WHERE tenant = :tenant")
            assert connection.execute(query, {"tenant": f"t{status}"}).scalars().all() == kept


def test_whatever_a_task_does_works_for_one_tenant_after_the_other(
    under: Under, deliveries: Deliveries, outside: OutsideWorld, connection: Connection
) -> None:
    with under(APPLICATION) as app:
        for tenant in ("a", "b"):
            account = f"of-{tenant}"

            def deliver(task: Any, *args: Any, tenant: str = tenant, **options: Any) -> str:
                return deliveries.deliver(task, *args, tenant=tenant, **options).state

            assert deliver(b.deposit, "same key") == "SUCCESS"
            assert deliver(b.deposit, "same key") == "SUCCESS"  # from the record
            assert deliver(b.deposit, "same key", 2) == "FAILURE"  # refused, and kept
            assert deliver(b.transfer, account, outside.url) == "SUCCESS"
            assert deliver(b.failing, account, "permanent") == "FAILURE"
            assert deliver(b.failing, f"{account}-2", "retry") == "RETRY"
            assert deliver(b.failing, f"{account}-3", "defer long") == "RETRY"
            assert deliver(b.failing, f"{account}-3", "defer long") == "IGNORED"  # not due, and counted
            assert deliver(b.replaced, account) in ("IGNORED", "SUCCESS")
            assert enqueue(app, b.deposit, account, tenant=tenant, ordering_key="lane").status() == "accepted"
            assert Handle(app, OperationId(tenant, b.deposit.name, "same key")).result() == {
                "account": "same key",
                "amount": 1,
            }
    tenants = "SELECT tenant, count(*) FROM idempotency.{} GROUP BY 1 ORDER BY 1"
    for table in ("records", "outbox", "dead_letters"):
        (one, of_one), (two, of_two) = connection.execute(text(tenants.format(table))).all()
        assert (one, two, of_one) == ("a", "b", of_two)
    ordered = (
        connection.execute(text("SELECT place FROM idempotency.outbox WHERE ordering_key IS NOT NULL")).scalars().all()
    )
    assert len(set(ordered)) == 2, "one for each tenant"
    assert None not in ordered, "each has its place, although no transaction may write lanes"
    lanes = "SELECT task, ordering_key FROM idempotency.lanes ORDER BY 2"
    assert connection.execute(text(lanes)).all() == [(b.deposit.name, f"{tenant}\nlane") for tenant in ("a", "b")]


@pytest.mark.plain
def test_relays_and_upkeep_see_the_work_of_all_tenants(
    under: Under, deliveries: Deliveries, connection: Connection
) -> None:
    with under(APPLICATION) as app:
        for tenant in ("a", "b"):
            enqueue(app, b.deposit, "a1", tenant=tenant, ordering_key="lane")
            enqueue(app, b.deposit, "a2", tenant=tenant)
            op.expired(connection, OperationId(tenant, b.deposit.name, "a3"), message="")
        life = SignOfLife(app, "worker")
        assert life.sign()
    with under(RELAY) as app:
        assert maintenance.recover(app) == 2
        relay = Relay(app)
        published = 0
        while passed := relay.run_once().published:
            published += passed
        relay.close()
        assert published == 4
        resend_lost(app)
        consume_once(app)
        alerts.run_once(app)
        alarms.run_once(app)
        maintenance.purge(app)
        assert SignOfLife(app, "relay").sign()


def test_a_relay_that_would_see_one_tenant_at_a_time_does_not_start(
    under: Under, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with under(APPLICATION):
        monkeypatch.setattr(sys, "argv", ["idempotency", "relay", "-A", "tests.support.bank"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    said = f"{capsys.readouterr().err}{ended.value.code}"
    assert f"{APPLICATION!r} sees one tenant at a time, and a relay works for all; log in as {RELAY}" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("role", [APPLICATION, RELAY, OPERATOR])
def test_the_check_at_the_start_finds_nothing_missing(under: Under, role: str) -> None:
    with under(role) as app:
        found = check_database(settings_of(app)) + check_sagas(app, settings_of(app))
        assert [str(each) for each in found if each.level is not Level.OK] == []
        assert require_safe_setup(app) is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("role", "said"), [(APPLICATION, "the tenants of a transaction"), (RELAY, "all tenants"), (OPERATOR, "all tenants")]
)
def test_the_doctor_says_what_row_security_means_for_a_role(under: Under, role: str, said: str) -> None:
    with under(role) as app:
        found = {finding.subject: finding for finding in check_database(settings_of(app))}
        assert str(found["database row-level security"]).startswith(
            f"database row-level security: on; {role!r} sees {said}"
        )
        looked = [str(finding) for finding in check_processes(app, settings_of(app))]
        assert any("does not see all tenants" in line for line in looked) == (role == APPLICATION)


def test_the_doctor_warns_of_a_superuser_behind_the_wall(walled: str, superuser: Engine, configured: Celery) -> None:
    configured.conf.idempotency_database_url = superuser.url.render_as_string(hide_password=False)
    (found,) = [each for each in check_database(settings_of(configured)) if "row-level" in each.subject]
    assert (found.level, "'postgres' is a superuser" in str(found)) == (Level.WARNING, True)


def test_one_renewal_covers_the_leases_of_several_tenants(under: Under, connection: Connection) -> None:
    held = [op.started(connection, OperationId(tenant, "t", "k")) for tenant in ("a", "b", "a'\"\\%s")]
    with under(APPLICATION) as app:
        assert set(runtime_of(app)._renew(held).values()) == {Renewal.HELD}
        assert set(runtime_of(app)._renew(held[:1]).values()) == {Renewal.HELD}


def test_a_forgotten_tenant_ends_no_operation(under: Under, connection: Connection) -> None:
    id = OperationId("a", "t", "k")
    op.started(connection, id)
    with under(APPLICATION) as app:
        with runtime_of(app).autocommit("a") as own:
            assert isinstance(op.claim(own, OperationId("a", "t", "k2")), Claimed)
        with (
            runtime_of(app).autocommit() as own,
            pytest.raises(ProgrammingError, match="tenant is not set"),
        ):
            op.claim(own, id)
        with runtime_of(app).autocommit("b") as own, pytest.raises(ProgrammingError, match="row-level security"):
            op.claim(own, id)
    assert op.status(connection, id) == "started"


def test_the_tenant_costs_no_statement_while_it_stays_the_same(under: Under, connection: Connection) -> None:
    asked: list[str] = []

    def statements(role: str, *tenants: str) -> list[str]:
        asked.clear()
        with under(role) as app:
            engine = runtime_of(app)._autocommit_engine
            event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
            for tenant in tenants:
                with runtime_of(app).autocommit(tenant) as own:
                    own.exec_driver_sql("SELECT 1")
        return [statement for statement in asked if statement != "SELECT 1"]

    with under(APPLICATION) as app:
        pooled: Any
        with runtime_of(app).autocommit() as own:
            pooled = own.connection.driver_connection
        if pooled.is_pooled:
            pytest.skip("behind a pooler it goes with every statement")
    assert len(statements(APPLICATION, "a", "a", "a")) == 1
    assert len(statements(APPLICATION, "a", "b", "b", "a")) == 3
    assert statements(RELAY, "a", "b") == []


def test_enqueue_in_the_applications_own_transaction_names_its_tenants(
    under: Under, walled: str, connection: Connection
) -> None:
    """On the application's own connection, which the library has not made; several tenants in one transaction."""
    own = create_engine(url_of(APPLICATION, walled), poolclass=NullPool)
    with under(APPLICATION), own.begin() as transaction:
        for tenant in ("a", "b"):
            for account in ("a1", "a2"):
                b.deposit.enqueue(transaction, account, tenant=tenant, ordering_key="lane")
    rows = connection.execute(text("SELECT tenant, place IS NOT NULL FROM idempotency.outbox ORDER BY id")).all()
    assert [tuple(row) for row in rows] == [("a", True), ("a", True), ("b", True), ("b", True)]
    with own.connect() as later, pytest.raises(ProgrammingError, match="tenant is not set"):
        later.execute(text("SELECT count(*) FROM idempotency.outbox"))


def test_a_body_sees_its_own_tenant_in_every_transaction(under: Under, walled: str) -> None:
    with under(APPLICATION) as app:
        seen = []
        session = runtime_of(app)
        from idempotency.attempt.session import sessions_of

        body = sessions_of(session.engine).of(session.engine, "a")
        for _ in range(2):
            seen.append(body.scalar(text("SELECT current_setting('idempotency.tenant')")))
            body.rollback()
        body.end()
        assert seen == ["a", "a"]
        with session.engine.connect() as plain:
            assert not plain.scalar(text("SELECT current_setting('idempotency.tenant', true)"))


def name_another(session: Session, way: str) -> None:
    match way:
        case "enqueue":
            b.deposit.enqueue(session, "x", tenant="other")
        case "on the driver":
            b.deposit.enqueue(session.connection().connection.driver_connection, "x", tenant="other")
        case "parameter":
            session.execute(text("SELECT idempotency.about(:tenant)"), {"tenant": "other"})
        case "literal":
            session.execute(text("SELECT \"idempotency\".about ('other')"))


@pytest.mark.few(3)
@pytest.mark.parametrize("fails", [False, True], ids=["", "behind savepoints"])
@pytest.mark.parametrize("way", ["enqueue", "on the driver", "parameter", "literal", "before the commit"])
def test_a_tenant_that_one_body_of_a_batch_names_is_hidden_from_the_next(
    under: Under, engine: Engine, connection: Connection, way: str, fails: bool
) -> None:
    connection.execute(text("CREATE TABLE orders (tenant text NOT NULL, paid boolean NOT NULL)"))
    connection.execute(text("INSERT INTO orders VALUES ('default', false), ('other', false)"))
    roles.protect(connection, "orders")
    connection.execute(text(f"GRANT ALL ON orders TO {APPLICATION}"))
    changed: dict[str, int] = {}

    def body(self: IdempotentTask, account: str) -> None:
        if account == "e1":
            if way == "before the commit":
                event.listen(self.session, "before_commit", lambda session: name_another(session, "enqueue"))
            else:
                name_another(self.session, way)
        if account == "e3" and fails:
            raise ValueError("bad")
        changed[account] = self.session.connection().exec_driver_sql("UPDATE orders SET paid = true").rowcount

    with under(APPLICATION) as app:
        task = together(app, body)
        run(app, task, *(message(app, task, f"e{n}") for n in range(4)))
    # its own transaction is about both
    assert changed.pop("e1") == (1 if way == "before the commit" else 2)
    assert changed == dict.fromkeys(("e0", "e2") if fails else ("e0", "e2", "e3"), 1)
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed") | {"e3": "failed" if fails else "completed"}


def test_the_tenant_costs_a_batch_one_statement_while_no_body_names_another(under: Under, engine: Engine) -> None:
    asked: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        b.deposit.enqueue(self.session, account)
        self.session.execute(text("SELECT idempotency.about(:own)"), {"own": "default"})

    with under(APPLICATION) as app:
        task = together(app, body)
        event.listen(runtime_of(app).engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
        run(app, task, *(message(app, task, f"e{n}") for n in range(3)))
    assert [statement for statement in asked if "set_config('idempotency.tenant'" in statement] == [SET_TENANTS]
    assert set(states(engine).values()) == {"completed"}


def test_claims_of_two_tenants_are_given_back_each_behind_its_wall(under: Under, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "e0":
            raise SoftTimeLimitExceeded  # as the pool raises it; the others are not begun

    with under(APPLICATION) as app:
        task = make_task(app, body, key="{account}", batch=10, max_attempts=1, batch_commit="each")
        messages = [message(app, task, f"e{n}") for n in range(5)]
        for n, (_, request, *_) in enumerate(messages):
            request[TENANT_HEADER] = "ab"[n % 2]
        assert [traced is None for traced in run(app, task, *messages)] == [False, True, True, True, True]
    with engine.connect() as connection:
        left = connection.execute(
            text("SELECT tenant, key, status, attempts FROM idempotency.records ORDER BY key")
        ).all()
    given_back = [("b", "e1"), ("a", "e2"), ("b", "e3"), ("a", "e4")]
    assert left == [("a", "e0", "failed", 1), *((tenant, key, "released", 0) for tenant, key in given_back)]


def test_sagas_of_two_tenants_wait_are_woken_and_undone(under: Under, engine: Engine, deliveries: Deliveries) -> None:
    with under(APPLICATION) as app:
        stage = Stage(app, engine, deliveries)

        @saga("walled", key="{id}", events={"picked": "{id}"}, app=app)
        def walled_saga(saga: Any, id: str, fails: bool) -> Any:
            saga.call(b.deposit, id, undo=b.returning)
            event = saga.wait_for("picked", match=id, timeout=60.0)
            if fails:
                raise PermanentError("it fails", "failed")
            return event["data"]["n"]

        handles = [enqueue(app, walled_saga, "s", tenant == "b", tenant=tenant) for tenant in "ab"]
        stage.run()
        for tenant in "ab":
            with runtime_of(app).transaction(tenant) as connection:
                publish(connection, "picked", {"id": "s", "n": tenant}, tenant=tenant, app=app)
        stage.run()
        assert [handle.status() for handle in handles] == ["completed", "failed"]
        assert handles[0].result() == "a"
        with runtime_of(app).transaction("a") as connection:
            seen = connection.execute(text("SELECT tenant, status FROM idempotency.saga_instances")).all()
        assert seen == [("a", "COMPLETED")]


@pytest.mark.long
def test_an_operator_changes_the_saga_of_one_tenant(under: Under, engine: Engine, deliveries: Deliveries) -> None:
    with under(APPLICATION) as app:
        stage = Stage(app, engine, deliveries)

        @saga("walled.changed", key="{id}", events={"picked": "{id}"}, max_attempts=1, app=app)
        def changed(saga: Any, id: str) -> Any:
            saga.effect("ask", ask, is_answered=saga.tenant != "d")
            return saga.wait_for("picked", match=id, timeout=60.0)["data"]

        def ask(*, is_answered: bool, idempotency_key: str) -> None:
            if not is_answered:
                raise EffectUnknown("no answer")

        handles = {tenant: enqueue(app, changed, "s", tenant=tenant) for tenant in "abcd"}
        stage.run()
    ids = {tenant: OperationId(tenant, "walled.changed", "s") for tenant in "abcd"}
    change = Change("ann", "ticket 42")
    with under(OPERATOR) as app:
        operate.signal_saga(app, ids["a"], "picked", "by hand", change)
        operate.cancel_saga(app, ids["b"], change)
        with (
            pytest.raises(ChangeRefused, match="4 sagas have it, choose one"),
            runtime_of(app).autocommit() as connection,
        ):
            operate.find(app, connection, "s")
        with runtime_of(app).autocommit() as connection:
            assert operate.find(app, connection, "s", tenant="c") == ids["c"]
            shown = saga_reading.show(connection, ids["a"])
        assert [(event["event_type"], event["person"]) for event in shown["events"]] == [("picked", "ann")]
        assert [row["action"] for row in shown["audit"]] == ["saga_signal"]
        resolve_effect_of_saga(app, ids["d"], "ask", DidNotHappen(), change)
        with runtime_of(app).autocommit() as connection:
            listed = saga_reading.list_sagas(connection, saga_reading.Filter("bank"), limit=10)
    waiting = [("a", "RUNNING"), ("b", "COMPENSATING"), ("c", "RUNNING"), ("d", "COMPENSATING")]
    assert sorted((row.tenant, row.status) for row in listed) == waiting
    with under(APPLICATION):
        stage.run()
        assert handles["a"].result() == "by hand"
        assert [handles[tenant].status() for tenant in "bcd"] == ["failed", "released", "failed"]


def test_a_saga_uses_a_call_that_failed_and_is_replayed_by_a_person(
    under: Under, engine: Engine, deliveries: Deliveries
) -> None:
    with under(APPLICATION) as app:
        stage = Stage(app, engine, deliveries)

        @saga("walled.failing", key="{id}", app=app)
        def failing(saga: Any, id: str) -> None:
            with contextlib.suppress(CallFailed):
                saga.call(b.failing, id, "permanent")
            raise PermanentError("it fails", "failed")

        handle = enqueue(app, failing, "s", tenant="a")
        stage.run()
        assert handle.status() == "failed"
    query = "SELECT id, status FROM idempotency.dead_letters ORDER BY task = 'walled.failing'"
    with engine.connect() as connection:
        letters = connection.execute(text(query)).all()
    assert [letter.status for letter in letters] == ["discarded", "open"]
    with under(OPERATOR) as app:
        replay(app, letters[1].id, Change("ann", "ticket 42"))
    with under(APPLICATION):
        stage.run()
        assert handle.status() == "failed"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT status, generation FROM idempotency.sagas")).all() == [("FAILED", 2)]


def test_an_operators_role_erases_a_saga_and_the_applications_does_not(
    under: Under, engine: Engine, deliveries: Deliveries
) -> None:
    with under(APPLICATION) as app:
        stage = Stage(app, engine, deliveries)

        @saga("walled.told", key="{id}", app=app)
        def told(saga: Any, id: str, name: str) -> Any:
            return saga.step("note", lambda session, noted: noted, name)

        enqueue(app, told, "s", "canary-7f3a", tenant="a")
        stage.run()
    id, change = OperationId("a", "walled.told", "s"), Change("ann", "request 17")
    with under(APPLICATION) as app, pytest.raises(ProgrammingError, match="row-level security is on"):
        erase(app, id, change)
    assert "saga_steps" in holding(engine, "canary-7f3a")
    with under(OPERATOR) as app:
        erase(app, id, change)
    assert holding(engine, "canary-7f3a") == set()


def test_an_operator_archives_and_edits_and_a_worker_knows_requests_of_before(
    under: Under, deliveries: Deliveries, connection: Connection
) -> None:
    with under(APPLICATION):
        deliveries.deliver(b.failing, "a1", "permanent", tenant="a")
    (letter,) = op.dead_letters(connection)
    with under(OPERATOR) as app:
        archive(app, letter.id, Change("ann", "later"))
        restore(app, letter.id, Change("ann", "now"))
        edit(app, letter.id, '{"args": ["a1", "retry"]}', Change("ann", "ticket 42"))
        replay(app, letter.id, Change("ann", "ticket 42"))
    with under(APPLICATION) as app:
        for how, state in (("permanent", "IGNORED"), ("retry", "RETRY")):
            assert deliveries.deliver(b.failing, "a1", how, tenant="a").state == state
        assert enqueue(app, b.failing, "a1", "permanent", tenant="a").status() == "released"
    with under(RELAY) as app:
        maintenance.purge(app)
    (only,) = op.dead_letters(connection)
    assert only.status == "replayed"
