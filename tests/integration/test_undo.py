"""Undos: when they run, in what order, and what a replay repeats."""

from __future__ import annotations

import sys
from typing import Any

from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency import PermanentError
from idempotency.operate.replay import replay
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code
from tests.support.operators import ANN, replay_and_deliver
from tests.support.tasks import Provider, lost, make_task, on_failed, told, told_codes, unwrite, write

# ---------------------------------------------------------------- undo


def test_undos_run_in_reverse_order_in_the_failing_transaction(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    refuse = [True]

    def body(self: Any) -> str:
        for name in ("zeta", "beta", "alpha"):
            self.step(name, write, name, undo=unwrite)
        self.step("kept", write, "kept")
        if refuse:
            raise PermanentError("no", "refused")
        return "done"

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    order = connection.execute(text("SELECT account FROM entries WHERE account LIKE 'undone%' ORDER BY id")).scalars()
    assert list(order) == ["undone alpha", "undone beta", "undone zeta"]
    assert (entries("alpha"), entries("kept")) == (0, 1)
    assert set(record("k").effects) == {"kept"}
    assert set(told[0][1].steps) == {"zeta", "beta", "alpha", "kept"}
    # what the end has undone, a replay does again; what it has not, it skips
    refuse.clear()
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == "done"
    assert [entries(name) for name in ("zeta", "beta", "alpha", "kept")] == [1, 1, 1, 1]


def unwrite_broken(session: Session, account: str) -> None:
    unwrite(session, account)
    raise ValueError("a bug")


def test_a_broken_undo_undoes_nothing_and_leaves_the_end_to_a_person(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("one", write, "one", undo=unwrite_broken)
        self.step("two", write, "two", undo=unwrite)
        raise PermanentError("no", "refused")

    deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k")
    assert code(record("k")) == ("unfinished", "refused")
    assert (entries("one"), entries("two"), entries("undone two")) == (1, 1, 0)
    assert (set(record("k").effects), told_codes()) == ({"one", "two"}, ["unfinished"])


def unwrite_and_exit(session: Session, account: str) -> None:
    unwrite(session, account)
    sys.exit("a library's way to report an error")


def test_an_undo_that_exits_ends_no_process_and_leaves_the_end_to_a_person(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """In the main thread, where a signal to stop would raise the same."""

    def body(self: Any) -> None:
        self.step("one", write, "one", undo=unwrite_and_exit)
        raise PermanentError("no", "refused")

    deliveries.deliver(make_task(bank, body), key="k")
    assert code(record("k")) == ("unfinished", "refused")
    assert (entries("one"), entries("undone one"), set(record("k").effects)) == (1, 0, {"one"})
    (letter,) = op.dead_letters(connection)
    assert "SystemExit: a library's way to report an error" in letter.last_error


def test_no_undo_runs_while_an_effect_is_unknown(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        try:
            self.effect("call", Provider(lost()))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    deliveries.deliver(make_task(bank, body), key="k")
    assert (code(record("k")), entries("reserved")) == (("effect_unknown", "gave_up"), 1)


def test_an_undo_that_no_other_process_could_find_is_refused(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    task = make_task(bank, lambda self: self.step("reserve", write, "reserved", undo=lambda session, result: None))
    deliveries.deliver(task, key="k")
    assert "undo: must be a function that can be imported by its name" in record("k").error
    assert entries("reserved") == 0


# ---------------------------------------------------------------- a replay with other arguments


def test_a_replay_repeats_an_undone_step_that_returns_something_new(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """The undone reservation had another id than the replay's, which is an argument of the refused call."""
    refusals = [PermanentError("the card was declined", "card_declined")]
    called: list[tuple[int, str]] = []

    def reserve(session: Session) -> dict[str, Any]:
        return {"reservation": session.execute(text("SELECT nextval('entries_id_seq')")).scalar_one()}

    def charge(reserved: dict[str, Any], *, idempotency_key: str) -> str:
        called.append((reserved["reservation"], idempotency_key))
        if refusals:
            raise refusals.pop()
        return "ch_1"

    def body(self: Any) -> Any:
        return self.effect("call", charge, self.step("reserve", reserve, undo=unreserve))

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    assert (code(record("k"))[0], set(record("k").effects)) == ("card_declined", {"call"})  # undone, plainly
    assert replay_and_deliver(bank, connection, deliveries, task).value == "ch_1"
    (before, first), (after, second) = called
    assert before != after
    assert first != second


def unreserve(session: Session, reserved: dict[str, Any]) -> None:
    pass


def test_a_refused_parameter_can_be_corrected_and_replayed(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    row = {"currency": "XXX"}
    called: list[tuple[str, str]] = []

    def charge(*, currency: str, idempotency_key: str) -> str:
        called.append((currency, idempotency_key))
        if currency == "XXX":
            raise PermanentError("no such currency", "invalid_currency")
        return "ch_1"

    task = make_task(bank, lambda self: self.effect("call", charge, **row), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    row["currency"] = "EUR"
    assert replay_and_deliver(bank, connection, deliveries, task).value == "ch_1"
    assert [currency for currency, _ in called] == ["XXX", "EUR"]
    assert called[0][1] != called[1][1]
