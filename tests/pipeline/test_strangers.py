"""A stranger without any credentials, while the company's issuer does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text

from api.operators import CHECKS_AT_ONCE, CHECKS_WAITING, OTHERS_WAITING
from idempotency import issuer as keys_of_issuer
from tests.integration.test_identities import AUDIENCE, ISSUER
from tests.integration.test_slow_issuer import KEY, Issuer, token
from tests.pipeline.test_admin import LETTERS, PAYMENT, Admin, admin, configure, started  # noqa: F401
from tests.support.tasks import transactional

# As many as the threads that all routes share (anyio), and some more.
GUESSES = 60


@pytest.mark.long
def test_guesses_at_an_operators_token_stop_no_payments_while_the_issuer_is_silent(
    admin: Admin,  # noqa: F811
    configure: Callable[..., None],  # noqa: F811
) -> None:
    """Each guess waits for the issuer's keys: four in threads, some more for those, and the others are told to come again."""
    issuer = Issuer()
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=issuer.url)
    issuer.pause.clear()

    async def pay(client: httpx.AsyncClient) -> tuple[int, float]:
        headers = {"Authorization": f"Bearer {admin.tokens['tenant']}", "Idempotency-Key": uuid4().hex}
        begun = time.monotonic()
        answer = await client.post("/payments", json=PAYMENT, headers=headers)
        return answer.status_code, time.monotonic() - begun

    async def attack() -> tuple[tuple[int, float], list[int]]:
        async with started(admin.app) as client:
            assert (await pay(client))[0] == 202  # before
            guess = token("unknown")
            guesses = [
                asyncio.create_task(client.get(LETTERS, headers={"Authorization": f"Bearer {guess}"}))
                for _ in range(GUESSES)
            ]
            await asyncio.sleep(1)
            try:
                during = await asyncio.wait_for(pay(client), 20)
                refused = [each for each in guesses if each.done()]
            finally:
                issuer.pause.set()
            return during, [each.result().status_code for each in refused]

    try:
        during, refused = asyncio.run(attack())
    finally:
        issuer.pause.set()
        issuer.server.shutdown()
        issuer.server.server_close()
    assert during[0] == 202
    assert refused == [429] * (GUESSES - CHECKS_AT_ONCE - CHECKS_WAITING)


def test_who_has_a_known_key_does_not_stand_in_line_with_strangers(
    admin: Admin,  # noqa: F811
    configure: Callable[..., None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each guess names another key, for which a silent issuer is asked."""
    issuer = Issuer()
    configure(oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_keys=issuer.url)
    monkeypatch.setattr(keys_of_issuer, "PAUSE", 0.0)

    async def attack() -> tuple[list[int], list[int]]:
        async with started(admin.app) as client:

            async def ask(token: str) -> int:
                return (await client.get(LETTERS, headers={"Authorization": f"Bearer {token}"})).status_code

            operators = [await ask(token("known", KEY))]
            issuer.pause.clear()
            guessed = token("unknown")
            guesses = [asyncio.create_task(ask(guessed)) for _ in range(CHECKS_AT_ONCE + CHECKS_WAITING + 4)]
            await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)  # the line is full
            operators.append(await ask(token("known", KEY)))
            has_ended = [each.done() for each in guesses].count(True)
            issuer.pause.set()
            return operators, [has_ended, *await asyncio.gather(*guesses)]

    try:
        operators, (has_ended, *guesses) = asyncio.run(attack())
    finally:
        issuer.pause.set()
        issuer.server.shutdown()
        issuer.server.server_close()
    assert operators == [200, 200]
    assert has_ended == guesses.count(429) == 4
    assert guesses.count(401) == CHECKS_AT_ONCE + CHECKS_WAITING


def test_guesses_that_wait_for_the_database_are_counted_too(admin: Admin) -> None:  # noqa: F811
    """No issuer is asked about them: the operators are in the database, whose table is locked."""
    many = CHECKS_AT_ONCE + OTHERS_WAITING + 4

    async def attack() -> tuple[list[int], list[int]]:
        async with started(admin.app) as client:
            headers = {"Authorization": "Bearer guess"}
            guesses = [asyncio.create_task(client.get(LETTERS, headers=headers)) for _ in range(many)]
            await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.5)
            refused = [each.result().status_code for each in guesses if each.done()]
            lock.rollback()
            return refused, [each.status_code for each in await asyncio.gather(*guesses)]

    with transactional(admin.engine).connect() as lock:
        lock.execute(text("LOCK TABLE idempotency.operators IN ACCESS EXCLUSIVE MODE"))
        refused, answers = asyncio.run(attack())
    assert refused == [429] * 4
    assert set(answers) == {401, 429}
