"""Reconciling: what the provider says it has moved, against our ledger; each difference is a dead letter that names both sides.

Each difference has an operation that asks both sides again: mend the difference and replay the letter, and the operation
completes. `python -m tasks.reconciliation --days 7` shows the differences, and exits with 1 if there are any, or with 2 if
the provider has not answered everything.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count
from typing import Any, Literal, get_args
from uuid import uuid4

from rich.console import Console
from rich.progress import track
from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from idempotency import CallRefused, Defer, IdempotentTask, OperationId, PermanentError
from idempotency.application import runtime_of, settings_of
from idempotency.store import letter_operations, operations
from idempotency.store.answers import error_fields
from idempotency.wire import keys

from . import app, disputes
from .gateway import GatewayError, Moved
from .outside import gateway
from .reports import STRIPE
from .settlement import NOT_THERE, ask_about_refund, settle_waiting
from .tenants import DEFAULT

Kind = Literal["charge", "refund"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The error code of the operation that tells a difference.
DIFFERS = "ledger_differs"
# What is younger may still be on its way to our ledger: the longest that an operation takes which is not in doubt.
SETTLED_AFTER = timedelta(hours=1)
# Some refunds fail, and some bank debits succeed, weeks after they were made.
WINDOW = timedelta(days=30)

# The provider is away, asks for patience, or has failed.
NO_ANSWER = (Defer, GatewayError)

# What the ledger has of Stripe's charges and refunds, under the id that they have there.
_OURS = {
    "charge": f"""
        SELECT p.tenant, p.id AS name, p.charge_id AS id, p.charge_id, l.amount, l.currency, false AS is_at_site FROM payments p
        JOIN ledger l ON (l.tenant, l.kind, l.reference) = (p.tenant, 'capture', p.id)
        WHERE p.gateway = '{STRIPE}' AND p.charge_id IS NOT NULL AND {{condition}}""",
    "refund": f"""
        SELECT p.tenant, p.id AS name, p.provider_refund_id AS id, paid.charge_id, l.amount, l.currency, p.is_at_site FROM refunds p
        JOIN ledger l ON (l.tenant, l.kind, l.reference) = (p.tenant, 'refund', p.id)
        JOIN payments paid ON (paid.tenant, paid.id) = (p.tenant, p.payment_id)
        WHERE p.gateway = '{STRIPE}' AND p.status = 'refunded' AND {{condition}}""",
}
_ID = {"charge": "charge_id", "refund": "provider_refund_id"}


def _query(kind: Kind, condition: str) -> TextClause:
    return text(_OURS[kind].format(condition=condition))


# Under its name or under its id: a person may have found that what was made otherwise is ours.
_OF_OBJECT = {
    kind: _query(kind, f"((p.tenant, p.id) = (:tenant, :name) OR p.{_ID[kind]} = :id) ORDER BY p.tenant, p.id")
    for kind in KINDS
}
_OF_TIME = {
    kind: _query(kind, "p.created_at >= :since AND p.created_at < :until").execution_options(yield_per=1000)
    for kind in KINDS
}
# A name that is none of ours is no claim: another application on the same account may have given it.
_KNOWN = {
    "charge": text("SELECT 1 FROM payments WHERE (tenant, id) = (:tenant, :name)"),
    "refund": text("SELECT 1 FROM refunds WHERE (tenant, id) = (:tenant, :name)"),
}
_PENDING_AT_SITE = text(f"""
SELECT tenant, id FROM refunds
WHERE is_at_site AND starts_with(id, '{STRIPE}-') AND status IN ('pending', 'reserved', 'unknown') AND created_at < :until
""")
# What was reported of a charge in our books and is not applied: it may have come while the charge was being noted.
_WAITING = text("""
SELECT DISTINCT e.tenant, e.gateway, e.charge_id FROM payment_events e
JOIN payments p ON (p.tenant, p.gateway, p.charge_id) = (e.tenant, e.gateway, e.charge_id)
WHERE NOT e.is_applied AND e.received_at < :until
""")
# Of Stripe's objects. A person may have typed anything else.
_AN_ID = re.compile(r"[A-Za-z0-9_]{1,255}")
_PAYER = text(f"SELECT tenant FROM payments WHERE gateway = '{STRIPE}' AND charge_id = :charge")


@dataclass(frozen=True, slots=True)
class Difference:
    """One object of which the provider and our ledger say different things; None: that side has nothing."""

    kind: Kind
    tenant: str
    id: str
    name: str | None
    provider: str | None
    ledger: str | None
    # The charge, or the charge of this refund, if our books do not have it.
    foreign_charge: str | None = None

    def __str__(self) -> str:
        said, posted = self.provider or "nothing", self.ledger or "nothing"
        return f"{self.kind} {self.id} of {self.name or 'no payment of ours'}: the provider has {said}, the ledger {posted}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison has found. `unanswered`: why the provider has not answered; what these questions were about is open."""

    differences: list[Difference]
    unanswered: list[str]


