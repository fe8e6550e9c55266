"""The lines of the library's log."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from idempotency.observe.logs import WholeLines, log


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
        ("a\r\x1b[2Kb", "a\\r\\x1b[2Kb"),
        ("\u2028\u202e", "\\u2028\\u202e"),
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


def formatted(message: str, *args: Any, **options: Any) -> str:
    """A line as a handler of Celery's writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    handler.addFilter(WholeLines())
    logger = logging.Logger("celery")
    logger.addHandler(handler)
    logger.error(message, *args, **options)
    return stream.getvalue()


FORGED = "x\n[INFO] Task paid\x1b[2J"


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("Task %s[%s] received", ("t", FORGED)),
        ("Task %(name)s[%(id)s] raised", ({"name": "t", "id": FORGED},)),
        ("%r", (ValueError(FORGED),)),
        ("%s", (ValueError(FORGED),)),
        ("missed heartbeat from %s: %d, %.1f s", (FORGED, 3, 1.5)),
    ],
)
def test_what_others_log_stays_one_line(message: str, args: tuple[Any, ...]) -> None:
    written = formatted(message, *args)
    assert written.count("\n") == 1
    assert "\x1b" not in written
    assert "Task paid" in written


def test_a_traceback_looks_like_no_other_line_and_shows_no_row() -> None:
    said = "\nDETAIL:  Key (iban)=({iban}) already exists.".format(iban="DE44")
    try:
        try:
            raise KeyError(f"duplicate{said}")
        except KeyError as error:
            raise ValueError(f"{FORGED}{said}") from error
    except ValueError:
        written = formatted("failed", exc_info=True)
    first, *rest = written.splitlines()
    assert first == "[ERROR] failed"
    assert all(line.startswith("    ") for line in rest)
    assert "    ValueError: x" in rest
    assert "DE44)" not in written
    assert "\x1b" not in written
