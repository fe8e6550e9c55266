"""docs/stores.md: its examples run, and its table is what the tests show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from idempotency.worker.store_runtimes import close_store_runtimes
from tests.stores import promises
from tests.support.deliveries import Deliveries
from tests.support.documents import ROOT, python_blocks

PAGE = "docs/stores.md"
ROWS = re.compile("(<!-- written by tests/stores/promises.py -->\n).*?(<!-- end -->)", re.DOTALL)


class Gateway:
    def __init__(self) -> None:
        self.keys: list[str] = []

    def capture(self, payment_id: str, amount_cents: int, *, idempotency_key: str) -> dict[str, str]:
        self.keys.append(idempotency_key)
        return {"id": f"ch_{payment_id}"}


def test_the_examples_run(redis_url: str, engine: Engine) -> None:
    gateway = Gateway()
    names: dict[str, Any] = {
        "__name__": "page",
        "broker_url": "memory://",
        "store": redis_url,
        "gateway": gateway,
        "engine": engine,
    }
    for block in python_blocks(PAGE):
        exec(block.replace("@app.task(", "@app.task(shared=False, "), names)
    app = names["app"]
    deliveries = Deliveries(app)
    results = [deliveries.deliver(names["charge"], "p1", 500) for _ in range(3)]
    assert [each.value for each in results] == [{"charge": "ch_p1"}] * 3
    assert len(gateway.keys) == 1

    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE exports (id text PRIMARY KEY, content text, fence bigint)"))
        connection.execute(text("INSERT INTO exports VALUES ('e1', 'old', 0), ('e2', 'newer', 9e15)"))
    assert deliveries.deliver(names["export"], "e1", "new").value == {"rows": 1}
    assert deliveries.deliver(names["export"], "e2", "new").value == {"rows": 0}  # a later holder has been here
    close_store_runtimes(app)


def test_the_table_is_what_the_tests_show() -> None:
    found = ROWS.search((ROOT / PAGE).read_text())
    assert found is not None
    assert found[0] == f"{found[1]}\n{promises.table()}\n{found[2]}", "python -m tests.stores.promises writes it"


def test_each_promise_has_a_test_that_exists() -> None:
    written = {
        name
        for path in Path(ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len({each.words for each in promises.PROMISES}) == len(promises.PROMISES)
    for each in promises.PROMISES:
        assert promises.tests_of(each.words), each.words
        assert set(each.elsewhere.values()) <= written
        assert set(each.verdicts) == set(promises.STORES)
