import pytest
from sqlalchemy import text

from tests import bank as b


def rows(engine, account):
    with engine.connect() as c:
        return c.execute(text("SELECT count(*) FROM entries WHERE account = :a"), {"a": account}).scalar_one()


def test_a_duplicate_gets_the_stored_result(deliveries, engine):
    first = deliveries.deliver(b.deposit, "a1", amount=5)
    second = deliveries.deliver(b.deposit, account="a1", amount=5)
    assert first == second
    assert first.state == "SUCCESS"
    assert rows(engine, "a1") == 1


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 1e16, "a\u0000b", {"b": 1, "a": 2}])
def test_results_survive(deliveries, value):
    assert deliveries.deliver(b.returning, value, key="k").value == value
    assert deliveries.deliver(b.returning, value, key="k").value == value


@pytest.mark.parametrize("how", ["permanent", "defer", "retry", "ignore", "value"])
def test_failures(deliveries, how, engine):
    print(deliveries.deliver(b.failing, "f1", how))
    with engine.connect() as c:
        print(c.execute(text("select status, attempts, error, available_at-clock_timestamp() from idempotency.records")).all())
        print(c.execute(text("select origin, status from idempotency.outbox")).all())
        print(c.execute(text("select reason from idempotency.dead_letters")).all())
        print(c.execute(text("select * from failures")).all(), c.execute(text("select * from entries")).all())


def test_worker(worker, relay, engine):
    b.deposit.delay("w1")
    from tests.processes import eventually
    eventually(lambda: rows(engine, "w1") == 1, timeout=15)
    b.failing.delay("w2", "value")
    eventually(lambda: engine.connect().execute(text("select * from failures")).all(), timeout=15)
