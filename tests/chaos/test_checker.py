"""The checker, on ledgers made by hand: silent about a clean run, and each invariant broken once is reported."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ProgrammingError

from tests.chaos import ledgers
from tests.chaos.checker import CHECKS, Accepted, Id
from tests.chaos.hand import (
    CLAIM,
    COMPLETE,
    COMPLETE_BRIEFLY,
    DEPOSIT,
    EFFECT,
    ENQUEUE,
    FAIL,
    FAIL_BRIEFLY,
    FAILURE,
    LETTER,
    NEXT,
    OPERATION,
    OVER,
    PUBLISH,
    PURGE,
    PURGE_ROWS,
    RECOVER,
    RELEASE,
    REOPEN,
    REPLAY,
    REPLAYED,
    SETTLE,
    Hand,
    deposited,
    enqueued_and_done,
    findings,
    reported,
)

# ---------------------------------------------------------------- nothing to report


def test_a_clean_run_has_no_violation_and_every_operation_is_somewhere(engine: Engine, hand: Hand) -> None:
    enqueued_and_done(hand)
    enqueued_and_done(hand, tenant="other")  # the same key, another tenant
    hand.sql(CLAIM, key="b")  # sent, not enqueued; its first holder dies
    hand.sql("UPDATE idempotency.records SET duplicates = 1 WHERE :row", key="b")
    hand.sql(OVER, key="b")
    hand.sql(RELEASE, RECOVER, key="b")
    hand.sql(PUBLISH, key="b")
    hand.sql(CLAIM, key="b")
    hand.sql(EFFECT, key="b", gateway="g1")
    hand.sql(OVER, key="b")
    hand.sql(CLAIM, key="b")  # a takeover
    hand.sql(DEPOSIT, COMPLETE, key="b")
    hand.sql(CLAIM, key="f")
    hand.sql(FAILURE, LETTER, FAIL, key="f")
    hand.sql(CLAIM, key="r")  # fails, is replayed, and then completes
    hand.sql(FAILURE, LETTER, FAIL, key="r")
    hand.sql(REPLAYED, REOPEN, REPLAY, key="r")
    hand.sql(PUBLISH, key="r")
    hand.sql(CLAIM, key="r")
    hand.sql(DEPOSIT, COMPLETE, key="r")
    hand.sql(CLAIM, key="p")  # ends, and is purged
    hand.sql(DEPOSIT, COMPLETE_BRIEFLY, key="p")
    hand.sql(PURGE_ROWS, PURGE, key="p")
    for statement in (ENQUEUE, ENQUEUE, PUBLISH):  # asked for twice; the second message dies while the first one waits
        hand.sql(statement, key="s")
    hand.sql(f"{SETTLE} AND id = (SELECT max(id) FROM idempotency.outbox)", key="s")
    hand.sql(CLAIM, key="s")
    hand.sql(DEPOSIT, COMPLETE, key="s")
    accepted = [
        deposited(),
        Accepted("other", OPERATION, "a", rows=(("a", 1),)),
        deposited("b", acts=1),
        deposited("f", rows=None, result=None, failure="no_account"),
        deposited("r", may_fail=frozenset({"no_account"})),
        deposited("p"),
        deposited("s"),
    ]
    found = findings(engine, *accepted, acts={"g1": 1}, fenced=1)
    assert [str(violation) for violation in found.violations] == []
    counts = found.counts
    assert (counts.accepted, counts.completed, counts.failed, counts.dead, counts.queued) == (7, 6, 1, 0, 0)
    assert (counts.lost, counts.doubled, counts.duplicated, counts.takeovers, counts.fenced) == (0, 0, 1, 2, 1)


def test_a_rolled_back_transaction_leaves_no_line(engine: Engine, hand: Hand) -> None:
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        connection.execute(text("INSERT INTO entries (account, amount) VALUES ('a', 1)"))
        connection.rollback()
    assert ledgers.read(engine) == []


def test_the_ledger_refuses_changes_and_what_it_watches_refuses_truncation(superuser: Engine, hand: Hand) -> None:
    enqueued_and_done(hand)
    for statement in (
        "UPDATE ledger.changes SET book = ''",
        "DELETE FROM ledger.changes",
        "TRUNCATE ledger.changes",
        "SET session_replication_role = replica; DELETE FROM ledger.changes",
        "TRUNCATE entries",
    ):
        with superuser.connect() as connection, pytest.raises(ProgrammingError, match="refused"):
            connection.execute(text(statement))


def test_writes_that_bypass_ordinary_triggers_are_still_in_the_ledger(
    engine: Engine, superuser: Engine, hand: Hand
) -> None:
    with superuser.connect() as connection:
        connection.execute(text("SET session_replication_role = replica; INSERT INTO entries VALUES (1, 'a', 1)"))
        connection.execute(text("SET session_replication_role = origin"))
    assert [(line.book, line.verb, line.row["account"]) for line in ledgers.read(engine)] == [
        ("entries", "INSERT", "a")
    ]


# ---------------------------------------------------------------- each invariant, broken once

TWICE = (DEPOSIT, DEPOSIT, COMPLETE)
BROKEN: dict[str, tuple[str, list[tuple[str, ...]], list[Accepted], dict[str, Any]]] = {
    "two rows of one completion": ("I1", [(CLAIM,), TWICE], [deposited()], {}),
    "two results in one generation": ("I1", [(CLAIM,), (DEPOSIT, COMPLETE), (CLAIM,), (COMPLETE,)], [deposited()], {}),
    "a generation without a replay": (
        "I1",
        [(CLAIM,), (RELEASE, NEXT), ("UPDATE idempotency.records SET generation = 2 WHERE :row",)],
        [deposited()],
        {},
    ),
    "an operation that never ends": ("I2", [(CLAIM,), (RELEASE, NEXT), (PUBLISH,)], [deposited()], {}),
    "a row settled before its end": ("I2", [(ENQUEUE,), (PUBLISH,), (SETTLE,), (CLAIM,), (DEPOSIT, COMPLETE)], [], {}),
    "both rows settled before their end": (
        "I2",
        [(ENQUEUE,), (ENQUEUE,), (PUBLISH,), (SETTLE,), (CLAIM,), (DEPOSIT, COMPLETE)],
        [],
        {},
    ),
    "a row committed before its record": ("I3", [(CLAIM,), (DEPOSIT,), (COMPLETE,)], [deposited()], {}),
    "a completion without its row": ("I3", [(CLAIM,), (COMPLETE,)], [deposited()], {}),
    "a body's row in a failing transaction": (
        "I3",
        [(CLAIM,), (DEPOSIT, FAILURE, LETTER, FAIL)],
        [deposited(failure="no_account")],
        {},
    ),
    "a failure without its row": (
        "I3",
        [(CLAIM,), (LETTER, FAIL)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "a row changed afterwards": (
        "I3",
        [(CLAIM,), (DEPOSIT, COMPLETE), ("UPDATE entries SET amount = 2",)],
        [deposited()],
        {},
    ),
    "a fence that goes back": (
        "I4",
        [
            (CLAIM,),
            (OVER,),
            (CLAIM,),
            ("UPDATE idempotency.records SET fence = fence - 1 WHERE :row",),
            (DEPOSIT, COMPLETE),
        ],
        [deposited()],
        {},
    ),
    "a fence handed out twice": (
        "I4",
        [(CLAIM,), (OVER,), ("SELECT setval('idempotency.fence', 1, false)",), (CLAIM,), (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "a finish without a holder": (
        "I4",
        [(CLAIM,), (RELEASE, NEXT), (PUBLISH,), (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "an ended record claimed again": ("I5", [(CLAIM,), (DEPOSIT, COMPLETE), (CLAIM,)], [deposited()], {}),
    "an ended record finished again": (
        "I5",
        [(CLAIM,), (DEPOSIT, COMPLETE), (COMPLETE.replace('"ok": 1', '"ok": 2'),)],
        [deposited(result=None)],
        {},
    ),
    "another result than expected": ("I6", [(CLAIM,), (DEPOSIT, COMPLETE)], [deposited(result='{"ok":1}')], {}),
    "another fingerprint under the key": (
        "I6",
        [(CLAIM,), ("UPDATE idempotency.records SET fingerprint = 'g' WHERE :row",), (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "an unexpected failure": ("I6", [(CLAIM,), (FAILURE, LETTER, FAIL)], [deposited()], {}),
    "a release without a delivery": ("I7", [(CLAIM,), (RELEASE,)], [deposited()], {"drained": False}),
    "a claim without its message": (
        "I7",
        [(CLAIM.replace("'{\"m\": 1}'", "''"),)],
        [deposited()],
        {"drained": False},
    ),
    "a duplicate counted after the end": (
        "I7",
        [(CLAIM,), (DEPOSIT, COMPLETE), ("UPDATE idempotency.records SET duplicates = 1 WHERE :row",)],
        [deposited()],
        {},
    ),
    "a row never published": ("I8", [(ENQUEUE,)], [], {"queues": {"q": 9}}),
    "a row marked that the broker never held": ("I8", [(ENQUEUE,), (PUBLISH,)], [], {"drained": False}),
    "a row given up without a dead letter": (
        "I8",
        [(ENQUEUE,), ("UPDATE idempotency.outbox SET status = 'failed', last_error = 'e'",)],
        [],
        {"drained": False},
    ),
    "a record that was never accepted": ("I9", [(CLAIM,), (DEPOSIT, COMPLETE)], [], {}),
    "a record of a rolled-back enqueue": (
        "I9",
        [(CLAIM,), (DEPOSIT, COMPLETE)],
        [deposited()],
        {"rolled_back": [Id("shop", OPERATION, "a")]},
    ),
    "an event applied twice": (
        "I11",
        [(CLAIM,), (DEPOSIT, COMPLETE), (CLAIM,), (COMPLETE,)],
        [deposited(is_event=True)],
        {},
    ),
    "two acts under one key": ("I12", [], [], {"acts": {"g1": 2}}),
    "an act that was never begun": ("I12", [], [], {"acts": {"g1": 1}}),
    "a failure without a dead letter": (
        "I13",
        [(CLAIM,), (FAILURE, FAIL)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "two dead letters of one failure": (
        "I13",
        [(CLAIM,), (FAILURE, LETTER, LETTER.replace("'no_account'", "'other'"), FAIL)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "a dead letter without headers": (
        "I13",
        [(CLAIM,), (FAILURE, LETTER.replace("attempts, '{}'", "attempts, NULL"), FAIL)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "too many attempts": (
        "I13",
        [(CLAIM,), *[(OVER,), (CLAIM,)] * 6, (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "a replay without a delivery": (
        "I14",
        [(CLAIM,), (FAILURE, LETTER, FAIL), (REPLAYED, REOPEN), (CLAIM,), (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "a dead letter replayed twice": (
        "I14",
        [
            (CLAIM,),
            (FAILURE, LETTER, FAIL),
            (REPLAYED, REOPEN, REPLAY),
            (PUBLISH,),
            (CLAIM,),
            (DEPOSIT, COMPLETE),
            ("UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL",),
            (REPLAYED,),
        ],
        [deposited()],
        {},
    ),
    "an operation that is nowhere": ("I15", [], [deposited()], {}),
    "a record that vanished": ("I15", [(CLAIM,), (PURGE,)], [deposited()], {}),
    "a living holder taken over": ("I20", [(CLAIM,), (CLAIM,), (DEPOSIT, COMPLETE)], [deposited()], {}),
    "a claim before it is due": (
        "I20",
        [
            (CLAIM,),
            (RELEASE.replace("clock_timestamp()", "clock_timestamp() + interval '1 h'"), NEXT),
            (PUBLISH,),
            (CLAIM,),
            (DEPOSIT, COMPLETE),
        ],
        [deposited()],
        {},
    ),
    "an orphan that is not recovered": ("I20", [(CLAIM,), (OVER,)], [deposited()], {}),
    "a purge before its time": ("I21", [(CLAIM,), (DEPOSIT, COMPLETE), (PURGE,)], [deposited()], {}),
    "a purge of what has not ended": ("I21", [(CLAIM,), (PURGE,)], [deposited()], {}),
    "a purge of an unsent row": (
        "I21",
        [(ENQUEUE,), (CLAIM,), (DEPOSIT, COMPLETE_BRIEFLY), (PURGE_ROWS, PURGE)],
        [],
        {},
    ),
    "a purge under an open dead letter": (
        "I21",
        [(CLAIM,), (FAILURE, LETTER, FAIL_BRIEFLY), (PURGE,)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "a release with two deliveries": (
        "I22",
        [(CLAIM,), (OVER,), (RELEASE, RECOVER, RECOVER), (PUBLISH,), (CLAIM,), (DEPOSIT, COMPLETE)],
        [deposited()],
        {},
    ),
    "a settled row sent again": (
        "I22",
        [
            (ENQUEUE,),
            (PUBLISH,),
            (CLAIM,),
            (DEPOSIT, COMPLETE),
            (SETTLE,),
            ("UPDATE idempotency.outbox SET status = 'pending'",),
            (PUBLISH,),
        ],
        [],
        {},
    ),
    "a record that begins in its second generation": (
        "I1",
        [
            (
                CLAIM.replace("key, status", "key, generation, status").replace(
                    "claim.key, 'started'", "claim.key, 2, 'started'"
                ),
            )
        ],
        [deposited()],
        {"drained": False},
    ),
    "a completion where a failure was declared": (
        "I6",
        [(CLAIM,), (DEPOSIT, COMPLETE)],
        [deposited(failure="no_account")],
        {},
    ),
    "a row that was never pending": (
        "I8",
        [(ENQUEUE.replace("ordering_key)", "status, published_at)").replace("'order'", "'published', now()"),)],
        [],
        {"drained": False, "queues": {"q": 1}},
    ),
    "an outbox row of a rolled-back enqueue": (
        "I9",
        [(ENQUEUE,)],
        [],
        {"drained": False, "rolled_back": [Id("shop", OPERATION, "a")]},
    ),
    "a completion without its act outside": ("I12", [(CLAIM,), (DEPOSIT, COMPLETE)], [deposited(acts=1)], {}),
    "a replay without its dead letter": (
        "I14",
        [(CLAIM,), (FAILURE, LETTER, FAIL), (REOPEN, REPLAY)],
        [deposited()],
        {"drained": False},
    ),
    "a replay in the same generation": (
        "I14",
        [(CLAIM,), (FAILURE, LETTER, FAIL), (REPLAYED, REOPEN.replace("generation + 1", "generation"), REPLAY)],
        [deposited()],
        {"drained": False},
    ),
    "an open dead letter deleted": (
        "I21",
        [(CLAIM,), (FAILURE, LETTER, FAIL), ("DELETE FROM idempotency.dead_letters",)],
        [deposited(rows=None, failure="no_account")],
        {},
    ),
    "a row that failed and is sent again": (
        "I22",
        [
            (ENQUEUE,),
            ("UPDATE idempotency.outbox SET status = 'failed', last_error = 'e'",),
            ("UPDATE idempotency.outbox SET status = 'pending'",),
        ],
        [],
        {"drained": False},
    ),
    "a row of no tenant": ("I23", [(CLAIM,), (DEPOSIT, COMPLETE)], [deposited()], {"tenants": frozenset({"other"})}),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_is_reported(engine: Engine, hand: Hand, name: Any) -> None:
    invariant, transactions, accepted, evidence = BROKEN[name]
    for statements in transactions:
        hand.sql(*statements)
    assert invariant in reported(engine, *accepted, **evidence)


def test_a_write_of_an_older_transaction_than_the_last_claim_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as stale:
        stale.execute(text("INSERT INTO entries (account, amount) VALUES ('a', 1)"))
        hand.sql(OVER)
        hand.sql(CLAIM)
        where = "tenant = 'shop' AND key = 'a'"
        stale.execute(text(COMPLETE.replace(":row", where)))
        stale.commit()
    assert reported(engine, deposited()) == {"I4"}


def test_a_write_by_another_process_than_the_holder_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql("SET application_name = 'pid 7'")
    hand.sql(CLAIM)  # held by process 7
    hand.sql("SET application_name = 'pid 8'")
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == {"I4"}


def test_a_write_by_a_holder_that_recovery_took_for_dead_is_reported(
    engine: Engine, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    from tests.chaos.checks import upkeep

    monkeypatch.setattr(upkeep, "LATE", timedelta(0))
    hand.sql(CLAIM)
    hand.sql(RELEASE, RECOVER)  # its lease was not over
    hand.sql(PUBLISH)
    hand.sql(CLAIM)
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited()) == set()
    hand.sql("SET application_name = 'pid 7'")
    hand.sql(CLAIM, key="b")
    hand.sql(DEPOSIT, COMPLETE, key="b")
    assert reported(engine, deposited(), deposited("b")) == {"I20"}


def test_rows_of_a_key_published_out_of_order_are_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(ENQUEUE, key="a")
    hand.sql(ENQUEUE, key="b")
    hand.sql(PUBLISH, key="b")
    hand.sql(PUBLISH, key="a")
    assert reported(engine, drained=False, queues={"q": 2}) == {"I10"}


def test_a_gateway_key_that_two_operations_share_is_reported(engine: Engine, hand: Hand) -> None:
    for key in ("a", "b"):
        hand.sql(CLAIM, key=key)
        hand.sql(EFFECT, key=key, gateway="g1")
        hand.sql(DEPOSIT, COMPLETE, key=key)
    assert reported(engine, deposited(), deposited("b"), acts={"g1": 1}) == {"I12"}


def test_an_effect_that_acted_under_two_keys_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql(EFFECT.replace("'done'", "'not_happened'"), gateway="g1")
    hand.sql(EFFECT, gateway="g2")
    hand.sql(DEPOSIT, COMPLETE)
    assert reported(engine, deposited(), acts={"g1": 1, "g2": 1}) == {"I12", "I27"}
    assert reported(engine, deposited(), acts={"g1": 0, "g2": 1}) == set()  # the first was proven not to have happened


def test_a_row_of_another_tenant_is_reported(engine: Engine, hand: Hand) -> None:
    hand.sql(CLAIM)
    hand.sql("INSERT INTO entries (account, amount) VALUES ('theirs', 1)", COMPLETE)
    theirs = Accepted("other", OPERATION, "b", rows=(("theirs", 1),))
    assert "I23" in reported(engine, deposited(), theirs, drained=False)


def test_the_same_key_of_two_tenants_ended_in_one_transaction_is_reported(engine: Engine, hand: Hand) -> None:
    for tenant in ("shop", "other"):
        hand.sql(CLAIM, tenant=tenant)
    hand.sql(DEPOSIT, COMPLETE.replace(":row", "key = 'a'"))
    assert "I23" in reported(engine, deposited(), Accepted("other", OPERATION, "a"))


def test_what_is_under_way_is_no_violation_until_the_run_has_drained(engine: Engine, hand: Hand) -> None:
    hand.sql(ENQUEUE)
    hand.sql(CLAIM, key="b")
    assert reported(engine, deposited("b"), drained=False) == set()
    assert reported(engine, deposited("b")) == {"I2", "I8"}


def test_a_message_that_is_left_excuses_nothing_once_the_run_has_drained(engine: Engine, hand: Hand) -> None:
    """Before, what was only sent may be that message."""
    assert reported(engine, deposited(), queues={"q": 1}, drained=False) == set()
    assert reported(engine, deposited(), queues={"q-dead": 1}) == {"I15"}


def test_every_check_is_broken_by_some_test() -> None:
    documented = {(check.__doc__ or "").split(":")[0] for check in CHECKS}
    in_books, forged = {"I27", "I29", "I31"}, {"I32", "I33"}  # test_checker_books.py, test_checker_forged.py
    elsewhere = {"I10", "I12", "I23"} | in_books | forged
    assert documented == {invariant for invariant, *_ in BROKEN.values()} | elsewhere


def test_a_violation_has_the_history_of_its_operation(engine: Engine, hand: Hand) -> None:
    hand.sql(ENQUEUE)
    hand.sql(CLAIM)
    hand.sql(DEPOSIT, DEPOSIT, COMPLETE)
    found = findings(engine, deposited(), drained=False)
    violation = next(each for each in found.violations if each.invariant == "I1")
    lines = found.history(violation)
    assert len(lines) == 4  # the row takes its place as it is committed
    assert "status=started→completed" in lines[-1]
