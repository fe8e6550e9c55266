"""What a person looks up at the sandbox: whether a call under a key has happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import stripe

from sandbox import finding
from sandbox import process as sandbox
from sandbox.finding import find


def charge(client: stripe.StripeClient, key: str) -> str:
    made = client.v1.payment_intents.create(
        {
            "amount": 1250,
            "currency": "eur",
            "confirm": True,
            "payment_method": "pm_card_visa",
            "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
            "metadata": {"purchase_id": key, "effect_key": key},
        },
        {"idempotency_key": key},
    )
    return made.id


@pytest.mark.long
def test_what_was_made_under_a_key_is_found_however_long_the_list_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "PAGE", 2)
    with sandbox.running("provider", tmp_path) as provider:
        client = stripe.StripeClient("sk_test_sandbox", base_addresses={"api": provider.url})
        first = charge(client, "k-1")
        refund = client.v1.refunds.create(
            {"payment_intent": first, "amount": 250, "metadata": {"effect_key": "r-1"}}, {"idempotency_key": "r-1"}
        )
        for number in range(4):
            charge(client, f"other-{number}")
        wanted = {"id": first, "amount": 1250, "currency": "eur", "status": "succeeded"}
        assert find(provider.url, "k-1", "sk_test_sandbox") == wanted
        found = find(provider.url, "r-1", "sk_test_sandbox")
        assert found is not None
        assert found["id"] == refund.id
        assert find(provider.url, "k-2", "sk_test_sandbox") is None
        command = [sys.executable, "-m", "sandbox", "find", "--url", provider.url]
        done = subprocess.run([*command, "k-1"], capture_output=True, text=True, check=True)
        option, result = json.loads(done.stdout)["outcome"]
        assert (option, json.loads(result)) == ("--happened", wanted)
        done = subprocess.run([*command, "k-2"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"found": None, "outcome": ["--not-happened"]}
