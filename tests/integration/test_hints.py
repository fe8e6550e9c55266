"""The hints' connections to Redis: closed, late and interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis as redis_client

from idempotency.attempt.hints import Hint, Hints
from idempotency.wire.keys import OperationId

# More than redis-py's pool gives by default.
CLOSED = 130


@pytest.fixture
def hints(redis_url: str) -> Hints:
    return Hints(redis_url, owner=uuid4().hex, lease=60, timeout=5.0, pause=60)


@pytest.fixture
def own(redis_url: str, hints: Hints) -> Iterator[redis_client.Redis]:
    """A client that knows which connection is that of the hints."""
    with redis_client.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def new() -> tuple[OperationId, str, str]:
    return OperationId("default", "task", uuid4().hex), uuid4().hex, "v1:00"


def test_a_hint_is_left_and_found(hints: Hints) -> None:
    id, token, fingerprint = new()
    assert hints.take(id, token, fingerprint) is Hint.FREE
    assert hints.take(id, token, fingerprint) is Hint.FREE  # our own
    assert hints.take(id, uuid4().hex, fingerprint) is Hint.HELD
    hints.count(id, token, fingerprint)
    assert hints.take(id, uuid4().hex, fingerprint) is Hint.COUNTED


def test_connections_that_are_closed_are_replaced_however_many(hints: Hints, own: redis_client.Redis) -> None:
    for _ in range(CLOSED):
        id, token, fingerprint = new()
        assert hints.take(id, token, fingerprint) is Hint.FREE
        assert hints.take(id, uuid4().hex, fingerprint) is Hint.HELD  # it was asked, and has answered
        own.client_kill_filter(_id=_number(hints))


def _number(hints: Hints) -> str:
    assert hints._redis is not None
    return str(hints._redis.ask("CLIENT", "ID"))


def test_threads_get_each_their_own_answers(hints: Hints) -> None:
    wrong = []

    def ask() -> None:
        for _ in range(200):
            id, token, fingerprint = new()
            if (hints.take(id, token, fingerprint), hints.take(id, uuid4().hex, fingerprint)) != (Hint.FREE, Hint.HELD):
                wrong.append(id)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_answer_that_was_not_read_is_no_answer_to_the_next(hints: Hints) -> None:
    """A soft time limit may interrupt anything."""
    assert hints._redis is not None
    id, token, fingerprint = new()
    hints.take(id, token, fingerprint)
    connection = hints._redis._idle[-1]
    read, connection.read_response = connection.read_response, _interrupted
    with pytest.raises(InterruptedError):
        hints.take(id, uuid4().hex, fingerprint)
    connection.read_response = read
    other = new()
    assert hints.take(*other) is Hint.FREE


def _interrupted(*_: object, **__: object) -> None:
    raise InterruptedError
