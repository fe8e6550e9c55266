"""An application that puts an id into the code of a failure makes no series of each operation."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from idempotency.observe import metrics


def test_codes_beyond_the_first_hundred_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_codes", {})
    for number in range(metrics.CODES + 50):
        metrics.count_failed("codes.many", f"declined-{number}")
    for code in ("declined-0", "attempts_exhausted"):
        metrics.count_failed("codes.many", code)

    counted = {
        sample.labels["code"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "idempotency_failed_total" and sample.labels["task"] == "codes.many"
    }
    assert len(counted) == metrics.CODES + 2
    assert counted["declined-0"] == 2
    assert counted["attempts_exhausted"] == 1  # the library's own are few
    assert counted[metrics.OTHER] == 50
