"""Payment intents and refunds like Stripe's: parameters, rules, and the JSON of objects and errors.

Not implemented: minimum charge amounts per currency, saved customers, manual capture, 3-D Secure.
Amounts are integers of at least 1 in the currency's minor unit.
"""

import json
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

# Stripe's test payment method for a card that is always declined.
DECLINING_METHOD = "pm_card_chargeDeclined"
MAX_AMOUNT = 99_999_999
_THREE_DECIMALS = {"bhd", "jod", "kwd", "omr", "tnd"}
_INTENT_PARAMS = {
    "amount",
    "automatic_payment_methods[allow_redirects]",
    "automatic_payment_methods[enabled]",
    "confirm",
    "currency",
    "error_on_requires_action",
    "payment_method",
}
_METADATA_NAME = re.compile(r"metadata\[([^\]]*)\]")
_QUERY = re.compile(r"""\s*metadata\[(['"])([\w-]{1,40})\1\]\s*:\s*(['"])((?:\\.|(?!\3)[^\\])*)\3\s*""")
_COLUMNS = "seq, id, amount, currency, payment_method, metadata, created"
CHARGED, DECLINED, PROCESSING = "succeeded", "requires_payment_method", "processing"
_INTENTS = f"""(
    SELECT {_COLUMNS}, '{CHARGED}' AS status FROM charges
    UNION ALL SELECT {_COLUMNS}, '{DECLINED}' FROM declines
    UNION ALL SELECT {_COLUMNS}, '{PROCESSING}' FROM undecided u
        WHERE NOT EXISTS (SELECT 1 FROM charges c WHERE c.id = u.id)
          AND NOT EXISTS (SELECT 1 FROM declines d WHERE d.id = u.id)
)"""
_REFUNDS = """SELECT r.id AS id, payment_intent, amount, currency, metadata, r.created AS created,
    CASE WHEN f.id IS NOT NULL THEN 'failed' WHEN p.id IS NOT NULL THEN 'pending' ELSE 'succeeded' END, f.reason
FROM refunds r LEFT JOIN failed_refunds f ON f.id = r.id LEFT JOIN pending_refunds p ON p.id = r.id"""


class ApiError(Exception):
    """An answer other than 2xx, in Stripe's format."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        error = {"type": kind, "message": message, "code": code, "param": param, **more}
        self.body = {"error": {name: value for name, value in error.items() if value is not None}}


def invalid(message: str, *, code: str | None = None, param: str | None = None, status: int = 400) -> ApiError:
    """The error for an invalid request."""
    return ApiError(status, "invalid_request_error", message, code=code, param=param)


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a JSON body, as stored under an idempotency key."""

    status: int
    body: str

    @classmethod
    def of(cls, value: Mapping[str, Any], status: int = 200) -> Self:
        return cls(status, json.dumps(value, separators=(",", ":")))

    @classmethod
    def error(cls, error: ApiError) -> Self:
        return cls.of(error.body, error.status)


@dataclass(frozen=True, slots=True)
class NewPaymentIntent:
    """The validated parameters of POST /v1/payment_intents."""

    amount: int
    currency: str
    payment_method: str
    metadata: dict[str, str]

    @classmethod
    def parse(cls, form: Mapping[str, str]) -> Self:
        metadata = _metadata(form)
        _reject_unknown(form, _INTENT_PARAMS)
        if _required(form, "confirm") != "true":
            raise invalid("This sandbox only captures at once: confirm must be true.", param="confirm")
        if form.get("automatic_payment_methods[allow_redirects]") != "never":
            raise invalid(
                "Confirming without a return_url needs automatic_payment_methods[allow_redirects]=never.",
                param="automatic_payment_methods",
            )
        currency = _required(form, "currency").lower()
        if not re.fullmatch("[a-z]{3}", currency):
            raise invalid("Invalid currency: it must be a three-letter ISO code.", param="currency")
        amount = _amount(_required(form, "amount"))
        _check_rounded(amount, currency)
        return cls(amount, currency, _required(form, "payment_method"), metadata)


