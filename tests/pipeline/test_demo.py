"""The demo as a user runs it, and the check it ends with: it must see what is missing and what is there twice."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.checking import (
    CAPTURE,
    LOOK_AGAIN,
    MAIL,
    REFUND,
    SUPPORT,
    WEBHOOKS,
    Books,
    Notification,
    Payment,
    Posting,
    Record,
    Refund,
    check,
)
from demo.faults import PROVIDER_FAULTS
from demo.input import InputError, Intake, Line
from demo.order_rules import SCARCE, Rules
from sandbox import ledger
from sandbox.faults import fires
from tests.support.ledgers import write_ledgers

ROOT = Path(__file__).parent.parent.parent
PURCHASES = "purchase_id,customer_id,purchased_on,quantity,amount_cents,currency\n"
REFUNDS = "refund_id,purchase_id,amount_cents,reason\n"
SEED = 3


def demo(*options: str | Path) -> subprocess.Popen[str]:
    """The demo with private servers, whatever the environment says."""
    given = ("DATABASE_URL", "REDIS_URL", "BROKER_URL")
    environment = {name: value for name, value in os.environ.items() if name not in given}
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--seed", str(SEED), *map(str, options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(output: str) -> dict[str, str]:
    """The fields of the last line."""
    last = output.rstrip("\n").rpartition("\n")[2]
    assert last.startswith("RESULT "), output[-3000:]
    return dict(field.split("=") for field in last.split()[1:])


def write(path: Path, header: str, rows: Sequence[Sequence[object]]) -> Path:
    path.write_text(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def declined(purchase_id: str) -> bool:
    return fires(SEED, "declined", purchase_id, PROVIDER_FAULTS["declined"])


@pytest.mark.long
def test_over_http_every_line_is_accounted_for_under_duplicates_and_faults(tmp_path: Path) -> None:
    amounts = {f"p-{n:03d}": 0 if n % 13 == 0 else 100 * n for n in range(1, 41)}
    purchases = [(id, f"c-{n % 7}", "2026-03-02", 1, amount, "EUR") for n, (id, amount) in enumerate(amounts.items())]
    paid = {id: amount for id, amount in amounts.items() if amount and not declined(id)}
    full, partial, raced, *_ = paid
    accepted = [("r-1", full, paid[full]), ("r-2", partial, paid[partial] // 2), ("r-3", partial, 1)]
    race = [(f"r-{n}", raced, paid[raced]) for n in (4, 5)]
    refused = [("r-6", "p-999", 500), ("r-7", "p-013", 1), ("r-8", partial, paid[partial])]
    refunds = [(*refund, "returned") for refund in accepted + race + refused]
    refunds.append(("r-9", "p-002", 0, "nothing"))
    wrong: list[tuple[object, ...]] = [
        ("b-1", "c-1", "2026-03-02", 1, "12.50", "USD"),
        ("b-2", "c-1", "2026-03-02", 1, -1, "USD"),
        ("b-3", "c-1", "2026-03-02", 1, 100_000_000, "USD"),
        ("b-4", "c-1", "2026-03-02", 1, 100, "XXX"),
        ("", "c-1", "2026-03-02", 1, 100, "USD"),
        ("p-007", "c-1", "2026-03-02", 1, 100, "USD"),
        ("b-5", "c-1"),
    ]

    run = demo(
        *("--purchases", write(tmp_path / "p.csv", PURCHASES, [*purchases, *wrong])),
        *("--refunds", write(tmp_path / "r.csv", REFUNDS, refunds)),
        *("--copies", "3", "--via", "http", "--report", tmp_path / "report.json"),
    )
    output, errors = run.communicate(timeout=540)

    assert run.returncode == 0, output + errors
    # The refund of a whole purchase excludes the two parts of it; which of them is first is not promised.
    report = json.loads((tmp_path / "report.json").read_text())
    refused_ids = {entry["id"] for entry in report["refused"] if entry["kind"] == "refund"}
    given_back = {id: amount for id, _, amount in accepted + race + refused if id not in refused_ids}
    assert {"r-6", "r-7"} < refused_ids
    assert "r-1" in given_back
    assert len({"r-4", "r-5"} & refused_ids) == 1
    assert ("r-8" in given_back) != ("r-2" in given_back)

    fields = result(output)
    unreadable = [entry for entry in report["refused"] if entry["stage"] == "input"]
    assert len(unreadable) == 8
    reasons = [f"{entry['file']}:{entry['line']} {entry['reason']}" for entry in unreadable]
    for expected in (
        "p.csv:42 amount_cents: must be an integer in the minor unit, got '12.50'",
        "p.csv:43 amount: Input should be greater than or equal to 0",
        "p.csv:44 amount: Input should be less than or equal to 99999999",
        "p.csv:45 currency: must be one of",
        "p.csv:46 Idempotency-Key: must not be empty or blank",
        "p.csv:47 purchase_id: must be unique, already used in line 8",
        "p.csv:48 line: must have 6 fields, got 2",
        "r.csv:10 amount: Input should be greater than or equal to 1",
    ):
        assert any(reason.startswith(expected) for reason in reasons), (expected, reasons)

    completed = [id for id in amounts if not (amounts[id] and declined(id))]
    assert fields.pop("broker") in ("rabbitmq", "redis")
    assert int(fields.pop("seconds")) > 0
    assert int(fields.pop("duplicates_suppressed")) >= 40 + 8
    assert {name: int(value) for name, value in fields.items()} == {
        "purchases": 47,
        "completed": len(completed),
        "failed": 47 - len(completed),
        "charged_cents": sum(paid.values()),
        "refunds": len(given_back),
        "refunded_cents": sum(given_back.values()),
        "refunds_refused": 9 - len(given_back),
        "emails": len(completed) + len(given_back),
        "lost": 0,
        "doubled": 0,
    }
    assert "that the client abandoned half-way" in output
    assert "SIGKILL" in output
    assert "wiped broker and Redis" in output


@pytest.mark.long
def test_as_orders_every_purchase_ends_as_its_line_says(tmp_path: Path) -> None:
    rules = Rules(SEED)
    rows = [(f"p-{n:03d}", f"c-{n % 7}", "2026-03-02", n % 3 + 1, 100 * (n % 11), "EUR") for n in range(1, 31)]
    purchases = write(tmp_path / "p.csv", PURCHASES, [*rows, ("b-1", "c-1", "2026-03-02", 0, 100, "EUR")])

    run = demo("--purchases", purchases, "--flow", "orders", "--report", tmp_path / "report.json")
    output, errors = run.communicate(timeout=540)

    assert run.returncode == 0, output + errors
    fields = result(output)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(entry["line"], entry["reason"]) for entry in report["refused"]] == [
        (32, "quantity: must be an integer between 1 and 1000000, got '0'")
    ]
    lines = [
        Line(n, "purchase", n, id, id, c, amount, "EUR", "", str(q)) for n, (id, c, _, q, amount, _) in enumerate(rows)
    ]
    # cards are declined by the orders' ids, which the application makes
    certain = [line for line in lines if rules.hesitation(line) is None and rules.article(line) != SCARCE]
    assert len(certain) - 3 <= int(fields["processing"]) < 30
    assert int(fields["processing"]) + int(fields["cancelled"]) == int(fields["orders"]) == 30
    assert (fields["flow"], fields["stock_lost"], fields["lost"], fields["doubled"]) == ("orders", "0", "0", "0")
    assert "SIGKILL" in output
    assert "wiped broker and Redis" in output
    # of what is certainly PROCESSING, exactly what the rules say is returned; of the rest, what became PROCESSING
    branches = Counter(rules.branch(line, "") is not None for line in lines)
    due = sum(rules.branch(line, "") is not None for line in certain)
    assert due - 3 <= int(fields["returns"]) <= branches[True]
    ends = ("refunded", "rejected", "escalated", "aborted", "compensated")
    assert sum(int(fields[end]) for end in ends) == int(fields["returns"])
    assert "each purchase was checked out 3 times at once" in output


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--flow", "orders", "--via", "http"], "no --via http"),
        (["--purchases", "nowhere.csv"], "nowhere.csv: No such file or directory"),
        (["--refunds", "demo/data/purchases.csv"], "column missing: refund_id, reason"),
        (["--copies", "0"], "copies: must be a whole number from 1 to"),
    ],
)
def test_an_unusable_file_or_option_is_one_line_and_nothing_is_started(options: list[str], message: str) -> None:
    run = demo(*options)
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 2
    assert output == ""
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.long
def test_an_interrupted_run_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    os_environ = os.environ | environment
    run = subprocess.Popen(
        [sys.executable, "-m", "demo"],
        cwd=ROOT,
        env=os_environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "accepted" in line:
            break
    pids = [int(record.read_text().split()[0]) for record in tmp_path.glob("services-*/*/pid")]
    assert len(pids) >= 6
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)

    assert run.returncode == 130, errors
    assert list(tmp_path.iterdir()) == []
    assert [pid for pid in pids if _is_alive(pid)] == []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_refund_is_submitted_after_its_own_purchase_whatever_the_seed(tmp_path: Path) -> None:
    rows = [(f"p-{n}", "c", "2026-03-02", 1, 100, "EUR") for n in range(50)]
    purchases = write(tmp_path / "p.csv", PURCHASES, rows)
    refunds = write(tmp_path / "r.csv", REFUNDS, [(f"r-{n}", f"p-{n}", 100, "x") for n in range(50)])
    orders = set()
    for seed in range(20):
        order = [line.id for batch in Intake(purchases, refunds, seed=seed).batches(7) for line in batch]
        assert all(order.index(f"p-{n}") < order.index(f"r-{n}") for n in range(50))
        orders.add(tuple(order))
    assert len(orders) == 20


def test_an_unclosed_quotation_mark_spoils_its_own_line_only(tmp_path: Path) -> None:
    text = PURCHASES + 'p-1,"c,2026-03-02,1,100,EUR\np-2,c,2026-03-02,1,100,EUR\n'
    (tmp_path / "p.csv").write_text(text)
    intake = Intake(tmp_path / "p.csv", write(tmp_path / "r.csv", REFUNDS, []), seed=0)
    assert [refused.line for refused in intake.refused("purchase")] == [2]
    assert [line.id for line in intake.accepted("purchase")] == ["p-2"]


def test_a_file_without_a_purchase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.csv: contains no purchases"):
        Intake(write(tmp_path / "p.csv", PURCHASES, []), write(tmp_path / "r.csv", REFUNDS, []), seed=0)


# ---------------------------------------------------------------- the check itself

CHARGED = ("pi_1", 500, "eur", "pm", "key-1", '{"purchase_id": "p-1"}', 0.0)
GIVEN_BACK = ("re_1", "pi_1", 200, "eur", "key-2", '{"refund_id": "r-1", "purchase_id": "p-1"}', 0.0)
CAPTURED_MAIL = ("<m-1@shop>", "c@customers.example", "payment.captured p-1", 0.0)
REFUNDED_MAIL = ("<m-2@shop>", "c@customers.example", "payment.refunded r-1", 0.0)


def books(
    directory: Path,
    *,
    charges: Sequence[tuple[object, ...]] = (CHARGED,),
    refunds: Sequence[tuple[object, ...]] = (GIVEN_BACK,),
    mails: Sequence[tuple[object, ...]] = (CAPTURED_MAIL, REFUNDED_MAIL),
) -> Books:
    """One purchase and one refund of a part of it, and the sandboxes' own ledgers as they are on disk."""
    write_ledgers(directory, charges, refunds, mails)
    told = {"payment.captured:p-1": "event-1", "payment.refunded:r-1": "event-2"}
    return Books(
        purchases=[Line(1, "purchase", 2, "p-1", "p-1", "c", 500, "EUR", "")],
        refund_requests=[Line(2, "refund", 2, "r-1", "p-1", "", 200, "", "returned")],
        payments={"p-1": Payment("c", 500, "EUR", "captured", "pi_1", 200, None)},
        refunds={"r-1": Refund("p-1", 200, "refunded", "re_1", None)},
        postings=[Posting("capture", "p-1", 500, "EUR"), Posting("refund", "r-1", 200, "EUR")],
        balances={"EUR": 0},
        notifications={about: Notification(event_id, "sent") for about, event_id in told.items()},
        cases={},
        records={
            key: Record("completed", None)
            for key in (
                (CAPTURE, "p-1"),
                (REFUND, "r-1"),
                (LOOK_AGAIN, "event-2"),
                *((task, event_id) for task in (MAIL, WEBHOOKS) for event_id in told.values()),
            )
        },
        provider=ledger.read(directory),
        mails=ledger.read_mail(directory),
    )


