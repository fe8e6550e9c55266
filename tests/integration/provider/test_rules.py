"""The provider sandbox keeps Stripe's rules: charges, refunds, searches and idempotency keys."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import stripe

from sandbox import ledger
from sandbox.process import Sandbox
from tests.integration.provider.client import KEY, charges, client, params, pay, refund, replayed, response
from tests.support.sandbox import faults

# ---------------------------------------------------------------- what it does when nothing goes wrong


@pytest.mark.long
def test_a_charge_is_in_the_ledger_with_its_key_and_metadata(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase, "key-of-" + purchase, amount=1999)
    assert (intent.status, intent.amount, intent.currency) == ("succeeded", 1999, "eur")
    (charge,) = charges(sandbox, purchase)
    assert (charge.id, charge.amount, charge.currency) == (intent.id, 1999, "eur")
    assert charge.idempotency_key == "key-of-" + purchase
    assert charge.metadata == {"purchase_id": purchase}
    assert abs(charge.created - time.time()) < 60


def test_a_payment_intent_can_be_retrieved_and_searched(sandbox: Sandbox, purchase: str) -> None:
    made = pay(sandbox, purchase)
    intents = client(sandbox).v1.payment_intents
    assert intents.retrieve(made.id).to_dict() == made.to_dict()
    found = intents.search({"query": f"metadata['purchase_id']:'{purchase}'"})
    assert [intent.id for intent in found.data] == [made.id]
    assert intents.search({"query": "metadata['purchase_id']:'nobody'"}).data == []


@pytest.mark.parametrize("odd", ["it's", 'a "quote"', "back\\slash", "ünï"])
def test_search_finds_values_with_quotes_when_they_are_escaped(sandbox: Sandbox, purchase: str, odd: str) -> None:
    made = pay(sandbox, f"{odd} {purchase}", purchase)
    value = f"{odd} {purchase}".replace("\\", "\\\\").replace("'", "\\'")
    found = client(sandbox).v1.payment_intents.search({"query": f"metadata['purchase_id']:'{value}'"})
    assert [intent.id for intent in found.data] == [made.id]


def test_search_works_for_other_metadata_than_the_purchase(sandbox: Sandbox, purchase: str) -> None:
    made = pay(sandbox, purchase, metadata={"purchase_id": purchase, "basket": "b" + purchase})
    found = client(sandbox).v1.payment_intents.search({"query": f'metadata["basket"]:"b{purchase}"'})
    assert [intent.id for intent in found.data] == [made.id]


def test_search_and_lists_have_pages(sandbox: Sandbox, purchase: str) -> None:
    made = [pay(sandbox, purchase, f"{purchase}-{number}").id for number in range(5)]
    intents = client(sandbox).v1.payment_intents
    page = intents.search({"query": f"metadata['purchase_id']:'{purchase}'", "limit": 2})
    assert [intent.id for intent in page.auto_paging_iter()] == made[::-1]
    given = [refund(sandbox, made[0], 10).id for _ in range(5)]
    refunds = client(sandbox).v1.refunds.list({"payment_intent": made[0], "limit": 2})
    assert [one.id for one in refunds.auto_paging_iter()] == given[::-1]


def test_refunds_stop_at_what_is_left_of_the_payment(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase, amount=1000)
    refund(sandbox, intent.id, 600)
    with pytest.raises(stripe.InvalidRequestError, match="greater than unrefunded amount"):
        refund(sandbox, intent.id, 401)
    last = refund(sandbox, intent.id, 400)
    with pytest.raises(stripe.InvalidRequestError) as refused:
        refund(sandbox, intent.id, 1)
    assert refused.value.code == "charge_already_refunded"
    assert client(sandbox).v1.refunds.retrieve(last.id).amount == 400
    mine = [row.amount for row in ledger.read(sandbox.data).refunds if row.payment_intent == intent.id]
    assert mine == [600, 400]


def test_refunds_in_a_currency_of_three_decimals_are_whole_hundredths(sandbox: Sandbox, purchase: str) -> None:
    intent = client(sandbox).v1.payment_intents.create(params(purchase, amount=1000, currency="kwd"))
    with pytest.raises(stripe.InvalidRequestError, match="multiple of 10"):
        refund(sandbox, intent.id, 5)
    assert refund(sandbox, intent.id, 10).amount == 10


def test_a_refund_without_an_amount_gives_back_all_that_is_left(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase, amount=1000)
    refund(sandbox, intent.id, 300)
    assert client(sandbox).v1.refunds.create({"payment_intent": intent.id}).amount == 700


@pytest.mark.parametrize("path", ["payment_intents/pi_none", "refunds/re_none"])
def test_what_does_not_exist_is_404(sandbox: Sandbox, path: str) -> None:
    response = requests.get(f"{sandbox.url}/v1/{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "resource_missing")


def test_an_unknown_url_is_404_in_stripes_words(sandbox: Sandbox) -> None:
    response = requests.get(f"{sandbox.url}/v1/customers", timeout=30)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_another_api_key_is_refused_and_not_repeated_back(sandbox: Sandbox, purchase: str) -> None:
    with pytest.raises(stripe.AuthenticationError) as refused:
        client(sandbox, key="sk_test_wrong").v1.payment_intents.create(params(purchase))
    assert refused.value.http_status == 401
    assert "wrong" not in str(refused.value)
    assert charges(sandbox, purchase) == []


def test_every_answer_has_a_request_id(sandbox: Sandbox, purchase: str) -> None:
    first = pay(sandbox, purchase)
    second = client(sandbox).v1.payment_intents.retrieve(first.id)
    ids = {response(thing).request_id for thing in (first, second)}
    assert len(ids) == 2
    assert all(identifier.startswith("req_") for identifier in ids)


# ---------------------------------------------------------------- idempotency keys: each rule with its accepting twin


def test_the_same_key_and_parameters_get_the_same_answer_and_one_charge(sandbox: Sandbox, purchase: str) -> None:
    first, second = pay(sandbox, purchase), pay(sandbox, purchase)
    assert second.to_dict() == first.to_dict()
    assert response(first).headers.get("Idempotent-Replayed") is None
    assert response(second).headers["Idempotent-Replayed"] == "true"
    assert response(second).headers["Original-Request"] == response(first).request_id
    assert len(charges(sandbox, purchase)) == 1


def test_two_keys_are_two_charges_and_the_ledger_shows_both(sandbox: Sandbox, purchase: str) -> None:
    pay(sandbox, purchase, purchase + "-1")
    pay(sandbox, purchase, purchase + "-2")
    assert [charge.idempotency_key[-2:] for charge in charges(sandbox, purchase)] == ["-1", "-2"]


def test_the_same_key_with_other_parameters_is_refused(sandbox: Sandbox, purchase: str) -> None:
    first = pay(sandbox, purchase, amount=100)
    with pytest.raises(stripe.IdempotencyError, match="same parameters"):
        pay(sandbox, purchase, amount=101)
    assert pay(sandbox, purchase, amount=100).id == first.id
    assert len(charges(sandbox, purchase)) == 1


def test_the_order_of_parameters_makes_no_difference(sandbox: Sandbox, purchase: str) -> None:
    first = pay(sandbox, purchase)
    backwards: Any = dict(reversed(params(purchase).items()))
    again = client(sandbox).v1.payment_intents.create(backwards, {"idempotency_key": purchase})
    assert again.id == first.id


def test_the_same_key_on_another_endpoint_is_refused(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase)
    with pytest.raises(stripe.IdempotencyError, match="same endpoint"):
        refund(sandbox, intent.id, 1, purchase)
    refund(sandbox, intent.id, 1, purchase + "-refund")


def test_a_repeated_refund_gives_money_back_once(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase)
    key = uuid.uuid4().hex
    assert refund(sandbox, intent.id, 100, key).id == refund(sandbox, intent.id, 100, key).id
    assert sum(row.amount for row in ledger.read(sandbox.data).refunds if row.payment_intent == intent.id) == 100


def test_a_refused_refund_is_stored_because_its_execution_began(sandbox: Sandbox, purchase: str) -> None:
    intent = pay(sandbox, purchase, amount=100)
    key = uuid.uuid4().hex
    for again in (False, True):
        with pytest.raises(stripe.InvalidRequestError) as refused:
            refund(sandbox, intent.id, 101, key)
        assert replayed(refused.value) is again


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"amount": 0}, "amount"),
        ({"amount": "1.5"}, "amount"),
        ({"amount": 100_000_000}, "amount"),
        ({"currency": "kwd", "amount": 1005}, "amount"),
        ({"currency": "euro"}, "currency"),
        ({"currency": ""}, "currency"),
        ({"confirm": False}, "confirm"),
        ({"payment_method": ""}, "payment_method"),
        ({"automatic_payment_methods": {"enabled": True}}, "automatic_payment_methods"),
        # removed from Stripe's API in September 2026
        ({"payment_method_types": ["card"]}, "payment_method_types[0]"),
        ({"metadata": {"k": "v" * 501}}, "metadata[k]"),
        ({"metadata": {"k" * 41: "v"}}, "metadata"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_parameters_name_the_field_and_leave_the_key_unused(
    sandbox: Sandbox, purchase: str, wrong: dict[str, Any], param: str
) -> None:
    with pytest.raises(stripe.InvalidRequestError) as refused:
        pay(sandbox, purchase, **wrong)
    assert refused.value.param == param
    assert pay(sandbox, purchase).status == "succeeded"


@pytest.mark.parametrize("amount", [1, 99_999_999])
def test_the_smallest_and_the_largest_amount_are_accepted(sandbox: Sandbox, purchase: str, amount: int) -> None:
    assert pay(sandbox, purchase, amount=amount).amount == amount


def test_a_key_of_255_characters_is_accepted_and_one_of_256_is_not(sandbox: Sandbox, purchase: str) -> None:
    assert pay(sandbox, purchase, purchase.ljust(255, "x")).status == "succeeded"
    with pytest.raises(stripe.InvalidRequestError, match="255"):
        pay(sandbox, purchase, purchase.ljust(256, "x"))
    assert len(charges(sandbox, purchase)) == 1


def test_a_key_is_kept_for_24_hours_and_then_forgotten(sandbox: Sandbox, purchase: str) -> None:
    first = pay(sandbox, purchase)
    age(sandbox, purchase, hours=23.9)
    assert pay(sandbox, purchase).id == first.id
    age(sandbox, purchase, hours=24.1)
    assert pay(sandbox, purchase).id != first.id
    assert len(charges(sandbox, purchase)) == 2


def age(sandbox: Sandbox, key: str, *, hours: float) -> None:
    db = sqlite3.connect(sandbox.data / ledger.PROVIDER_FILE)
    with db:
        changed = db.execute(
            "UPDATE answers SET created = ? WHERE idempotency_key = ?", (time.time() - hours * 3600, key)
        )
    assert changed.rowcount == 1
    db.close()


def test_concurrent_calls_under_one_key_make_one_charge_and_409s(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, latency_ms=500)
    barrier = threading.Barrier(8)

    def call(_: int) -> str:
        barrier.wait()
        try:
            return pay(sandbox, purchase).status
        except stripe.APIError as error:
            return f"{error.http_status} {getattr(error.error, 'code', None)}"

    with ThreadPoolExecutor(8) as threads:
        assert Counter(threads.map(call, range(8))) == {"succeeded": 1, "409 idempotency_key_in_use": 7}
    assert len(charges(sandbox, purchase)) == 1
    assert response(pay(sandbox, purchase)).headers["Idempotent-Replayed"] == "true"


def test_concurrent_calls_under_different_keys_all_succeed(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, latency_ms=100)
    with ThreadPoolExecutor(8) as threads:
        paid = list(threads.map(lambda number: pay(sandbox, purchase, f"{purchase}-{number}").id, range(8)))
    assert len(set(paid)) == len(charges(sandbox, purchase)) == 8
