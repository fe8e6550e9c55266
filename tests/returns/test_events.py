"""Events of returns: late, twice, before their wait, against its time-out, and in any order drawn from a seed."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import requests

from idempotency import OperationId, PermanentError
from idempotency.operate.saga import mark_undone, signal_saga
from tests.returns.books import check_goods, check_labels, check_money, check_return, check_told
from tests.returns.shop import INSPECTED, PICKED_UP, Returns
from tests.support.operations import at_once
from tests.support.operators import ANN

pytestmark = pytest.mark.usefixtures("fresh")

# Of each verdict. RETURN_SEEDS=200 draws more.
SEEDS = int(os.environ.get("RETURN_SEEDS", "4"))


def told(shop: Returns, event_type: str, return_id: str, verdict: str = "APPROVED") -> None:
    """An event, past the function that publishes it once."""
    data = {"return_id": return_id} | ({"verdict": verdict} if event_type == INSPECTED else {})
    shop.tell(event_type, data)


def test_events_that_come_before_their_waits_count(shop: Returns) -> None:
    return_id = shop.send_back(shop.bought())
    told(shop, INSPECTED, return_id)
    shop.run()
    assert shop.row(return_id).status == "LABELLED"  # what is here was not collected yet, as far as anybody knows
    shop.collect(return_id)
    shop.run()
    check_return(shop, return_id, "approved")


@pytest.mark.long
def test_events_that_come_twice_count_once(shop: Returns) -> None:
    return_id = shop.labelled()
    for _ in range(2):
        shop.collect(return_id)
        told(shop, PICKED_UP, return_id)
    shop.run()
    for _ in range(2):
        told(shop, INSPECTED, return_id, "DAMAGED")
    shop.run()
    told(shop, PICKED_UP, return_id)
    told(shop, INSPECTED, return_id, "DAMAGED")
    shop.run()
    check_return(shop, return_id, "damaged")


@pytest.mark.long
def test_a_verdict_without_a_pick_up_is_late_once_the_time_is_over(shop: Returns) -> None:
    """The goods are here, and the carrier has never said so: nothing is lost, a person is told of both."""
    return_id = shop.labelled()
    shop.inspect(return_id, "APPROVED")
    shop.run()
    shop.pass_days(5)
    shop.run()
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", "no_pickup")
    assert shop.cases(return_id) == {"no_pickup", "late_inspection"}
    told(shop, PICKED_UP, return_id)
    shop.run()
    assert shop.cases(return_id) == {"no_pickup", "late_inspection", "late_parcel"}
    check_told(shop, return_id)
    check_goods(shop, return_id, None)
    check_money(shop, shop.row(return_id).order_id, refunded=False)


@pytest.mark.long
def test_a_parcel_between_the_time_out_and_its_escalation_is_not_lost(shop: Returns) -> None:
    """The wait is decided, its label not void yet: whoever notes the pick-up first, support hears of it once."""
    for held_back in ("returns.note", "returns.process_return"):
        return_id = shop.labelled()
        shop.pass_days(5)
        shop.run("shipping.void_label")
        told(shop, PICKED_UP, return_id)
        shop.run(held_back)
        shop.run()
        assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", "no_pickup")
        assert shop.cases(return_id) == {"no_pickup", "late_parcel"}
        assert shop.told_of(return_id).count("return.late") == 1
        check_told(shop, return_id)
        check_labels(shop, return_id)


@pytest.mark.long
def test_the_last_moment_of_a_wait_belongs_to_its_event(shop: Returns) -> None:
    """Both are there when the saga goes on: the event ends the wait, and nobody is told that something is late."""
    return_id = shop.labelled()
    shop.pass_days(5)
    shop.collect(return_id)
    shop.run()
    assert shop.row(return_id).status == "IN_TRANSIT"
    shop.pass_days(14)
    shop.inspect(return_id, "APPROVED")
    shop.run()
    check_return(shop, return_id, "approved")


@pytest.mark.few(1)
@pytest.mark.parametrize(("days", "event"), [(5, PICKED_UP), (14, INSPECTED)])
def test_time_out_and_event_at_the_same_moment_end_one_way(shop: Returns, days: int, event: str) -> None:
    return_id = shop.labelled()
    if event == INSPECTED:
        shop.collect(return_id)
        shop.run()
    shop.pass_days(days)
    (wait,) = [sent for sent in shop.waiting() if sent.row.task == "returns.process_return"]
    at_once(2, lambda number: told(shop, event, return_id) if number else shop.deliver(wait))
    shop.run()
    row = shop.row(return_id)
    if row.status == "ESCALATED":
        problem, late = ("no_pickup", "late_parcel") if event == PICKED_UP else ("no_inspection", "late_inspection")
        assert (row.problem, shop.cases(return_id)) == (problem, {problem, late})
    else:
        assert row.status == ("IN_TRANSIT" if event == PICKED_UP else "REFUNDED")
        assert shop.cases(return_id) == set()
    check_labels(shop, return_id)


def test_an_event_about_nothing_that_is_known_changes_nothing(shop: Returns) -> None:
    for event in (PICKED_UP, INSPECTED):
        told(shop, event, "no such return")
    shop.run()
    assert shop.all("SELECT * FROM return_cases WHERE return_id = 'no such return'") == []


@pytest.mark.long
@pytest.mark.parametrize("held_back", ["nothing", "returns.note"])
def test_a_parcel_that_is_collected_while_it_is_cancelled_is_left_to_a_person(shop: Returns, held_back: str) -> None:
    """Its saga is cancelled before it has seen the pick-up, which returns has noted already, or has not."""
    return_id = shop.labelled()
    shop.collect(return_id)
    shop.run("returns.process_return", held_back)
    shop.cancel_return(return_id)
    shop.run(held_back)
    shop.run()
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", "cancelled")
    assert shop.cases(return_id) == {"cancelled", "late_parcel"}
    check_told(shop, return_id)
    check_labels(shop, return_id)


@pytest.mark.long
def test_a_label_that_the_driver_has_taken_is_not_voided_and_says_so(shop: Returns) -> None:
    """The carrier's own message never comes: its answer to the undo tells of the pick-up."""
    return_id = shop.labelled()
    (label,) = shop.labels(return_id)
    requests.post(f"{shop.sandbox.url}/v1/labels/{label.id}/collect", timeout=20).raise_for_status()
    shop.cancel_return(return_id)
    shop.run()
    assert shop.row(return_id).problem == "cancelled"
    assert "late_parcel" in shop.cases(return_id)
    assert shop.told_of(return_id).count(PICKED_UP) == 1
    check_told(shop, return_id)
    check_labels(shop, return_id)


