"""How long each page of `idempotency web` takes over a large database: `python -m benchmarks.web_pages`.

Makes a database with so many operations and dead letters in servers of its own, asks every page several times, and prints each
one's slowest answer, with the slowest of all in the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import httpx
from celery import Celery
from sqlalchemy import create_engine, text

import services
from idempotency.application import close_runtime
from idempotency.queues import quorum_queue
from idempotency.store import schema
from idempotency.web.application import create_app

TASKS, TENANTS = 12, 40
RECORDS = """
INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, queue, result, response_code, service,
    created_at, completed_at, expires_at, locked_until, available_at, token, locked_by, attempts, effects, error, error_code)
SELECT 'tenant-' || n % :tenants, 'task.' || n % :tasks, md5(n::text), status, n, 'v1:x', message, 'queue-' || n % 5,
       CASE WHEN status = 'completed' THEN '{"charge": "ch_1"}' END, CASE WHEN status = 'completed' THEN 200 END, 'page', at,
       CASE WHEN status IN ('completed', 'failed') THEN at END, CASE WHEN status IN ('completed', 'failed') THEN now() + interval '9 days' END,
       CASE WHEN status = 'started' THEN now() + interval '1 minute' END, CASE WHEN status = 'released' THEN now() END,
       CASE WHEN status = 'started' THEN 't' END, CASE WHEN status = 'started' THEN 'h|b|n|1|1' END, 1,
       CASE WHEN n % 50 = 0 AND status = 'failed' THEN jsonb_build_object('call', jsonb_build_object('kind', 'effect',
           'state', 'begun', 'key', 'idem-' || n, 'number', 1, 'position', 1, 'begun_at', 1.7e9))
            WHEN n % 2 = 0 THEN jsonb_build_object('call', jsonb_build_object('kind', 'effect', 'state', 'done',
                'key', 'idem-' || lpad(n::text, 40, '0'), 'number', 1, 'position', 1, 'begun_at', 1.7e9, 'result', '{"id": "ch_1"}'))
            ELSE '{}' END,
       CASE WHEN status = 'failed' THEN '{"code": "effect_unknown", "message": "begun"}' END,
       CASE WHEN status = 'failed' THEN 'effect_unknown' END
FROM (SELECT n, now() - n * interval '200 ms' AS at, repeat('{"headers": {}, "body": "[[], {}, {}]"}', 8) AS message,
             CASE WHEN n % 10 = 0 THEN 'failed' WHEN n % 500 = 1 THEN 'started' WHEN n % 200 = 2 THEN 'released'
                  ELSE 'completed' END AS status
      FROM generate_series(1, :operations) n) made
"""
LETTERS = """
INSERT INTO idempotency.dead_letters (source, tenant, task, header_task, key, generation, fingerprint, queue, consumer_service,
    reason, first_error, last_error, attempts, payload, failed_at, code_version)
SELECT 'operation', tenant, task, task, key, 1, 'v1:x', queue, 'page',
       (ARRAY['effect_unknown', 'card_declined', 'attempts_exhausted', 'expired'])[1 + n % 4], '{"code": "x", "message": "y"}',
       '{"code": "x", "message": "the provider has refused it"}', 3, message, completed_at, 'v' || n % 3
FROM (SELECT r.*, row_number() OVER () AS n FROM idempotency.records r WHERE status = 'failed' LIMIT :letters) r
"""
OUTBOX = """
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at, service)
SELECT 'm' || n, 'tenant-' || n % :tenants, 'task.' || n % :tasks, 'waits-' || n, 'v1:x', repeat('x', 300), 'queue-' || n % 5,
       'enqueue', CASE WHEN n % 3 = 0 THEN 'pending' ELSE 'published' END, CASE WHEN n % 3 > 0 THEN now() END, 'page'
