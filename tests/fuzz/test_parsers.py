"""The seeds, and some inputs that are drawn, for each parser; and that an oracle can say no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from idempotency.webhooks.addresses import Target
from tests.fuzz import parsers, seeds
from tests.fuzz.__main__ import fuzz
from tests.fuzz.parsers import PARSERS, Parser

EXAMPLES = 100


def kept() -> Iterator[Any]:
    for name, inputs in seeds.read().items():
        for number, each in enumerate(inputs):
            yield pytest.param(name, each, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "seed"), list(kept()))
def test_what_has_failed_once_holds(name: str, seed: Any) -> None:
    PARSERS[name].holds(seed)


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_drawn_holds(name: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(PARSERS[name].inputs)
    def holds(given: Any) -> None:
        PARSERS[name].holds(given)

    holds()


def test_a_failure_is_made_small_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "FILE", tmp_path / "parsers.json")
    seeds.FILE.write_text("{}")

    def at_most_three(given: str) -> None:
        if len(given) > 3:
            raise ValueError("too long")

    examples, what = fuzz(Parser("lengths", some.text("a"), at_most_three), 30)
    assert examples
    assert what == "failed with 'aaaa': ValueError: too long"
    assert seeds.read() == {"lengths": ["aaaa"]}


def test_a_url_that_others_read_differently_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "target_of", lambda url, allowed: Target("elsewhere.example", 443, "/"))
    with pytest.raises(AssertionError, match="httpx would connect to"):
        parsers.webhook_url("https://hooks.example.com/")


def test_a_signature_that_is_accepted_too_easily_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "check_stripe", lambda *_: None)
    with pytest.raises(AssertionError, match="at another time"):
        parsers.stripe_signature({"header": "t=OLD,v1=STRIPE_OLD", "body": parsers._EVENT})
    with pytest.raises(AssertionError, match="without the digest"):
        parsers.stripe_signature({"header": "t=NOW,v1=STRIPE_OLD", "body": parsers._EVENT})
    monkeypatch.setattr(parsers, "check_standard", lambda *_: None)
    headers = {"webhook-id": "msg_1", "webhook-timestamp": "NOW", "webhook-signature": "v1,00"}
    with pytest.raises(AssertionError, match="without its digest"):
        parsers.standard_signature({"headers": headers, "body": parsers._EVENT})
    monkeypatch.setattr(parsers, "signed_at", lambda *_: parsers._NOW)
    with pytest.raises(AssertionError, match="another body is believed"):
        parsers.message_signature({"headers": {}, "signature": None, "body": "[]"})


def test_a_key_that_is_read_wrongly_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "key_of", lambda headers: "a")
    with pytest.raises(AssertionError, match="read as 'a'"):
        parsers.idempotency_key('"b"')
