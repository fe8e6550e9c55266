"""What Celery is told of a message that is rejected: nothing, for its operation has not failed by that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import Reject

from idempotency.worker.revocation import KeyedRequest, Request


@pytest.mark.parametrize("kind", [KeyedRequest, Request])
@pytest.mark.parametrize("requeue", [False, True])
def test_neither_result_nor_signal_nor_errback_says_that_it_has_failed(
    kind: type[Any], requeue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected: list[bool] = []
    monkeypatch.setattr(kind, "reject", lambda self, requeue: rejected.append(requeue))
    request = object.__new__(kind)
    request.id = "t-1"
    request._task = SimpleNamespace()  # asked for its backend, this raises
    try:
        raise Reject("bank.charge: still in doubt after 5 rounds", requeue=requeue)
    except Reject:
        request.on_failure(ExceptionInfo(internal=True))
    assert rejected == [requeue]
