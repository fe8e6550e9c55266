"""Dead letters in bulk and from the command line; discarded only by two people, as the database itself insists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError, ProgrammingError
from typer.testing import CliRunner, Result

from idempotency.application import runtime_of
from idempotency.cli.root import cli
from idempotency.errors import ChangeRefused, DiscardRefused, IdempotencyError, NotAllowed
from idempotency.operate import discard, people
from idempotency.operate.change import Change
from idempotency.operate.people import Person
from idempotency.store import dead_letters as letters
from idempotency.store import letters as store
from idempotency.store.letters import BrokerLetter
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import at_once, record
from tests.support.operators import act, snapshot

ANN, BEN, EVE = Person("ann", "admin"), Person("ben", "admin"), Person("eve", "operator")
# What a tenant would have: a token that belongs to no operator.
TENANTS_TOKEN = "tenant-token"
SETUP = Change("setup", "set-up")


@pytest.fixture
def failed(bank: Celery) -> Callable[..., None]:
    deliveries = Deliveries(bank)

    def fail(*accounts: str) -> None:
        for account in accounts:
            deliveries.deliver(b.failing, account, "permanent")

    return fail


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A command, as typed, with a person's token in the environment."""
    monkeypatch.setenv("COLUMNS", "160")

    def command(*arguments: object, token: str | None = None, status: int = 0) -> Result:
        monkeypatch.delenv(people.TOKEN_VARIABLE, raising=False)
        if token is not None:
            monkeypatch.setenv(people.TOKEN_VARIABLE, token)
        result = CliRunner().invoke(cli, [*map(str, arguments), "-A", "tests.support.bank"])
        exit_code = 1 if isinstance(result.exception, IdempotencyError) else result.exit_code
        assert exit_code == status, (result.output, result.exception)
        return result

    return command


def audits(connection: Connection) -> list[tuple[str, str, str | None, str]]:
    rows = connection.execute(text("SELECT actor, action, key, reason FROM idempotency.audit ORDER BY id"))
    return [tuple(row) for row in rows]


# ---------------------------------------------------------------- two people


def test_two_people_discard_a_letter_and_its_operation_can_be_purged(
    bank: Celery, failed: Callable[..., None], connection: Connection
) -> None:
    failed("a1")
    (letter,) = op.dead_letters(connection)
    connection.execute(text("UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 s'"))
    act(bank, discard.request, EVE, letter.id, "account closed")
    assert op.dead_letters(connection) == [letter]
    assert maintenance.purge(bank) == 0
    act(bank, discard.approve, ANN, letter.id)
    assert [letter.status for letter in op.dead_letters(connection)] == ["discarded"]
    assert audits(connection) == [
        ("eve", "discard_requested", "a1", "account closed"),
        ("ann", "discard_approved", "a1", "account closed"),
    ]
    connection.execute(text("UPDATE idempotency.records SET kept_until = NULL"))  # an hour later
    assert maintenance.purge(bank) >= 1
    assert record(connection, OperationId("default", b.failing.name, "a1")) is None


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(discard.approve, ANN)], "no one has asked"),
        ([(discard.request, ANN, "x"), (discard.approve, ANN)], "another person, an approver or admin, has to approve"),
        ([(discard.request, EVE, "x"), (discard.approve, EVE)], "needs the role approver"),
        ([(discard.request, EVE, "x"), (discard.request, ANN, "x")], "'eve' has asked already"),
        ([(discard.request, EVE, "  ")], "--reason: 1 to 500 characters, got 0"),
        ([(discard.request, EVE, "x"), (discard.approve, ANN), (discard.approve, BEN)], "already discarded"),
    ],
)
def test_one_person_alone_cannot_discard(
    bank: Celery, failed: Callable[..., None], connection: Connection, steps: list[Any], why: str
) -> None:
    failed("a1")
    (letter,) = op.dead_letters(connection)
    for step, person, *rest in steps[:-1]:
        act(bank, step, person, letter.id, *rest)
    before = snapshot(connection)
    step, person, *rest = steps[-1]
    with pytest.raises((ChangeRefused, DiscardRefused, NotAllowed), match=why):
        act(bank, step, person, letter.id, *rest)
    assert snapshot(connection) == before


