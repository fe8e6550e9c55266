"""What a provider promises about idempotency keys: declared once, at the gateway, and given to its tasks.

    @app.task(base=IdempotentTask, bind=True, key="{payment_id}", provider=STRIPE)

The effects of such a task are repeated only for as long as the provider keeps a key, and a refusal closes an effect
that was begun before only if the provider keeps refusals. `idempotency doctor` compares it with retries and retentions.
"""

from __future__ import annotations

from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class ProviderContract:
    """How long a key lives (seconds), which answers are kept and replayed under it, and whether bodies are compared.

    `keeps_refusals`: the first answer is replayed whatever it was; otherwise only a success is, and a call that was
    refused is carried out anew when it is repeated. `compares_body`: another request under a used key is an error at
    the provider too; the library compares arguments in any case.
    """

    name: str
    keeps_keys_for: float
    keeps_refusals: bool
    compares_body: bool


# docs.stripe.com/api/idempotent_requests: at least 24 hours; any answer of a call that began to execute, errors included.
STRIPE = ProviderContract("Stripe", 24 * HOUR, keeps_refusals=True, compares_body=True)
# docs.adyen.com/development-resources/api-idempotency: at least 31 days; says nothing about comparing bodies.
ADYEN = ProviderContract("Adyen", 31 * 24 * HOUR, keeps_refusals=True, compares_body=False)
# checkout.com/docs/developer-resources/api/idempotency: 24 hours in production; only what was processed successfully.
CHECKOUT = ProviderContract("Checkout.com", 24 * HOUR, keeps_refusals=False, compares_body=False)
