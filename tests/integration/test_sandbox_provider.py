"""The provider sandbox keeps Stripe's rules: real processes, the official SDK, and a ledger read from disk."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import stripe

from sandbox import ledger, process
from sandbox.faults import FaultPlan, fires
from sandbox.process import Sandbox
from tests.support.processes import eventually
from tests.support.sandbox import faults

KEY = "sk_test_sandbox"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("provider"), "--faults", "hold_ms=3000") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    yield shared
    response = requests.post(shared.url + "/_sandbox/faults", json={"rates": {}, "hold_ms": 3000}, timeout=30)
    assert response.json()["queued"] == [], "a queued fault found no request"


@pytest.fixture
def purchase() -> str:
    return f"purchase-{uuid.uuid4().hex}"


def client(sandbox: Sandbox, *, key: str = KEY, timeout: float = 30) -> stripe.StripeClient:
    return stripe.StripeClient(
        key,
        base_addresses={"api": sandbox.url},
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=timeout),
    )


def params(purchase: str, amount: int = 1250, **more: Any) -> Any:
    return {
        "amount": amount,
        "currency": "eur",
        "confirm": True,
        "payment_method": "pm_card_visa",
        "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
        "metadata": {"purchase_id": purchase},
    } | more


def pay(
    sandbox: Sandbox, purchase: str, key: str | None = None, *, timeout: float = 30, **more: Any
) -> stripe.PaymentIntent:
    intents = client(sandbox, timeout=timeout).v1.payment_intents
    return intents.create(params(purchase, **more), {"idempotency_key": key or purchase})


def refund(sandbox: Sandbox, intent: str, amount: int, key: str | None = None) -> stripe.Refund:
    return client(sandbox).v1.refunds.create(
        {"payment_intent": intent, "amount": amount, "metadata": {"refund_id": "r"}},
        {"idempotency_key": key or uuid.uuid4().hex},
    )


def charges(sandbox: Sandbox, purchase: str) -> list[ledger.Charge]:
    return [charge for charge in ledger.read(sandbox.data).charges if charge.metadata.get("purchase_id") == purchase]


def response(thing: stripe.PaymentIntent) -> Any:
    return thing.last_response


def replayed(error: stripe.StripeError) -> bool:
    return (error.headers or {}).get("Idempotent-Replayed") == "true"


# what it does when nothing goes wrong


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


# idempotency keys: each rule with its accepting twin


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


def test_the_same_key_with_other_parameters_is_refused_and_the_first_answer_stays(
    sandbox: Sandbox, purchase: str
) -> None:
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


def test_concurrent_calls_under_one_key_make_one_charge_and_the_others_are_told_409(
    sandbox: Sandbox, purchase: str
) -> None:
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


# faults


def test_a_500_before_the_charge_is_stored_and_no_money_moves(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["error_500_before"])
    for again in (False, True):
        with pytest.raises(stripe.APIError) as failed:
            pay(sandbox, purchase)
        assert (failed.value.http_status, replayed(failed.value)) == (500, again)
    assert charges(sandbox, purchase) == []
    assert pay(sandbox, purchase, purchase + "-2").status == "succeeded"


def test_a_500_after_the_charge_is_stored_and_the_money_has_moved(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["error_500_after"])
    for again in (False, True):
        with pytest.raises(stripe.APIError) as failed:
            pay(sandbox, purchase)
        assert (failed.value.http_status, replayed(failed.value)) == (500, again)
    assert len(charges(sandbox, purchase)) == 1


def test_a_time_out_after_the_charge_leaves_the_answer_to_be_asked_for_again(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["timeout_after"])
    with pytest.raises(stripe.APIConnectionError):
        pay(sandbox, purchase, timeout=0.3)
    eventually(lambda: len(charges(sandbox, purchase)) == 1)
    (charge,) = charges(sandbox, purchase)
    answer = pay(sandbox, purchase)
    assert (answer.id, response(answer).headers["Idempotent-Replayed"]) == (charge.id, "true")


def test_a_patient_client_is_cut_off_without_an_answer(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["timeout_after"])
    faults(sandbox, hold_ms=50)
    with pytest.raises(stripe.APIConnectionError):
        pay(sandbox, purchase, timeout=10)
    assert len(charges(sandbox, purchase)) == 1


def test_a_rate_limit_says_when_to_come_back_and_is_not_stored(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["rate_limited"])
    with pytest.raises(stripe.RateLimitError) as limited:
        pay(sandbox, purchase)
    assert limited.value.http_status == 429
    assert (limited.value.headers or {})["Retry-After"] == "1"
    assert charges(sandbox, purchase) == []
    assert response(pay(sandbox, purchase)).headers.get("Idempotent-Replayed") is None


def test_a_declined_card_is_402_and_stored(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["declined"])
    for again in (False, True):
        with pytest.raises(stripe.CardError) as declined:
            pay(sandbox, purchase)
        assert (declined.value.http_status, declined.value.code) == (402, "card_declined")
        assert replayed(declined.value) is again
    assert charges(sandbox, purchase) == []
    (intent,) = client(sandbox).v1.payment_intents.search({"query": f"metadata['purchase_id']:'{purchase}'"}).data
    assert intent.status == "requires_payment_method"


def test_stripes_declining_test_card_is_declined(sandbox: Sandbox, purchase: str) -> None:
    with pytest.raises(stripe.CardError):
        pay(sandbox, purchase, payment_method="pm_card_chargeDeclined")


def test_a_declined_purchase_is_declined_under_every_key(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, rates={"declined": 0.5}, seed=3)
    declined = next(name for n in range(99) if fires(3, "declined", name := f"{purchase}-{n}", 0.5))
    accepted = next(name for n in range(99) if not fires(3, "declined", name := f"{purchase}-{n}", 0.5))
    for key in ("a", "b"):
        with pytest.raises(stripe.CardError):
            pay(sandbox, declined, declined + key)
        assert pay(sandbox, accepted, accepted + key).status == "succeeded"


def test_a_queued_fault_waits_for_the_request_it_is_meant_for(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, next=["error_500_before"], only={"purchase_id": purchase})
    assert pay(sandbox, purchase + "-other").status == "succeeded"
    with pytest.raises(stripe.APIError):
        pay(sandbox, purchase)


def test_a_replay_takes_no_queued_fault(sandbox: Sandbox, purchase: str) -> None:
    pay(sandbox, purchase)
    faults(sandbox, next=["rate_limited"])
    pay(sandbox, purchase)
    with pytest.raises(stripe.RateLimitError):
        pay(sandbox, purchase, purchase + "-2")


def test_a_fault_from_a_rate_happens_once_per_key(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, rates={"rate_limited": 1.0})
    with pytest.raises(stripe.RateLimitError):
        pay(sandbox, purchase)
    assert pay(sandbox, purchase).status == "succeeded"


def test_the_same_seed_makes_the_same_plan_in_any_order(sandbox: Sandbox, purchase: str) -> None:
    def outcomes(suffix: str, numbers: Iterator[int]) -> dict[int, str]:
        found = {}
        for number in numbers:
            key = f"plan-{number}"
            try:
                with_key = client(other).v1.payment_intents
                with_key.create(params(f"{purchase}-{number}"), {"idempotency_key": key})
                found[number] = "ok"
            except stripe.StripeError as error:
                found[number] = str(error.http_status)
        return found

    results = []
    for order in (range(40), range(39, -1, -1)):
        with process.running(
            "provider", sandbox.data / f"{purchase}-{order.start}", "--seed", "7", "--faults",
            "error_500_before=0.2,rate_limited=0.2",
        ) as other:  # fmt: skip
            results.append(outcomes("", iter(order)))
    assert results[0] == results[1]
    assert set(results[0].values()) == {"ok", "500", "429"}


def test_a_rate_falls_on_about_its_share_of_keys() -> None:
    hit = sum(fires(1, "error_500_after", f"key-{number}", 0.01) for number in range(100_000))
    assert 800 < hit < 1200
    assert not any(fires(1, "declined", f"key-{number}", 0) for number in range(1000))
    assert all(fires(1, "declined", f"key-{number}", 1) for number in range(1000))


def test_a_lagging_search_does_not_show_a_fresh_payment_but_a_retrieve_does(sandbox: Sandbox, purchase: str) -> None:
    faults(sandbox, search_lag_ms=60_000)
    made = pay(sandbox, purchase)
    intents = client(sandbox).v1.payment_intents
    query: Any = {"query": f"metadata['purchase_id']:'{purchase}'"}
    assert intents.search(query).data == []
    assert intents.retrieve(made.id).id == made.id
    faults(sandbox, search_lag_ms=0)
    assert len(intents.search(query).data) == 1


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ({"next": ["explode"]}, "timeout_after"),
        ({"rates": {"explode": 0.1}}, "explode"),
        ({"rates": {"declined": 2}}, "declined"),
        ({"latency_ms": -1}, "latency_ms"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_by_name(sandbox: Sandbox, plan: Any, names: str) -> None:
    response = requests.post(sandbox.url + "/_sandbox/faults", json=plan, timeout=30)
    assert response.status_code == 400
    assert names in response.json()["error"]


# the process


def test_it_counts_how_often_each_key_was_called(sandbox: Sandbox, purchase: str) -> None:
    for _ in range(3):
        pay(sandbox, purchase)
    pay(sandbox, purchase, purchase + "-once")
    counts = requests.get(sandbox.url + "/_sandbox/requests", timeout=30).json()
    assert (counts["keys"][purchase], counts["keys"][purchase + "-once"]) == (3, 1)
    assert counts["endpoints"]["POST /v1/payment_intents"] >= 4
    often = requests.get(sandbox.url + "/_sandbox/requests?at_least=2", timeout=30).json()["keys"]
    assert purchase in often
    assert purchase + "-once" not in often


def test_a_crash_keeps_the_ledger_the_answers_and_the_faults_already_spent(tmp_path: Path, purchase: str) -> None:
    with process.running("provider", tmp_path, "--faults", "rate_limited=1") as sandbox:
        with pytest.raises(stripe.RateLimitError):
            pay(sandbox, purchase)
        first = pay(sandbox, purchase)
        url = sandbox.url
        sandbox.kill()
        assert [charge.id for charge in ledger.read(tmp_path).charges] == [first.id]
        sandbox.start()
        assert sandbox.url == url
        again = pay(sandbox, purchase)
        assert (again.id, response(again).headers["Idempotent-Replayed"]) == (first.id, "true")
        assert len(charges(sandbox, purchase)) == 1
        assert requests.get(url + "/_sandbox/requests", timeout=30).json()["keys"] == {purchase: 3}


def test_killed_at_any_moment_under_load_every_charge_has_its_answer_and_every_answer_its_charge(
    tmp_path: Path,
) -> None:
    with process.running("provider", tmp_path) as sandbox:
        for crash in range(3):
            answered: list[str] = []

            def load(worker: int, crash: int = crash, answered: list[str] = answered) -> None:
                for number in range(100_000):
                    key = f"{crash}-{worker}-{number}"
                    try:
                        pay(sandbox, key)
                    except stripe.APIConnectionError:
                        return
                    answered.append(key)

            with ThreadPoolExecutor(4) as threads:
                running = [threads.submit(load, worker) for worker in range(4)]
                eventually(lambda answered=answered: len(answered) >= 100)  # type: ignore[misc]
                os.kill(sandbox.pid, signal.SIGKILL)
                for worker in running:
                    worker.result()
            charged = Counter(charge.idempotency_key for charge in ledger.read(tmp_path).charges)
            assert set(answered) <= set(charged)
            assert set(charged.values()) == {1}
            sandbox.restart()
            # whoever got no answer asks again: still once each
            for key in charged:
                if key not in answered and key.startswith(f"{crash}-"):
                    assert response(pay(sandbox, key)).headers["Idempotent-Replayed"] == "true"


def test_the_ledger_cannot_be_rewritten(sandbox: Sandbox, purchase: str) -> None:
    pay(sandbox, purchase)
    db = sqlite3.connect(sandbox.data / ledger.PROVIDER_FILE)
    for statement in ("UPDATE charges SET amount = 1", "DELETE FROM charges"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(statement)
    db.close()


def test_reading_where_no_sandbox_ran_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data"):
        ledger.read(tmp_path)


def test_sigterm_stops_it_cleanly_even_while_it_holds_a_client(tmp_path: Path, purchase: str) -> None:
    with process.running("provider", tmp_path) as sandbox, ThreadPoolExecutor(1) as thread:
        faults(sandbox, next=["timeout_after"])
        held = thread.submit(pay, sandbox, purchase, timeout=30)
        eventually(lambda: len(charges(sandbox, purchase)) == 1)
        assert sandbox.stop() == 0
        with pytest.raises(stripe.APIConnectionError):
            held.result()
        assert (tmp_path / "provider.log").read_text() == ""


def test_it_stops_when_the_process_that_started_it_dies(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from sandbox.process import Sandbox\n"
        "s = Sandbox('provider', Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    root = Path(ledger.__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text())


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [("declined=2", "declined"), ("explode=1", "explode"), ("declined", "name=number"), ("reject=1", "reject")],
)
def test_bad_faults_on_the_command_line_are_refused_in_one_line(tmp_path: Path, faults: str, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        Sandbox("provider", tmp_path, "--faults", faults).start()


def test_a_port_in_use_is_refused_in_one_line(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in use"):
        Sandbox("provider", tmp_path, "--port", str(sandbox.port)).start()


def test_provider_and_mail_run_in_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox", "all", "--data", str(tmp_path), "--faults", "reject=0.1,declined=0.1"]
    root = Path(ledger.__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as both:
        assert both.stdout is not None
        lines = sorted(both.stdout.readline() for _ in range(2))
        both.terminate()
        assert both.wait(timeout=10) == 0
    assert lines[0].startswith("ready http://127.0.0.1:")
    assert lines[1].startswith("ready smtp://127.0.0.1:")


def test_a_plan_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match="hold_ms"):
        FaultPlan(hold_ms=-1)
