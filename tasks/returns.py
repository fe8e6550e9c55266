"""Returns: a saga takes one order back, from the buyer's request to the last row. docs/returns.md has its branches.

What has happened outside is not undone: a parcel that was collected, goods that are here, money that was paid out. So a
return whose parcel is on its way can only end, or be left to a person (ESCALATED). Before that it can be cancelled.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

import celeryconfig
from idempotency import Defer, Handle, IdempotentTask, Operation, OperationId, PermanentError, publish, subscribe
from idempotency.errors import CallFailed, EffectUnknown, Unfinished
from idempotency.sagas import SagaTask, saga

from . import app
from .models import Order, Payment, Return
from .once import check_not_carried_out, insert_once, wait_at_most
from .refunds import PENDING_PAUSE, has_refund, is_owed, refund_payment, request_rest, withdraw
from .shipping import RESHIP, RETURN, create_label, is_collected, is_void, note_void, void_label
from .tenants import DEFAULT, named, owned
from .validation import NotReturnable, check_flag, check_id, check_text, check_verdict
from .warehouse import is_taken_back, quarantine, restock, verdict_of

REQUESTED, LABELLED, IN_TRANSIT, INSPECTED = "REQUESTED", "LABELLED", "IN_TRANSIT", "INSPECTED"
REFUNDED, REJECTED, ESCALATED, ABORTED, CANCELLED = "REFUNDED", "REJECTED", "ESCALATED", "ABORTED", "CANCELLED"
OPEN = (REQUESTED, LABELLED, IN_TRANSIT, INSPECTED)
# after which the order can be returned again
CAME_TO_NOTHING = (REJECTED, ABORTED, CANCELLED)
# Why a return is left to a person, if its saga has come to its end. Any other is the code of the error that ended it.
NO_PICKUP, NO_INSPECTION, REFUND_FAILED = "no_pickup", "no_inspection", "refund_failed"
GOODS_NOT_BOOKED, RESHIP_REFUSED, LABEL_NOT_VOID = "goods_not_booked", "reship_refused", "label_not_void"
PROBLEMS = (NO_PICKUP, NO_INSPECTION, REFUND_FAILED, GOODS_NOT_BOOKED, RESHIP_REFUSED, LABEL_NOT_VOID)
# The code of a saga that a person has cancelled; any other code is a failure of ours.
BY_A_PERSON = "cancelled"
# What was done before, and is not undone.
ALREADY_REFUNDED, ALREADY_BOOKED = "already_refunded", "already_booked"
# What became of the call is unknown.
IN_DOUBT = (EffectUnknown.default_code, Unfinished.default_code)
# Seconds, for the commit of another caller: those who wait hold a thread and a connection of a server that all share.
LONGEST_WAIT = 0.5
PICKED_UP, INSPECTION_DONE = "carrier.pickup_confirmed", "warehouse.inspected"


def submit_return(
    session: Session, *, return_id: str, order_id: str, reason: str, reship: bool = False, tenant: str = DEFAULT
) -> Handle:
    """Accept the return of an order in the caller's transaction: its row, and the message of its saga.

    `reship`: whether the buyer wants the goods back if they are rejected. The same request again changes nothing. Raises
    `ValueError`, which names the field and the limit, `NotReturnable` unless the order is PROCESSING and has no
    return, `Taken` if another request has the id, and `OperationalError` if another caller does not commit soon.
    """
    wanted = {
        "order_id": check_id("order_id", order_id),
        "reason": check_text("reason", reason),
        "reship": check_flag("reship", reship),
    }
    key = {"tenant": tenant, "id": check_id("return_id", return_id)}
    operation = OperationId(tenant, process_return.name, return_id)
    wait_at_most(session, LONGEST_WAIT)
    # another return of this order waits here
    order = session.scalars(select(Order).filter_by(tenant=tenant, id=order_id).with_for_update()).one_or_none()
    if session.get(Return, key) is None:
        if order is None or order.status != "PROCESSING":
            raise NotReturnable("order_id: only an order that is PROCESSING can be returned")
        others = select(Return.id).filter_by(tenant=tenant, order_id=order_id)
        if session.scalars(others.where(Return.status.not_in(CAME_TO_NOTHING))).first() is not None:
            raise NotReturnable("order_id: has a return already")
    of_order = {"customer_id": "" if order is None else order.customer_id}
    taken = "return_id: was used before, for another return"
    if not insert_once(session, Return, key, wanted, generated=of_order, taken=taken):
        return Handle(app, operation)  # its message was part of the commit that accepted it
    check_not_carried_out(session, operation, "return_id: its saga was begun before there was a request")
    return process_return.using(tenant=tenant).enqueue(session, return_id=return_id)


def return_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    """Record that the saga was cancelled or failed, in the commit that ends it. Its undo has run: an uncollected label is void.

    A failure of ours is not told to the buyer as a cancellation: a person has to see to it.
    """
    row = session.get(Return, (operation.tenant, operation.arguments["return_id"]), with_for_update=True)
    if row is None:
        return
    if row.status not in OPEN:
        # the buyer was told that the goods come back, and then it was cancelled
        if row.status == REJECTED and is_void(session, row.id, RESHIP, tenant=row.tenant):
            _tell_late(session, row, [RESHIP_VOID])
        return
    done = _done(session, row, error.code)
    note_void(session, row.id, tenant=row.tenant)
    # by the label, because what `note` hears of a pick-up comes later
    was_collected = row.is_collected or is_collected(session, row.id, tenant=row.tenant)
    if error.code == BY_A_PERSON and row.status in (REQUESTED, LABELLED) and not was_collected:
        row.status, row.problem = CANCELLED, error.code
        publish(session, "return.cancelled", {**_told(row), "problem": error.code}, tenant=row.tenant, app=app)
        if row.is_inspected:
            _tell_late(session, row, [LATE_INSPECTION])
    else:
        _escalate(session, row, [error.code, *done])


def _done(session: Session, row: Return, code: str) -> list[str]:
    """What a saga that has failed leaves done. No call is under way any more: a refund without one is withdrawn."""
    done = []
    if row.refund_id is not None:
        became = withdraw(session, row.refund_id, code, tenant=row.tenant)
        undone = [REFUND_FAILED]  # or its money has come back
        done += {"refunded": [ALREADY_REFUNDED], "unknown": undone, "reversed": undone}.get(became, [])
    if is_taken_back(session, row.order_id, tenant=row.tenant):
        done.append(ALREADY_BOOKED)
    return done


@saga(
    "returns.process_return",
    key="{return_id}",
    entity="return_id",
    events={PICKED_UP: "{return_id}", INSPECTION_DONE: "{return_id}"},
    on_failed=return_failed,
    moves_money=True,
    app=app,
)
def process_return(saga: SagaTask, return_id: str) -> Any:
    """Take one order back."""
    mine, within = named(saga.tenant), celeryconfig.environment
    wanted = saga.step("open", open_return, return_id, **mine)

    try:
        label = saga.call(create_label, return_id=return_id, kind=RETURN, undo=void_label)
    except CallFailed as refused:
        if refused.code in IN_DOUBT:
            raise  # there may be a label: the saga stops, for a person
        return saga.step("abort", abort, return_id, refused.code, **mine)
    saga.step("send label", send_label, return_id, label["label_id"], **mine)

    if saga.wait_for(PICKED_UP, match=return_id, timeout=within.pickup_within) is None:
        problems = [NO_PICKUP, *_failing(LABEL_NOT_VOID, saga, void_label, return_id, RETURN, result=label)]
        return saga.step("escalate", escalate, return_id, problems, **mine)
    saga.step("collected", collected, return_id, **mine)

    event = saga.wait_for(INSPECTION_DONE, match=return_id, timeout=within.inspection_within)
    if event is None:
        return saga.step("escalate", escalate, return_id, [NO_INSPECTION], **mine)
    verdict = saga.step("inspected", inspected, return_id, event["data"], **mine)

    if verdict == "REJECTED":
        if wanted["reship"]:
            try:
                saga.call(create_label, return_id=return_id, kind=RESHIP, undo=void_label)
            except CallFailed as refused:
                if refused.code in IN_DOUBT:
                    raise
                return saga.step("escalate", escalate, return_id, [RESHIP_REFUSED], **mine)
        return saga.step("reject", reject, return_id, **mine)

    # The goods are here, so both are done, whatever becomes of the other.
    book = restock if verdict == "APPROVED" else quarantine
    problems = _failing(GOODS_NOT_BOOKED, saga, book, return_id, wanted["order_id"])
    refund_id = f"return-{saga.uuid().hex}"
    amount = saga.step("request refund", request_refund, return_id, refund_id, **mine)
    if amount > 0:
        with suppress(CallFailed):  # the payment shows whether the buyer has the money
            saga.call(refund_payment, refund_id, is_reserved=True, **owned(saga.tenant))
    return saga.step("conclude", conclude, return_id, amount, problems, **mine)


def _failing(problem: str, saga: SagaTask, task: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Call a task whose failure is left to a person: the problem that is then to be seen to, or nothing."""
    try:
        saga.call(task, *args, **kwargs)
    except CallFailed:
        return [problem]
    return []


