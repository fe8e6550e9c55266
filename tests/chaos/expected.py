"""What should come of each accepted operation, by its task."""

from __future__ import annotations

import json

from tests.chaos import application
from tests.chaos.application import FEW_ATTEMPTS
from tests.chaos.checker import Accepted, Step
from tests.chaos.provider import CLOSED, DECLINED, REVOKED

# What a payment may end as without having happened: declined, or called by an attempt that was too late.
_REFUSALS = frozenset({f"provider_{DECLINED}", f"provider_{CLOSED}"})
# Closed by a person's question, whose answer was never recorded.
_CLOSED = frozenset({f"provider_{CLOSED}"})
# Only a repeat is refused so: the provider has acted, and nothing plainly fails over that unless an undo answers for it.
_REVOKED = frozenset({f"provider_{REVOKED}"})

UNLIMITED = 2**31 - 1


def expected(tenant: str, task: str, key: str, account: str, amount: int) -> Accepted:
    """What should come of an accepted operation."""
    row = (account, amount)
    result = json.dumps({"account": account, "amount": amount})
    reserve, tag = Step("reserve", f"{account}/reserved", amount), Step("tag", f"{account}/tag", amount)
    match task:
        case "chaos.refused":
            return Accepted(tenant, task, key, rows=(), failure="no_account")
        case "chaos.ungrateful" | "chaos.stuck":
            # how often a stuck end is tried is for the library to bound
            return Accepted(tenant, task, key, rows=(), failure="no_account", failure_row=False)
        case "chaos.hopeless" | "chaos.poison":
            return Accepted(tenant, task, key, rows=(), failure="attempts_exhausted", max_attempts=FEW_ATTEMPTS)
        case "chaos.stumble":
            return Accepted(
                tenant,
                task,
                key,
                rows=(),
                failure="unfinished",
                may_fail=_CLOSED,
                may_stop=_REVOKED | {"no_account"},
                failure_row=True,
                amount=amount,
                steps=(reserve,),
            )
        case "chaos.refunded":
            return Accepted(
                tenant,
                task,
                key,
                rows=(),
                failure="no_account",
                may_fail=_CLOSED | _REVOKED,
                amount=amount,
                steps=(reserve,),
                refunds=(Step("pay", f"{account}/reserved/pay", amount),),
            )
        case "chaos.transfer":
            rows = (row, reserve[1:])
            return Accepted(
                tenant,
                task,
                key,
                rows,
                result,
                may_fail=_CLOSED,
                may_stop=_REVOKED,
                failure_row=True,
                acts=2,
                amount=amount,
                steps=(reserve,),
            )
        case "chaos.charge":
            return Accepted(
                tenant,
                task,
                key,
                rows=(row, reserve[1:], tag[1:]),
                result=result,
                may_fail=_REFUSALS,
                may_stop=_REVOKED,
                failure_row=True,
                acts=1,
                amount=amount,
                steps=(reserve, tag),
                max_attempts=FEW_ATTEMPTS,
            )
        case "chaos.direct":
            return Accepted(tenant, task, key, (row,), result, failure_row=True, once_claimed=True)
        case "http":
            # clients ask until they are answered: there is no last attempt
            refused, paid = "-refused-" in account, "-paid-" in account
            return Accepted(
                tenant,
                task,
                key,
                rows=() if refused else (row,),
                may_stop=_REVOKED,
                failure_row=False,
                acts=int(paid),
                amount=amount,
                max_attempts=UNLIMITED,
                status=422 if refused else 201,
            )
        case application.LEDGER | application.MAILER:
            return Accepted(tenant, task, key, (row,), result, failure_row=False, is_event=True)
    return Accepted(tenant, task, key, (row,), result, failure_row=True)
