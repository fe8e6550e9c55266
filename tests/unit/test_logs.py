"""The lines of the library's log."""

from __future__ import annotations

import logging

import pytest

from idempotency.observe.logs import log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "idempotency")
    return caplog


def test_a_line_begins_with_what_an_operator_looks_for(lines: pytest.LogCaptureFixture) -> None:
    log.info("claimed", seconds=0.5, attempt=1, key="k1", task="shop.pay", fence=None)
    (record,) = lines.records
    assert record.getMessage() == "event=claimed task=shop.pay key=k1 attempt=1 seconds=0.5"
    assert (record.name, record.levelname, record.funcName) == (
        "idempotency",
        "INFO",
        "test_a_line_begins_with_what_an_operator_looks_for",
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("two words", '"two words"'),
        ('a "quote"', '"a \\"quote\\""'),
        ("a=b", '"a=b"'),
        ("two\nlines", "two\\nlines"),
        ("C:\\x y", '"C:\\\\x y"'),
        (None, ""),
        (True, "true"),
        (["a", 1], "\"['a', 1]\""),
        ("100%", "100%"),
    ],
)
def test_a_value_stays_one_value_on_one_line(lines: pytest.LogCaptureFixture, value: object, written: str) -> None:
    log.warning("seen", value=value)
    assert lines.messages == [f"event=seen value={written}"]


def test_an_exception_is_part_of_its_line(lines: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("no account")
    except ValueError:
        log.exception("rejected", task="shop.pay")
    (message,) = lines.messages
    assert message.startswith('event=rejected task=shop.pay exception="Traceback ')
    assert message.endswith('\\nValueError: no account"')
    assert "\n" not in message


def test_a_level_that_is_off_costs_no_text(lines: pytest.LogCaptureFixture) -> None:
    class Untouched:
        def __str__(self) -> str:
            raise AssertionError

    lines.set_level(logging.ERROR, "idempotency")
    log.info("claimed", value=Untouched())
    assert lines.messages == []