# ---------------------------------------------------------------- its steps


def open_return(session: Session, return_id: str, *, tenant: str = DEFAULT) -> dict[str, Any]:
    """What was asked for. One that was cancelled is not opened again by a replay of its saga: it can be asked for anew."""
    row = _locked(session, return_id, tenant)
    if row.status != REQUESTED:
        raise PermanentError(f"return {return_id}: is {row.status}", "return_closed")
    return {"order_id": row.order_id, "reship": row.reship}


def abort(session: Session, return_id: str, code: str, *, tenant: str = DEFAULT) -> dict[str, Any]:
    """The carrier makes no label: nothing has happened, and the buyer is told."""
    row = _locked(session, return_id, tenant)
    row.status, row.problem = ABORTED, code
    publish(session, "return.aborted", {**_told(row), "problem": code}, tenant=tenant, app=app)
    if row.is_inspected:
        _tell_late(session, row, [LATE_INSPECTION])
    return _result(row)


def send_label(session: Session, return_id: str, label_id: str, *, tenant: str = DEFAULT) -> None:
    row = _locked(session, return_id, tenant)
    row.status = LABELLED
    publish(session, "return.labelled", {**_told(row), "label_id": label_id}, tenant=tenant, app=app)


def collected(session: Session, return_id: str, *, tenant: str = DEFAULT) -> None:
    row = _locked(session, return_id, tenant)
    row.status, row.is_collected = IN_TRANSIT, True