def test_who_approves_is_shown_who_has_asked_and_why(
    bank: Celery, failed: Callable[..., None], connection: Connection, run: Callable[..., Result]
) -> None:
    failed("a1")
    (letter,) = op.dead_letters(connection)
    assert "discard_" not in run("dead-letters", "show", letter.id).output
    act(bank, discard.request, EVE, letter.id, "it was paid by hand")
    shown = run("dead-letters", "show", letter.id).output
    assert "discard_requested_by" in shown
    assert "it was paid by hand" in shown
    act(bank, discard.approve, ANN, letter.id)
    assert "discard_" not in run("dead-letters", "show", letter.id).output


def test_a_letter_replayed_meanwhile_is_not_discarded(
    bank: Celery, failed: Callable[..., None], connection: Connection
) -> None:
    failed("a1")
    (letter,) = op.dead_letters(connection)
    act(bank, discard.request, EVE, letter.id, "x")
    act(bank, letters.replay, letter.id)
    with pytest.raises(DiscardRefused, match="already replayed"):
        act(bank, discard.approve, ANN, letter.id)
    assert [letter.status for letter in op.dead_letters(connection)] == ["replayed"]


def test_of_approvals_and_replays_at_once_one_wins(
    bank: Celery, failed: Callable[..., None], connection: Connection
) -> None:
    failed(*map(str, range(5)))
    for letter in op.dead_letters(connection):
        act(bank, discard.request, EVE, letter.id, "x")

        def attempt(number: int, letter: int = letter.id) -> bool:
            try:
                if number % 2:
                    act(bank, discard.approve, (ANN, BEN)[number // 2], letter)
                else:
                    act(bank, letters.replay, letter)
            except IdempotencyError:
                return False
            return True

        assert sum(at_once(4, attempt)) == 1
    statuses = [letter.status for letter in op.dead_letters(connection)]
    assert statuses.count("replayed") == len(op.outbox(connection))
    assert statuses.count("discarded") == len([row for row in audits(connection) if row[1] == "discard_approved"])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE idempotency.discards SET approved_by = requested_by, approved_at = now()",
        "UPDATE idempotency.discards SET approved_by = 'ann'",
        "UPDATE idempotency.discards SET approved_at = now()",
        "UPDATE idempotency.discards SET reason = ' '",
        "UPDATE idempotency.discards SET letter = 0",
        "INSERT INTO idempotency.operators VALUES ('x', 'owner', repeat('a', 64), now())",
        "INSERT INTO idempotency.operators VALUES ('x', 'admin', 'a token', now())",
    ],
)
def test_the_database_itself_refuses_what_is_not_two_people(
    bank: Celery, failed: Callable[..., None], connection: Connection, statement: str
) -> None:
    failed("a1")
    act(bank, discard.request, EVE, op.dead_letters(connection)[0].id, "x")
    with pytest.raises(IntegrityError):
        connection.execute(text(statement))


# ---------------------------------------------------------------- who is it


def test_only_a_valid_token_of_its_role_is_accepted_refusals_are_noted(bank: Celery, connection: Connection) -> None:
    runtime = runtime_of(bank)
    tokens = {role: people.add_operator(connection, SETUP, role, role, days=1) for role in ("operator", "admin")}
    tokens["late"] = people.add_operator(connection, SETUP, "late", "admin", days=1)
    connection.execute(text("UPDATE idempotency.operators SET expires_at = clock_timestamp() WHERE name = 'late'"))
    connection.execute(text("SELECT pg_sleep(0.01)"))
    assert people.authenticate(runtime, tokens["operator"], role="operator", action="discard").name == "operator"
    assert people.authenticate(runtime, tokens["admin"], role="operator", action="discard").role == "admin"
    assert people.authenticate(runtime, tokens["admin"], role="admin", action="approve").role == "admin"
    noted = len(audits(connection))
    for token, why, who in [
        (None, "not set; `idempotency operators add` prints one", "unknown"),
        (TENANTS_TOKEN, "no operator has this token", "unknown"),
        (tokens["late"], "has expired", "late"),
        (tokens["operator"], "needs the role admin", "operator"),
    ]:
        with pytest.raises(NotAllowed, match=why):
            people.authenticate(runtime, token, role="admin", action="approve", letter=7)
        assert audits(connection)[noted:][-1][:2] == (who, "refused")
    assert len(audits(connection)) == noted + 4
    stored = json.dumps([list(map(str, table)) for table in snapshot(connection)])
    assert not any(token in stored for token in [*tokens.values(), TENANTS_TOKEN])