@pytest.mark.long
def test_a_verdict_that_nobody_knows_is_left_to_a_person(shop: Returns) -> None:
    """It did not pass the warehouse's function: a person has signalled it."""
    return_id = shop.labelled()
    shop.collect(return_id)
    told(shop, INSPECTED, return_id, "FINE")
    shop.run()
    assert (shop.row(return_id).status, shop.row(return_id).problem) == ("ESCALATED", "verdict_unknown")
    assert shop.saga(return_id).status == "FAILED"
    assert shop.cases(return_id) == {"verdict_unknown", "late_inspection"}  # somebody has inspected it
    check_labels(shop, return_id)


@pytest.mark.long
@pytest.mark.parametrize("held_back", ["returns.note", "returns.process_return"])
def test_a_verdict_other_than_what_a_person_said_is_left_to_a_person(shop: Returns, held_back: str) -> None:
    """The return goes on with what it was told first; the warehouse's word comes later, or is there and not used."""
    return_id = shop.in_transit()
    id = OperationId("default", shop.returns.process_return.name, return_id)
    with shop.operating():
        signal_saga(shop.app, id, INSPECTED, {"return_id": return_id, "verdict": "APPROVED"}, ANN)
    assert shop.inspect(return_id, "DAMAGED")
    shop.run(held_back)
    shop.run()
    assert (shop.row(return_id).status, shop.row(return_id).verdict) == ("REFUNDED", "APPROVED")
    assert shop.cases(return_id) == {"other_verdict"}
    check_told(shop, return_id)


@pytest.mark.long
def test_a_label_that_a_person_has_voided_is_void(shop: Returns) -> None:
    return_id = shop.labelled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.shipping.carrier, "void_label", refused, raising=False)
        shop.cancel_return(return_id)
        shop.run()
    (label,) = shop.labels(return_id)
    shop.shipping.carrier.void_label(label_id=label.id, idempotency_key="by hand")
    with shop.operating():
        id = OperationId("default", shop.returns.process_return.name, return_id)
        mark_undone(shop.app, id, "shipping.create_label", ANN)
    shop.run()
    check_return(shop, return_id, "cancelled")


def refused(**_: Any) -> None:
    raise PermanentError("not now", "carrier_refused")


# ---------------------------------------------------------------- any order


def one_return(shop: Returns, verdict: str, seed: int) -> None:
    """Whatever the order and however often: who was collected and inspected in time ends by the verdict."""
    chance = random.Random(f"{verdict} {seed}")
    order, reship = shop.bought(chance.randint(1, 5)), chance.random() < 0.5
    return_id = shop.send_back(order, reship=reship)
    happens = [PICKED_UP, INSPECTED] * 2
    chance.shuffle(happens)
    while happens or shop.waiting():
        if happens and chance.random() < 0.25:
            told(shop, happens.pop(), return_id, verdict)
        elif waiting := shop.waiting():
            sent = chance.choice(waiting)
            shop.deliver(sent)
            if chance.random() < 0.2:
                shop.deliver(sent)
    ends = {"APPROVED": "REFUNDED", "DAMAGED": "REFUNDED", "REJECTED": "REJECTED"}
    row = shop.row(return_id)
    assert (row.status, row.verdict, row.problem) == (ends[verdict], verdict, None)
    assert shop.cases(return_id) == set()
    kinds = [label.kind for label in shop.labels(return_id)]
    assert kinds == (["return", "reship"] if verdict == "REJECTED" and reship else ["return"])
    check_told(shop, return_id)
    check_goods(shop, return_id, {"APPROVED": "returned", "DAMAGED": "quarantined", "REJECTED": None}[verdict])
    check_money(shop, order, refunded=verdict != "REJECTED")
    assert shop.saga(return_id).status == "COMPLETED"


@pytest.mark.long
@pytest.mark.parametrize(
    "verdict",
    ["APPROVED", pytest.param("DAMAGED", marks=pytest.mark.long), pytest.param("REJECTED", marks=pytest.mark.long)],
)
def test_a_return_ends_right_in_any_order_of_its_events(shop: Returns, verdict: str) -> None:
    for seed in range(SEEDS):
        try:
            one_return(shop, verdict, seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}: " + " | ".join(shop.log))
            raise
        shop.forget()


@pytest.mark.long
def test_goods_that_came_before_their_label_was_refused_open_a_case(shop: Returns) -> None:
    shop.refuses_label("ret-brought")
    return_id = shop.send_back(shop.bought(), "ret-brought")
    shop.inspect(return_id, "APPROVED")  # the buyer has brought it to the shop
    shop.run("shipping.create_label")
    assert shop.row(return_id).is_inspected
    shop.run()
    assert (shop.row(return_id).status, shop.cases(return_id)) == ("ABORTED", {"late_inspection"})
