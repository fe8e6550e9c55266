"""Proofs of a second reader: rows that the check of the demo does not read; corrupted, its books are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

import services
from demo.order_books import Told, read_order_books
from sandbox import ledger
from tests.returns.shop import Returns

CORRUPT = {
    "the warehouse's verdict": "UPDATE inspections SET verdict = 'REJECTED'",
    "a verdict that is gone": "DELETE FROM inspections",
    "the return's verdict": "UPDATE returns SET verdict = 'REJECTED'",
    "the return's customer": "UPDATE returns SET customer_id = 'x'",
    "the return was never collected": "UPDATE returns SET is_collected = false, is_inspected = false",
    "the payment's customer": "UPDATE payments SET customer_id = 'x'",
    "what payments knows of the order": "UPDATE payments SET order_status = 'cancelled'",
    "the checkout's content": "UPDATE checkouts SET customer_id = 'x', amount = 1, quantity = 99, sku = 'x'",
    "the placements": "DELETE FROM placements",
    "the accounts of the ledger": "UPDATE ledger SET debit = credit, credit = debit",
    "what the observer shows": "UPDATE idempotency.sagas SET status = 'COMPENSATING' WHERE task = 'order_placement'",
    "why a payment has failed, in the refunds": "UPDATE refunds SET failure = 'x', reason = 'x'",
    "whose the rows are": "UPDATE notifications SET tenant = 'globex'",
}


@pytest.fixture(scope="module")
def returned(shop: Returns) -> str:
    shop.forget()
    return_id = shop.send_back(shop.bought())
    shop.run()
    shop.collect(return_id)
    shop.inspect(return_id, "APPROVED")
    shop.run()
    assert shop.row(return_id).status == "REFUNDED"
    return return_id


@pytest.mark.parametrize("what", CORRUPT)
def test_the_check_reads(servers: services.Services, shop: Returns, returned: str, tmp_path: Path, what: str) -> None:
    for make in (ledger.open_provider, ledger.open_mail):
        make(tmp_path).close()
    outside = {"provider": tmp_path, "mail": tmp_path, "carrier": Path(shop.sandbox.data)}
    owner = create_engine(make_url(servers.database_url).set(database=shop.books.url.database))
    told = Told((), {}, {})

    def read(connection: object) -> object:
        class One:
            def connect(self) -> object:
                import contextlib

                return contextlib.nullcontext(connection)

        return read_order_books(One(), told, outside)  # type: ignore[arg-type]

    with owner.connect() as connection:
        before = read(connection)
        done = connection.execute(text(CORRUPT[what]))
        assert done.rowcount
        assert read(connection) != before
        connection.rollback()