def test_the_check_finds_nothing_where_the_ledgers_agree(tmp_path: Path) -> None:
    verdict = check(books(tmp_path))
    assert verdict.discrepancies == []
    assert (verdict.lost, verdict.doubled, verdict.charged_cents, verdict.refunded_cents) == (0, 0, 500, 200)


def test_the_check_sees_a_charge_that_is_missing(tmp_path: Path) -> None:
    verdict = check(books(tmp_path, charges=[]))
    assert verdict.lost == 1
    assert "p-1" in {found.id for found in verdict.discrepancies if found.kind == "lost"}


def test_the_check_sees_a_second_charge(tmp_path: Path) -> None:
    verdict = check(books(tmp_path, charges=[CHARGED, ("pi_2", *CHARGED[1:])]))
    assert (verdict.lost, verdict.doubled) == (0, 1)


def test_the_check_sees_a_charge_without_an_order(tmp_path: Path) -> None:
    verdict = check(books(tmp_path, charges=[CHARGED, ("pi_9", *CHARGED[1:5], '{"purchase_id": "p-9"}', 0.0)]))
    assert "p-9" in {found.id for found in verdict.discrepancies}


def test_the_check_sees_a_charge_of_another_amount(tmp_path: Path) -> None:
    assert check(books(tmp_path, charges=[("pi_1", 501, *CHARGED[2:])])).discrepancies