def compare(session: Session, since: datetime, until: datetime) -> Compared:
    """Compare what was moved in a time, both ways. No transaction is open while the provider is asked, nor afterwards.

    What it does not answer about one object holds up no other.
    """
    found: list[Difference] = []
    unanswered: list[str] = []
    for kind in KINDS:
        try:
            listed = {moved.id: moved for moved in _moved(kind, since, until)}
        except NO_ANSWER as error:
            unanswered.append(f"list of {kind}s: {error}")
            continue
        ours = session.execute(_OF_TIME[kind], {"since": since, "until": until})
        unlisted = [row.id for row in ours if row.id not in listed]
        session.rollback()
        for id in [*listed, *unlisted]:
            try:
                # what was created here in this time, and there perhaps later
                moved = listed[id] if id in listed else _look_up(kind, id)
                each = _compare(session, kind, id, moved)
                session.rollback()
                if each is not None and not _is_given_back(each):
                    found.append(each)
            except NO_ANSWER as error:
                unanswered.append(f"{kind}: {error}")
    return Compared(found, unanswered)


def _is_given_back(difference: Difference) -> bool:
    """Whether it is about a charge that is not in our books, and all of which was refunded, so that nothing of it is left."""
    return difference.foreign_charge is not None and gateway.is_given_back(difference.foreign_charge)


def _compare(session: Session, kind: Kind, id: str, moved: Moved | None) -> Difference | None:
    """What the provider has under an id, with what we have under the same id, or under the name that it tells."""
    tenant, name = (None, None) if moved is None else (moved.tenant, moved.name)
    if moved is not None and not session.execute(_KNOWN[kind], {"tenant": tenant, "name": name}).first():
        moved = moved._replace(name=None)
    ours = session.execute(_OF_OBJECT[kind], {"tenant": tenant, "name": moved and moved.name, "id": id}).all()
    if moved is not None and moved.name is None and not (moved.is_decided or ours):
        return None  # of a refund at the provider's site, our books wait for its success
    under_id = [row for row in ours if row.id == id]
    theirs = None if moved is None else f"{moved.amount} {moved.currency}"
    posted = [_posted(row, moved, is_one=len(under_id) == 1) for row in under_id]
    if not under_id:  # the payment has another charge
        posted = [f"{row.amount} {row.currency.upper()} as {row.id}" for row in ours]
    if posted == ([] if theirs is None else [theirs]):
        return None
    ledger = " + ".join(posted) or None
    if moved is None:
        tenant, name = (ours[0].tenant, ours[0].name) if ours else (DEFAULT, None)
        return Difference(kind, tenant, id, name, theirs, ledger)
    # It is told where it is in the books, or else where its charge is: the name at the provider may be another tenant's.
    payer = session.execute(_PAYER, {"charge": moved.charge_id}).scalar_one_or_none()
    owner = under_id[0].tenant if under_id else payer
    if moved.name is None:
        name = f"{STRIPE}-{id}" if kind == "refund" else name
    foreign = moved.charge_id if owner is None else None
    return Difference(kind, owner or moved.tenant or DEFAULT, id, name, theirs, ledger, foreign)


