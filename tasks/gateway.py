"""The payment provider as the tasks see it: capture, refund, and finding out whether either happened.

Every call that moves money has an idempotency key, which the library derives and keeps while the outcome is unknown.
Only this module decides what an answer means for the operation:

    declined, or any refusal that   StoredRefusal   nothing was charged under this key, and never will be
    is replayed for this key
    refused parameters              PermanentError  nothing was charged by this call; says nothing about earlier ones
    unreachable, timed out,         Defer           later, under the same key, without using up an attempt
    502/503/504, 429, key in
    progress, our API key refused
    accepted, and not decided yet   Undecided       asked about later, or when a webhook says so; not called again
    a 5xx replayed for this key     StoredFailure   calling again under this key is pointless
    any other 5xx, nonsense, or     GatewayError    uses up an attempt; the outcome is unknown
    an answer that is too long
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import stripe
from pydantic import Field
from typing_extensions import TypedDict

from idempotency import (
    Defer,
    DidNotHappen,
    EffectInDoubt,
    Happened,
    PermanentError,
    StillUnknown,
    StoredFailure,
    StoredRefusal,
    Undecided,
)
from idempotency.text import storable
from tasks.answers import AnswerTooLong
from tasks.circuit import Circuit, Unavailable, seconds_of
from tasks.stripe_http import StripeConnections
from tasks.tenants import DEFAULT, check_tenant, named

T = TypeVar("T")


class Result(TypedDict):
    """The result of a capture or a refund."""

    # the provider's; a person may have typed it
    id: Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]{0,253}[^\s\x00-\x1f\x7f])?$")]
    amount: int
    currency: str
    status: str


class Moved(NamedTuple):
    """Money that a provider says it has moved: a charge, or a refund of one. Amounts are in the minor unit.

    `tenant`, `name`: the payment or the refund as we named it, if we did. `is_decided`: a refund may be made and may still
    fail.
    """

    id: str
    charge_id: str
    amount: int
    currency: str
    tenant: str
    name: str | None
    is_decided: bool = True


class FailedAfterwards(StoredRefusal):
    """The provider has accepted a charge or a refund, and this object of its, `id`, has failed afterwards."""

    def __init__(self, message: str, code: str | None = None, id: str = "") -> None:
        super().__init__(message, code)
        self.id = id


Outcome = Happened | DidNotHappen | StillUnknown

CAPTURED = frozenset({"succeeded"})
NOT_CAPTURED = frozenset({"requires_payment_method", "canceled"})
# Accepted, and up to the customer's bank, or to the customer.
UNDECIDED = frozenset({"processing", "requires_action"})
# A pending refund has been made; only the customer's bank is pending.
REFUNDED = frozenset({"succeeded", "pending"})
NOT_REFUNDED = frozenset({"failed", "canceled"})

# Seconds. Long enough for the other call under this key to finish.
IN_PROGRESS_SECONDS = 2.0
RATE_LIMITED_SECONDS = 5.0
UNAVAILABLE_SECONDS = 5.0
# A refused API key needs a person, and is not the operation's fault.
REFUSED_KEY_SECONDS = 60.0
# An undecided call is asked about after a quarter of the time that it has taken, within these limits.
FIRST_POLL_SECONDS = 5.0
LONGEST_POLL_SECONDS = 3600.0


class GatewayError(Exception):
    """The provider failed in a way that leaves the outcome unknown. The message contains no body and no secret."""


class Gateway(Protocol):
    """A payment provider that honours idempotency keys. Amounts are integers in the currency's minor unit.

    `charge_id` is the `id` that `capture` returned. Results are JSON: id, amount, currency, status.
    """

    def capture(
        self,
        *,
        payment_id: str,
        customer_id: str,
        amount: int,
        currency: str,
        idempotency_key: str,
        tenant: str = DEFAULT,
    ) -> dict[str, Any]: ...

    def refund(
        self,
        *,
        refund_id: str,
        payment_id: str,
        charge_id: str,
        amount: int,
        idempotency_key: str,
        tenant: str = DEFAULT,
    ) -> dict[str, Any]: ...

    def find_capture(
        self,
        *,
        payment_id: str,
        customer_id: str,
        amount: int,
        currency: str,
        doubt: EffectInDoubt,
        tenant: str = DEFAULT,
        reported: Sequence[str] = (),
    ) -> Outcome: ...

    def find_refund(
        self,
        *,
        refund_id: str,
        payment_id: str,
        charge_id: str,
        amount: int,
        doubt: EffectInDoubt,
        tenant: str = DEFAULT,
    ) -> Outcome: ...

    def charges(self, since: datetime, until: datetime) -> Iterator[Moved]: ...

    def refunds(self, since: datetime, until: datetime) -> Iterator[Moved]: ...

    def charge(self, charge_id: str) -> Moved | None: ...

    def refunded(self, refund_id: str) -> Moved | None: ...

    def state_of_refund(self, refund_id: str) -> tuple[str, str | None] | None: ...

    def is_given_back(self, charge_id: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Connection:
    client: stripe.StripeClient
    http: StripeConnections
    circuit: Circuit


class StripeGateway:
    """Stripe, through its official SDK. Safe to share between threads and to create before a fork.

    Times are in seconds. `search_lag` is how long Stripe's search may not find a new payment: under a minute in normal
    operation (docs.stripe.com/search#data-freshness), without a limit during an outage. Raises `ValueError`, which names
    the setting that is out of range.
    """

    def __init__(
        self,
        api_key: str,
        *,
        url: str = "https://api.stripe.com",
        payment_method: str = "pm_card_visa",
        connect_timeout: float = 10.0,
        read_timeout: float = 10.0,
        search_lag: float = 60.0,
        first_poll: float = FIRST_POLL_SECONDS,
        circuit_failures: int = 5,
        circuit_pause: float = 30.0,
    ) -> None:
        if not api_key:
            raise ValueError("api_key is empty")
        if circuit_failures < 1:
            raise ValueError(f"circuit_failures is {circuit_failures}; it must be at least 1")
        for name, value, least in (
            ("connect_timeout", connect_timeout, 0.001),
            ("read_timeout", read_timeout, 0.001),
            ("circuit_pause", circuit_pause, 0.001),
            ("search_lag", search_lag, 0.0),
            ("first_poll", first_poll, 0.001),
        ):
            if not least <= value <= 3600:
                raise ValueError(f"{name} is {value}; it must be between {least:g} and 3600 seconds")
        self._api_key = api_key
        self._url = url.rstrip("/")
        self._payment_method = payment_method
        self._timeout = (connect_timeout, read_timeout)
        self._search_lag = search_lag
        self._first_poll = first_poll
        self._circuit_failures = circuit_failures
        self._circuit_pause = circuit_pause
        self._lock = threading.Lock()
        self._opened: _Connection | None = None
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def __repr__(self) -> str:
        return f"StripeGateway(url={self._url!r})"

    @property
    def circuit_open(self) -> bool:
        """Whether this process currently makes no calls."""
        return self._connection().circuit.is_open

    def capture(
        self,
        *,
        payment_id: str,
        customer_id: str,
        amount: int,
        currency: str,
        idempotency_key: str,
        tenant: str = DEFAULT,
    ) -> dict[str, Any]:
        """Charge the customer, once per key."""
        params: stripe.params.PaymentIntentCreateParams = {
            "amount": amount,
            "currency": currency,
            "confirm": True,
            "payment_method": self._payment_method,
            # The customer is not present to confirm the payment or be redirected: decline it instead.
            "error_on_requires_action": True,
            "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
            "metadata": {
                "purchase_id": payment_id,
                "customer_id": customer_id,
                "effect_key": idempotency_key,
                **named(tenant),
            },
        }
        intent = self._call(
            lambda client: client.v1.payment_intents.create(params, {"idempotency_key": idempotency_key})
        )
        return _completed(intent.to_dict(), CAPTURED, first_poll=self._first_poll)

    def refund(
        self,
        *,
        refund_id: str,
        payment_id: str,
        charge_id: str,
        amount: int,
        idempotency_key: str,
        tenant: str = DEFAULT,
    ) -> dict[str, Any]:
        """Give back part or all of a captured payment, once per key."""
        params: stripe.params.RefundCreateParams = {
            "payment_intent": charge_id,
            "amount": amount,
            "metadata": {
                "refund_id": refund_id,
                "purchase_id": payment_id,
                "effect_key": idempotency_key,
                **named(tenant),
            },
        }
        refund = self._call(lambda client: client.v1.refunds.create(params, {"idempotency_key": idempotency_key}))
        return _completed(refund.to_dict(), REFUNDED, first_poll=self._first_poll)

    def find_capture(
        self,
        *,
        payment_id: str,
        customer_id: str,
        amount: int,
        currency: str,
        doubt: EffectInDoubt,
        tenant: str = DEFAULT,
        reported: Sequence[str] = (),
    ) -> Outcome:
        """Find out whether the purchase was charged, under any key; the arguments are those of `capture`.

        `reported`: the ids of its charges that the provider has reported, which its search may not show yet.
        """
        value = payment_id.replace("\\", "\\\\").replace("'", "\\'")
        query = f"metadata['purchase_id']:'{value}'"
        found = self._ask(lambda client: _all(client.v1.payment_intents.search({"query": query, "limit": 100})))
        known = {intent["id"] for intent in found}
        found += [intent for id in reported if id not in known and (intent := self._intent(id)) is not None]
        # Search is case-insensitive, and also finds declined intents. One of another amount is not of this call.
        return _finish(
            [
                self._as_it_is(intent)
                for intent in found
                if _is_named(intent, "purchase_id", payment_id, tenant)
                and (intent["amount"], intent["currency"].upper()) == (amount, currency.upper())
            ],
            doubt,
            done=CAPTURED,
            nothing=NOT_CAPTURED,
            poll=self._poll(doubt),
            ended=doubt.ended_for is not None and doubt.ended_for > self._search_lag,
            lag=self._search_lag - (doubt.age if doubt.ended_for is None else doubt.ended_for),
        )

    def find_refund(
        self,
        *,
        refund_id: str,
        payment_id: str,
        charge_id: str,
        amount: int,
        doubt: EffectInDoubt,
        tenant: str = DEFAULT,
    ) -> Outcome:
        """Find out whether the refund was made, under any key; the arguments are those of `refund`."""
        found = self._ask(lambda client: _all(client.v1.refunds.list({"payment_intent": charge_id, "limit": 100})))
        # Unlike search, lists are always up to date.
        return _finish(
            [r for r in found if _is_named(r, "refund_id", refund_id, tenant) and r["amount"] == amount],
            doubt,
            done=REFUNDED,
            nothing=NOT_REFUNDED,
            poll=self._poll(doubt),
            ended=doubt.ended_for is not None,
        )

    def charges(self, since: datetime, until: datetime) -> Iterator[Moved]:
        """The charges of a time. Raises what a call raises: an incomplete list says nothing."""
        listing = {"created": {"gte": int(since.timestamp()), "lt": int(until.timestamp())}, "limit": 100}
        for intent in self._ask(lambda client: _all(client.v1.payment_intents.list(listing))):  # type: ignore[arg-type]
            if intent["status"] in CAPTURED:
                yield _moved(intent, intent["id"], "purchase_id")

    def refunds(self, since: datetime, until: datetime) -> Iterator[Moved]:
        """The refunds of a time that have not failed. Raises what a call raises: an incomplete list says nothing."""
        listing = {"created": {"gte": int(since.timestamp()), "lt": int(until.timestamp())}, "limit": 100}
        for refund in self._ask(lambda client: _all(client.v1.refunds.list(listing))):  # type: ignore[arg-type]
            moved = _moved(refund, refund["payment_intent"], "refund_id")
            if refund["status"] in REFUNDED:
                yield moved

    def charge(self, charge_id: str) -> Moved | None:
        """A charge by its id; None if there is none, or nothing was charged."""
        return self._moved(lambda client: client.v1.payment_intents.retrieve(charge_id), CAPTURED, "purchase_id")

    def refunded(self, refund_id: str) -> Moved | None:
        """A refund by the provider's id; None if there is none, or it has failed."""
        return self._moved(lambda client: client.v1.refunds.retrieve(refund_id), REFUNDED, "refund_id")

    def state_of_refund(self, refund_id: str) -> tuple[str, str | None] | None:
        """The state of a refund by the provider's id, and why it has failed if it has; None: there is no such refund."""
        found = self._retrieved(lambda client: client.v1.refunds.retrieve(refund_id))
        return None if found is None else (found["status"] or "pending", found.get("failure_reason"))

    def is_given_back(self, charge_id: str) -> bool:
        """Whether the refunds of a charge that have succeeded are all of it."""
        intent = self._intent(charge_id)
        if intent is None:
            return False
        found = self._ask(lambda client: _all(client.v1.refunds.list({"payment_intent": charge_id, "limit": 100})))
        returned = sum(refund["amount"] for refund in found if refund["status"] == "succeeded")
        return bool(returned >= intent["amount"])

    def _intent(self, charge_id: str) -> dict[str, Any] | None:
        return self._retrieved(lambda client: client.v1.payment_intents.retrieve(charge_id))

    def _moved(self, request: Callable[[stripe.StripeClient], Any], done: frozenset[str], field: str) -> Moved | None:
        found = self._retrieved(request)
        if found is None or found["status"] not in done:
            return None
        return _moved(found, found.get("payment_intent", found["id"]), field)

    def _retrieved(self, request: Callable[[stripe.StripeClient], Any]) -> dict[str, Any] | None:
        """One object; None: the provider has none of this id. Raises `GatewayError` and `Defer`."""
        try:
            found: dict[str, Any] = self._call(request).to_dict()
        except PermanentError as error:
            if error.code != "resource_missing":
                raise GatewayError(str(error)) from None  # the question was refused, which says nothing about the money
            return None
        return found

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._connection().http.close()

    def _as_it_is(self, intent: dict[str, Any]) -> dict[str, Any]:
        """An intent that search has found, which may show it as it was some time ago."""
        if intent["status"] in CAPTURED:
            return intent
        return self._ask(lambda client: client.v1.payment_intents.retrieve(intent["id"])).to_dict()

    def _poll(self, doubt: EffectInDoubt) -> float:
        return max(self._first_poll, min(doubt.age / 4, LONGEST_POLL_SECONDS))

    def _call(self, request: Callable[[stripe.StripeClient], T]) -> T:
        connection = self._connection()
        return connection.circuit.call(lambda: _translated(lambda: request(connection.client)))

    def _ask(self, question: Callable[[stripe.StripeClient], T]) -> T:
        try:
            return self._call(question)
        except PermanentError as error:
            # The question was refused, which says nothing about what was charged.
            refusal = str(error)
        raise GatewayError(refusal)

    def _connection(self) -> _Connection:
        with self._lock:
            if self._opened is None:
                http = StripeConnections(self._url, timeout=self._timeout)
                client = stripe.StripeClient(
                    self._api_key,
                    base_addresses={"api": self._url},
                    # The library retries, and its retries survive this process.
                    max_network_retries=0,
                    http_client=http,
                )
                circuit = Circuit("the payment provider", failures=self._circuit_failures, pause=self._circuit_pause)
                self._opened = _Connection(client, http, circuit)
            return self._opened

    def _reset_after_fork(self) -> None:
        # Processes that share a socket would read each other's answers, and the lock may be held by a thread that does
        # not exist in the child.
        self._lock = threading.Lock()
        self._opened = None


def _translated(request: Callable[[], T]) -> T:
    """Raise what an error means for the operation, without the SDK's errors, which contain bodies and headers."""
    try:
        return request()
    except stripe.StripeError as error:
        meaning = _meaning(error)
    except AnswerTooLong as error:
        meaning = GatewayError(f"the payment provider's answer is {error}")
    raise meaning


def _meaning(error: stripe.StripeError) -> Exception:
    status = error.http_status
    where = f" ({error.request_id})" if error.request_id else ""
    replayed = _header(error, "idempotent-replayed") == "true"
    match error:
        case stripe.APIConnectionError():
            return Unavailable(UNAVAILABLE_SECONDS, "the payment provider is unreachable or did not answer in time")
        case stripe.RateLimitError():
            return Defer(_retry_after(error), f"the payment provider's rate limit was reached{where}")
        case stripe.CardError():
            reason = getattr(error.error, "decline_code", None) or error.code or "declined"
            # Stripe stores a decline under the key.
            return StoredRefusal(f"the card was declined: {reason}{where}", error.code or "card_declined")
        case stripe.AuthenticationError() | stripe.PermissionError():
            return Defer(REFUSED_KEY_SECONDS, f"the payment provider refuses our API key{where}")
        case stripe.IdempotencyError():
            # Not permanent: the key's first request may have charged, so the outcome is unknown.
            return GatewayError(f"the idempotency key was used with other parameters{where}")
        case stripe.InvalidRequestError():
            field = f" in {error.param}" if error.param else ""
            code = error.code or "invalid_request"
            refusal = StoredRefusal if replayed else PermanentError
            return refusal(f"the payment provider refused the request: {code}{field}{where}", code)
        case _ if status == 409:
            return Defer(IN_PROGRESS_SECONDS, f"a call under this idempotency key is in progress{where}")
        case _ if status is not None and status >= 500 and replayed:
            return StoredFailure(f"the payment provider replays a stored {status} for this key{where}")
        case _ if status in (502, 503, 504):
            return Unavailable(_retry_after(error), f"the payment provider is unavailable: {status}{where}")
        case _:
            return GatewayError(f"the payment provider failed: {status or type(error).__name__}{where}")


def _retry_after(error: stripe.StripeError) -> float:
    return seconds_of(_header(error, "retry-after"), otherwise=RATE_LIMITED_SECONDS)


def _header(error: stripe.StripeError, name: str) -> str:
    headers: Mapping[str, str] = error.headers or {}
    return next((value for header, value in headers.items() if header.lower() == name), "")


def _all(page: Any) -> list[dict[str, Any]]:
    return [thing.to_dict() for thing in page.auto_paging_iter()]


def _is_named(found: dict[str, Any], field: str, id: str, tenant: str) -> bool:
    metadata = found["metadata"] or {}
    return bool(metadata.get(field) == id and metadata.get("tenant", DEFAULT) == tenant)


def _finish(
    found: list[dict[str, Any]],
    doubt: EffectInDoubt,
    *,
    done: frozenset[str],
    nothing: frozenset[str],
    poll: float,
    ended: bool,
    lag: float = 0.0,
) -> Outcome:
    """The outcome of the effect, judging by what was found. `lag`: seconds until a search will find everything.

    Raises `Undecided` for what is up to the provider; what has failed under the key of the doubt is decided.
    """
    # the effect's own first: what another key has done is another effect's, too
    found = sorted(found, key=lambda thing: thing["metadata"].get("effect_key") != doubt.idempotency_key)
    for thing in found:
        if thing["status"] in done:
            return Happened(_result(thing))
    for thing in found:
        if thing["status"] in UNDECIDED:
            raise Undecided(poll, f"the payment provider has not decided: {thing['object']} is {thing['status']}")
    undecided = any(thing["status"] not in nothing for thing in found)
    for thing in found:
        if not undecided and thing["metadata"].get("effect_key") == doubt.idempotency_key:
            return DidNotHappen(_refusal(thing))
    if ended and not undecided:
        return DidNotHappen()
    return StillUnknown(ask_again=lag if lag > 0 else None)


def _moved(thing: dict[str, Any], charge_id: str, field: str) -> Moved:
    metadata = thing["metadata"] or {}
    tenant, name = metadata.get("tenant", DEFAULT), metadata.get(field)
    try:
        check_tenant(tenant)
    except ValueError:  # of another application on the same account
        tenant, name = DEFAULT, None
    name = None if name is None else storable(name)
    is_decided = thing["status"] == "succeeded"
    return Moved(thing["id"], charge_id, thing["amount"], thing["currency"].upper(), tenant, name, is_decided)


def _refusal(thing: dict[str, Any]) -> FailedAfterwards:
    """Why a charge or a refund has failed that was accepted first."""
    error = thing.get("last_payment_error") or {}
    code = error.get("code") or thing.get("failure_reason") or thing["status"]
    reason = error.get("decline_code") or code
    return FailedAfterwards(f"{thing['object']} was refused: {reason}", code, thing["id"])


def _completed(thing: dict[str, Any], done: frozenset[str], *, first_poll: float) -> dict[str, Any]:
    if thing["status"] in UNDECIDED:
        raise Undecided(first_poll, f"the payment provider has not decided: {thing['object']} is {thing['status']}")
    if thing["status"] not in done:
        raise GatewayError(f"the payment provider has not finished: {thing['object']} is {thing['status']}")
    return _result(thing)


def _result(thing: dict[str, Any]) -> dict[str, Any]:
    return {name: thing[name] for name in ("id", "amount", "currency", "status")}
