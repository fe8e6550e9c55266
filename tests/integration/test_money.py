"""What moves money is changed only with a token; what was declined or cancelled is replayed only on purpose."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import DidNotHappen, EffectUnknown, IdempotentTask, OperationId, PermanentError
from idempotency.errors import NotAuthenticated
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import replay as replaying
from idempotency.operate.change import Change, read
from idempotency.operate.people import add_operator
from idempotency.operate.release import release
from idempotency.operate.rename import rename_service
from idempotency.operate.replay import NotConfirmed, replay, to_confirm
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import saga
from tests.sagas.conftest import Stage
from tests.support import bank as b
from tests.support import operations as op
from tests.support.commands import Answer, runner
from tests.support.dead_messages import body_of, die
from tests.support.deliveries import Deliveries
from tests.support.operators import ANN, snapshot
from tests.support.tasks import transactional

Ask = Callable[..., Answer]
NEEDED = "moves money, or its task is not known here, so a change needs an operator's token"
NOBODY = {"nobody": "not set", "late": "the token of 'late' has expired", "gone": "no operator has this token"}


@pytest.fixture
def charge(bank: Celery) -> Iterator[Any]:
    """A task that moves money, and fails as it is told."""

    @bank.task(base=IdempotentTask, bind=True, key="{id}", name="tests.charge", shared=False, moves_money=True)
    def charge(self: IdempotentTask, id: str, how: str = "declined") -> str:
        def ask(*, idempotency_key: str) -> str:
            if how == "unknown":
                raise EffectUnknown("no answer")
            if how == "declined":
                raise PermanentError("not enough money", "card_declined")
            return "charged"

        if how.startswith("refused as "):
            raise PermanentError("the bank does not do it", how.removeprefix("refused as "))
        return str(self.effect("capture", ask))

    yield charge
    bank.tasks.pop(charge.name)


@pytest.fixture
def ask(bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """A command, by a person's name; their token is in the environment."""
    run, tokens = runner(monkeypatch, capsys), {}
    with transactional(engine).begin() as connection:
        for name in ("ann", "late", "gone"):
            tokens[name] = add_operator(connection, Change("setup", "tests"), name, "operator", days=1)
        connection.execute(
            text("UPDATE idempotency.operators SET expires_at = now() - interval '1 s' WHERE name = 'late'")
        )
        connection.execute(text("DELETE FROM idempotency.operators WHERE name = 'gone'"))

    def ask(*arguments: object, who: str | None = None) -> Answer:
        monkeypatch.delenv("IDEMPOTENCY_TOKEN", raising=False)
        if who in tokens:
            monkeypatch.setenv("IDEMPOTENCY_TOKEN", tokens[who])
        return run(*arguments)

    return ask


def failed(connection: Connection, deliveries: Deliveries, task: Any, how: str) -> OperationId:
    deliveries.deliver(task, "k", how)
    return op.operation(task, "k")


# ---------------------------------------------------------------- who

