"""What each answer of the payment provider means for an operation: the gateway against the real sandbox."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from celery.exceptions import SoftTimeLimitExceeded

from idempotency import Defer, DidNotHappen, EffectInDoubt, Happened, PermanentError, StillUnknown, StoredFailure
from sandbox import ledger, process
from sandbox.process import Sandbox
from tasks.circuit import Circuit, Unavailable
from tasks.gateway import Gateway, GatewayError, StripeGateway
from tests.support.processes import eventually
from tests.support.sandbox import faults

KEY = "sk_test_sandbox"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("provider", tmp_path_factory.mktemp("provider"), "--faults", "hold_ms=5000") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    yield shared
    response = requests.post(shared.url + "/_sandbox/faults", json={"rates": {}, "hold_ms": 5000}, timeout=30)
    assert response.json()["queued"] == [], "a queued fault found no request"


@pytest.fixture
def gateway(sandbox: Sandbox) -> Iterator[StripeGateway]:
    gateway = StripeGateway(KEY, url=sandbox.url, read_timeout=10)
    yield gateway
    gateway.close()


@pytest.fixture
def purchase() -> dict[str, Any]:
    return {"payment_id": f"p-{uuid.uuid4().hex}", "customer_id": "c-1", "amount": 1250, "currency": "eur"}


@pytest.fixture
def key() -> str:
    return f"idem-{uuid.uuid4().hex}"


def charges(sandbox: Sandbox, purchase: dict[str, Any]) -> list[ledger.Charge]:
    return [
        charge
        for charge in ledger.read(sandbox.data).charges
        if charge.metadata["purchase_id"] == purchase["payment_id"]
    ]


def doubt(key: str, *, age: float = 0, ended: bool = False) -> EffectInDoubt:
    return EffectInDoubt(idempotency_key=key, age=9e9, ended_for=age if ended else None)


def a_refund(charge_id: str, amount: int = 250) -> dict[str, Any]:
    return {"refund_id": f"r-{uuid.uuid4().hex}", "payment_id": "p-1", "charge_id": charge_id, "amount": amount}


def unreachable() -> str:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# money moves


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


# known outcomes


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


# not the operation's fault


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


def test_concurrent_calls_under_one_key_charge_once_and_the_others_are_deferred(
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


# unknown outcomes


@pytest.mark.parametrize(("fault", "charged"), [("error_500_before", 0), ("error_500_after", 1)])
def test_a_500_is_an_ordinary_error_first_and_a_stored_failure_when_replayed(
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


# "did it happen?"


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
def test_a_missing_charge_is_a_no_only_when_the_key_has_ended_and_search_has_caught_up(
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
    assert gateway.find_capture(**purchase, doubt=doubt(key, ended=True, age=61)) == DidNotHappen()


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


def test_a_question_that_finds_nobody_is_deferred(purchase: dict[str, Any], key: str) -> None:
    with closing(StripeGateway(KEY, url=unreachable())) as gateway, pytest.raises(Defer):
        gateway.find_capture(**purchase, doubt=doubt(key))


def test_a_refused_question_is_not_taken_for_a_known_outcome(gateway: Gateway, key: str) -> None:
    with pytest.raises(GatewayError):
        gateway.find_refund(**a_refund(""), doubt=doubt(key))


# circuit breaker


def test_the_circuit_opens_after_failures_in_a_row_and_closes_when_the_provider_is_back(
    tmp_path: Path, purchase: dict[str, Any], key: str
) -> None:
    with (
        process.running("provider", tmp_path) as sandbox,
        closing(StripeGateway(KEY, url=sandbox.url, circuit_failures=3, circuit_pause=0.5)) as gateway,
    ):
        sandbox.kill()
        for _ in range(3):
            with pytest.raises(Unavailable):
                gateway.capture(**purchase, idempotency_key=key)
        assert gateway.circuit_open
        with pytest.raises(Defer, match="circuit open") as held_back:
            gateway.capture(**purchase, idempotency_key=key)
        assert not isinstance(held_back.value, Unavailable)
        assert 0 < held_back.value.seconds <= 0.5 + 0.25

        def tried_again_in_vain() -> bool:
            with pytest.raises(Defer) as deferred:
                gateway.capture(**purchase, idempotency_key=key)
            return isinstance(deferred.value, Unavailable)

        eventually(tried_again_in_vain)
        assert gateway.circuit_open
        sandbox.start()

        def charged() -> bool:
            try:
                return bool(gateway.capture(**purchase, idempotency_key=key))
            except Defer:
                return False

        eventually(charged)
        assert not gateway.circuit_open
        assert len(charges(sandbox, purchase)) == 1


def test_an_open_circuit_does_not_call(sandbox: Sandbox, purchase: dict[str, Any], key: str) -> None:
    with closing(StripeGateway(KEY, url=sandbox.url, circuit_failures=1, circuit_pause=600)) as gateway:
        faults(sandbox, hold_ms=10)
        faults(sandbox, next=["timeout_after"])
        with pytest.raises(Unavailable):
            gateway.capture(**purchase, idempotency_key=key)
        for _ in range(5):
            with pytest.raises(Defer, match="circuit open") as held_back:
                gateway.capture(**purchase, idempotency_key=key)
            assert 590 < held_back.value.seconds <= 900
    counts = requests.get(sandbox.url + "/_sandbox/requests", timeout=30).json()
    assert counts["keys"][key] == 1


def test_refusals_do_not_open_the_circuit_and_reset_the_count(
    sandbox: Sandbox, purchase: dict[str, Any], key: str
) -> None:
    with closing(StripeGateway(KEY, url=sandbox.url, circuit_failures=2, circuit_pause=600)) as gateway:
        faults(sandbox, hold_ms=10)
        for number, fault in enumerate(["timeout_after", "declined", "timeout_after", "rate_limited"] * 2):
            faults(sandbox, next=[fault])
            with pytest.raises((Defer, PermanentError)):
                gateway.capture(**purchase, idempotency_key=f"{key}-{number}")
        assert not gateway.circuit_open


def test_calls_do_not_wait_for_each_other(sandbox: Sandbox, gateway: StripeGateway, purchase: dict[str, Any]) -> None:
    faults(sandbox, latency_ms=1000)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda number: gateway.capture(**purchase, idempotency_key=f"{purchase['payment_id']}-{number}"),
                range(8),
            )
        )
    assert time.monotonic() - began < 8 * 1.0 / 2


def test_only_one_call_tries_a_provider_that_was_away() -> None:
    circuit = Circuit("it", failures=1, pause=0.05)

    def fail() -> None:
        raise Unavailable(1, "away")

    with pytest.raises(Unavailable):
        circuit.call(fail)
    trying, finish = threading.Event(), threading.Event()

    def slow() -> str:
        trying.set()
        finish.wait(10)
        return "back"

    def trial() -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                return circuit.call(slow)
            except Defer:
                time.sleep(0.01)
        return "never"

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(trial)
        assert trying.wait(10)
        with pytest.raises(Defer):
            circuit.call(lambda: "second")
        finish.set()
        assert first.result() == "back"
    assert circuit.call(lambda: "open again") == "open again"


def test_a_failure_reported_late_does_not_hide_behind_the_open_circuit() -> None:
    circuit = Circuit("it", failures=1, pause=600)
    started, finish = threading.Barrier(2), threading.Event()

    def late() -> None:
        started.wait(60)
        finish.wait(10)
        raise Unavailable(1, "late")

    def fail() -> None:
        raise Unavailable(1, "first")

    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(circuit.call, late)
        started.wait(60)
        with pytest.raises(Unavailable, match="first"):
            circuit.call(fail)
        finish.set()
        with pytest.raises(Unavailable, match="late"):
            second.result()


# processes, secrets, settings


def _charge_in_child(gateway: StripeGateway, purchase: dict[str, Any], key: str, start: Any) -> None:
    start.wait(60)
    result = gateway.capture(**purchase, idempotency_key=key)
    os._exit(0 if result["amount"] == purchase["amount"] else 1)


def test_children_of_a_fork_share_no_connection_with_each_other_or_their_parent(
    sandbox: Sandbox, gateway: StripeGateway, purchase: dict[str, Any], key: str
) -> None:
    gateway.capture(**purchase, idempotency_key=key)
    # slow enough that all are under way at once: on one connection they would read each other's answers
    faults(sandbox, latency_ms=200)
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(4)
    children = [
        fork.Process(target=_charge_in_child, args=(gateway, purchase | {"amount": number}, f"{key}-{number}", start))
        for number in range(1, 5)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert gateway.capture(**purchase, idempotency_key=key)["amount"] == 1250
    assert sorted(charge.amount for charge in charges(sandbox, purchase)) == [1, 2, 3, 4, 1250]


@pytest.mark.parametrize(
    "fault", ["declined", "rate_limited", "error_500_before", "timeout_after", "wrong key", "refused", "away"]
)
def test_no_error_holds_the_api_key_the_card_or_a_body(
    sandbox: Sandbox, purchase: dict[str, Any], key: str, fault: str
) -> None:
    secret = "sk_test_verysecret" if fault == "wrong key" else KEY
    url = unreachable() if fault == "away" else sandbox.url
    faults(sandbox, hold_ms=10)
    with closing(StripeGateway(secret, url=url)) as gateway:
        if fault == "refused":
            purchase["amount"] = -1
        elif fault not in ("wrong key", "away"):
            faults(sandbox, next=[fault])
        with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
            gateway.capture(**purchase, idempotency_key=key)
    error = raised.value
    assert isinstance(error, Defer | PermanentError | GatewayError)
    assert error.__cause__ is None
    assert error.__context__ is None
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(error.args) + repr(gateway)
    for hidden in (secret, "pm_card", "Bearer", '"error"', purchase["payment_id"]):
        assert hidden not in shown


@pytest.mark.parametrize("error", [Unavailable(1.5, "away"), GatewayError("it failed")])
def test_errors_survive_being_serialised(error: Exception) -> None:
    rebuilt = pickle.loads(pickle.dumps(error))
    assert (type(rebuilt), rebuilt.args) == (type(error), error.args)
    assert str(type(error)(*error.args)) == str(error)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"api_key": ""}, "api_key"),
        ({"connect_timeout": 0}, "connect_timeout"),
        ({"read_timeout": -1}, "read_timeout"),
        ({"search_lag": -1}, "search_lag"),
        ({"circuit_failures": 0}, "circuit_failures"),
        ({"circuit_pause": 0}, "circuit_pause"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        StripeGateway(**{"api_key": KEY} | settings)
    assert StripeGateway(KEY, search_lag=0, circuit_failures=1)


# the connections


@pytest.mark.parametrize(("excepted", "through_proxy"), [("", True), ("127.0.0.1", False)])
def test_calls_go_through_the_proxy_of_the_environment_unless_it_excepts_the_address(
    monkeypatch: pytest.MonkeyPatch,
    sandbox: Sandbox,
    purchase: dict[str, Any],
    key: str,
    excepted: str,
    through_proxy: bool,
) -> None:
    seen: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def proxy() -> None:
            with contextlib.suppress(OSError):  # closed without a call
                connection, _ = listener.accept()
                with connection:
                    seen.append(connection.recv(65536).split(b"\r\n")[0])

        thread = threading.Thread(target=proxy)
        thread.start()
        with monkeypatch.context() as environment:
            for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
                environment.delenv(name, raising=False)
            environment.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
            environment.setenv("no_proxy", excepted)
            gateway = StripeGateway(KEY, url=sandbox.url)
            assert not gateway.circuit_open  # its connections are made on first use, under this environment
        if through_proxy:
            with pytest.raises(Unavailable):  # this proxy hangs up
                gateway.capture(**purchase, idempotency_key=key)
        else:
            assert gateway.capture(**purchase, idempotency_key=key)["status"] == "succeeded"
        gateway.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert seen == ([f"POST {sandbox.url}/v1/payment_intents HTTP/1.1".encode()] if through_proxy else [])


def test_a_connection_is_kept_between_calls(
    sandbox: Sandbox, gateway: Gateway, purchase: dict[str, Any], key: str
) -> None:
    def ours() -> list[int]:
        """The local ports of our connections to the sandbox."""
        connections = psutil.Process().net_connections(kind="tcp")
        return [
            c.laddr.port for c in connections if c.raddr and c.raddr.port == sandbox.port and c.status == "ESTABLISHED"
        ]

    seen = []
    for number in range(3):
        numbered = purchase | {"payment_id": f"{purchase['payment_id']}-{number}"}
        gateway.capture(**numbered, idempotency_key=f"{key}{number}")
        seen.append(ours())
    assert len(seen[0]) == 1
    assert seen == [seen[0]] * 3


def test_an_interruption_by_the_worker_says_nothing_about_the_provider(
    sandbox: Sandbox, purchase: dict[str, Any], key: str
) -> None:
    def interrupt(*_: object) -> None:
        raise SoftTimeLimitExceeded

    faults(sandbox, next=["timeout_after"])
    with closing(StripeGateway(KEY, url=sandbox.url, circuit_failures=1)) as gateway:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SoftTimeLimitExceeded):
                gateway.capture(**purchase, idempotency_key=key)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not gateway.circuit_open
        # and the connection that waits for the lost answer is not used for the next call
        assert gateway.capture(**purchase | {"payment_id": f"{key}-2"}, idempotency_key=f"{key}-2")["amount"] == 1250
