"""Which requests fail and how: at random by rates and a seed, or one by one as queued.

A hash of seed, fault and identity decides, so the same seed gives the same faults in any order of requests. The identity
is the idempotency key; for a refusal it is what is refused, so that a second try with another key is refused again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

# In order of precedence: a request has at most one fault.
PROVIDER_FAULTS = ("rate_limited", "declined", "error_500_before", "error_500_after", "timeout_after", "refund_fails")
CARRIER_FAULTS = ("rate_limited", "label_refused", "error_500_before", "error_500_after", "timeout_after")
# Refusals, and the member of a request's metadata that is refused.
REFUSALS = {"declined": "purchase_id", "label_refused": "reference"}
MAIL_FAULTS = ("reject", "drop_after_data")


def fires(seed: int, fault: str, identity: str, rate: float) -> bool:
    """Whether a fault with this rate (0 to 1) hits `identity`; the same for the same seed."""
    digest = blake2b(f"{seed}\0{fault}\0{identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64


def check_rates(rates: Mapping[str, float], known: Iterable[str]) -> dict[str, float]:
    """Check and return the rates. Raises `ValueError` for an unknown fault or a rate outside 0 to 1."""
    for fault, rate in rates.items():
        if fault not in known:
            raise ValueError(f"unknown fault {fault!r}; there are {', '.join(known)}")
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise ValueError(f"the rate of {fault} is {rate!r}; it must be between 0 and 1")
    return dict(rates)


@dataclass(frozen=True, slots=True)
class Queued:
    """A fault for the next request with these metadata values."""

    fault: str
    only: Mapping[str, str]


@dataclass
class FaultPlan:
    """The faults of the provider, or of the carrier. Times are in milliseconds.

    `undecided` is the share of charges, 0 to 1, that are accepted and decided after `decision_ms`; so are refunds that fail.
    `latency_ms` delays every POST before it has any effect. `hold_ms` is how long `timeout_after` keeps a client waiting
    before it cuts the connection. `search_lag_ms` is how long search does not find a new payment.
    """

    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    only: Mapping[str, str] = field(default_factory=dict)
    latency_ms: float = 0
    hold_ms: float = 30_000
    search_lag_ms: float = 0
    undecided: float = 0
    decision_ms: float = 500
    queued: list[Queued] = field(default_factory=list)
    known: tuple[str, ...] = PROVIDER_FAULTS

    def __post_init__(self) -> None:
        check_rates(self.rates, self.known)
        check_rates({"undecided": self.undecided}, ("undecided",))
        for name in ("latency_ms", "hold_ms", "search_lag_ms", "decision_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3_600_000:
                raise ValueError(f"{name} is {value!r}; it must be between 0 and 3600000")

    def take(self, metadata: Mapping[str, str]) -> str | None:
        """Remove and return the first queued fault for a request with this metadata."""
        for queued in self.queued:
            if _matches(queued.only, metadata):
                self.queued.remove(queued)
                return queued.fault
        return None

    def planned(self, idempotency_key: str, metadata: Mapping[str, str]) -> Iterable[str]:
        """The faults for this request by rates and seed."""
        if not _matches(self.only, metadata):
            return
        for fault in self.known:
            rate = self.rates.get(fault, 0)
            identity = metadata.get(REFUSALS[fault], "") if fault in REFUSALS else idempotency_key
            if rate and identity and fires(self.seed, fault, identity, rate):
                yield fault

    def decides_after(self, idempotency_key: str, metadata: Mapping[str, str]) -> float | None:
        """The seconds after which a charge is decided that is only accepted; None if it is decided at once."""
        if not (_matches(self.only, metadata) and fires(self.seed, "undecided", idempotency_key, self.undecided)):
            return None
        return self.decision_ms / 1000

    def changed(self, wanted: Any) -> Self:
        """The plan after a request: single faults queued ("next"), or all else replaced ("rates", "seed", times).

        Raises `ValueError` and `TypeError`.
        """
        if not isinstance(wanted, dict):
            raise ValueError("the body must be a JSON object")
        if (following := wanted.pop("next", None)) is not None:
            only = wanted.pop("only", {})
            if not isinstance(following, list) or any(fault not in self.known for fault in following):
                raise ValueError(f"next must be a list of {', '.join(self.known)}")
            self.queued.extend(Queued(fault, only) for fault in following)
        return type(self)(known=self.known, queued=self.queued, **wanted) if wanted else self


def _matches(only: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    return all(metadata.get(key) == value for key, value in only.items())