VERBS: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
    "release": (lambda c, d, t: op.started(c, op.operation(t, "k")), ("release", "k", "--reason", "r"), "release"),
    "cancel": (lambda c, d, t: op.early(c, op.operation(t, "k")), ("cancel", "k", "--reason", "r"), "cancel"),
    "resolve": (
        lambda c, d, t: failed(c, d, t, "unknown"),
        ("effects", "resolve", "k", "capture", "--not-happened", "--reason", "r"),
        "resolve",
    ),
    "replay": (lambda c, d, t: failed(c, d, t, "declined"), ("dead-letters", "replay", "{letter}", "--yes"), "replay"),
    "bulk replay": (
        lambda c, d, t: failed(c, d, t, "declined"),
        ("dead-letters", "replay", "--task", "tests.charge", "--yes"),
        "replay",
    ),
    "erase": (lambda c, d, t: failed(c, d, t, "well"), ("erase", "k", "--reason", "r"), "erase"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("verb", VERBS)
def test_what_moves_money_is_changed_only_with_a_valid_token(
    ask: Ask, connection: Connection, deliveries: Deliveries, charge: Any, verb: str
) -> None:
    make, arguments, action = VERBS[verb]
    make(connection, deliveries, charge)
    letter = next((str(each.id) for each in op.dead_letters(connection)), "")
    arguments = tuple(each.format(letter=letter) for each in arguments)
    before = snapshot(connection)[:-1]
    for who, why in NOBODY.items():
        refused = ask(*arguments, "--as", "ann", who=who)
        assert (refused.status, NEEDED in refused.error, f"IDEMPOTENCY_TOKEN: {why}" in refused.error) == (
            1,
            True,
            True,
        )
    assert snapshot(connection)[:-1] == before
    done = ask(*arguments, "--as", "somebody else", who="ann")
    assert done.status == 0, done.error
    noted = connection.execute(text("SELECT actor, action FROM idempotency.audit WHERE task = 'tests.charge'")).all()
    assert [tuple(row) for row in noted] == [("ann", action)]
    refusals = connection.execute(text("SELECT actor FROM idempotency.audit WHERE action = 'refused' ORDER BY id"))
    assert list(refusals.scalars()) == ["unknown", "late", "unknown"]


def test_a_task_that_is_not_known_may_move_money(ask: Ask, connection: Connection) -> None:
    op.early(connection, OperationId("default", "elsewhere.charge", "k"))
    cancelling = ("cancel", "k", "--reason", "r", "--without-task")
    refused = ask(*cancelling)
    assert (refused.status, NEEDED in refused.error) == (1, True)
    assert ask(*cancelling, who="ann").status == 0
    (letter,) = op.dead_letters(connection)
    assert NEEDED in ask("dead-letters", "replay", letter.id, "--yes").error


def test_other_tasks_are_changed_without_a_token(ask: Ask, bank: Celery, connection: Connection) -> None:
    op.started(connection, op.operation(b.deposit, "k"))
    assert ask("release", "k", "--reason", "r", "--as", "ben", who="late").status == 0
    by = connection.execute(text("SELECT actor FROM idempotency.audit WHERE action = 'release'"))
    assert by.scalar_one() == "ben"


def test_the_functions_behind_the_commands_refuse_by_themselves(
    bank: Celery, connection: Connection, charge: Any
) -> None:
    shown = read(connection, op.started(connection, op.operation(charge, "k")).id, op.SERVICE)
    before = snapshot(connection)
    with pytest.raises(NotAuthenticated, match=f"tests.charge k: {NEEDED}"):
        release(bank, shown, Change("ann", "stuck"))
    assert snapshot(connection) == before


# ---------------------------------------------------------------- what was declined or cancelled


DECLINED = r"was declined by the provider as card_declined at .*; a replay asks it again for capture, under a new key"
CANCELLED = r"was cancelled by a person at .*; a replay runs it all the same, under the same key"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("declined", DECLINED),
        ("cancelled", CANCELLED),
        (
            "refused",
            r"was refused for good as no_account at .*; a replay runs it again, and what was refused may happen",
        ),
        ("revoked", r"was revoked by a person"),
        ("attempts", None),
    ],
)
def test_a_replay_says_what_it_does_to_what_was_declined_or_cancelled(
    ask: Ask, bank: Celery, connection: Connection, deliveries: Deliveries, charge: Any, how: str, said: str | None
) -> None:
    if how == "declined":
        failed(connection, deliveries, charge, "declined")
    elif how == "refused":
        deliveries.deliver(b.failing, "k", "permanent")
    else:
        id = op.early(connection, op.operation(b.deposit, "k")).id
        assert ask("cancel", "k", "--reason", "r").status == 0
        if how != "cancelled":
            code = {"revoked": "revoked", "attempts": "attempts_exhausted"}[how]
            connection.execute(text("UPDATE idempotency.records SET error_code = :code"), {"code": code})
        assert op.status(connection, id) == "failed"
    (letter,) = op.dead_letters(connection)
    before = snapshot(connection)
    replaying = ("dead-letters", "replay", letter.id)
    if said is None:
        assert ask(*replaying).status == 0
        return
    with pytest.raises(NotConfirmed, match=f"dead letter {letter.id}: .* k: {said}"):
        replay(bank, letter.id, ANN, confirmed=())
    refused = ask(*replaying, who="ann")
    assert refused.status == 1
    assert refused.error.endswith("\nNothing was replayed. To replay it, add --yes\n")
    assert snapshot(connection) == before
    assert ask(*replaying, "--yes", who="ann").status == 0
    assert [each.status for each in op.dead_letters(connection)] == ["replayed"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "code", ["rejected", "expired", "abandoned", "call_refused", "unfinished", "attempts_exhausted"]
)
def test_what_was_declined_under_a_word_of_ours_is_replayed_only_on_purpose(
    bank: Celery, connection: Connection, deliveries: Deliveries, charge: Any, code: str
) -> None:
    deliveries.deliver(charge, "k", f"refused as {code}")
    (letter,) = op.dead_letters(connection)
    with pytest.raises(NotConfirmed, match=f"k: was refused for good as {code} at"):
        replay(bank, letter.id, ANN, confirmed=())
    replay(bank, letter.id, ANN, confirmed=to_confirm(connection, [letter.id]))


@pytest.mark.parametrize("has_undo", [False, True])
def test_a_saga_whose_call_was_declined_so_is_replayed_only_on_purpose(
    bank: Celery, engine: Engine, connection: Connection, deliveries: Deliveries, charge: Any, has_undo: bool
) -> None:
    stage = Stage(bank, engine, deliveries)

    @saga("paying", key="{id}", app=bank)
    def paying(saga: Any, id: str) -> None:
        if has_undo:
            saga.call(b.deposit, id, undo=b.returning)
        saga.call(charge, id, "refused as rejected")

    stage.enqueue(paying, "k")
    stage.run()
    (letter,) = (each for each in op.dead_letters(connection) if each.task == "paying")
    with pytest.raises(NotConfirmed, match="k: was refused for good as rejected at"):
        replay(bank, letter.id, ANN, confirmed=())
    replay(bank, letter.id, ANN)