@pytest.mark.parametrize(
    ("name", "days", "why"),
    [("eve", 1, "'eve': exists already; remove it first"), (" ", 1, "name: 1 to 255"), ("ann", 367, "1 to 366 days")],
)
def test_an_operator_that_cannot_be_added_is_a_refused_change(
    bank: Celery, connection: Connection, name: str, days: int, why: str
) -> None:
    people.add_operator(connection, SETUP, "eve", "operator", days=1)
    with pytest.raises(ChangeRefused, match=why):
        people.add_operator(connection, SETUP, name, "operator", days=days)


def test_an_admin_removes_people_and_only_the_tables_owner_adds_them(
    run: Callable[..., Result], connection: Connection
) -> None:
    run("operators", "remove", "ann", status=1)
    ann = json.loads(run("operators", "add", "ann", "--role", "admin", "--json").stdout)["token"]
    for token in (None, ann):
        refused = run("operators", "add", "eve", token=token, status=1)
        assert "only the owner of the tables makes identities, an admin does not" in str(refused.exception)
    eve = json.loads(run("operators", "add", "eve", "--as-owner", "--json").stdout)["token"]
    for same in (
        "eve",
        "Eve",
        "EVE ",
        "\uff45ve",
        "e\u034fve",
        "eve\ufe0f",
        "e\u200bve",
        "eve\u2800",
        "eve\U0001d159",
        "\u3164",
        "e\nve",
    ):
        run("operators", "add", same, "--as-owner", status=1)
    assert [row["name"] for row in json.loads(run("operators", "list", "--json").stdout)] == ["ann", "eve"]
    assert ann not in run("operators", "list").stdout
    run("operators", "remove", "eve", token=eve, status=1)
    run("operators", "remove", "eve", token=ann)
    run("operators", "remove", "eve", token=ann, status=1)
    actors = [actor.partition(", ")[2] for actor, action, *_ in audits(connection) if action == "operator_added"]
    assert actors == ["as the owner of the tables"] * 2


@pytest.mark.long
def test_nearly_the_same_name_is_the_same_person(
    bank: Celery, failed: Callable[..., None], connection: Connection, run: Callable[..., Result]
) -> None:
    """Removed and added again, with a new token: what they have asked for is still theirs."""
    failed("a1")
    (letter,) = op.dead_letters(connection)
    first = json.loads(run("operators", "add", "ann", "--role", "admin", "--json").stdout)["token"]
    run("dead-letters", "discard", letter.id, "--reason", "mine", token=first)
    run("operators", "remove", "ann", token=first)
    for name in ("ann", "Ann", "\uff41nn", "an\u034fn", "ann\ufe0f"):
        again = json.loads(run("operators", "add", name, "--role", "admin", "--as-owner", "--json").stdout)["token"]
        run("dead-letters", "approve", letter.id, token=first, status=1)
        refused = run("dead-letters", "approve", letter.id, token=again, status=1)
        assert "'ann' asked for it, so another person" in str(refused.exception)
        run("operators", "remove", name, token=again)
    ben = json.loads(run("operators", "add", "ben", "--role", "admin", "--as-owner", "--json").stdout)["token"]
    run("dead-letters", "approve", letter.id, token=ben)


def test_a_name_that_was_known_otherwise_does_not_count_as_another_person(
    bank: Celery, failed: Callable[..., None], connection: Connection
) -> None:
    failed("a1")
    (letter,) = op.dead_letters(connection)
    act(bank, discard.request, ANN, letter.id, "mine")
    ann = Person("00u1", "admin", "https://login.example")  # the same person, as the company knows her
    with pytest.raises(
        DiscardRefused, match="was known in another way than people are now, and may be the same person"
    ):
        act(bank, discard.approve, ann, letter.id)
    act(bank, discard.request, ann, letter.id, "asked again")
    with pytest.raises(DiscardRefused, match="'00u1' asked for it"):
        act(bank, discard.approve, ann, letter.id)
    act(bank, discard.approve, Person("00u2", "admin", "https://login.example"), letter.id)
    assert audits(connection)[-1][:2] == ("00u2", "discard_approved")