def inspected(session: Session, return_id: str, said: Any, *, tenant: str = DEFAULT) -> str:
    try:  # a person may have sent it
        verdict = check_verdict("verdict", said.get("verdict") if isinstance(said, dict) else None)
    except ValueError as error:
        raise PermanentError(str(error), "verdict_unknown") from None
    row = _locked(session, return_id, tenant)
    row.status, row.verdict, row.is_inspected = INSPECTED, verdict, True
    _compare(session, row, verdict_of(session, return_id, tenant=tenant))
    return verdict


def request_refund(session: Session, return_id: str, refund_id: str, *, tenant: str = DEFAULT) -> int:
    """Request all that is left of the payment: what was refunded by hand is not refunded again. Returns the amount.

    A refund that is under way, here or at the provider's site, may still come to nothing, so it is waited for.
    """
    row = _locked(session, return_id, tenant)
    payment = _payment_of(session, row)
    if has_refund(session, payment, "reserved"):
        raise Defer(PENDING_PAUSE, f"payment {payment.id}: another refund is under way")
    amount = request_rest(session, payment, refund_id=refund_id, reason="returned")
    row.refund_id = refund_id if amount > 0 else None
    return amount


def conclude(
    session: Session, return_id: str, amount: int, problems: list[str], *, tenant: str = DEFAULT
) -> dict[str, Any]:
    """The buyer has all of the money, and the goods are booked; or it is left to a person. A refund may have come back by now."""
    row = _locked(session, return_id, tenant)
    payment = _payment_of(session, row)
    # another refund that is under way may still fail, and nobody would notice
    if is_owed(session, payment) or has_refund(session, payment, "reserved"):
        problems = [*problems, REFUND_FAILED]
    if problems:
        _escalate(session, row, problems)
        return _result(row)
    row.status = REFUNDED
    told = {**_told(row), "verdict": row.verdict, "amount": amount}
    publish(session, "return.refunded", told, tenant=tenant, app=app)
    return _result(row)


