"""What each answer of the payment provider means for an operation: the gateway against the real sandbox."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from idempotency import Defer, DidNotHappen, Happened, PermanentError, StillUnknown, StoredFailure
from sandbox import ledger
from sandbox.process import Sandbox
from tasks.circuit import Unavailable
from tasks.gateway import Gateway, GatewayError, StripeGateway
from tests.integration.gateway.purchases import KEY, a_refund, charges, doubt, unreachable
from tests.support.processes import eventually
from tests.support.sandbox import faults

# ---------------------------------------------------------------- money moves


@pytest.mark.long
def test_a_capture_charges_once_however_often_it_is_called(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    first = gateway.capture(**purchase, idempotency_key=key)
    assert first == gateway.capture(**purchase, idempotency_key=key)
    assert first == {"id": first["id"], "amount": 1250, "currency": "eur", "status": "succeeded"}
    (charge,) = charges(sandbox, purchase)
    assert (charge.id, charge.idempotency_key) == (first["id"], key)
    assert charge.metadata == {
        "purchase_id": purchase["payment_id"],
        "customer_id": "c-1",
        "effect_key": key,
    }


def test_a_refund_gives_money_back_once_however_often_it_is_called(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    charge = gateway.capture(**purchase, idempotency_key=key)
    refund = a_refund(charge["id"])
    first = gateway.refund(**refund, idempotency_key=key + "-r")
    assert first == gateway.refund(**refund, idempotency_key=key + "-r")
    assert (first["amount"], first["currency"], first["status"]) == (250, "eur", "succeeded")
    (row,) = (row for row in ledger.read(sandbox.data).refunds if row.payment_intent == charge["id"])
    assert row.metadata["refund_id"] == refund["refund_id"]


def test_results_are_json_that_survives_a_round_trip(gateway: Gateway, purchase: dict[str, Any], key: str) -> None:
    result = gateway.capture(**purchase, idempotency_key=key)
    assert {type(value) for value in result.values()} == {str, int}


# ---------------------------------------------------------------- known outcomes


def test_a_declined_card_is_permanent_and_says_why(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, next=["declined"])
    for _ in range(2):
        with pytest.raises(PermanentError, match="generic_decline") as declined:
            gateway.capture(**purchase, idempotency_key=key)
        assert declined.value.code == "card_declined"
    assert charges(sandbox, purchase) == []


def test_refused_parameters_are_permanent_and_name_the_field(
    gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    with pytest.raises(PermanentError, match="amount") as refused:
        gateway.capture(**purchase | {"amount": 0}, idempotency_key=key)
    assert refused.value.code == "parameter_invalid_integer"
    assert gateway.capture(**purchase, idempotency_key=key)["status"] == "succeeded"


def test_a_refund_of_more_than_is_left_is_permanent(gateway: Gateway, purchase: dict[str, Any], key: str) -> None:
    charge = gateway.capture(**purchase, idempotency_key=key)
    with pytest.raises(PermanentError, match="amount"):
        gateway.refund(**a_refund(charge["id"], 1251), idempotency_key=key + "-1")
    assert gateway.refund(**a_refund(charge["id"], 1250), idempotency_key=key + "-2")["amount"] == 1250


def test_a_refund_of_an_unknown_charge_is_permanent(gateway: Gateway, key: str) -> None:
    with pytest.raises(PermanentError) as refused:
        gateway.refund(**a_refund("pi_none"), idempotency_key=key)
    assert refused.value.code == "resource_missing"


# ---------------------------------------------------------------- not the operation's fault


def test_a_rate_limit_is_deferred_for_as_long_as_the_provider_asks(
    sandbox: Sandbox, gateway: StripeGateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, next=["rate_limited"])
    with pytest.raises(Defer) as limited:
        gateway.capture(**purchase, idempotency_key=key)
    assert limited.value.seconds == 1
    assert not isinstance(limited.value, Unavailable)
    assert gateway.capture(**purchase, idempotency_key=key)["status"] == "succeeded"


def test_a_read_time_out_is_deferred_and_the_same_key_finds_the_charge(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, next=["timeout_after"])
    with closing(StripeGateway(KEY, url=sandbox.url, read_timeout=0.3)) as hasty, pytest.raises(Unavailable):
        hasty.capture(**purchase, idempotency_key=key)
    eventually(lambda: len(charges(sandbox, purchase)) == 1)
    (charge,) = charges(sandbox, purchase)
    assert gateway.capture(**purchase, idempotency_key=key)["id"] == charge.id


def test_an_unreachable_provider_is_deferred(purchase: dict[str, Any], key: str) -> None:
    with closing(StripeGateway(KEY, url=unreachable())) as gateway, pytest.raises(Unavailable):
        gateway.capture(**purchase, idempotency_key=key)


def test_a_refused_api_key_is_deferred_and_blames_no_purchase(
    sandbox: Sandbox, purchase: dict[str, Any], key: str
) -> None:
    with closing(StripeGateway("sk_test_wrong", url=sandbox.url)) as gateway, pytest.raises(Defer, match="API key"):
        gateway.capture(**purchase, idempotency_key=key)


def test_of_concurrent_calls_under_one_key_one_charges_and_others_defer(
    sandbox: Sandbox, gateway: StripeGateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, latency_ms=500)
    barrier = threading.Barrier(6)

    def call(_: int) -> str:
        barrier.wait()
        try:
            gateway.capture(**purchase, idempotency_key=key)
        except Defer as deferred:
            return str(deferred)
        return "charged"

    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(call, range(6)))
    assert outcomes.count("charged") == len(charges(sandbox, purchase)) == 1
    assert sum("in progress" in outcome for outcome in outcomes) == 5
    assert not gateway.circuit_open


# ---------------------------------------------------------------- unknown outcomes


@pytest.mark.parametrize(("fault", "charged"), [("error_500_before", 0), ("error_500_after", 1)])
def test_a_500_is_an_ordinary_error_and_once_replayed_a_stored_failure(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str, fault: str, charged: int
) -> None:
    faults(sandbox, next=[fault])
    with pytest.raises(GatewayError):
        gateway.capture(**purchase, idempotency_key=key)
    for _ in range(2):
        with pytest.raises(StoredFailure):
            gateway.capture(**purchase, idempotency_key=key)
    assert len(charges(sandbox, purchase)) == charged


def test_a_key_used_with_other_parameters_leaves_the_outcome_unknown(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    gateway.capture(**purchase, idempotency_key=key)
    with pytest.raises(GatewayError, match="other parameters"):
        gateway.capture(**purchase | {"amount": 1}, idempotency_key=key)
    assert len(charges(sandbox, purchase)) == 1


# ---------------------------------------------------------------- "did it happen?"


def test_a_charge_is_found_under_whatever_key_it_was_made(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, next=["error_500_after"])
    with pytest.raises(GatewayError):
        gateway.capture(**purchase, idempotency_key=key)
    (charge,) = charges(sandbox, purchase)
    expected = {"id": charge.id, "amount": 1250, "currency": "eur", "status": "succeeded"}
    assert gateway.find_capture(**purchase, doubt=doubt(key)) == Happened(expected)
    assert gateway.find_capture(**purchase, doubt=doubt("another", ended=True, age=9e9)) == Happened(expected)


def test_a_charge_is_found_although_its_purchase_id_has_quotes(
    gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    odd = purchase | {"payment_id": f'it\'s \\ "{key}"'}
    charge = gateway.capture(**odd, idempotency_key=key)
    assert gateway.find_capture(**odd, doubt=doubt(key)) == Happened(charge)


@pytest.mark.parametrize(
    ("age", "ended", "answer"),
    [
        (10.0, False, StillUnknown()),
        (1e6, False, StillUnknown()),
        (59.0, True, StillUnknown(ask_again=1.0)),
        (61.0, True, DidNotHappen()),
    ],
)
def test_a_missing_charge_is_a_no_once_key_and_search_lag_are_over(
    sandbox: Sandbox,
    gateway: Gateway,
    purchase: dict[str, Any],
    key: str,
    age: float,
    ended: bool,
    answer: DidNotHappen | StillUnknown,
) -> None:
    faults(sandbox, next=["error_500_before"])
    with pytest.raises(GatewayError):
        gateway.capture(**purchase, idempotency_key=key)
    assert gateway.find_capture(**purchase, doubt=doubt(key, age=age, ended=ended)) == answer


def test_a_charge_that_search_does_not_show_yet_is_not_taken_for_a_no(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, search_lag_ms=60_000)
    faults(sandbox, next=["error_500_after"])
    with pytest.raises(GatewayError):
        gateway.capture(**purchase, idempotency_key=key)
    in_doubt = doubt(key, age=30, ended=True)
    assert gateway.find_capture(**purchase, doubt=in_doubt) == StillUnknown(ask_again=30.0)
    faults(sandbox, search_lag_ms=0)
    assert isinstance(gateway.find_capture(**purchase, doubt=in_doubt), Happened)


def test_a_declined_try_is_not_taken_for_a_charge(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    faults(sandbox, next=["declined"])
    with pytest.raises(PermanentError):
        gateway.capture(**purchase, idempotency_key=key)
    found = gateway.find_capture(**purchase, doubt=doubt(key, ended=False, age=61))
    assert isinstance(found, DidNotHappen)
    assert found.refusal is not None
    assert found.refusal.code == "card_declined"
    # under another key it may be tried again
    assert gateway.find_capture(**purchase, doubt=doubt("another", ended=True, age=61)) == DidNotHappen()


@pytest.mark.parametrize("fault", ["error_500_before", "error_500_after"])
def test_a_refund_is_found_or_proven_missing_by_the_list_at_once(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str, fault: str
) -> None:
    charge = gateway.capture(**purchase, idempotency_key=key)
    refund = a_refund(charge["id"])
    faults(sandbox, next=[fault])
    with pytest.raises(GatewayError):
        gateway.refund(**refund, idempotency_key=key + "-r")
    found = gateway.find_refund(**refund, doubt=doubt(key + "-r", ended=True))
    if fault == "error_500_before":
        assert found == DidNotHappen()
        assert gateway.find_refund(**refund, doubt=doubt(key + "-r", age=1e6)) == StillUnknown()
    else:
        (row,) = (row for row in ledger.read(sandbox.data).refunds if row.payment_intent == charge["id"])
        assert found == Happened({"id": row.id, "amount": 250, "currency": "eur", "status": "succeeded"})


def test_another_refund_of_the_same_charge_is_not_taken_for_this_one(
    gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    charge = gateway.capture(**purchase, idempotency_key=key)
    gateway.refund(**a_refund(charge["id"]), idempotency_key=key + "-1")
    other = a_refund(charge["id"])
    assert gateway.find_refund(**other, doubt=doubt(key + "-2", ended=True)) == DidNotHappen()


def test_a_question_to_an_unreachable_provider_is_deferred(purchase: dict[str, Any], key: str) -> None:
    with closing(StripeGateway(KEY, url=unreachable())) as gateway, pytest.raises(Defer):
        gateway.find_capture(**purchase, doubt=doubt(key))


def test_only_what_the_provider_does_not_have_is_taken_for_nothing(gateway: Gateway) -> None:
    assert gateway.charge("pi_unknown") is None
    assert gateway.refunded("re_unknown") is None
    with pytest.raises(GatewayError):
        gateway.charge("search")  # another address, where the question lacks its query


def test_a_refused_question_is_not_taken_for_a_known_outcome(gateway: Gateway, key: str) -> None:
    with pytest.raises(GatewayError):
        gateway.find_refund(**a_refund(""), doubt=doubt(key))