def test_what_was_asked_for_a_message_is_not_approved_for_the_operation_that_it_has_become(
    bank: Celery, connection: Connection
) -> None:
    """It comes again, to a consumer that knows its task by now and ends the operation."""
    unknown = BrokerLetter(
        message_id="m1", tenant=None, task=None, key=None, generation=None, fingerprint=None, queue="q",
        header_task="tests.payment", service="bank", reason="unknown_task", first_error=None, last_error="no such task",
        attempts=0, headers="{}", payload="", digest="d1",
    )  # fmt: skip
    id = op.new_id("default", "tests.payment")
    op.failed(connection, id)
    ended = replace(
        unknown, tenant=id.tenant, task=id.task, key=id.key, generation=1, fingerprint=op.FINGERPRINT,
        reason="delivery_limit", last_error="delivered too often",
    )  # fmt: skip
    with runtime_of(bank).engine.begin() as own:
        letter = store.store_message(own, unknown)
    act(bank, discard.request, EVE, letter, "no task of this name any more")
    with runtime_of(bank).engine.begin() as own:
        assert store.store_end(own, ended) == letter
    with pytest.raises(
        DiscardRefused, match="'eve' asked for it as 'unknown_task', and it is 'delivery_limit' by now; ask again"
    ):
        act(bank, discard.approve, BEN, letter)
    act(bank, discard.request, EVE, letter, "paid otherwise")
    act(bank, discard.approve, BEN, letter)
    assert audits(connection)[-1] == ("ben", "discard_approved", id.key, "paid otherwise")