def _posted(row: Any, moved: Moved | None, *, is_one: bool) -> str:
    """What is in our ledger, and of what, unless that is what the provider says, too."""
    posted = f"{row.amount} {row.currency.upper()}"
    if moved is not None and row.charge_id != moved.charge_id:
        return f"{posted} of {row.name}, charged as {row.charge_id}"
    is_named_so = moved is None or moved.name is None or (row.tenant, row.name) == (moved.tenant, moved.name)
    is_named_so = is_named_so or row.is_at_site  # under no name of ours, though one may have asked for it since
    return posted if is_one and is_named_so else f"{posted} of {row.name}"


def _moved(kind: Kind, since: datetime, until: datetime) -> Iterator[Moved]:
    return gateway.charges(since, until) if kind == "charge" else gateway.refunds(since, until)


def _look_up(kind: Kind, id: str) -> Moved | None:
    """What the provider has under an id; nothing under what cannot be one, which a person may have typed."""
    if not _AN_ID.fullmatch(id):
        return None
    return gateway.charge(id) if kind == "charge" else gateway.refunded(id)


@app.task(base=IdempotentTask, bind=True, name="payments.check_difference", key="{difference}")
def check_difference(
    self: IdempotentTask,
    difference: str,
    kind: Kind,
    id: str,
    name: str | None = None,
) -> dict[str, Any]:
    """Ask both sides about one object again. Fails, and so leaves a dead letter, for as long as they differ.

    `name`: ignored; letters that earlier code has left still carry it.
    """
    moved = _look_up(kind, id)
    # the tenant in whose books it was, and the one that the provider names, who may have it by now
    tenants = {self.tenant, _known_tenant(self.tenant if moved is None else moved.tenant or DEFAULT)}
    with runtime_of(app).transaction(*tenants) as connection, Session(connection) as session:
        found = _compare(session, kind, id, moved)
    if found is not None and not _is_given_back(found):
        raise PermanentError(str(found), DIFFERS)
    return {"agrees": True}


def reconcile(since: datetime, until: datetime) -> Compared:
    """Compare, and enqueue an operation for each difference that is not told yet."""
    with Session(runtime_of(app).engine) as session:
        compared = compare(session, since, until)
    for each in compared.differences:
        with Session(runtime_of(app).engine) as session, session.begin():
            tenant = _known_tenant(each.tenant)
            key = _key_to_tell(session, check_difference.name, tenant, _name_of(each), told=DIFFERS)
            if key is not None:
                # not its name: that becomes known, and is no other difference
                about = {"kind": each.kind, "id": each.id}
                check_difference.enqueue(session, difference=key, **about, tenant=tenant)
    return compared


def prepare(until: datetime) -> list[str]:
    """Before it is compared: have what was reported before and waits looked at again, pending refunds asked about, and disputes
    handed over. Returns what could not be done."""
    settle_waiting_before(until)
    ask_about_pending(until)
    return disputes.hand_over()


def settle_waiting_before(until: datetime) -> int:
    """Have each report of a charge in our books that was received before, and waits, looked at again. Returns of how many charges."""
    with Session(runtime_of(app).engine) as session:
        waiting = session.execute(_WAITING, {"until": until}).all()
    for row in waiting:
        about = {"gateway": row.gateway, "charge_id": row.charge_id, "tenant": row.tenant}
        with Session(runtime_of(app).engine) as session, session.begin():
            settle_waiting.enqueue(session, **about, idempotency_key=str(uuid4()))
    return len(waiting)