@dataclass(frozen=True, slots=True)
class NewRefund:
    """The validated parameters of POST /v1/refunds. Without an amount, everything left is refunded."""

    payment_intent: str
    amount: int | None
    metadata: dict[str, str]

    @classmethod
    def parse(cls, form: Mapping[str, str]) -> Self:
        metadata = _metadata(form)
        _reject_unknown(form, {"payment_intent", "amount"})
        amount = _amount(form["amount"]) if "amount" in form else None
        return cls(_required(form, "payment_intent"), amount, metadata)


def create_payment_intent(
    db: sqlite3.Connection,
    new: NewPaymentIntent,
    idempotency_key: str,
    now: float,
    *,
    decline: bool,
    undecided_for: float | None = None,
) -> Answer:
    """Charge or decline, in the caller's transaction; or accept, to do so after `undecided_for` seconds."""
    decline = decline or new.payment_method == DECLINING_METHOD
    row = (_identifier("pi"), new.amount, new.currency, new.payment_method, json.dumps(new.metadata), now)
    if undecided_for is not None:
        db.execute(
            "INSERT INTO undecided (id, amount, currency, payment_method, idempotency_key, metadata, created, decided_at,"
            " is_declined) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row[:4], idempotency_key, *row[4:], now + undecided_for, decline),
        )
        return Answer.of(_payment_intent(row, PROCESSING))
    db.execute(
        f"INSERT INTO {'declines' if decline else 'charges'}"
        " (id, amount, currency, payment_method, idempotency_key, metadata, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row[:4], idempotency_key, *row[4:]),
    )
    intent = _payment_intent(row, DECLINED if decline else CHARGED)
    if decline:
        return Answer.error(
            ApiError(
                402,
                "card_error",
                "Your card was declined.",
                code="card_declined",
                decline_code="generic_decline",
                payment_intent=intent,
            )
        )
    return Answer.of(intent)


def decide_payment_intents(db: sqlite3.Connection, now: float) -> list[dict[str, Any]]:
    """Charge or decline what was accepted and is due, in the caller's transaction. Returns the intents as they are now."""
    due = db.execute(
        f"SELECT {_COLUMNS}, idempotency_key, is_declined FROM undecided u WHERE decided_at <= ?"
        " AND NOT EXISTS (SELECT 1 FROM charges c WHERE c.id = u.id)"
        " AND NOT EXISTS (SELECT 1 FROM declines d WHERE d.id = u.id)",
        (now,),
    ).fetchall()
    decided = []
    for _, *row, idempotency_key, declined in due:
        db.execute(
            f"INSERT INTO {'declines' if declined else 'charges'}"
            " (id, amount, currency, payment_method, idempotency_key, metadata, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*row[:4], idempotency_key, *row[4:]),
        )
        decided.append(_payment_intent(tuple(row), DECLINED if declined else CHARGED))
    return decided


def decide_refunds(db: sqlite3.Connection, now: float) -> list[dict[str, Any]]:
    """Let the pending refunds fail that are due, in the caller's transaction. Returns them as they are now."""
    due = [id for (id,) in db.execute("SELECT id FROM pending_refunds WHERE decided_at <= ?", (now,))]
    for id in due:
        db.execute("INSERT INTO failed_refunds VALUES (?, 'lost_or_stolen_card', ?)", (id, now))
        db.execute("DELETE FROM pending_refunds WHERE id = ?", (id,))
    return [get_refund(db, id) for id in due]


