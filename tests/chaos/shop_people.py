"""The people of the shop under chaos: they cancel, signal and retry sagas. Importing this reads the environment (celeryconfig)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from sqlalchemy import text

from demo.returns import Returns
from idempotency.errors import IdempotencyError
from idempotency.operate import saga
from idempotency.operate.change import Change
from idempotency.wire.keys import OperationId
from tasks import app
from tasks.returns import INSPECTION_DONE, PICKED_UP, process_return
from tasks.tenants import DEFAULT

# Of what the carrier and the warehouse say: a person has told the saga before.
SIGNALLED = 0.3
_RUNNING = text("SELECT key FROM idempotency.sagas WHERE task = :saga AND status = 'RUNNING' ORDER BY key")
_STOPPED = text("SELECT key FROM idempotency.sagas WHERE task = :saga AND stopped IS NOT NULL ORDER BY key")


class People(Returns):
    """What happens to returns, with a person's hand in it. `overruled`: returns that were cancelled at any moment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chance = random.Random("people")
        self.overruled: set[str] = set()
        self.given: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.surprises: list[str] = []

    def cancel(self, id: str) -> None:
        """As the rules say of this return."""
        self._give("cancel", id, lambda of, change: saga.cancel_saga(app, of, change))

    def cancel_any(self, chance: random.Random) -> None:
        """Whatever saga runs, at whatever moment."""
        if running := self._keys(_RUNNING):
            id = chance.choice(running)
            self.overruled.add(id)  # also if the answer is lost
            self.cancel(id)

    def retry_stopped(self) -> None:
        """Let those go on that have stopped."""
        for id in self._keys(_STOPPED):
            self._give("retry", id, lambda of, change: saga.retry_saga(app, of, change))

    def pick_up(self, id: str) -> None:
        """Sometimes the driver rings before the carrier tells us."""
        if self._chance.random() < SIGNALLED:
            self.collect(id)
            self._signal(id, PICKED_UP, {"return_id": id})
        super().pick_up(id)

    def inspect(self, id: str, verdict: str) -> None:
        """Sometimes somebody of the warehouse rings before it has written its verdict."""
        if self._chance.random() < SIGNALLED:
            self._signal(id, INSPECTION_DONE, {"return_id": id, "verdict": verdict})
        super().inspect(id, verdict)

    def _signal(self, id: str, event_type: str, data: dict[str, Any]) -> None:
        self._give("signal", id, lambda of, change: saga.signal_saga(app, of, event_type, data, change, match=id))

    def _give(self, name: str, id: str, command: Callable[[OperationId, Change], Any]) -> None:
        """Give a command; repeated because its answer was lost, it changes nothing more."""
        of = OperationId(DEFAULT, process_return.name, id)
        request = None if name == "retry" else f"{name} {id} {self._chance.randrange(2**32)}"
        try:
            command(of, Change("ann", f"{name} {id}", request, is_verified=True))
            self.given[name] += 1
        except IdempotencyError:
            self.refused[name] += 1  # it has ended meanwhile, or not begun

    def _keys(self, query: Any) -> list[str]:
        with self._people.connect() as connection:
            return list(connection.scalars(query, {"saga": process_return.name}))
