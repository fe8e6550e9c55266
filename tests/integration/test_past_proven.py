"""Counts of `audit-past` that are wrong: each asserts the bad outcome."""

from __future__ import annotations

from sqlalchemy import Engine

from tests.integration.test_audit_past import asked, past  # noqa: F401
from tests.support.commands import Run


def test_where_on_a_column_of_fixed_length_finds_nothing(past: Run, engine: Engine) -> None:  # noqa: F811
    """char(3) is cast to `character`, which is char(1): 'EUR' becomes 'E', and the answer is "none", exit status 0."""
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE fixed (id bigserial PRIMARY KEY, order_id text, currency char(3), flags bit(4));"
            "INSERT INTO fixed (order_id, currency, flags) VALUES ('o1', 'EUR', B'1010'), ('o1', 'EUR', B'1010')"
        )
    found = asked(past, "--table", "fixed", "--key", "order_id")
    assert (found["rows"], found["groups"]) == (2, 1)
    answer = past("--table", "fixed", "--key", "order_id", "--where", "currency=EUR", "--json")
    assert answer.status == 0
    assert (answer.document["rows"], answer.document["groups"]) == (0, 0)
    bits = past("--table", "fixed", "--key", "order_id", "--where", "flags=1010", "--json")
    assert (bits.status, bits.document["rows"]) == (0, 0)
    # and what should leave them out does not
    left = past("--table", "fixed", "--key", "order_id", "--where", "currency!=EUR", "--json")
    assert (left.status, left.document["rows"]) == (1, 2)


def test_where_on_a_domain_over_a_fixed_length_finds_nothing(past: Run, engine: Engine) -> None:  # noqa: F811
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE DOMAIN iso_currency AS char(3); CREATE TABLE paid2 (id bigserial PRIMARY KEY, order_id text, currency iso_currency);"
            "INSERT INTO paid2 (order_id, currency) VALUES ('o1', 'EUR'), ('o1', 'EUR')"
        )
    answer = past("--table", "paid2", "--key", "order_id", "--where", "currency=EUR", "--json")
    assert (answer.status, answer.document["groups"]) == (0, 0)
