"""The bodies of requests and answers. They are strict: an amount of `1.0` or `"1"` is refused, not rounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tasks.validation import (
    CURRENCIES,
    LOCAL_PART,
    MAX_AMOUNT,
    MAX_LOCAL_PART,
    MAX_QUANTITY,
    MAX_TEXT,
    check_currency,
    check_id,
    check_local_part,
    check_minor_unit,
    check_text,
)

# Dead letters that one request may name.
MOST_LETTERS = 1000
BIGINT = 2**63 - 1

# In the document only: the checks of `tasks.validation` decide, and name the field.
PRINTABLE = {"pattern": "^[!-~]([ -~]*[!-~])?$"}

Id = Annotated[
    str,
    AfterValidator(lambda value: check_id("id", value)),
    Field(max_length=255, json_schema_extra={"minLength": 1, **PRINTABLE}),
]
CustomerId = Annotated[
    str,
    AfterValidator(lambda value: check_local_part("customer_id", value)),
    Field(
        max_length=MAX_LOCAL_PART,
        description="Letters, digits and . _ + -",
        examples=["c-17"],
        json_schema_extra={"pattern": f"^{LOCAL_PART.pattern}$"},
    ),
]
Currency = Annotated[
    str,
    AfterValidator(lambda value: check_currency("currency", value)),
    Field(json_schema_extra={"enum": sorted(CURRENCIES)}),
]
Reason = Annotated[
    str,
    AfterValidator(lambda value: check_text("reason", value)),
    Field(max_length=MAX_TEXT, json_schema_extra=PRINTABLE),
]
MINOR_UNIT = "In the currency's minor unit: cents, whole yen, thousandths of a dinar (these end with 0)."


class Body(BaseModel):
    """A request's body. Unknown members and values of another type are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class _Priced(Body):
    amount: int
    currency: Currency

    @model_validator(mode="after")
    def _check_minor_unit(self) -> Self:
        check_minor_unit("amount", self.amount, self.currency)
        return self


class NewPayment(_Priced):
    """A payment. Its id is the request's Idempotency-Key."""

    customer_id: CustomerId
    amount: Annotated[int, Field(ge=0, le=MAX_AMOUNT, description=f"{MINOR_UNIT} 0: nothing is charged.")]


class NewRefund(Body):
    """A refund of a payment, whole or in part. Its id is the request's Idempotency-Key."""

    payment_id: Id
    amount: Annotated[int, Field(ge=1, le=MAX_AMOUNT, description=MINOR_UNIT)]
    reason: Reason


class NewOrder(_Priced):
    """The order of a checkout session."""

    checkout_session_id: Id
    customer_id: CustomerId
    amount: Annotated[int, Field(ge=1, le=MAX_AMOUNT, description=MINOR_UNIT)]
    sku: Annotated[Id | None, Field(description="The article. Without one, nothing is set aside in the warehouse.")] = (
        None
    )
    quantity: Annotated[int, Field(ge=1, le=MAX_QUANTITY, description="Pieces of the article.")] = 1


class NewReturn(Body):
    """The return of an order. Its id is the request's Idempotency-Key."""

    order_id: Id
    reason: Reason
    reship: Annotated[bool, Field(description="Whether the buyer wants the goods back if they are rejected.")] = False


class Accepted(BaseModel):
    """Accepted. The work goes on; `operation` is where to read its status and result."""

    id: str
    status: Literal["accepted"] = "accepted"
    operation: str


class AcceptedOrder(Accepted):
    """The order of the checkout session, the same for every request; `operation` is its payment's."""

    checkout_session_id: str
    customer_id: str
    amount: int
    currency: str
    sku: str | None = None
    quantity: int = 1


class OperationDocument(BaseModel):
    """An operation as it is recorded. `code` says why it ended without success."""

    task: str
    key: str
    status: Literal["accepted", "started", "released", "completed", "failed"]
    result: Any = None
    code: str | None = None
    erased: Annotated[bool | None, Field(description="The result was erased.")] = None


class Letters(Body):
    """Dead letters by number."""

    ids: Annotated[
        list[Annotated[int, Field(ge=1, le=BIGINT)]], Field(min_length=1, max_length=MOST_LETTERS, examples=[[17]])
    ]
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"\S", description="Kept in the audit table.")]


class Replayed(Letters):
    """Dead letters to send again."""

    even_if_declined: Annotated[
        bool, Field(description="Also what was declined or cancelled, which may then happen after all.")
    ] = False
    unedited: Annotated[
        bool, Field(description="Also what somebody has asked to edit: the message is sent without the edit.")
    ] = False


class Refusal(BaseModel):
    """A dead letter that was left as it was, and why."""

    letter: int
    why: str


class Outcome(BaseModel):
    """What became of each dead letter that a request named."""

    done: list[int]
    refused: list[Refusal]


class Part(BaseModel):
    """A part of the application. Without one that is `needed`, no request can be accepted."""

    ok: bool
    needed: bool
    detail: str


class Readiness(BaseModel):
    """Whether requests can be accepted, and each part by name."""

    ready: bool
    parts: dict[str, Part]