FROM generate_series(1, :operations / 20) n
"""
DISCARDS = """
INSERT INTO idempotency.discards (letter, requested_by, reason, letter_reason, letter_generation)
SELECT id, 'ann', 'a test', reason, generation FROM idempotency.dead_letters WHERE id % 20 = 0
"""


@contextmanager
def filled(operations: int, letters: int) -> Iterator[Celery]:
    """An application over so much work, in servers that are stopped again."""
    with services.running() as running:
        name = f"page_{uuid4().hex[:8]}"
        address = running.create_database(name)
        engine = create_engine(address)
        schema.migrate(engine)
        sizes = {"operations": operations, "letters": letters, "tasks": TASKS, "tenants": TENANTS}
        with engine.begin() as connection:
            for statement in (RECORDS, LETTERS, OUTBOX, DISCARDS):
                connection.execute(text(statement), sizes)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
        app = Celery("page", broker=running.broker_url, set_as_current=False)
        app.conf.update(
            idempotency_database_url=address,
            task_queues=[quorum_queue(f"queue-{number}") for number in range(5)],
            task_default_queue="queue-0",
            idempotency_tenant_keys_limit=1000,
        )
        yield app
        close_runtime(app)
        engine.dispose()
        running.drop_database(name)


async def measure(app: Celery, rounds: int) -> list[tuple[float, str]]:
    """The slowest answer of each page, in milliseconds."""
    page = create_app(app)
    transport = httpx.ASGITransport(page)
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8500", timeout=60) as client:
        for path in await paths(client):
            slowest = 0.0
            for _ in range(rounds):
                page.state.desk.forget()
                begun = time.perf_counter()
                answer = await client.get(path)
                slowest = max(slowest, time.perf_counter() - begun)
                # an operation that a search has found is another page
                assert answer.status_code == (303 if "key=idem-" in path else 200), (path, answer.status_code)
            found.append((slowest * 1000, path))
    page.state.desk.close()
    return sorted(found, reverse=True)


async def paths(client: httpx.AsyncClient) -> list[str]:
    """Every page, with filters that choose much, little and nothing, and pages after the first."""
    found = ["/", "/failures", "/doubts", "/approvals", "/sagas", "/tenants", "/runbooks/declined", "/letters"]
    found += ["/letters?status=all", "/letters?reason=expired", "/letters?reason=nothing", "/letters?tenant=tenant-7"]
    found += ["/letters?tenant=nobody", "/letters?code_version=v1", "/letters?code_version=v9", "/letters?over=7d"]
    found += [
        "/letters?before=5000",
        "/letters?task=task.0&within=1h",
        "/doubts?before=20000",
        "/tenants?after=tenant-2",
    ]
    found += [f"/operations?stage={stage}" for stage in ("accepted", "running", "released", "ended")]
    found += [
        "/operations?stage=ended&status=failed",
        "/operations?stage=ended&task=nothing",
        "/operations?stage=ended&tenant=tenant-7",
    ]
    # by the key of a call outside: of one that has ended, of one in doubt, and of none
    found += [
        "/operations?key=nothing",
        f"/operations?key=idem-{500_004:040d}",
        "/operations?key=idem-5000",
    ]
    for path in (
        "/operations?stage=ended",
        "/operations?stage=released",
        "/operations?stage=accepted",
        "/letters",
        "/approvals",
    ):
        shown = (await client.get(path)).text
        found += [html.unescape(each) for each in re.findall(r'rel="next" href="([^"]+)"', shown)]
    listed = (await client.get("/doubts")).text
    found += [html.unescape(each) for each in re.findall(r'href="(/(?:operation|letters/\d)[^"]*)"', listed)[:2]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web_pages")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with filled(given.operations, given.letters) as app:
        found = asyncio.run(measure(app, given.rounds))
    for milliseconds, path in found:
        print(f"{milliseconds:8.0f} ms  {path[:110]}")
    slowest, path = found[0]
    print(
        f"RESULT operations={given.operations} letters={given.letters} pages={len(found)} slowest_ms={slowest:.0f} page={path[:110]}"
    )


if __name__ == "__main__":
    main()
