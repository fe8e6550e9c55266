"""`migrate --partitioned` beside processes that handle streams."""

from __future__ import annotations

import threading
import time

import pytest

from tests.streams.conftest import Make
from tests.streams.conftest import kafka_cluster as kafka_cluster
from tests.streams.conftest import make_streaming as make_streaming
from tests.partitions.test_proven_streams import Slow
from tests.support.partitions import put_into_partitions


@pytest.mark.parametrize("slow", [False, True])
def test_control_streams_go_on(make_streaming: Make, slow: bool) -> None:
    streaming = make_streaming("kafka", partitions=2, apart=True)
    url = streaming.engine.url.render_as_string(hide_password=False)
    options = {} if not slow else {"batch": 100}
    for _ in range(2):
        if slow:
            streaming.environment["LEASE"] = "30"
            streaming.start(Slow(streaming.broker.source(start="earliest"), options=options))
        else:
            streaming.start_from("earliest")
    many = 400 if slow else 2000
    streaming.broker.publish_many(many)
    time.sleep(1.5)
    began = time.monotonic()
    converting = threading.Thread(target=put_into_partitions, args=(url,))
    converting.start()
    converting.join(40)
    took = time.monotonic() - began
    is_done = not converting.is_alive()
    streaming.broker.publish_many(many, first=many)
    streaming.wait_until_handled(timeout=60)
    print(f"\nconversion: {is_done} {took:.1f} s")
    assert sorted(streaming.entries()) == sorted(f"a{n}" for n in range(2 * many))
    logs = streaming.logs()
    print(
        "\n".join(line for line in logs.splitlines() if "WARN" in line or "ERROR" in line or "Traceback" in line)[:1500]
    )
    converting.join(60)
    assert streaming.query("SELECT relkind = 'p' AS is_so FROM pg_class WHERE oid = 'idempotency.records'::regclass")[
        0
    ].is_so