def test_the_check_sees_a_refund_made_twice_and_one_never_made(tmp_path: Path) -> None:
    twice = check(books(tmp_path / "twice", refunds=[GIVEN_BACK, ("re_2", *GIVEN_BACK[1:])]))
    assert (twice.lost, twice.doubled) == (0, 1)
    never = check(books(tmp_path / "never", refunds=[]))
    assert (never.lost, never.doubled) == (1, 0)


def test_the_check_sees_a_second_mail_and_notes_the_same_mail_again(tmp_path: Path) -> None:
    again = check(books(tmp_path / "again", mails=[CAPTURED_MAIL, REFUNDED_MAIL, REFUNDED_MAIL]))
    assert (again.doubled, again.repeated, again.discrepancies) == (0, 1, [])
    second = check(books(tmp_path / "second", mails=[CAPTURED_MAIL, REFUNDED_MAIL, ("<m-3@shop>", *REFUNDED_MAIL[1:])]))
    assert (second.doubled, second.repeated) == (1, 0)
    missing = check(books(tmp_path / "missing", mails=[CAPTURED_MAIL]))
    assert (missing.lost, missing.doubled) == (1, 0)


@pytest.mark.parametrize("status", ["started", "released", None])
def test_the_check_sees_an_operation_that_has_not_ended(tmp_path: Path, status: str | None) -> None:
    agreeing = books(tmp_path)
    records = {id: record for id, record in agreeing.records.items() if id != (CAPTURE, "p-1")}
    if status is not None:
        records[CAPTURE, "p-1"] = Record(status, None)
    assert check(dataclasses.replace(agreeing, records=records)).lost == 1