def ask_about_pending(until: datetime) -> int:
    """Have the provider asked about each refund that was made at its site before, and of which no webhook has told the end.

    Returns how many. One that the provider does not know is a dead letter, and is asked about no more while that is open.
    """
    with Session(runtime_of(app).engine) as session:
        pending = session.execute(_PENDING_AT_SITE, {"until": until}).all()
    for row in pending:
        with Session(runtime_of(app).engine) as session, session.begin():
            key = _key_to_tell(session, ask_about_refund.name, row.tenant, _in_key(row.id), told=NOT_THERE)
            if key is not None:
                ask_about_refund.enqueue(session, refund_id=row.id, tenant=row.tenant, idempotency_key=key)
    return len(pending)


def days_before(until: datetime, days: float) -> list[tuple[datetime, datetime]]:
    """That time in parts of a day at most, so that no list is longer than a day's."""
    begins = [until - timedelta(days=days) + timedelta(days=n) for n in range(int(-(-days // 1)))]
    return [(begin, min(begin + timedelta(days=1), until)) for begin in begins]


def _known_tenant(tenant: str) -> str:
    """The tenant whose dead letter it is: the provider's text may not be a valid one."""
    return tenant if _is_key(tenant) else DEFAULT


def _is_key(given: str) -> bool:
    try:
        keys.check_key(given)
    except CallRefused:
        return False
    return True


def _name_of(difference: Difference) -> str:
    """One name for as long as a difference lasts."""
    sides = sha256(json.dumps([difference.provider, difference.ledger]).encode()).hexdigest()[:12]
    return f"{difference.kind}:{_in_key(difference.id)}:{sides}"


def _in_key(id: str) -> str:
    return (id if _is_key(id) else sha256(id.encode()).hexdigest()[:32])[:200]


def _key_to_tell(session: Session, task: str, tenant: str, name: str, *, told: str) -> str | None:
    """An unused key, made of this name. None: an operation is under way that will tell it, or its open letter says `told`.

    A completed operation tells nobody; nor does one whose letter says something else or was discarded.
    """
    connection, service = session.connection(), settings_of(app).service
    for id in letter_operations.with_open_letters(connection, OperationId(tenant, task, name)):
        known = operations.lookup(connection, id, service)
        if known is not None and known.error and error_fields(known.error)["code"] == told:
            return None
    for number in count(1):
        id = OperationId(tenant, task, name if number == 1 else f"{name}:{number}")
        known = operations.lookup(connection, id, service)
        if known is None:
            return id.key
        if known.status not in ("completed", "failed"):
            return None
    raise AssertionError


def main(arguments: list[str] | None = None) -> int:
    """Reconcile, show the differences, and return the exit status."""
    from idempotency.cli.terminal import print_table  # which only this command needs

    parser = argparse.ArgumentParser(prog="python -m tasks.reconciliation", description=__doc__)
    parser.add_argument(
        "--days", type=float, default=WINDOW / timedelta(days=1), help="how far back (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    given = parser.parse_args(arguments)
    if not 0 < given.days <= 3650:
        parser.error(f"--days: must be above 0 and at most 3650, got {given.days:g}")
    until = datetime.now(UTC) - SETTLED_AFTER
    console = Console(stderr=True)
    found: list[Difference] = []
    unanswered = prepare(until)
    for since, end in track(days_before(until, given.days), "days compared", console=console, disable=given.json):
        compared = reconcile(since, end)
        found += compared.differences
        unanswered += compared.unanswered
    if unanswered:
        console.print(
            f"{len(unanswered)} questions have no answer, and what they were about is not compared: {unanswered[0]}"
        )
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=1))  # noqa: T201
        return 1 if found else 2 if unanswered else 0
    if not found:
        Console().print("What was compared agrees." if unanswered else "The provider and the ledger agree.")
        return 2 if unanswered else 0
    columns = ("what", "tenant", "at the provider", "ours", "provider has", "ledger has")
    rows = [(each.kind, each.tenant, each.id, each.name, each.provider, each.ledger) for each in found]
    print_table(*columns, rows=[[cell or "–" for cell in row] for row in rows])
    return 1


if __name__ == "__main__":
    sys.exit(main())
