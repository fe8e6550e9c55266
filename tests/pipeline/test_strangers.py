"""A stranger without any credentials, while the company's issuer does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

import httpx

from api.operators import ASKED_AT_ONCE, WAITING
from tests.integration.test_identities import AUDIENCE, ISSUER
from tests.integration.test_slow_issuer import Issuer, token
from tests.pipeline.test_admin import LETTERS, PAYMENT, Admin, admin, configure, started  # noqa: F401

# As many as the threads that all routes share (anyio), and some more.
GUESSES = 60


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
    assert refused == [429] * (GUESSES - ASKED_AT_ONCE - WAITING)
