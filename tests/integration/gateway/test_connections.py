"""The gateway's processes, settings and connections, and the secrets that its errors must not hold."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from contextlib import closing
from typing import Any

import psutil
import pytest
from celery.exceptions import SoftTimeLimitExceeded

from idempotency import Defer, PermanentError
from sandbox.process import Sandbox
from tasks.circuit import Unavailable
from tasks.gateway import Gateway, GatewayError, StripeGateway
from tests.integration.gateway.purchases import KEY, charges, unreachable
from tests.support.sandbox import faults

# ---------------------------------------------------------------- processes, secrets, settings


def _charge_in_child(gateway: StripeGateway, purchase: dict[str, Any], key: str, start: Any) -> None:
    start.wait(60)
    result = gateway.capture(**purchase, idempotency_key=key)
    os._exit(0 if result["amount"] == purchase["amount"] else 1)


def test_forked_children_share_no_connection_with_each_other_or_the_parent(
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


# ---------------------------------------------------------------- the connections


@pytest.mark.parametrize(("excepted", "through_proxy"), [("", True), ("127.0.0.1", False)])
def test_calls_go_through_the_proxy_of_the_environment_unless_excepted(
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


@pytest.mark.long
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
