"""What the tests of the gateway charge, give back and ask for."""

from __future__ import annotations

import socket
import uuid
from contextlib import closing
from typing import Any

from idempotency import EffectInDoubt
from sandbox import ledger
from sandbox.process import Sandbox

KEY = "sk_test_sandbox"


def charges(sandbox: Sandbox, purchase: dict[str, Any]) -> list[ledger.Charge]:
    return [
        charge
        for charge in ledger.read(sandbox.data).charges
        if charge.metadata["purchase_id"] == purchase["payment_id"]
    ]


def doubt(key: str, *, age: float = 0, ended: bool = False) -> EffectInDoubt:
    return EffectInDoubt(idempotency_key=key, age=9e9, ended_for=age if ended else None)


def a_refund(charge_id: str, amount: int = 250) -> dict[str, Any]:
    return {"refund_id": f"r-{uuid.uuid4().hex}", "payment_id": "p-1", "charge_id": charge_id, "amount": amount}


def unreachable() -> str:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
