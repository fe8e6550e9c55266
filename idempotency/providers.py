"""What a payment provider promises about idempotency keys. Give it to the tasks that call the provider:

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}", provider=STRIPE)

An effect of such a task is repeated only while the provider keeps its key, and a refusal answers for an earlier call of
unknown outcome only if the provider stores refusals. `idempotency doctor` checks retries and retentions against it.
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class ProviderContract:
    """How a provider treats idempotency keys. `keeps_keys_for` is in seconds.

    `keeps_refusals`: every first answer is stored and replayed; otherwise only successes are, and repeating a refused
    call executes it again. `compares_body`: the provider rejects a used key with another request; the library compares
    arguments in any case.
    """

    name: str
    keeps_keys_for: float
    keeps_refusals: bool
    compares_body: bool


# docs.stripe.com/api/idempotent_requests: at least 24 hours; every answer once execution has begun, errors included.
STRIPE = ProviderContract("Stripe", 24 * HOUR, keeps_refusals=True, compares_body=True)
# docs.adyen.com/development-resources/api-idempotency: at least 31 days; does not mention comparing bodies.
ADYEN = ProviderContract("Adyen", 31 * 24 * HOUR, keeps_refusals=True, compares_body=False)
# checkout.com/docs/developer-resources/api/idempotency: 24 hours in production; only successes.
CHECKOUT = ProviderContract("Checkout.com", 24 * HOUR, keeps_refusals=False, compares_body=False)
