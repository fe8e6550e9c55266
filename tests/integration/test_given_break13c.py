"""Proofs of a second reader: what ordinary callers of signed and unsigned messages lose."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from tests.support import bank as b
from tests.support import queues


def test_a_shadow_made_of_the_messages_key_fails_its_call(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery gives `shadow_name` all options of the message: with its headers, where the key is, and its `argsrepr`."""

    def shadow_name(args: Any, kwargs: Any, options: dict[str, Any]) -> str:
        return f"deposit {options['headers']['idempotency-key']}"

    monkeypatch.setattr(b.deposit, "shadow_name", shadow_name)
    with pytest.raises(KeyError):
        b.deposit.apply_async(("a",))
