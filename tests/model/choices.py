"""What programs are made of: operations, amounts, answers; and which of what there is by now."""

from __future__ import annotations

from typing import TypeVar

import hypothesis.strategies as st

from idempotency.wire import keys
from idempotency.wire.keys import OperationId

# Long enough that no timer fires while a program runs: time passes when a rule says so.
LEASE = 600.0
LATER = 600.0
RETENTION = 1e6
ELSEWHERE = "another-host|boot|namespace|1|1"
# Two tenants share a key, and one of them has another one. The first is met more often: depth needs repetition.
TASK = "tests.support.bank.deposit"
ACME, OTHER_TENANT, OTHER_KEY = (
    OperationId("acme", TASK, "k1"),
    OperationId("umbrella", TASK, "k1"),
    OperationId("acme", TASK, "k2"),
)
some_id = st.sampled_from([ACME, ACME, ACME, OTHER_TENANT, OTHER_KEY])
# What is asked for: the fingerprint of each amount is another one.
some_amount = st.sampled_from([1, 1, 1, 2])
# What the broker says to a batch, over and over.
some_answers = st.lists(
    st.sampled_from(["confirmed", "confirmed", "confirmed", "unroutable", "own fault", "none"]), min_size=1, max_size=3
)
some_statement = st.sampled_from(["complete", "fail", "release", "begin", "happened", "step"])
some_name = st.sampled_from(["charge", "reserve"])
# Which of those there are, the newest first.
which = st.sampled_from([0, 0, 0, 1, 1, 2, 3])


T = TypeVar("T")


def fingerprint(id: OperationId, amount: int) -> str:
    return keys.fingerprint({"account": id.key, "amount": amount})


def account(id: OperationId) -> str:
    return f"{id.tenant}/{id.key}"


def nth(those: list[T], n: int) -> T:
    """The newest for 0."""
    return those[-1 - n % len(those)]