def reject(session: Session, return_id: str, *, tenant: str = DEFAULT) -> dict[str, Any]:
    row = _locked(session, return_id, tenant)
    row.status = REJECTED
    publish(session, "return.rejected", {**_told(row), "reship": row.reship}, tenant=tenant, app=app)
    return _result(row)


def escalate(session: Session, return_id: str, problems: list[str], *, tenant: str = DEFAULT) -> dict[str, Any]:
    """Leave it to a person."""
    row = _locked(session, return_id, tenant)
    _escalate(session, row, problems)
    return _result(row)


# ---------------------------------------------------------------- what comes when the saga has stopped waiting for it

LATE_PARCEL, LATE_INSPECTION, RESHIP_VOID = "late_parcel", "late_inspection", "reship_void"
# The warehouse has found something else than what the return went on with, which a person had said.
OTHER_VERDICT = "other_verdict"


@subscribe(PICKED_UP, INSPECTION_DONE, consumer="returns", app=app)
def note(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Note what has come, so that it is not lost if the saga has ended without it: goods are on their way, or here."""
    row = self.session.get(Return, (self.tenant, event["data"]["return_id"]), with_for_update=True)
    if row is None:
        return
    late = []
    if event["type"] == PICKED_UP and not row.is_collected:
        row.is_collected, late = True, [LATE_PARCEL]
    elif event["type"] == INSPECTION_DONE and not row.is_inspected:
        row.is_inspected, late = True, [LATE_INSPECTION]
    if row.status in (ESCALATED, ABORTED, CANCELLED):
        _tell_late(self.session, row, late)
    if event["type"] == INSPECTION_DONE:
        _compare(self.session, row, event["data"].get("verdict"))


def _escalate(session: Session, row: Return, problems: list[str]) -> None:
    """Under the lock of the row: what was noted and not used is late; what comes from now on, `note` finds late."""
    unused = []
    if row.is_collected and row.status in (REQUESTED, LABELLED):
        unused.append(LATE_PARCEL)
    if row.is_inspected and row.status != INSPECTED:
        unused.append(LATE_INSPECTION)
    row.status, row.problem = ESCALATED, ", ".join(problems)
    told = {**_told(row), "problem": row.problem, "problems": problems}
    publish(session, "return.escalated", told, tenant=row.tenant, app=app)
    _tell_late(session, row, unused)


def _compare(session: Session, row: Return, found: object) -> None:
    """Under the lock of the row: who comes second, what is used or what was found, sees the other."""
    if found is not None and row.verdict is not None and found != row.verdict:
        _tell_late(session, row, [OTHER_VERDICT])


def _tell_late(session: Session, row: Return, problems: list[str]) -> None:
    if problems:
        publish(session, "return.late", {**_told(row), "problems": problems}, tenant=row.tenant, app=app)


# ---------------------------------------------------------------- rows


def _locked(session: Session, return_id: str, tenant: str) -> Return:
    row = session.get(Return, (tenant, return_id), with_for_update=True)
    if row is None:
        raise PermanentError(f"return {return_id}: unknown", "return_unknown")
    return row


def _payment_of(session: Session, row: Return) -> Payment:
    """The payment of a locked return's order, locked."""
    of_order = select(Payment).filter_by(tenant=row.tenant, order_id=row.order_id)
    return session.scalars(of_order.with_for_update()).one()


def _told(row: Return) -> dict[str, Any]:
    return {"return_id": row.id, "order_id": row.order_id, "customer_id": row.customer_id}


def _result(row: Return) -> dict[str, Any]:
    return {"status": row.status, "problem": row.problem}
