"""What one process holds open for a store: its connections, the heartbeat of its claims, the place of long results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .. import objects
from ..attempt.heartbeat import Heartbeat
from ..attempt.hints import Hints
from ..attempt.liveness import process_identity
from ..errors import InvalidResult
from ..observe import metrics
from ..settings import Settings
from ..store.answers import Claimed, Completed, Failed, Mismatch, Renewal
from ..wire import results
from ..wire.delivery import Delivery
from .addresses import open_store
from .store import TIMEOUT, Answer, PlaceAway, StoreBusy, Watch


class StoreRuntime:
    """One store of one process. Made in the process that uses it, so that a forked child shares no socket."""

    def __init__(self, settings: Settings, address: str) -> None:
        metrics.prepare()
        self.pid = os.getpid()
        self.settings = settings
        self.holder = process_identity()
        # a renewal has to come back before the next is due
        timeout = min(TIMEOUT, settings.heartbeat)
        self.store = open_store(address, service=settings.service, timeout=timeout)
        self._renewing = self.store.with_own_connections()
        no_hints = Hints(None, owner="", lease=settings.lease, timeout=timeout, pause=0.0)
        self.heartbeat = Heartbeat(
            self._renew,
            no_hints,
            lease=settings.lease,
            interval=settings.heartbeat,
            longest_run=settings.longest_run,
        )

    def close(self) -> None:
        """Close everything; it is not used again."""
        self.heartbeat.stop()
        self.store.close()
        self._renewing.close()

    def claim(self, delivery: Delivery, token: str, watch: Watch) -> Answer:
        """Claim the operation of a delivery, or learn from its record why not. Raises `StoreAway`, and what a watch raises."""
        with metrics.phase(delivery.id.task, "claim"):
            answer = self.store.claim(
                delivery.id,
                token=token,
                fingerprints=[delivery.fingerprint, *delivery.also],
                holder=self.holder,
                lease=self.settings.lease,
                keep=self.keep,
                watch=watch,
            )
        _count(answer, delivery.id.task)
        return answer

    @property
    def keep(self) -> float:
        """Seconds for which a record is kept if nothing ends it: after that no message for it can come."""
        return self.settings.redelivery_horizon

    def stored_result(self, result: Any) -> str:
        """A result as text. Raises `InvalidResult`, also for one that has room neither in a record nor elsewhere."""
        settings, place = self.settings, self.settings.store_results_at
        room = min(settings.result_limit, self.store.room)
        limit = settings.result_limit if place is None else max(room, settings.large_result_limit)
        text = results.to_text(result, limit=limit, compress_above=settings.compress_results_above)
        if len(text) > room and place is None:
            raise InvalidResult(f"result: at most {room} bytes in a record of {self.store.name}, got {len(text)}")
        return text

    def placed(self, text: str) -> str:
        """A result's text as its record keeps it: one that is too long is put elsewhere, and referred to. Raises `PlaceAway`."""
        place = self.settings.store_results_at
        if place is None or len(text) <= min(self.settings.result_limit, self.store.room):
            return text
        try:
            return objects.keep(place, text)
        except Exception as error:
            raise PlaceAway(f"store_results_at does not take one: {type(error).__name__}") from error

    def read_result(self, text: str) -> Any:
        """The result that a record keeps, wherever it is. Raises as `results.from_text` does, and what that place raises."""
        return results.from_text(objects.fetch(self.settings.store_results_at, text))

    def renew(self, held: Sequence[Claimed]) -> dict[str, Renewal]:
        """Renew the leases of claims now. Raises `StoreAway`."""
        return self.store.renew(held, lease=self.settings.lease, keep=self.keep)

    def _renew(self, held: Sequence[Claimed]) -> dict[str, Renewal]:
        return self._renewing.renew(held, lease=self.settings.lease, keep=self.keep)


def _count(answer: Answer, task: str) -> None:
    match answer:
        case Claimed(taken_over=taken_over):
            metrics.claims.labels(task).inc()
            if taken_over:
                metrics.takeovers.labels(task).inc()
        case Completed() | Failed():
            metrics.duplicates.labels(task).inc()
        case Mismatch():
            metrics.mismatches.labels(task).inc()
        case StoreBusy():
            metrics.busy.labels(task).inc()