def create_refund(
    db: sqlite3.Connection, new: NewRefund, idempotency_key: str, now: float, *, fails_after: float | None = None
) -> Answer:
    """Refund at most what is left of the payment intent; with `fails_after`, that fails after so many seconds."""
    intent = db.execute("SELECT amount, currency FROM charges WHERE id = ?", (new.payment_intent,)).fetchone()
    if intent is None:
        return Answer.error(
            invalid(
                f"No such payment_intent: '{new.payment_intent}'",
                code="resource_missing",
                param="payment_intent",
            )
        )
    charged, currency = intent
    (refunded,) = db.execute(
        "SELECT coalesce(sum(amount), 0) FROM refunds WHERE payment_intent = ?"
        " AND id NOT IN (SELECT id FROM failed_refunds)",
        (new.payment_intent,),
    ).fetchone()
    if refunded == charged:
        return Answer.error(invalid("The charge has already been refunded.", code="charge_already_refunded"))
    left = charged - refunded
    amount = left if new.amount is None else new.amount
    try:
        _check_rounded(amount, currency)
    except ApiError as error:
        return Answer.error(error)
    if amount > left:
        return Answer.error(
            invalid(
                f"Refund amount ({amount}) is greater than unrefunded amount on charge ({left})",
                param="amount",
            )
        )
    row = (_identifier("re"), new.payment_intent, amount, currency, json.dumps(new.metadata), now)
    db.execute(
        "INSERT INTO refunds (id, payment_intent, amount, currency, idempotency_key, metadata, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*row[:4], idempotency_key, *row[4:]),
    )
    if fails_after is not None:
        db.execute("INSERT INTO pending_refunds VALUES (?, ?)", (row[0], now + fails_after))
    return Answer.of(get_refund(db, row[0]))


def get_payment_intent(db: sqlite3.Connection, identifier: str) -> dict[str, Any]:
    """Get one payment intent; 404 if there is none."""
    row = db.execute(f"SELECT {_COLUMNS}, status FROM {_INTENTS} WHERE id = ?", (identifier,)).fetchone()
    if row is None:
        raise invalid(f"No such payment_intent: '{identifier}'", code="resource_missing", param="intent", status=404)
    return _payment_intent(row[1:-1], row[-1])


def search_payment_intents(db: sqlite3.Connection, query: Mapping[str, str], visible_before: float) -> dict[str, Any]:
    """Search payment intents by one metadata value, newest first, among those that search already finds."""
    _reject_unknown(query, {"query", "limit", "page"})
    match = _QUERY.fullmatch(_required(query, "query"))
    if match is None:
        raise invalid("This sandbox understands one clause: metadata['key']:'value'.", param="query")
    name, value = match[2], re.sub(r"\\(.)", r"\1", match[4])
    limit, offset = _limit(query), query.get("page", "0")
    if not re.fullmatch("[0-9]{1,9}", offset):
        raise invalid("Invalid page.", param="page")
    # The name is not a bound parameter, so that SQLite can use the index on purchase_id.
    clause = f"""WHERE json_extract(metadata, '$."{name}"') = ? AND created <= ?"""
    rows = db.execute(
        f"SELECT {_COLUMNS}, status FROM {_INTENTS} {clause} ORDER BY created DESC, seq DESC LIMIT ? OFFSET ?",
        (value, visible_before, limit + 1, int(offset)),
    ).fetchall()
    return {
        "object": "search_result",
        "url": "/v1/payment_intents/search",
        "has_more": len(rows) > limit,
        "next_page": str(int(offset) + limit) if len(rows) > limit else None,
        "data": [_payment_intent(row[1:-1], row[-1]) for row in rows[:limit]],
    }


def list_payment_intents(db: sqlite3.Connection, query: Mapping[str, str]) -> dict[str, Any]:
    """List payment intents, newest first."""
    _reject_unknown(query, {"limit", "starting_after", "created[gte]", "created[lt]"})
    return _listed(
        db,
        query,
        "/v1/payment_intents",
        f"SELECT {_COLUMNS}, status FROM {_INTENTS}",
        lambda row: _payment_intent(row[1:-1], row[-1]),
    )


def get_refund(db: sqlite3.Connection, identifier: str) -> dict[str, Any]:
    """Get one refund; 404 if there is none."""
    row = db.execute(f"{_REFUNDS} WHERE r.id = ?", (identifier,)).fetchone()
    if row is None:
        raise invalid(f"No such refund: '{identifier}'", code="resource_missing", param="id", status=404)
    return _refund(row)


def list_refunds(db: sqlite3.Connection, query: Mapping[str, str]) -> dict[str, Any]:
    """List refunds, newest first, all or those of a payment intent. Unlike search, without a lag."""
    _reject_unknown(query, {"payment_intent", "limit", "starting_after", "created[gte]", "created[lt]"})
    return _listed(db, query, "/v1/refunds", _REFUNDS, _refund)


