"""What a deduplicated task asks for by Celery's `retry`, on Redis and on DynamoDB."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from idempotency.worker import waiting
from tests.stores.test_tasks import deliver, id_of, make, new_key, shop, store_of  # noqa: F401


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seconds", "by_hand", "expected"),
    [("nan", False, "FAILURE"), ("nan", True, "FAILURE"), ("-1e12", False, "RETRY"), ("-inf", True, "RETRY")],
)
def test_a_retry_after_no_number_of_seconds_ends_the_operation_and_one_in_the_past_is_due(
    shop: Celery,  # noqa: F811
    deliver: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    seconds: str,
    by_hand: bool,
    expected: str,
) -> None:
    """No store could write such a release, which would be taken for a store that is away."""
    monkeypatch.setattr(waiting, "PATIENCE", 1.0)

    def body(self: Any, account: str) -> None:
        raise Retry(when=float(seconds)) if by_hand else self.retry(countdown=float(seconds))

    task = make(shop, body, key="{account}")
    key = new_key()
    assert deliver(task, key).state == expected
    stored = store_of(shop).read(id_of(task, key))
    assert stored is not None
    assert stored.state == {"FAILURE": "failed", "RETRY": "released"}[expected]
