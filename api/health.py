"""Whether the process lives, whether it can accept requests, and its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache

import redis
from fastapi import APIRouter, Request, Response
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from idempotency.application import runtime_of
from idempotency.errors import IdempotencyError
from idempotency.observe import metrics
from idempotency.sentinel import client_of
from idempotency.store import schema
from idempotency.store.overview import Snapshot, monitoring_connection, take_snapshot
from idempotency.store.statements import describe
from idempotency.upkeep import overview
from tasks import app as celery
from tasks.models import Base

from .schemas import Part, Readiness

# Seconds until a part counts as missing; and for those that say who does the work, within a probe's ten.
DEADLINE, DEADLINE_OF_WORK = 2.5, 8.0
# Seconds for which an answer is repeated: anyone may ask, and each check costs queries.
KEPT = 1.0
# Seconds that a due message may wait before the relay counts as late.
LATE = 60.0

# A standby, or a server that its operator or a full disk has made read-only.
_READ_ONLY = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean"

router = APIRouter()


class Unready(Exception):
    """A part answers, but requests cannot be accepted with it."""


@router.get("/livez", summary="The process answers")
async def live() -> dict[str, str]:
    """200 while the event loop runs. Nothing else is checked: a restart repairs no database."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="Requests can be accepted",
    responses={503: {"model": Readiness, "description": "A part is missing without which none can be accepted"}},
)
async def ready(request: Request, response: Response) -> Readiness:
    """A line for each part. Only Postgres is needed: without Redis, a broker or a relay, work is accepted and kept."""
    found: Readiness = await request.app.state.readiness.answer()
    response.status_code = 200 if found.ready else 503
    return found


@router.get("/metrics", summary="The process's counters, for Prometheus", response_class=Response)
def counters() -> Response:
    """Of this process alone, or of all that share `PROMETHEUS_MULTIPROC_DIR`."""
    text, media_type = metrics.exposition()
    return Response(text, media_type=media_type)


class ReadinessCheck:
    """Checks all parts at once, each with its deadline, and at most once in `KEPT` seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._found: Readiness | None = None
        self._until = 0.0

    async def answer(self) -> Readiness:
        async with self._lock:
            if self._found is None or time.monotonic() >= self._until:
                self._found, self._until = await _check_all(), time.monotonic() + KEPT
            return self._found


async def _check_all() -> Readiness:
    postgres, hints, work = await asyncio.gather(_in_time(_postgres, needed=True), _in_time(_redis), _work_in_time())
    parts = {"postgres": postgres, "redis": hints, **work}
    return Readiness(ready=all(part.ok for part in parts.values() if part.needed), parts=parts)


async def _in_time(check: Callable[[], str], *, needed: bool = False) -> Part:
    try:
        async with asyncio.timeout(DEADLINE):
            return Part(ok=True, needed=needed, detail=await asyncio.to_thread(check))
    except TimeoutError:
        return Part(ok=False, needed=needed, detail=f"no answer within {DEADLINE:g} s")
    except (IdempotencyError, Unready) as error:
        return Part(ok=False, needed=needed, detail=str(error))
    except ProgrammingError as error:
        return Part(ok=False, needed=needed, detail=describe(error))
    except (SQLAlchemyError, redis.RedisError, OSError) as error:
        return Part(ok=False, needed=needed, detail=type(error).__name__)


def _postgres() -> str:
    with monitoring_connection(runtime_of(celery).settings) as connection:
        schema.require_compatible(connection)
        if connection.exec_driver_sql(_READ_ONLY).scalar_one():
            raise Unready("takes no writes")
        for table in Base.metadata.sorted_tables:
            connection.execute(table.select().limit(0))  # its columns, and the right to read them
    return "answers, with the tables of this version"


def _redis() -> str:
    url = runtime_of(celery).settings.redis_url
    if url is None:
        return "not used"
    _client(url.get_secret_value()).ping()
    return "answers"


@lru_cache(maxsize=1)
def _client(address: str) -> redis.Redis:
    """Kept: one of Sentinels has connections to each of them. Once more, for an idle connection that a restart has closed."""
    return client_of(address, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 1))


async def _work_in_time() -> dict[str, Part]:
    try:
        async with asyncio.timeout(DEADLINE_OF_WORK):
            return await asyncio.to_thread(_work)
    except TimeoutError:
        late = Part(ok=False, needed=False, detail=f"not known within {DEADLINE_OF_WORK:g} s")
        return dict.fromkeys(("broker", "relay", "consumers"), late)


def _work() -> dict[str, Part]:
    """The broker, the relay and the consumers: without them what is accepted waits in Postgres."""
    settings, found = runtime_of(celery).settings, Snapshot()
    try:
        with monitoring_connection(settings) as connection:
            found = take_snapshot(connection, settings)
        relay = _relay(found, settings.alarm_silence)
    except SQLAlchemyError as error:
        relay = Part(ok=False, needed=False, detail=f"not known: {type(error).__name__}")
    overview.ask_broker(celery, settings, found)
    answered = found.broker_answered
    broker = Part(ok=answered, needed=False, detail="answers" if answered else "does not answer")
    return {"broker": broker, "relay": relay, "consumers": _consumers(found)}


def _relay(found: Snapshot, silence: float) -> Part:
    lag = max(found.outbox.oldest or 0.0, 0.0)
    running = found.has_relay(silence)
    detail = f"{'running' if running else 'none is running'}, {found.outbox.unpublished} due, for {lag:.0f} s"
    return Part(ok=running and lag < LATE, needed=False, detail=detail)


def _consumers(found: Snapshot) -> Part:
    counted = {name: found.queue(name).consumers for name in celery.amqp.queues}
    detail = ", ".join(f"{name} {'?' if number is None else number}" for name, number in sorted(counted.items()))
    return Part(ok=all(counted.values()), needed=False, detail=detail)
