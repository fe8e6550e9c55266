"""The circuit breaker in front of a payment provider that is unavailable."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from idempotency import Defer, PermanentError
from sandbox import process
from sandbox.process import Sandbox
from tasks.circuit import Circuit, Unavailable
from tasks.gateway import StripeGateway
from tests.integration.gateway.purchases import KEY, charges
from tests.support.processes import eventually
from tests.support.sandbox import faults


def test_the_circuit_opens_after_failures_and_closes_after_a_success(
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
