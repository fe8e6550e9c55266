"""What a person looks up at the provider: the charge or refund that was made under an idempotency key."""

from __future__ import annotations

from typing import Any

import httpx

LISTS = ("payment_intents", "refunds")
PAGE = 100


def find(url: str, key: str, api_key: str) -> dict[str, Any] | None:
    """The charge or refund of a call, as the task would have got it: id, amount, currency, status. None: there is none.

    Reads the whole lists, as a person would, and not the search, which lags. Raises `httpx.HTTPError`.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=10) as client:
        for kind in LISTS:
            after: dict[str, str] = {}
            while True:
                page = client.get(f"/v1/{kind}", params={"limit": PAGE, **after}).raise_for_status().json()
                for thing in page["data"]:
                    if thing["metadata"].get("effect_key") == key:
                        return {name: thing[name] for name in ("id", "amount", "currency", "status")}
                if not page["has_more"]:
                    break
                after = {"starting_after": page["data"][-1]["id"]}
    return None
