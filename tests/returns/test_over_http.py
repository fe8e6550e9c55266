"""Returns over HTTP, on real servers: one key for the request, the return and its saga."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from sandbox import ledger
from tests.support.api import ORDER, WAIT, Api, forget, new_key, problem, running
from tests.support.processes import eventually


@pytest.fixture(scope="module")
def api(servers: Any, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running(servers, template, tmp_path_factory.mktemp("shop")) as api:
        yield api


@pytest.mark.long
def test_a_return_is_accepted_once_and_its_operation_is_its_saga(api: Api) -> None:
    """In one key space: the row's id, the saga's key and the Idempotency-Key."""
    from tasks.returns import process_return, submit_return
    from tasks.shipping import confirm_pickup
    from tasks.warehouse import record_inspection

    ordered = api.acme.post(
        "/orders", json=ORDER | {"checkout_session_id": new_key()}, headers={"Idempotency-Key": new_key()} | WAIT
    )
    order, key = ordered.json()["key"], new_key()
    eventually(lambda: api.count("orders", "id = :id AND status = 'PROCESSING'", id=order))
    body = {"order_id": order, "reason": "too small"}
    answers = [api.acme.post("/returns", json=body, headers={"Idempotency-Key": key}) for _ in range(2)]
    where = f"/operations/{process_return.name}/{key}"
    for answer in answers:
        assert (answer.status_code, answer.headers["location"]) == (202, where)
        assert answer.json() == {"id": key, "status": "accepted", "operation": where}
    with Session(api.shop.engine) as session, session.begin():
        submit_return(session, return_id=key, tenant="acme", **body)  # the same once more, by a program
    other = api.acme.post("/returns", json=body | {"reason": "another"}, headers={"Idempotency-Key": new_key()})
    assert (other.status_code, problem(other)) == (409, "not_returnable")
    assert api.globex.get(where).status_code == 404
    theirs = api.globex.post("/returns", json=body, headers={"Idempotency-Key": key})
    assert (theirs.status_code, problem(theirs)) == (409, "not_returnable")

    eventually(lambda: api.count("returns", "id = :id AND status = 'LABELLED'", id=key))
    eventually(lambda: api.acme.get(where).json()["status"] == "released")
    with Session(api.shop.engine) as session, session.begin():
        assert confirm_pickup(session, return_id=key, tenant="acme")
        assert record_inspection(session, return_id=key, verdict="DAMAGED", tenant="acme")
    ended = api.acme.get(where, headers=WAIT).json()
    assert (ended["status"], ended["result"]) == ("completed", {"status": "REFUNDED", "problem": None})
    refunds = [
        each for each in ledger.read(api.shop.data / "provider").refunds if each.metadata["purchase_id"] == order
    ]
    assert [refund.amount for refund in refunds] == [ORDER["amount"]]
    forget(api, key)  # as a purge does, weeks later
    assert api.acme.get(where).json() == ended
