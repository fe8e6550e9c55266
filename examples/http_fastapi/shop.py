import os
from typing import Annotated

from fastapi import Body, FastAPI, HTTPException
from sqlalchemy import text

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from idempotency.settings import Settings

runtime = Runtime(Settings.read({"database_url": os.environ["DATABASE_URL"], "service": "shop"}))
app = FastAPI()
app.add_middleware(IdempotencyMiddleware, runtime=runtime, required=True)

PAY = text("INSERT INTO payments (id, amount) VALUES (:id, :amount)")


@app.post("/payments", status_code=201)
def pay(
    amount: Annotated[int, Body(embed=True)], session: AttemptSession, attempt: CurrentAttempt
) -> dict[str, object]:
    if amount > 1000:
        raise HTTPException(402, "declined")  # rolled back; a repeat gets the same answer
    session.execute(PAY, {"id": attempt.key, "amount": amount})
    return {"id": attempt.key, "amount": amount}  # committed with the row, then sent


@app.post("/refunds", status_code=201)
async def refund(amount: Annotated[int, Body(embed=True)], attempt: CurrentAttempt) -> dict[str, object]:
    # in the attempt's own thread: the event loop stays free
    await attempt.run_sync(lambda session: session.execute(PAY, {"id": attempt.key, "amount": -amount}))
    return {"id": attempt.key, "amount": -amount}
