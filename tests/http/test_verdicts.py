"""What is not known about an effect decides how its request ends, whatever the handler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency import StillUnknown
from idempotency.errors import EffectUnknown, PermanentError
from idempotency.http import RequestAttempt
from tests.http.test_handlers import Provider, post, with_effects
from tests.support.edge import Edge, new_key


def open_since(edge: Edge, key: str, seconds: float) -> None:
    """The effect `charge` was begun so many seconds earlier."""
    with edge.engine.connect() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET effects = jsonb_set(effects, '{charge,begun_at}',
                 to_jsonb((effects #>> '{charge,begun_at}')::float8 - :seconds)) WHERE key = :key"""),
            {"key": key, "seconds": seconds},
        )


def fail_once(failures: list[ValueError]) -> None:
    if failures:
        raise failures.pop()


@pytest.mark.parametrize(("lost", "code"), [(1, "effect_unknown"), (0, "unfinished")])
def test_an_effect_begun_with_other_arguments_is_left_to_a_person(edge: Edge, lost: int, code: str) -> None:
    """A handler that makes an id of its own in each run charges with another one in the next request."""
    key, provider, ids, failures = new_key(), Provider(fails=lost), iter(range(9)), [ValueError("after the charge")]

    def work(attempt: RequestAttempt) -> Any:
        charged = attempt.effect("charge", provider.charge, next(ids))
        fail_once(failures)
        return charged

    first, second, third = post(with_effects(edge, work), key, times=3)
    assert (first.status_code, second.status_code, second.json()["code"]) == (500, 500, code)
    assert (third.json(), edge.letters(key), len(provider.keys)) == (second.json(), [code], 1)


def test_a_verdict_that_a_handler_catches_is_left_to_a_person(edge: Edge) -> None:
    key, provider = new_key(), Provider(fails=1)

    def work(attempt: RequestAttempt) -> Any:
        try:
            return attempt.effect("charge", provider.charge, 5)
        except EffectUnknown:
            return {"state": "pending"}

    (first,) = post(with_effects(edge, work), key)
    open_since(edge, key, 7 * 86400)
    (second,) = post(with_effects(edge, work), key)
    assert (first.status_code, second.status_code, second.json()["code"]) == (500, 500, "effect_unknown")
    assert edge.letters(key) == ["effect_unknown"]


def test_an_answer_over_an_open_effect_is_not_kept(edge: Edge) -> None:
    """The handler takes a lost answer for "pending": the next request repeats the call under its key."""
    key, provider = new_key(), Provider(fails=1)

    def work(attempt: RequestAttempt) -> Any:
        try:
            return attempt.effect("charge", provider.charge, 5)
        except TimeoutError:
            return {"state": "pending"}

    first, second, third = post(with_effects(edge, work), key, times=3)
    assert (first.status_code, second.status_code, second.json()) == (503, 201, {"charged": 5})
    assert third.json() == second.json()
    assert provider.keys == [provider.keys[0]] * 2


def test_a_deferral_tells_the_client_when_to_ask_again_and_nobody_asks_before(edge: Edge) -> None:
    key, provider, asked = new_key(), Provider(fails=1), []

    def charge(*, idempotency_key: str) -> None:
        provider.keys.append(idempotency_key)
        if len(provider.keys) == 1:
            raise TimeoutError
        raise PermanentError("busy", "busy")

    def reconcile(*, doubt: Any) -> StillUnknown:
        asked.append(doubt)
        return StillUnknown(3600)

    def work(attempt: RequestAttempt) -> Any:
        return attempt.effect("charge", charge, reconcile=reconcile)

    first, *others = post(with_effects(edge, work), key, times=4)
    assert first.status_code == 500
    for answer in others:
        assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (503, "unavailable")
        assert 3500 < int(answer.headers["retry-after"]) <= 3600
    assert (len(provider.keys), len(asked)) == (2, 2)