def _listed(
    db: sqlite3.Connection, query: Mapping[str, str], url: str, select: str, shown: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    limit = _limit(query)
    wanted: list[str] = ["true"]
    values: list[Any] = []
    for name, condition in (("created[gte]", "created >= ?"), ("created[lt]", "created < ?")):
        if name in query:
            if not re.fullmatch("[0-9]{1,12}", query[name]):
                raise invalid("Invalid timestamp.", param=name)
            wanted.append(condition)
            values.append(int(query[name]))
    if "payment_intent" in query:
        wanted.append("payment_intent = ?")
        values.append(_required(query, "payment_intent"))
    found = db.execute(f"SELECT * FROM ({select}) WHERE {' AND '.join(wanted)} ORDER BY created DESC, id", values)
    data = [shown(row) for row in found]
    ids = [thing["id"] for thing in data]
    if "starting_after" in query:
        if query["starting_after"] not in ids:
            raise invalid(
                f"No such object: '{query['starting_after']}'", code="resource_missing", param="starting_after"
            )
        data = data[ids.index(query["starting_after"]) + 1 :]
    return {"object": "list", "url": url, "has_more": len(data) > limit, "data": data[:limit]}


def _payment_intent(row: tuple[Any, ...], status: str) -> dict[str, Any]:
    identifier, amount, currency, payment_method, metadata, created = row
    error = {"type": "card_error", "code": "card_declined", "decline_code": "generic_decline"}
    return {
        "id": identifier,
        "object": "payment_intent",
        "amount": amount,
        "amount_received": amount if status == CHARGED else 0,
        "capture_method": "automatic_async",
        "created": int(created),
        "currency": currency,
        "last_payment_error": error if status == DECLINED else None,
        "latest_charge": "ch" + identifier[2:],
        "livemode": False,
        "metadata": json.loads(metadata),
        "payment_method": None if status == DECLINED else payment_method,
        "payment_method_types": ["card"],
        "status": status,
    }


def _refund(row: tuple[Any, ...]) -> dict[str, Any]:
    identifier, payment_intent, amount, currency, metadata, created, status, reason = row
    return {
        "id": identifier,
        "object": "refund",
        "amount": amount,
        "charge": "ch" + payment_intent[2:],
        "created": int(created),
        "currency": currency,
        "failure_reason": reason,
        "metadata": json.loads(metadata),
        "payment_intent": payment_intent,
        "status": status,
    }


def _identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _metadata(form: Mapping[str, str]) -> dict[str, str]:
    metadata = {match[1]: value for name, value in form.items() if (match := _METADATA_NAME.fullmatch(name))}
    if len(metadata) > 50:
        raise invalid("Metadata can have at most 50 keys.", param="metadata")
    for name, value in metadata.items():
        if not 1 <= len(name) <= 40:
            raise invalid("Metadata keys must have 1 to 40 characters.", param="metadata")
        if len(value) > 500:
            raise invalid("Metadata values can have at most 500 characters.", param=f"metadata[{name}]")
    return metadata


def _reject_unknown(form: Mapping[str, str], names: Iterable[str]) -> None:
    for name in form:
        if name not in names and not _METADATA_NAME.fullmatch(name):
            raise invalid(f"Received unknown parameter: {name}", code="parameter_unknown", param=name)


def _required(form: Mapping[str, str], name: str) -> str:
    value = form.get(name, "")
    if not value:
        raise invalid(f"Missing required param: {name}.", code="parameter_missing", param=name)
    return value


def _amount(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text) or not 1 <= int(text) <= MAX_AMOUNT:
        raise invalid(
            f"Invalid amount: it must be an integer from 1 to {MAX_AMOUNT} in the minor unit.",
            code="parameter_invalid_integer",
            param="amount",
        )
    return int(text)


def _check_rounded(amount: int, currency: str) -> None:
    """Three-decimal currencies are rounded to two decimals: their amounts end with 0."""
    if currency in _THREE_DECIMALS and amount % 10:
        raise invalid("Invalid amount: in this currency it must be a multiple of 10.", param="amount")


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", "10")
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= 100:
        raise invalid("Invalid limit: it must be an integer from 1 to 100.", param="limit")
    return int(text)
