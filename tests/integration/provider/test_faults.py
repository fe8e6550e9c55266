"""The faults that the provider sandbox is told to make, and its life as a process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
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
from tests.integration.provider.client import charges, client, params, pay, replayed, response
from tests.support.processes import eventually
from tests.support.sandbox import faults

# ---------------------------------------------------------------- faults


@pytest.mark.long
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


def test_a_repeat_after_a_time_out_behind_the_charge_gets_its_answer(sandbox: Sandbox, purchase: str) -> None:
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


@pytest.mark.long
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


def test_a_lagging_search_misses_a_fresh_payment_but_a_retrieve_finds_it(sandbox: Sandbox, purchase: str) -> None:
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


# ---------------------------------------------------------------- the process


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


@pytest.mark.long
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


@pytest.mark.long
def test_killed_under_load_charges_and_answers_still_match(
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
                eventually(lambda answered=answered: len(answered) >= 100)
                os.kill(sandbox.pid, signal.SIGKILL)
                for worker in running:
                    worker.result()
            charged = Counter(charge.idempotency_key for charge in ledger.read(tmp_path).charges)
            assert set(answered) <= set(charged)
            assert set(charged.values()) == {1}
            sandbox.restart()
            # what got no answer is asked again: still once each
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


@pytest.mark.long
def test_sigterm_stops_it_cleanly_even_while_it_holds_a_client(tmp_path: Path, purchase: str) -> None:
    with process.running("provider", tmp_path) as sandbox, ThreadPoolExecutor(1) as thread:
        faults(sandbox, next=["timeout_after"])
        held = thread.submit(pay, sandbox, purchase, timeout=30)
        eventually(lambda: len(charges(sandbox, purchase)) == 1)
        assert sandbox.stop() == 0
        with pytest.raises(stripe.APIConnectionError):
            held.result()
        assert (tmp_path / "provider.log").read_text() == ""


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "complaint"),
    [("declined=2", "declined"), ("explode=1", "explode"), ("declined", "name=number"), ("reject=1", "reject")],
)
def test_bad_faults_on_the_command_line_are_refused_in_one_line(tmp_path: Path, faults: str, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        Sandbox("provider", tmp_path, "--faults", faults).start()


@pytest.mark.long
def test_a_port_in_use_is_refused_in_one_line(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in use"):
        Sandbox("provider", tmp_path, "--port", str(sandbox.port)).start()


@pytest.mark.long
def test_provider_and_mail_run_in_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox", "all", "--data", str(tmp_path), "--faults", "reject=0.1,declined=0.1"]
    root = Path(ledger.__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as both:
        assert both.stdout is not None
        lines = sorted(both.stdout.readline() for _ in range(2))
        both.terminate()
        assert both.wait(timeout=60) == 0
    assert lines[0].startswith("ready http://127.0.0.1:")
    assert lines[1].startswith("ready smtp://127.0.0.1:")


@pytest.mark.long
def test_a_plan_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match="hold_ms"):
        FaultPlan(hold_ms=-1)
