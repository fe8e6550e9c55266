"""The carrier: the sandbox's server through the client of the tasks, with faults, and what its ledger has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests

from idempotency import Defer, DidNotHappen, EffectInDoubt, Happened, PermanentError, StillUnknown, StoredRefusal
from idempotency.errors import StoredFailure
from sandbox import ledger, process
from sandbox.process import Sandbox
from tasks.carrier import Carrier, CarrierError
from tests.support.operations import at_once
from tests.support.sandbox import faults


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with process.running("carrier", tmp_path_factory.mktemp("carrier"), "--faults", "hold_ms=1") as sandbox:
        yield sandbox


@pytest.fixture
def carrier(sandbox: Sandbox) -> Iterator[Carrier]:
    faults(sandbox, rates={}, hold_ms=1)
    carrier = Carrier(sandbox.url, timeout=20)
    yield carrier
    carrier.close()


@pytest.fixture
def reference() -> str:
    return f"ret-{uuid4().hex[:10]}"


def make(carrier: Carrier, reference: str, key: str | None = None, **changes: Any) -> dict[str, Any]:
    wanted = {"return_id": reference, "kind": "return", **changes}
    return carrier.create_label(**wanted, idempotency_key=key or reference)


def labels(sandbox: Sandbox, reference: str) -> list[ledger.Label]:
    return [label for label in ledger.read_labels(sandbox.data) if label.reference == reference]


def find(carrier: Carrier, reference: str, *, ended_for: float | None = 5.0) -> Any:
    doubt = EffectInDoubt(idempotency_key=reference, age=5.0, ended_for=ended_for)
    return carrier.find_label(return_id=reference, kind="return", doubt=doubt)


def test_a_label_is_made_once_for_its_key(carrier: Carrier, sandbox: Sandbox, reference: str) -> None:
    made = at_once(4, lambda _: _until_answered(carrier, reference))
    assert len({label["id"] for label in made}) == 1
    assert [(label.kind, label.status) for label in labels(sandbox, reference)] == [("return", "created")]
    assert make(carrier, reference, "another key")["id"] != made[0]["id"]
    assert len(labels(sandbox, reference)) == 2  # the ledger would show a second one


def _until_answered(carrier: Carrier, reference: str) -> dict[str, Any]:
    while True:
        try:
            return make(carrier, reference)
        except Defer:  # the other call under this key is under way
            continue


def test_a_key_that_was_used_for_another_label_is_refused(carrier: Carrier, reference: str) -> None:
    make(carrier, reference)
    with pytest.raises(CarrierError):
        make(carrier, reference, kind="reship")


def test_a_refusal_is_final_for_its_key_and_makes_nothing(carrier: Carrier, sandbox: Sandbox, reference: str) -> None:
    faults(sandbox, next=["label_refused"], only={"reference": reference})
    for _ in range(2):
        with pytest.raises(StoredRefusal) as refused:
            make(carrier, reference)
        assert refused.value.code == "address_not_served"
    assert labels(sandbox, reference) == []


def test_a_label_of_a_lost_answer_is_found_by_its_key(carrier: Carrier, sandbox: Sandbox, reference: str) -> None:
    assert find(carrier, reference) == DidNotHappen()
    assert find(carrier, reference, ended_for=None) == StillUnknown()
    faults(sandbox, next=["timeout_after"], only={"reference": reference})
    with pytest.raises(Defer):
        make(carrier, reference)
    (label,) = labels(sandbox, reference)
    assert find(carrier, reference) == Happened({"id": label.id, "status": "created"})
    assert make(carrier, reference)["id"] == label.id


@pytest.mark.parametrize(("fault", "made"), [("error_500_before", 0), ("error_500_after", 1)])
def test_a_stored_error_says_nothing_until_it_is_asked(
    carrier: Carrier, sandbox: Sandbox, reference: str, fault: str, made: int
) -> None:
    faults(sandbox, next=[fault], only={"reference": reference})
    with pytest.raises(CarrierError):
        make(carrier, reference)
    with pytest.raises(StoredFailure):
        make(carrier, reference)
    assert len(labels(sandbox, reference)) == made
    assert isinstance(find(carrier, reference), Happened if made else DidNotHappen)


def test_a_rate_limit_is_waited_for(carrier: Carrier, sandbox: Sandbox, reference: str) -> None:
    faults(sandbox, next=["rate_limited"], only={"reference": reference})
    with pytest.raises(Defer, match="rate limit") as later:
        make(carrier, reference)
    assert later.value.seconds == 1
    assert make(carrier, reference)["status"] == "created"


@pytest.mark.parametrize("status", [401, 403, 404, 408, 425])
def test_what_is_no_word_about_the_label_is_waited_for(recording_server: Any, status: int) -> None:
    recording_server.answer = lambda call: (status, {"error": {"type": "auth", "code": "expired"}})
    with pytest.raises(Defer):
        make(Carrier(recording_server.url, timeout=5), "r")


@pytest.mark.parametrize(("first", "second"), [("void", "collect"), ("collect", "void")])
def test_a_label_is_voided_or_collected_whichever_comes_first(
    carrier: Carrier, sandbox: Sandbox, reference: str, first: str, second: str
) -> None:
    id = make(carrier, reference)["id"]
    status = {"void": "voided", "collect": "collected"}[first]
    for act in (first, first, second):
        if act == "void":
            assert carrier.void_label(label_id=id, idempotency_key=f"v-{id}") == {"id": id, "status": status}
        else:
            answer = requests.post(f"{sandbox.url}/v1/labels/{id}/collect", timeout=20)
            assert answer.json() == {"id": id, "status": status}
    assert [label.status for label in labels(sandbox, reference)] == [status]


def test_a_label_that_nobody_made_cannot_be_voided(carrier: Carrier) -> None:
    with pytest.raises(PermanentError) as refused:
        carrier.void_label(label_id="lbl-none", idempotency_key="v")
    assert refused.value.code == "carrier_refused"


def test_a_carrier_that_is_not_there_is_waited_for() -> None:
    carrier = Carrier("http://127.0.0.1:1", timeout=1)
    with pytest.raises(Defer, match="unreachable"):
        make(carrier, "r")


@pytest.mark.parametrize(
    "wanted", [{"label": "x"}, {"next": "label_refused"}, {"next": ["declined"]}, {"rates": {"declined": 1}}, []]
)
def test_a_fault_that_a_carrier_does_not_have_is_refused(sandbox: Sandbox, wanted: Any) -> None:
    answer = requests.post(f"{sandbox.url}/_sandbox/faults", json=wanted, timeout=20)
    assert answer.status_code == 400
