"""`idempotency audit-past`, on tables of an application that does not use the library."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

from idempotency.cli import audit_past
from idempotency.framework import Framework
from idempotency.past import reading
from tests.support.commands import Answer, Run, runner
from tests.support.documents import ROOT, blocks

# What a name of a table or column may have in it, and a careless statement would run or stumble over.
HOSTILE = ['weird "t"', "a;DROP TABLE paid", "per%s cent%", "dot.ted", "com,ma", "naïve->x", "$1", "%(key)s", "'"]
PAID = """
CREATE TABLE paid (id bigserial PRIMARY KEY, order_id text, email text, amount numeric(12, 2), paid_at timestamptz, data jsonb);
INSERT INTO paid (order_id, email, amount, paid_at, data) VALUES
    ('o1', 'a@x', 12.50, '2026-03-01 10:00:00+00', '{"cart": {"id": 7}}'),
    ('o1', 'A@x', 12.50, '2026-03-01 10:00:02+00', '{"cart": {"id": 7}}'),
    ('o1', 'a@x', 12.50, '2026-03-01 12:00:02+00', '{"cart": {"id": 8}}'),
    ('o2', 'b@x', 99.99, '2026-03-01 10:00:00+00', null),
    ('o3', 'c@x', 20, '2026-03-01 10:00:00+00', null),
    ('o3', 'c@x', 30, '2026-03-31 10:00:00+00', null),
    (null, 'd@x', 5, '2026-03-01 10:00:00+00', null),
    (null, 'd@x', 5, '2026-03-01 10:00:00+00', null),
    ('o4', 'e@x', 7, 'infinity', null),
    ('o4', 'e@x', 7, null, null)
