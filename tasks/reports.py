"""What a payment provider reports in a webhook, in one form for every provider.

The body is signed by then. It is still looked at as a stranger's: an error names the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .tenants import DEFAULT, check_tenant

GATEWAYS = STRIPE, STANDARD = "stripe", "payment"
Kind = Literal["charge", "refund", "dispute"]

ModelT = TypeVar("ModelT", bound=BaseModel)

SUCCEEDED, FAILED, PENDING = "succeeded", "failed", "pending"
# Of a charge or a refund, at other providers than Stripe.
STATES = (SUCCEEDED, FAILED, PENDING, "processing")
# What a refund does not come back from, and what a dispute does not.
REFUND_FAILED = frozenset({FAILED, "canceled"})
DISPUTE_ENDED = frozenset({"won", "lost", "warning_closed"})


class Malformed(ValueError):
    """The document is not what the provider sends; the message names the field and no value."""


@dataclass(frozen=True, slots=True)
class Report:
    """An object at a provider is in a state. `charge_id`: of the charge that it is about; amounts are in the minor unit.

    `payment_id`, `refund_id`: our names, if the provider was told, as was `effect_key`, the idempotency key of the call that
    made it. `code`: why it failed, or is disputed.
    """

    gateway: str
    event_id: str
    type: str
    object: Kind
    object_id: str
    state: str
    charge_id: str
    amount: int
    currency: str
    occurred_at: datetime
    tenant: str = DEFAULT
    payment_id: str | None = None
    refund_id: str | None = None
    effect_key: str | None = None
    code: str | None = None


# ---------------------------------------------------------------- Stripe


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("must not contain NUL")
    return text


_Tenant = Annotated[str, AfterValidator(check_tenant)]
_Name = Annotated[str, Field(max_length=255), AfterValidator(_no_nul)]


class _Metadata(BaseModel):
    purchase_id: _Name | None = None
    refund_id: _Name | None = None
    effect_key: _Name | None = None
    tenant: _Tenant = DEFAULT


def _if_ours(given: Any, read: ValidatorFunctionWrapHandler) -> _Metadata | None:
    """What we have not written ourselves is another application's on the same account, and no defect of the event."""
    try:
        metadata: _Metadata | None = read(given)
    except ValidationError:
        return None
    return metadata


class _Error(BaseModel):
    code: str | None = None
    decline_code: str | None = None


class _Object(BaseModel):
    id: str = Field(min_length=1, max_length=255)
    object: str
    # a refund may have none yet
    status: Annotated[
        str, Field(min_length=1, max_length=64), BeforeValidator(lambda given: PENDING if given is None else given)
    ]
    amount: int = Field(ge=0, lt=2**63)
    currency: str = Field(min_length=3, max_length=3)
    metadata: Annotated[_Metadata | None, WrapValidator(_if_ours)] = None
    payment_intent: str | None = Field(None, max_length=255)
    last_payment_error: _Error | None = None
    failure_code: str | None = None
    failure_reason: str | None = None
    reason: str | None = None


class _Data(BaseModel):
    object: _Object


class _Event(BaseModel):
    id: str = Field(min_length=1, max_length=255)
    type: str = Field(min_length=1, max_length=255)
    created: int = Field(ge=0, le=32_503_680_000)
    data: _Data


class _Plain(BaseModel):
    """An event of which only the type is known."""

    type: str
    data: dict[str, Any]


def of_stripe(body: bytes) -> Report | None:
    """Read an event of Stripe; None if it reports nothing that we keep. Raises `Malformed`.

    A charge is reported under its payment intent, so that both of their events are about one object.
    """
    plain = _read(_Plain, body)
    found = plain.data.get("object")
    kind = found.get("object") if isinstance(found, dict) else None
    if kind not in ("payment_intent", "charge", "refund", "dispute"):
        return None
    event = _read(_Event, body)
    thing = event.data.object
    charge_id = thing.id if kind == "payment_intent" else thing.payment_intent
    state = _state_of_charge(thing, event.type) if kind in ("payment_intent", "charge") else thing.status
    if charge_id is None or state is None:
        return None
    error, metadata = thing.last_payment_error or _Error(), thing.metadata or _Metadata()
    # the same as the answer to the call would have, whichever of the two comes first
    code = error.code or error.decline_code or thing.failure_code or thing.failure_reason or thing.reason
    return Report(
        gateway=STRIPE,
        event_id=event.id,
        type=event.type,
        object="charge" if kind in ("payment_intent", "charge") else kind,
        object_id=charge_id if kind == "charge" else thing.id,
        state=state,
        charge_id=charge_id,
        amount=thing.amount,
        currency=thing.currency.upper(),
        occurred_at=datetime.fromtimestamp(event.created, UTC),
        tenant=metadata.tenant,
        payment_id=metadata.purchase_id,
        refund_id=metadata.refund_id,
        effect_key=metadata.effect_key,
        code=code,
    )


def _state_of_charge(thing: _Object, event_type: str) -> str | None:
    """An intent that waits for a payment method has failed only if one was tried; what is refunded, its refunds tell."""
    if event_type in ("charge.refunded", "charge.updated"):
        return None
    if thing.status == "canceled":
        return FAILED
    if thing.status == "requires_payment_method":
        return FAILED if event_type.endswith("payment_failed") or thing.last_payment_error is not None else None
    return thing.status


# ---------------------------------------------------------------- every other provider


class _Reported(BaseModel):
    """What docs/payment-webhooks.md asks of a provider that is not Stripe."""

    type: Literal["charge", "refund", "dispute"]
    id: str = Field(min_length=1, max_length=255)
    state: str = Field(pattern="^[a-z_]{1,64}$")
    charge_id: str = Field(min_length=1, max_length=255)
    amount: int = Field(ge=0, lt=2**63)
    currency: str = Field(pattern="^[A-Z]{3}$")
    # a day from the ends of what Python's clock has, in any time zone
    occurred_at: AwareDatetime = Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC))
    tenant: _Tenant = DEFAULT
    payment_id: str | None = Field(None, max_length=255)
    refund_id: str | None = Field(None, max_length=255)
    idempotency_key: str | None = Field(None, max_length=255)
    code: str | None = Field(None, max_length=255)

    @model_validator(mode="after")
    def _state_is_known(self) -> Self:
        if self.type != "dispute" and self.state not in STATES:
            raise PydanticCustomError("state", "state: must be one of {states}", {"states": ", ".join(STATES)})
        return self


def of_standard(event_id: str, body: bytes) -> Report:
    """Read a report of any other provider; `event_id` is its webhook-id. Raises `Malformed`."""
    if not 1 <= len(event_id) <= 255:
        raise Malformed("webhook-id: must have 1 to 255 characters")
    said = _read(_Reported, body)
    about = said.model_dump(exclude={"type", "id", "idempotency_key"})
    return Report(
        gateway=STANDARD,
        event_id=event_id,
        type=f"{said.type}.{said.state}",
        object=said.type,
        object_id=said.id,
        effect_key=said.idempotency_key,
        **about,
    )


def _read(model: type[ModelT], body: bytes) -> ModelT:
    try:
        read = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        what = first["msg"].removeprefix("Value error, ").removeprefix(f"{where}: ")
        raise Malformed(f"{where}: {what}") from None
    for name, value in _texts(read):
        if "\x00" in value:
            raise Malformed(f"{name}: must not contain NUL")
    return read


def _texts(model: BaseModel) -> list[tuple[str, str]]:
    found = []
    for name, value in model:
        if isinstance(value, str):
            found.append((name, value))
        elif isinstance(value, BaseModel):
            found += _texts(value)
    return found