@pytest.mark.long
@pytest.mark.parametrize("command", ["approve", "replay"])
def test_an_admin_who_is_removed_while_a_command_runs_changes_nothing_more(
    bank: Celery,
    failed: Callable[..., None],
    connection: Connection,
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    failed("a1", "a2", "a3")
    monkeypatch.setattr(b.failing, "moves_money", True)
    numbers = [letter.id for letter in op.dead_letters(connection)]
    ben = json.loads(run("operators", "add", "ben", "--role", "admin", "--json").stdout)["token"]
    for number in numbers:
        act(bank, discard.request, EVE, number, "account closed")
    real = letters.lock_record
    locked: list[int] = []

    def lock(own: Connection, letter: int) -> None:
        real(own, letter)
        locked.append(letter)
        if len(set(locked)) == 2:  # the first one is done, the second one under way
            connection.execute(text("DELETE FROM idempotency.operators WHERE name = 'ben'"))

    monkeypatch.setattr(letters, "lock_record", lock)
    result = run("dead-letters", command, *numbers, "--yes" if command == "replay" else "--json", token=ben, status=1)
    assert "ben" in result.output
    assert [letter.status == "open" for letter in op.dead_letters(connection)] == [False, True, True]


@pytest.mark.parametrize(
    "how", ["UPDATE idempotency.operators SET expires_at = now()", "DELETE FROM idempotency.operators"]
)
def test_nobody_becomes_the_first_admin_twice(
    run: Callable[..., Result], connection: Connection, superuser: Engine, how: str
) -> None:
    """When the only admin's token has expired, the owner of the tables adds another, and nobody else."""
    ann = json.loads(run("operators", "add", "ann", "--role", "admin", "--json").stdout)["token"]
    connection.execute(text(how))
    for token in (None, ann):
        run("operators", "add", "eve", "--role", "admin", token=token, status=1)
        run("operators", "remove", "ann", token=token, status=1)
    with superuser.connect() as owner:
        login = connection.execute(text("SELECT current_user")).scalar_one()
        owner.execute(text("ALTER TABLE idempotency.operators OWNER TO CURRENT_USER"))
        owner.execute(text(f'GRANT ALL ON idempotency.operators TO "{login}"'))
        run("operators", "add", "eve", "--role", "admin", "--as-owner", status=1)
        with pytest.raises(ProgrammingError, match="only the owner of the tables adds or changes people"):
            people.add_operator(connection, SETUP, "eve", "admin", days=1)
        owner.execute(text(f'ALTER TABLE idempotency.operators OWNER TO "{login}"'))
    run("operators", "add", "ben", "--role", "admin", "--as-owner")
    noted = [(actor.partition(", ")[2], action) for actor, action, *_ in audits(connection)]
    assert [each for each in noted if each[0]] == [("as the owner of the tables", "operator_added")] * 2


# ---------------------------------------------------------------- from the command line


def test_letters_are_counted_by_service_task_and_reason(
    run: Callable[..., Result], failed: Callable[..., None]
) -> None:
    failed("a1", "a2")
    grouped = json.loads(
        run("dead-letters", "list", "--by", "service", "--by", "task", "--by", "reason", "--json").stdout
    )
    (group,) = grouped
    assert (group["service"], group["task"], group["reason"], group["letters"]) == (
        "bank",
        b.failing.name,
        "no_account",
        2,
    )
    assert [letter["key"] for letter in json.loads(run("dead-letters", "list", "--json").stdout)] == ["a2", "a1"]
    assert json.loads(run("dead-letters", "list", "--error", "other", "--json").stdout) == []
    assert "no_account" in run("dead-letters", "list").stdout


@pytest.mark.long
def test_a_dry_run_writes_nothing_and_a_bulk_replay_sends_each_once(
    run: Callable[..., Result], failed: Callable[..., None], connection: Connection
) -> None:
    failed("a1", "a2", "a3")
    before = snapshot(connection)
    ids = [letter.id for letter in op.dead_letters(connection)]
    replay = ("dead-letters", "replay", "--task", b.failing.name)
    assert json.loads(run(*replay, "--dry-run", "--json").stdout) == {"dry_run": True, "replayed": ids, "declined": ids}
    assert "more than 2 dead letters match" in str(run(*replay, "--limit", 2, status=1).exception)
    assert "at most 10000" in str(run(*replay, "--limit", 2, status=1).exception)
    run("dead-letters", "replay", status=2)  # of all that there are: that must be said
    run(*replay, "--limit", 10_001, status=2)
    assert snapshot(connection) == before

    assert json.loads(run(*replay, "--json", "--yes").stdout) == {"replayed": ids, "refused": []}
    assert [row.origin for row in op.outbox(connection)] == ["replay"] * 3
    assert [action for _, action, *_ in audits(connection)] == ["replay"] * 3
    again = run("dead-letters", "replay", *ids, 4711, "--json", status=1)
    refused = json.loads(again.stdout)["refused"]
    assert [each["why"] for each in refused] == [
        *(f"dead letter {id}: already replayed" for id in ids),
        "dead letter 4711: not found",
    ]
    assert len(op.outbox(connection)) == 3


def test_discard_and_approve_from_the_command_line(
    run: Callable[..., Result], failed: Callable[..., None], connection: Connection
) -> None:
    failed("a1", "a2")
    ids = [letter.id for letter in op.dead_letters(connection)]
    ann = json.loads(run("operators", "add", "ann", "--role", "admin", "--json").stdout)["token"]
    eve = json.loads(run("operators", "add", "eve", "--as-owner", "--json").stdout)["token"]
    discard = ("dead-letters", "discard", *ids, "--reason", "closed", "--json")
    run(*discard, status=1)
    run(*discard, token=TENANTS_TOKEN, status=1)
    run("dead-letters", "discard", *ids, token=eve, status=2)  # no reason
    assert json.loads(run(*discard, token=eve).stdout) == {"requested": ids, "refused": []}
    run("dead-letters", "approve", *ids, token=eve, status=1)
    assert json.loads(run("dead-letters", "approve", *ids, "--json", token=ann).stdout)["discarded"] == ids
    assert {letter.status for letter in op.dead_letters(connection)} == {"discarded"}
    (service,) = json.loads(run("dead-letters", "report", "--json").stdout)
    assert (service["service"], service["new"], service["discarded"], service["open"]) == ("bank", 2, 2, 0)