"""


@pytest.fixture
def paid(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(PAID)


@pytest.fixture
def past(database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("CELERY_APP", raising=False)
    run = runner(monkeypatch, capsys)
    monkeypatch.delenv("CELERY_APP")

    def ask(*arguments: object) -> Answer:
        return run("audit-past", "--database", database, *arguments)

    return ask


def asked(past: Run, *arguments: object) -> Any:
    answer = past(*arguments, "--json")
    assert answer.status in (0, 1), answer.error
    return answer.document


def refused(past: Run, *arguments: object) -> str:
    answer = past(*arguments)
    assert (answer.status, answer.out, answer.error.count("\n")) == (2, "", 1)
    return answer.error.removeprefix("idempotency: ").rstrip()


def test_copies_are_counted_timed_and_added(past: Run, paid: None) -> None:
    found = asked(past, "--table", "paid", "--key", "order_id", "--at", "paid_at", "--amount", "amount")
    examples = found.pop("examples")
    assert found == {
        "table": "public.paid", "key": ["order_id"], "at": "paid_at", "within_seconds": None, "amount_column": "amount",
        "rows": 10, "without_key": 2, "without_time": 2, "groups": 3, "copies": 4,
        "distances": {"minute": 1, "hour": 0, "day": 1, "longer": 1},
        "amount": "52.00", "differing": 1, "unreadable": 0,
    }  # fmt: skip
    assert examples[0] == {
        "key": {"order_id": "o1"}, "rows": 3, "first": "2026-03-01T10:00:00.000000+00:00",
        "last": "2026-03-01T12:00:02.000000+00:00", "shortest": 2.0, "longest": 7200.0, "amount": "25.00",
        "amounts_differ": False, "ids": ["1", "2", "3"],
    }  # fmt: skip
    assert [each["key"]["order_id"] for each in examples] == ["o1", "o3", "o4"]


def test_a_window_divides_the_rows_of_a_key(past: Run, paid: None, engine: Engine) -> None:
    with engine.connect() as connection:  # a second burst of the same key, weeks later
        connection.execute(
            text("INSERT INTO paid (order_id, amount, paid_at) SELECT 'o1', 1, '2026-04-01 10:00+00'::timestamptz + d * interval '40 s'"
                 " FROM generate_series(0, 2) d")
        )  # fmt: skip
    options = ("--table", "paid", "--key", "order_id", "--at", "paid_at", "--amount", "amount")
    found = asked(past, *options, "--within", "1m")
    assert [(each["rows"], each["longest"], each["amount"]) for each in found["examples"]] == [
        (3, 40, "2.00"),
        (2, 2, "12.50"),
    ]
    assert (found["groups"], found["copies"], found["distances"]["longer"]) == (2, 3, 0)
    # each row is compared with the one before it, so a group may be longer than the window
    assert asked(past, *options, "--within", "40s")["copies"] == 3
    assert asked(past, *options, "--within", "39s")["copies"] == 1
    assert asked(past, *options, "--within", "1s")["groups"] == 0


def test_a_part_of_a_key_that_is_null_names_no_operation_unless_it_is_said(past: Run, paid: None) -> None:
    both = ("--table", "paid", "--key", "order_id,email")
    assert asked(past, *both)["without_key"] == 2
    assert {each["key"]["order_id"] for each in asked(past, *both)["examples"]} == {"o1", "o3", "o4"}
    counted = asked(past, *both, "--nulls")
    assert (counted["without_key"], counted["groups"]) == (0, 4)
    assert {"order_id": None, "email": "d@x"} in [each["key"] for each in counted["examples"]]


def test_a_key_may_have_functions_of_columns(past: Run, paid: None) -> None:
    keys = {
        "lower(email),amount": 3, "email,day(paid_at)": 2, "data->cart->id": 1, "data->cart": 1, "data->none": 0, "data": 1,
    }  # fmt: skip
    assert {key: asked(past, "--table", "paid", "--key", key)["groups"] for key in keys} == keys


def test_conditions_are_values_and_never_sql(past: Run, paid: None) -> None:
    rows = {
        ("amount>=20",): 3, ("amount>20", "order_id != o2"): 1, ("order_id=o1",): 3, ("order_id is null",): 2,
        ("order_id IS NOT NULL", "paid_at<2026-03-31"): 5, ("email = ' OR 1=1",): 0, ("email='; DROP TABLE paid",): 0,
    }  # fmt: skip
    for conditions, wanted in rows.items():
        options = [option for each in conditions for option in ("--where", each)]
        assert asked(past, "--table", "paid", "--key", "order_id", *options)["rows"] == wanted, conditions


@pytest.mark.long
def test_any_name_of_a_table_and_a_column_is_only_a_name(past: Run, paid: None, engine: Engine) -> None:
    for name in HOSTILE:
        quoted = '"' + name.replace('"', '""') + '"'
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute(f"CREATE TABLE {quoted} ({quoted} text, t timestamp)")
            driver.execute(f"INSERT INTO {quoted} VALUES ('a', now()), ('a', now()), ('b', now())")
            driver.execute(f"CREATE SCHEMA {quoted}")
            driver.execute(f"CREATE VIEW {quoted}.{quoted} AS SELECT {quoted}, 1 AS n FROM public.{quoted}")
        found = asked(
            past, "--table", name, "--key", name, "--at", "t", "--where", f"{name}>=a", "--where", f"{name}!=c"
        )
        assert (found["groups"], found["examples"][0]["key"]) == (1, {name: "a"})
        assert asked(past, "--table", f"{name}.{name}", "--key", name, "--amount", name)["unreadable"] == 2
    assert asked(past, "--table", "paid", "--key", "id")["groups"] == 0, "the other table is there"


def test_types_of_the_application_are_compared_as_they_are(past: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE SCHEMA shop; CREATE TYPE shop.\"a mood\" AS ENUM ('glad', 'sad'); CREATE TYPE shop.pair AS (a int, b int);"
            'CREATE TABLE shop.guests (feels shop."a mood", has shop.pair, n int);'
            "INSERT INTO shop.guests VALUES ('glad', (1, 2), 1), ('glad', (1, 2), 2), ('sad', (1, 3), 3)"
        )
    asks = ("--table", "shop.guests", "--key", "feels,has")
    assert asked(past, *asks, "--where", "feels=glad")["rows"] == 2
    assert asked(past, *asks)["examples"][0]["key"] == {"feels": "glad", "has": "(1,2)"}
    assert "--where: the value for feels is none of type" in refused(past, *asks, "--where", "feels=angry")
    assert "whose comparisons are not Postgres' own" in refused(past, *asks, "--where", "has=(1,2)")


def test_without_examples_the_totals_are_there(past: Run, paid: None) -> None:
    found = asked(past, "--table", "paid", "--key", "order_id", "--limit", 0)
    assert (found["groups"], found["copies"], found["examples"]) == (3, 4, [])
    assert past("--table", "paid", "--key", "order_id", "--limit", 0).status == 1


def test_the_address_may_be_that_of_the_environment_or_the_framework(
    paid: None, database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys)
    monkeypatch.setattr(Framework, "database_url", lambda self: database)
    assert run("audit-past", "--table", "paid", "--key", "order_id").status == 1
    monkeypatch.undo()
    run = runner(monkeypatch, capsys)
    monkeypatch.setenv("DATABASE_URL", database.replace("+psycopg", ""))
    assert run("audit-past", "--table", "paid", "--key", "order_id").status == 1


def test_times_without_a_zone_and_days_are_taken_as_they_are(past: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE DOMAIN made AS timestamp; CREATE TABLE jobs (k int, local made, day date);"
            "INSERT INTO jobs VALUES (1, '2026-10-25 02:30', '2026-10-25'), (1, '2026-10-25 03:30', '2026-10-26'),"
            " (1, '10000-01-01', '-infinity')"
        )
    local = asked(past, "--table", "jobs", "--key", "k", "--at", "local")["examples"][0]
    assert (local["first"], local["last"], local["shortest"]) == (
        "2026-10-25T02:30:00.000000",
        "10000-01-01T00:00:00.000000",
        3600,
    )
    day = asked(past, "--table", "jobs", "--key", "k", "--at", "day", "--within", "1d")
    assert (day["without_time"], day["examples"][0]["shortest"]) == (1, 86400)


def test_amounts_of_any_numeric_type_are_added_exactly(past: Run, engine: Engine) -> None:
    amounts = {
        "text": (["12.50", "12.50", "1e2", "free", "٣"], "25.00", 2),
        "varchar(9)": ([" 7 ", "-.5", "+3.", "NaN", ""], "2.5", 2),
        "money": (["1.50", "1.50"], "1.50", 0),
        "float8": (["0.1", "0.1", "infinity", "NaN"], "0.1", 2),
        "numeric": (["0.10", "0.100", "NaN"], "0.100", 1),
        "int": (["-5", "-5"], "-5", 0),
        "bigint": ([], None, 0),
    }
    for type, (values, total, unreadable) in amounts.items():
        with engine.connect() as connection:
            connection.exec_driver_sql(f'CREATE TABLE "in {type}" (k int DEFAULT 1, amount {type})')
            for value in values:
                insert = text(f'INSERT INTO "in {type}" (amount) VALUES (CAST(:value AS {type}))')
                connection.execute(insert, {"value": value})
        found = asked(past, "--table", f"in {type}", "--key", "k", "--amount", "amount")
        assert (found["amount"], found["unreadable"]) == (total, unreadable), type


def test_people_read_how_far_apart_and_what_it_usually_is(past: Run, paid: None) -> None:
    answer = past("--table", "paid", "--key", "order_id", "--at", "paid_at", "--amount", "amount", "--limit", 1)
    assert answer.status == 1
    for words in (
        "public.paid: 10 rows; 2 with NULL in order_id: left out; 2 without paid_at counted, without a distance",
        "4 rows too many, if the same order_id means one operation: 3 groups of 7 rows",
        "amount of all rows but the largest of each group: 52.00; the amounts differ in 1 groups",
        "under a minute", "probably meant", "1 of 3 groups", "2 s, 2 h", "1, 2, 3", "--limit shows more",
    ):  # fmt: skip
        assert words in answer.out
    none = past("--table", "paid", "--key", "id")
    assert (none.status, none.out) == (0, "public.paid: 10 rows\nno two rows have the same id\n")


def test_what_is_wrong_is_named(past: Run, paid: None) -> None:
    key = ("--table", "paid", "--key")
    wrong: dict[tuple[str, ...], str] = {
        ("--table", "payd", "--key", "id"): "--table: there is no table 'payd'; did you mean public.paid",
        ("--table", "idempotency.outbox2", "--key", "id"): "did you mean idempotency.outbox",
        (*key, "orderId"): "--key: public.paid has no column 'orderId'; did you mean order_id?",
        (*key, "id", "--at", "payed_at"): "--at: public.paid has no column 'payed_at'; did you mean paid_at?",
        (*key, "id", "--at", "email"): "--at: email is of type text; must be a timestamp or a date",
        (*key, "id", "--amount", "data"): "--amount: data is of type jsonb; must be numeric or text",
        (*key, "day(email)"): "--key day(email): email is of type text, and has no day",
        (*key, "email->x"): "--key email->x: email is of type text, and has no fields",
        (*key, "upper(email)"): "--key: public.paid has no column 'upper(email)'",
        (*key, "id,id"): "--key: a part is given twice",
        (*key, "id", "--where", "1=1"): "--where: public.paid has no column '1'",
        (*key, "id", "--where", "true"): "--where: must be COLUMN=VALUE",
        (*key, "id", "--where", "amount=secret"): "--where: the value for amount is none of type numeric",
        (*key, "id", "--within", "1h"): "--within: needs --at",
        **{
            (*key, "id", "--at", "paid_at", "--within", period): "--within: must be a period like 90s"
            for period in ("1", "0s", "h", "-1h", "1 fortnight", "1e9d")
        },
    }
    for options, said in wrong.items():
        error = refused(past, *options)
        assert said in error
        assert "secret" not in error


def test_a_type_that_cannot_be_compared_is_named(past: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE places (j json, p point)")
    assert "j is of type json" in refused(past, "--table", "places", "--key", "j")
    assert "--key: a column is of a type whose values Postgres cannot compare" in refused(
        past, "--table", "places", "--key", "p"
    )
    assert asked(past, "--table", "places", "--key", "j->x")["groups"] == 0


def test_a_role_reads_what_it_may_and_is_told_what_it_may_not(
    past: Run, paid: None, superuser: Engine, database: str
) -> None:
    with superuser.connect() as connection:
        connection.exec_driver_sql(
            "DROP ROLE IF EXISTS past_reader; CREATE ROLE past_reader LOGIN PASSWORD 'of the reader'"
        )
    mine = (
        make_url(database).set(username="past_reader", password="of the reader").render_as_string(hide_password=False)
    )
    ask = ("--database", mine, "--table", "paid", "--key", "order_id")
    try:
        assert 'no right to read public.paid; GRANT SELECT ON "public"."paid"' in refused(past, *ask)
        with superuser.connect() as connection:
            connection.exec_driver_sql("GRANT SELECT (order_id) ON paid TO past_reader")
        assert asked(past, *ask)["groups"] == 3
        assert "no column 'amount'" in refused(past, *ask, "--amount", "amount")
        with superuser.connect() as connection:
            connection.exec_driver_sql("ALTER TABLE paid ENABLE ROW LEVEL SECURITY")
        assert "row-level security would hide rows" in refused(past, *ask), "no rows would be an answer about none"
    finally:
        with superuser.connect() as connection:
            connection.exec_driver_sql("DROP OWNED BY past_reader; DROP ROLE past_reader")


def test_a_view_that_writes_is_not_let(past: Run, paid: None, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION spoil() RETURNS int LANGUAGE sql VOLATILE AS 'DELETE FROM public.paid RETURNING 1';"
            "CREATE VIEW spoiling AS SELECT spoil() AS n"
        )
    assert "read-only transaction" in refused(past, "--table", "spoiling", "--key", "n")
    assert asked(past, "--table", "paid", "--key", "id")["rows"] == 10


def test_functions_and_operators_of_the_application_are_not_run(past: Run, paid: None, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION lower(text) RETURNS text LANGUAGE sql AS $$ SELECT 'same' $$;"
            "CREATE FUNCTION all_equal(numeric, numeric) RETURNS bool LANGUAGE sql AS $$ SELECT true $$;"
            "CREATE OPERATOR >= (LEFTARG = numeric, RIGHTARG = numeric, PROCEDURE = all_equal)"
        )
    found = asked(past, "--table", "paid", "--key", "lower(email)", "--where", "amount>=20")
    assert (found["rows"], found["groups"]) == (3, 1)


def test_a_limit_of_time_and_a_locked_table_end_it(
    past: Run, paid: None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE VIEW slow AS SELECT pg_sleep(30)::text AS n")
    assert "no answer within --timeout" in refused(past, "--table", "slow", "--key", "n", "--timeout", "200ms")
    monkeypatch.setattr(reading, "LOCK_TIMEOUT", 0.1)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute("BEGIN; LOCK TABLE paid")
        assert "the table was locked" in refused(past, "--table", "paid", "--key", "id")
        driver.execute("ROLLBACK")


def test_what_takes_long_gives_signs_of_life(
    past: Run, paid: None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE VIEW slow AS SELECT pg_sleep(0.3)::text AS n")
    monkeypatch.setattr(audit_past, "SIGN_EVERY", 0.1)
    answer = past("--table", "slow", "--key", "n", "--json")
    assert (answer.status, answer.document["rows"]) == (0, 1)
    assert "public.slow: an unknown number of rows, 0 s so far" in answer.error


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://u:hidden@127.0.0.1/x", "must be an address like"),
        ("nothing", "must be an address like"),
        ("", "--database: not given"),
        ("postgresql://u:hidden@127.0.0.1:1/x", "--database: connection refused"),
        ("postgresql://u:hidden@db.example/x", "plain text off this machine; add sslmode=verify-full"),
    ],
)
def test_an_address_that_is_none_or_unsafe_is_told_without_its_password(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys)
    error = refused(run, "audit-past", "--database", address, "--table", "paid", "--key", "id")
    assert said in error
    assert "hidden" not in error


def test_it_needs_neither_our_schema_nor_an_application(past: Run, engine: Engine, paid: None) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("DROP SCHEMA idempotency CASCADE")
    assert past("--table", "paid", "--key", "order_id").status == 1


PAYMENTS = """
CREATE TABLE payments (id bigserial PRIMARY KEY, order_id text, amount numeric(12, 2), created_at timestamptz);
INSERT INTO payments (order_id, amount, created_at) VALUES
    ('A-17', 25.00, '2026-03-02 09:14:07+00'), ('A-17', 25.00, '2026-03-02 09:14:09.5+00'),
    ('A-18', 12.50, '2026-03-02 10:00:00+00'), ('A-18', 12.50, '2026-03-02 10:36:00+00'),
    ('A-19', 50.00, '2026-02-01 08:00:00+00'), ('A-19', 50.00, '2026-03-01 08:00:00+00'),
    ('A-20', 19.99, '2026-03-02 11:00:00+00'), ('A-21', 19.99, '2026-03-02 11:00:00+00'),
    (NULL, 5.00, '2026-03-02 12:00:00+00')