def test_the_check_sees_a_payment_row_that_is_gone(tmp_path: Path) -> None:
    assert check(dataclasses.replace(books(tmp_path), payments={})).lost == 1


def test_the_check_sees_a_doubled_posting_and_unbalanced_accounts(tmp_path: Path) -> None:
    agreeing = books(tmp_path)
    twice = check(dataclasses.replace(agreeing, postings=[*agreeing.postings, agreeing.postings[0]]))
    assert twice.doubled == 1
    assert check(dataclasses.replace(agreeing, balances={"EUR": 1})).discrepancies


def test_the_check_sees_an_event_that_was_not_handled(tmp_path: Path) -> None:
    agreeing = books(tmp_path)
    assert check(dataclasses.replace(agreeing, notifications={})).lost == 2
    for task in (MAIL, WEBHOOKS):
        records = {id: record for id, record in agreeing.records.items() if id != (task, "event-1")}
        assert check(dataclasses.replace(agreeing, records=records)).lost == 1
    records = dict(agreeing.records) | {(SUPPORT, "event-3"): Record("completed", None)}
    assert check(dataclasses.replace(agreeing, records=records)).discrepancies


def test_the_check_sees_failed_payments_and_cases_that_do_not_match(tmp_path: Path) -> None:
    agreeing = books(tmp_path, charges=(), refunds=(), mails=())
    failed = dataclasses.replace(
        agreeing,
        refund_requests=[],
        payments={"p-1": Payment("c", 500, "EUR", "failed", None, 0, "card_declined")},
        refunds={},
        postings=[],
        notifications={},
        cases={"p-1": "card_declined"},
        records={(CAPTURE, "p-1"): Record("failed", None), (SUPPORT, "event-1"): Record("completed", None)},
    )
    assert check(failed).discrepancies == []
    assert check(dataclasses.replace(failed, cases={})).lost == 1
    assert check(dataclasses.replace(failed, cases={"p-1": "another_code"})).discrepancies
    assert check(dataclasses.replace(agreeing, cases={"p-1": "card_declined"})).discrepancies
