"""The call under test: the message that it sends, and the deliveries of that message."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ..errors import NotIdempotent
from ..wire.keys import OperationId
from ..wire.message import Message
from ..worker.task import IdempotentTask
from .differences import KEY_HINT, Difference
from .ground import Ground
from .processes import Delivery, Interruption, Journal
from .report import report

# Beyond the attempts that the task may use: an operation that has not ended by then does not end.
MORE_DELIVERIES = 10


class CallUnderTest:
    """A task with its arguments, delivered in separate processes. `timeout`: seconds for each delivery."""

    def __init__(
        self,
        task: IdempotentTask,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
        ground: Ground,
        timeout: float,
    ) -> None:
        self._task = task
        self._args, self._kwargs, self._options = args, kwargs, options
        self._ground, self._timeout = ground, timeout
        self._id: OperationId | None = None
        self._deliveries: list[Delivery] = []
        # the scenario under way
        self.scenario = ""
        task.app.finalize()

    @property
    def title(self) -> str:
        values = [*map(repr, self._args), *(f"{name}={value!r}" for name, value in self._kwargs.items())]
        return f"{self._task.name}({', '.join(values)})"

    @property
    def id(self) -> OperationId:
        """The operation that the call names; known once it was made."""
        assert self._id is not None
        return self._id

    def message(self) -> Message:
        """The message that the call sends, under the key that it makes. Raises `NotIdempotent` if that is another key."""
        options = dict(self._options)
        key, tenant = options.pop("idempotency_key", None), options.pop("tenant", None)
        given = options.pop("headers", None) or {}
        id, headers = self._task._checked(self._args, self._kwargs, key, tenant, given)
        self._ground.meet(id)
        if self._id is None:
            self._id = id
        elif id != self._id:
            difference = Difference("the idempotency key", self._id.key, id.key, KEY_HINT)
            raise NotIdempotent(report(self.title, "the same call, made again", difference, ()))
        routing = {name: options[name] for name in ("queue", "priority") if name in options}
        return Message.composed(
            self._task.app,
            self._task.name,
            self._args,
            self._kwargs,
            task_id=str(uuid4()),
            headers={**given, **headers},
            **routing,
        )

    def start(
        self, message: Message, interruption: Interruption | None = None, *, barrier: int | None = None
    ) -> Delivery:
        delivery = Delivery(self._task.app, self._task, message, interruption=interruption, barrier=barrier)
        self._deliveries.append(delivery)
        return delivery

    def wait_for(self, delivery: Delivery, *, stopped: bool = False) -> None:
        """Wait until a delivery has ended, or with `stopped` until it stands still. Raises `NotIdempotent`."""
        if not delivery.wait(self._timeout, stopped=stopped):
            raise self._stuck(f"a delivery did not end within {self._timeout:g} s")
        journal = delivery.journal()
        if journal.broken:
            raise RuntimeError(f"{self.title}: a delivery broke, {self.scenario}:\n{journal.broken}")
        if journal.outcome == "REJECTED":
            raise self._stuck(f"a delivery was rejected: {journal.error}")

    def deliver(self, message: Message, interruption: Interruption | None = None) -> Journal:
        delivery = self.start(message, interruption)
        self.wait_for(delivery)
        return delivery.journal()

    def deliver_later(self, message: Message) -> Journal:
        """Deliver it as recovery does: when the lease is over, or the next delivery due."""
        self._ground.ripen(self.id)
        return self.deliver(message.marked(origin="recover", outbox_id="0"))

    def finish(self, message: Message) -> None:
        """Deliver until the operation has ended. Raises `NotIdempotent` if it does not."""
        attempts = self._task.max_attempts or self._task.app.conf.get("idempotency_max_attempts") or 5
        for _ in range(attempts + MORE_DELIVERIES):
            if self._ground.status(self.id) in ("completed", "failed"):
                return
            self.deliver_later(message)
        raise self._stuck(f"the operation has not ended after {attempts + MORE_DELIVERIES} deliveries")

    def journals(self) -> list[Journal]:
        """What the deliveries of this scenario have written down, in order."""
        return [delivery.journal() for delivery in self._deliveries]

    def end(self) -> None:
        """End the scenario's processes."""
        for delivery in self._deliveries:
            delivery.end()
        self._deliveries.clear()

    def _stuck(self, what: str) -> NotIdempotent:
        last = next((journal for journal in reversed(self.journals()) if journal.error), None)
        lines = [f"{self.title}: {what}", "", f"    Scenario:  {self.scenario}"]
        if last is not None:
            lines.append(f"    Last seen: {last.outcome} {last.error}")
        return NotIdempotent("\n".join(lines))