"""


def test_the_page_shows_what_the_command_prints(past: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(PAYMENTS)
    page = (ROOT / "docs/audit-past.md").read_text()
    (line,) = re.findall(r"^    idempotency audit-past (.+)$", page, re.MULTILINE)
    (shown,) = blocks("docs/audit-past.md", "text")
    answer = past(*shlex.split(line))
    assert (answer.status, answer.error) == (1, "")
    assert [line.rstrip() for line in answer.out.splitlines()] == shown.splitlines()


@pytest.mark.long
def test_a_large_table_is_answered_with_a_few_rows_of_memory(past: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE many AS SELECT mod(n, 1900000) AS k, now() + n * interval '1 ms' AS t, 1.5 AS amount"
            " FROM generate_series(1, 2000000) n"
        )
    found = asked(past, "--table", "many", "--key", "k", "--at", "t", "--amount", "amount", "--limit", 3)
    assert (found["rows"], found["copies"], found["amount"]) == (2_000_000, 100_000, "150000.0")
    assert len(json.dumps(found)) < 3000


def test_where_compares_all_of_a_column_of_fixed_length(past: Run, engine: Engine) -> None:
    """Also of a domain over one, and of an array of them."""
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE DOMAIN iso_currency AS char(3);"
            "CREATE TABLE fixed (id bigserial PRIMARY KEY, order_id text, currency char(3), iso iso_currency, flags bit(4), "
            "several char(3)[]);"
            "INSERT INTO fixed (order_id, currency, iso, flags, several) SELECT 'o1', 'EUR', 'EUR', B'1010', '{EUR,USD}' "
            "FROM generate_series(1, 2)"
        )
    table = ("--table", "fixed", "--key", "order_id")
    for right in ("currency=EUR", "iso=EUR", "flags=1010", "several={EUR,USD}", "currency!=E", "flags!=1"):
        assert asked(past, *table, "--where", right)["groups"] == 1, right
    for wrong in ("currency!=EUR", "iso!=EUR", "flags!=1010", "currency=E", "flags=1", "several={E,U}"):
        answer = past(*table, "--where", wrong, "--json")
        assert (answer.status, answer.document["rows"]) == (0, 0), wrong