def test_what_no_worker_could_run_is_replayed_without_being_asked(
    bank: Celery, connection: Connection, consumer: DeadLetterConsumer
) -> None:
    die(bank, consumer, body_of("k"))
    consumer.run_once()
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, op.status(connection, op.operation(b.deposit, "k"))) == ("rejected", "failed")
    replay(bank, letter.id, ANN, confirmed=())
    assert op.status(connection, op.operation(b.deposit, "k")) == "released"


def test_a_replay_asks_about_what_another_person_has_cancelled_meanwhile(
    bank: Celery, connection: Connection, deliveries: Deliveries, charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = failed(connection, deliveries, charge, "unknown")
    (letter,) = op.dead_letters(connection)
    assert to_confirm(connection, [letter.id]) == []
    check = replaying.check_signature

    def meanwhile(*arguments: Any) -> None:
        resolve_effect(bank, read(connection, id, op.SERVICE), "capture", DidNotHappen(), ANN, end=True)
        check(*arguments)

    monkeypatch.setattr(replaying, "check_signature", meanwhile)
    with pytest.raises(NotConfirmed, match=f"k: {CANCELLED}"):
        replay(bank, letter.id, ANN, confirmed=())
    assert op.status(connection, id) == "failed"


def test_what_a_person_has_confirmed_is_what_they_were_shown(
    bank: Celery, connection: Connection, deliveries: Deliveries, charge: Any
) -> None:
    id = failed(connection, deliveries, charge, "declined")
    (letter,) = op.dead_letters(connection)
    shown = to_confirm(connection, [letter.id])
    connection.execute(text("UPDATE idempotency.records SET error_code = 'cancelled'"))
    with pytest.raises(NotConfirmed, match=f"k: {CANCELLED}"):
        replay(bank, letter.id, ANN, confirmed=shown)
    replay(bank, letter.id, ANN, confirmed=to_confirm(connection, [letter.id]))
    assert op.status(connection, id) == "released"


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "status", "left"), [("n\n", 1, "open"), ("y\n", 0, "replayed")])
def test_a_bulk_replay_counts_what_was_declined_and_asks_once(
    ask: Ask,
    connection: Connection,
    deliveries: Deliveries,
    bank: Celery,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    status: int,
    left: str,
) -> None:
    for key in ("a", "b"):
        deliveries.deliver(b.failing, key, "permanent")
    op.early(connection, op.operation(b.failing, "c"))
    assert ask("cancel", "c", "--reason", "r").error.startswith(
        "done, but"
    )  # its arguments do not fit, so no `on_failed`
    bulk = ("dead-letters", "replay", "--task", "failing")
    ids = [letter.id for letter in op.dead_letters(connection)]
    counted = json.loads(ask(*bulk, "--dry-run", "--json").out)
    assert counted == {"dry_run": True, "replayed": ids, "declined": ids[:2], "cancelled": ids[2:]}
    assert ask(*bulk, "--dry-run").out.endswith("; of these, 1 was cancelled, 2 were refused for good\n")
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    answer = ask(*bulk)
    assert answer.status == status
    assert "of 3 to be replayed, 1 was cancelled, 2 were refused for good:" in answer.error
    assert answer.error.count("Do it? [y/N]") == 1
    assert {letter.status for letter in op.dead_letters(connection)} == {left}


@pytest.mark.parametrize("is_known", [True, False])
def test_an_application_is_not_renamed_without_a_token_if_what_it_has_moves_money(
    ask: Ask, bank: Celery, deliveries: Deliveries, connection: Connection, charge: Any, is_known: bool
) -> None:
    """A name alone gives an application that knows none of its tasks no money of another."""
    deliveries.deliver(charge, "c1", "unknown")
    connection.execute(text("UPDATE idempotency.records SET service = 'shop'"))
    connection.execute(text("UPDATE idempotency.dead_letters SET consumer_service = 'shop'"))
    if not is_known:
        bank.tasks.pop(charge.name)
    try:
        with pytest.raises(NotAuthenticated, match=f"^shop: {NEEDED}$"):
            rename_service(bank, "shop", "bank", Change("ann", "because"))
        assert NEEDED in ask("rename-service", "shop", "bank", "--reason", "r").error
        assert connection.execute(text("SELECT service FROM idempotency.records")).scalars().all() == ["shop"]
        assert ask("rename-service", "shop", "bank", "--reason", "r", who="ann").status == 0
    finally:
        bank.tasks.register(charge)


def test_an_application_that_has_moved_no_money_is_renamed_without_a_token(
    bank: Celery, deliveries: Deliveries, connection: Connection, charge: Any
) -> None:
    deliveries.deliver(b.deposit, "a1")
    connection.execute(text("UPDATE idempotency.records SET service = 'shop'"))
    assert rename_service(bank, "shop", "bank", Change("ann", "because"))["records"] == 1
