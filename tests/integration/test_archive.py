"""The archive: an open dead letter that nobody means to decide now is off the lists, and open in all that it decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from typer.testing import CliRunner, Result

from idempotency.application import settings_of
from idempotency.checks import processes as checks
from idempotency.cli.root import cli
from idempotency.errors import ChangeRefused, DiscardRefused, IdempotencyError, NotAuthenticated, ReplayRefused
from idempotency.operate import discard
from idempotency.operate.archive import archive, restore
from idempotency.operate.change import Change
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.store import alarms, dead_letters, schema
from idempotency.store.dead_letters import Selection
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import maintenance, overview
from idempotency.upkeep.backlog import Backlog
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operators import act, snapshot
from tests.support.tasks import Provider, lost, make_task

ANN = Change("ann", "next quarter")


@pytest.fixture
def deliveries(bank: Celery) -> Deliveries:
    return Deliveries(bank)


@pytest.fixture
def letter(bank: Celery, deliveries: Deliveries, connection: Connection) -> int:
    deliveries.deliver(b.failing, "a1", "permanent")
    (found,) = op.dead_letters(connection)
    return int(found.id)


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(cli, [*map(str, arguments), "-A", "tests.support.bank"])
        exit_code = 1 if isinstance(result.exception, IdempotencyError) else result.exit_code
        assert exit_code == status, (result.output, result.exception)
        return result

    return command


def listed(connection: Connection, **filters: Any) -> list[int]:
    return [row.id for row in dead_letters.list_letters(connection, **filters)]


def news(bank: Celery, connection: Connection) -> Any:
    return alarms.news(connection, "bank", "log", interval=0.0, most=0, repeat=0.0)


def test_an_archived_letter_leaves_lists_counts_and_alarms_and_comes_back(
    bank: Celery, letter: int, connection: Connection
) -> None:
    settings = settings_of(bank)
    assert news(bank, connection).letters == [letter]
    assert news(bank, connection).crowded == {"bank": 1}
    archive(bank, letter, ANN)

    assert listed(connection) == []
    assert dead_letters.group_letters(connection, Selection(), ["reason"]) == []
    assert dead_letters.select_ids(connection, Selection(), limit=10) == []
    assert listed(connection, archived=True) == listed(connection, status=None) == [letter]
    (report,) = dead_letters.report(connection, "bank")
    assert (report.open, report.archived, report.oldest_open, report.reasons) == (0, 1, None, None)
    assert not news(bank, connection)
    with monitoring_connection(settings) as monitoring:
        status = overview.status(monitoring, bank, settings)["dead_letters"]
    assert (status["open"], status["archived"], status["by_reason"]) == (0, 1, [])
    assert 0 <= status["oldest_archived_seconds"] < 60
    gauges = {metric.name: metric for metric in Backlog(bank).collect()}
    assert [sample.value for sample in gauges["idempotency_dead_letters_archived"].samples] == [1]
    assert gauges["idempotency_dead_letters_open"].samples == []
    (found,) = [each for each in checks.check_processes(bank, settings) if each.subject == "archive"]
    assert "1 dead letter is archived and open, the oldest for 0.0 days" in found.found

    restore(bank, letter, Change("ben", "it is next quarter"))
    assert listed(connection) == [letter]
    assert listed(connection, archived=True) == []
    assert news(bank, connection).letters == [letter]
    assert not [each for each in checks.check_processes(bank, settings) if each.subject == "archive"]
    rows = connection.execute(text("SELECT actor, action, reason, details FROM idempotency.audit ORDER BY id"))
    assert [tuple(row) for row in rows] == [
        ("ann", "archive", "next quarter", {"dead_letter": letter}),
        ("ben", "restore", "it is next quarter", {"dead_letter": letter}),
    ]


def test_nothing_is_decided_about_an_archived_letter_before_it_is_restored(
    bank: Celery, letter: int, connection: Connection, deliveries: Deliveries
) -> None:
    archive(bank, letter, ANN)
    before = snapshot(connection)
    with pytest.raises(ReplayRefused, match=rf"dead letter {letter}: archived at .* by 'ann'; restore it first"):
        replay(bank, letter, ANN)
    with pytest.raises(DiscardRefused, match="restore it first"):
        act(bank, discard.request, Person("ann", "operator"), letter, "why")
    assert snapshot(connection) == before

    restore(bank, letter, ANN)
    assert replay(bank, letter, ANN).key == "a1"
    (row,) = op.dead_letters(connection)
    assert (row.status, row.archived_at) == ("replayed", None)


def test_an_archived_letter_keeps_its_operation_from_being_purged(
    bank: Celery, letter: int, connection: Connection
) -> None:
    archive(bank, letter, ANN)
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    connection.execute(text("UPDATE idempotency.dead_letters SET failed_at = failed_at - interval '900 days'"))
    maintenance.purge(bank)
    assert len(op.dead_letters(connection)) == 1
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 1


def test_the_next_letter_of_the_operation_is_not_archived(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    task = make_task(bank, lambda self, divisor=0: 1 / divisor, max_attempts=1)
    deliveries.deliver(task, key="k")
    (first,) = op.dead_letters(connection)
    archive(bank, first.id, ANN)
    deliveries.deliver(task, 1, key="k")  # another request under its key, which is refused
    assert [(row.id, row.reason) for row in dead_letters.list_letters(connection)] == [
        (op.dead_letters(connection)[-1].id, "fingerprint_mismatch")
    ]
    assert listed(connection, archived=True) == [first.id]


@pytest.mark.parametrize(
    "change", ["status = 'replayed', closed_at = now()", "reason = 'effect_unknown'", "generation = 7"]
)
def test_a_letter_that_is_closed_or_becomes_another_one_leaves_the_archive_by_itself(
    bank: Celery, letter: int, connection: Connection, change: str
) -> None:
    archive(bank, letter, ANN)
    # also by code that knows no archive
    connection.execute(text("UPDATE idempotency.dead_letters SET last_error = 'another text'"))
    assert op.dead_letters(connection)[0].archived_by == "ann"
    connection.execute(text(f"UPDATE idempotency.dead_letters SET {change}"))
    (row,) = op.dead_letters(connection)
    assert (row.archived_at, row.archived_by, row.archived_because) == (None, None, None)


def test_what_waits_for_a_decision_is_not_archived(
    bank: Celery, letter: int, connection: Connection, engine: Engine, deliveries: Deliveries
) -> None:
    act(bank, discard.request, Person("ben", "operator"), letter, "a test account")
    with pytest.raises(ChangeRefused, match="'ben' has asked to discard it"):
        archive(bank, letter, ANN)
    provider = Provider(lost(), lost())
    task = make_task(bank, lambda self: self.effect("charge", provider), max_attempts=1)
    for _ in range(2):
        deliveries.deliver(task, key="k")
        op.make_due(engine, "k")
    doubtful = op.dead_letters(connection)[-1]
    assert doubtful.reason == "effect_unknown"
    with pytest.raises(ChangeRefused, match="its outcome is not known; resolve it first"):
        archive(bank, doubtful.id, ANN)
    with pytest.raises(ChangeRefused, match="not archived"):
        restore(bank, letter, ANN)
    replay(bank, letter, ANN)
    for work in (archive, restore):
        with pytest.raises(ChangeRefused, match="already replayed"):
            work(bank, letter, ANN)


def test_of_what_moves_money_only_a_token_archives(
    bank: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    task = make_task(bank, lambda self: 1 / 0, max_attempts=1, moves_money=True)
    deliveries.deliver(task, key="k")
    (letter,) = op.dead_letters(connection)
    for work in (archive, restore):
        with pytest.raises(NotAuthenticated, match="moves money"):
            work(bank, letter.id, ANN)
    archive(bank, letter.id, Change("ann", "later", is_verified=True))
    assert op.dead_letters(connection)[0].archived_because == "later"


def test_a_repeated_request_archives_once(bank: Celery, letter: int, connection: Connection) -> None:
    for _ in range(2):
        archive(bank, letter, Change("ann", "later", "r1"))
    with pytest.raises(ChangeRefused, match="archived already"):
        archive(bank, letter, ANN)
    assert connection.execute(text("SELECT count(*) FROM idempotency.audit")).scalar_one() == 1


def test_a_repeated_request_does_not_say_that_it_has_archived_what_was_restored_since(
    bank: Celery, letter: int, connection: Connection
) -> None:
    archive(bank, letter, Change("ann", "later", "r1"))
    restore(bank, letter, Change("ben", "now", "r2"))
    with pytest.raises(ChangeRefused, match="archived by this request before, and restored since"):
        archive(bank, letter, Change("ann", "later", "r1"))
    restore(bank, letter, Change("ben", "now", "r2"))
    archive(bank, letter, ANN)
    with pytest.raises(ChangeRefused, match="restored by this request before, and archived since"):
        restore(bank, letter, Change("ben", "now", "r2"))
    restore(bank, letter, ANN)
    replay(bank, letter, ANN)
    archive(bank, letter, Change("ann", "later", "r1"))  # closed since: there is nothing to look at again


def test_the_commands_archive_what_filters_match(
    bank: Celery, run: Callable[..., Result], deliveries: Deliveries, connection: Connection
) -> None:
    for account in ("a1", "a2", "a3"):
        deliveries.deliver(b.failing, account, "permanent")
    first, *_ = ids = [row.id for row in op.dead_letters(connection)]
    name = b.failing.name
    assert "would be archived: 3" in run("dead-letters", "archive", "--task", name, "--reason", "x", "--dry-run").output
    run("dead-letters", "archive", first, "--reason", "later", "--as", "ann")
    answer = json.loads(run("dead-letters", "archive", "--task", name, "--reason", "later", "--json").stdout)
    assert answer == {"archived": ids[1:], "refused": []}
    assert json.loads(run("dead-letters", "list", "--json").stdout) == []
    assert len(json.loads(run("dead-letters", "list", "--archived", "--json").stdout)) == 3
    assert "archived" in run("dead-letters", "show", first).output
    assert "dead letters archived" in run("status").output
    answer = json.loads(run("dead-letters", "restore", "--task", name, "--reason", "now", "--json").stdout)
    assert answer["restored"] == ids
    # a filter is needed, as for every change of many
    assert run("dead-letters", "restore", "--reason", "now", status=2)


def test_on_a_schema_without_an_archive_all_else_is_as_before(empty: Engine) -> None:
    schema.migrate(empty, "0020")
    with empty.connect() as connection:
        insert = "INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload) VALUES ('broker', 'bank', 'unsigned', '')"
        connection.execute(text(insert))
        assert len(listed(connection)) == 1
        assert listed(connection, archived=True) == []
        assert [row.open for row in dead_letters.report(connection, "bank")] == [1]
        assert news(None, connection).crowded == {"bank": 1}
