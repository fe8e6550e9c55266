"""Input validation. Every error names the field and the limit, never the value of another field."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from iso4217 import Currency

from idempotency.errors import CallRefused
from idempotency.wire.keys import check_key

# An amount counts the minor unit: a cent, a whole yen, a thousandth of a dinar.
CURRENCIES = frozenset(
    {"AUD", "BHD", "CAD", "CHF", "EUR", "GBP", "JOD", "JPY", "KRW", "KWD", "NOK", "NZD", "OMR", "SEK", "TND", "USD"}
)
# The provider's limit: eight digits in the minor unit (docs.stripe.com/currencies).
MAX_AMOUNT = 99_999_999
MAX_QUANTITY = 1_000_000
MAX_TEXT = 200
# What the warehouse may find in a parcel.
VERDICTS = ("APPROVED", "DAMAGED", "REJECTED")
# RFC 5321 allows 64 characters before the @; "customer-" takes nine.
MAX_LOCAL_PART = 55
LOCAL_PART = re.compile(r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*")
ORDER_ID = re.compile(r"order-[0-9a-f]{32}")


class Taken(ValueError):
    """This id is that of something else, which was accepted before."""


class NotReturnable(ValueError):
    """There is no such order, or it cannot be sent back (again)."""


def check_id(field: str, value: object) -> str:
    """Check an identifier that is used as an idempotency key. Raises `ValueError`."""
    try:
        return check_key(value, field=field)
    except CallRefused as error:
        raise ValueError(str(error)) from None


def new_order_id() -> str:
    """An id for an order, of a form that nothing else has."""
    return f"order-{uuid4().hex}"


def check_purchase_id(value: object) -> str:
    """Check the id of a purchase. Raises `ValueError`, and `Taken` for an order's, whose payment has the same id."""
    id = check_id("purchase_id", value)
    if ORDER_ID.fullmatch(id):
        raise Taken("purchase_id: is the id of an order, which is paid by itself")
    return id


def check_local_part(field: str, value: object) -> str:
    """Check an identifier that is also used in an e-mail address: letters, digits and . _ + -. Raises `ValueError`."""
    text = check_id(field, value)
    if len(text) > MAX_LOCAL_PART or not LOCAL_PART.fullmatch(text):
        raise ValueError(f"{field}: at most {MAX_LOCAL_PART} letters, digits and . _ + -")
    return text


def check_text(field: str, value: object) -> str:
    """Check a short note for people. Raises `ValueError`."""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{field}: at most {MAX_TEXT} printable characters")
    return value


def check_amount(field: str, value: object, *, at_least: int) -> int:
    """Check an amount in the minor unit. Raises `ValueError` for anything but an integer within the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field}: must be an integer in the minor unit, got {type(value).__name__}")
    if not at_least <= value <= MAX_AMOUNT:
        raise ValueError(f"{field}: must be between {at_least} and {MAX_AMOUNT}, got {value}")
    return value


def check_quantity(field: str, value: object) -> int:
    """Check a number of pieces. Raises `ValueError` for anything but an integer within the limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_QUANTITY:
        raise ValueError(f"{field}: must be an integer between 1 and {MAX_QUANTITY}")
    return value


def exponent(currency: str) -> int:
    """How many decimals a supported currency has: 2 for EUR, 0 for JPY, 3 for KWD (ISO 4217)."""
    return Currency(currency).exponent or 0


def check_minor_unit(field: str, amount: int, currency: str) -> None:
    """Check that the provider takes this amount in this currency. Raises `ValueError`.

    It rounds three-decimal currencies to two: their amounts end with 0 (docs.stripe.com/currencies#three-decimal).
    """
    if exponent(currency) == 3 and amount % 10:
        raise ValueError(f"{field}: in {currency}, must be a multiple of 10")


def check_purchase(customer_id: object, amount: object, currency: object) -> dict[str, Any]:
    """Check who pays how much, as columns of a row. Raises `ValueError`, which names the field as in a purchase."""
    customer = check_local_part("customer_id", customer_id)
    minor, name = check_amount("amount_cents", amount, at_least=0), check_currency("currency", currency)
    check_minor_unit("amount_cents", minor, name)
    return {"customer_id": customer, "amount": minor, "currency": name}


def check_currency(field: str, value: object) -> str:
    """Check that the application supports a currency. Raises `ValueError`."""
    if not isinstance(value, str) or value not in CURRENCIES:
        raise ValueError(f"{field}: must be one of {', '.join(sorted(CURRENCIES))}")
    return value


def check_flag(field: str, value: object) -> bool:
    """Check a yes or no. Raises `ValueError`."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}: must be true or false")
    return value


def check_verdict(field: str, value: object) -> str:
    """Check what the warehouse says of a return. Raises `ValueError`."""
    if not isinstance(value, str) or value not in VERDICTS:
        raise ValueError(f"{field}: must be one of {', '.join(VERDICTS)}")
    return value
