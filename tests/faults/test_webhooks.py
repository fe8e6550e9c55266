"""P10: a webhook has been posted to a customer, and what it was answered is not recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from idempotency import events, publish
from idempotency.application import close_runtime, runtime_of
from idempotency.operate.change import Change
from idempotency.operate.webhooks import add_endpoint, enable_endpoint
from idempotency.webhooks import send_webhooks
from idempotency.webhooks.tasks import delivery_id
from tests.faults import clocks
from tests.faults.conftest import SeenCell
from tests.faults.own_postgres import Writes, fixture_database, fixture_postgres, fixture_template, fixture_writes  # noqa: F401
from tests.faults.scene import PATIENCE, Scene
from tests.faults.test_workers import ended_at_last
from tests.support import receiver as receivers
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, Worker, eventually
from tests.support.receiver import Answer, Receiver, Request

EVENT, APPLICATION = "bank.paid", "tests.faults.webhook_application"
RECORDED = b"UPDATE idempotency.webhook_attempts"
# One statement, which sees the record and the message of a pause, or neither: a message that comes before its record is due
# is one too many, and acknowledged.
_DUE = """
WITH due AS (
    UPDATE idempotency.records SET available_at = clock_timestamp() WHERE available_at > clock_timestamp()
)
UPDATE idempotency.outbox SET available_at = clock_timestamp() WHERE available_at > clock_timestamp()
"""
DAY = 86400
# As Standard Webhooks has it, in seconds.
TOLERANCE = 300


class WebhookScene(Scene):
    """One event, which a customer is told of. `account` is the key of the delivery's operation."""

    receiver: Receiver
    endpoint: str
    secret: str

    def accept(self) -> None:
        with Session(self.engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
            self.delivery = delivery_id(publish(session, EVENT, {"amount": 7}, app=self.app), self.endpoint)
            self.account = f"{self.delivery}:0"

    def worker(self, children: int = 2, **environment: str) -> Worker:
        self.workers.append(self._processes.worker("--concurrency", str(children), app=APPLICATION, **environment))
        return self.workers[-1]

    def delivered(self, *, with_leases: bool = True) -> None:
        """Wait until the delivery has ended; pauses pass at once, and leases, unless every attempt is alive."""

        def is_over() -> bool:
            if with_leases:
                self.age()
            else:
                self.pass_pauses()
            return self.status() == "completed"

        eventually(is_over, timeout=PATIENCE, what="delivered")

    def pass_pauses(self) -> None:
        """Let what waits for its next attempt be due now, its message included."""
        self.execute(_DUE)

    def answers(self) -> list[int | None]:
        """What each attempt was answered with, as people see it."""
        return [row.status for row in self.rows("SELECT status FROM idempotency.webhook_attempts ORDER BY id")]

    def outcome(self) -> str:
        posted = self.receiver.webhooks
        assert {(each.id, each.body) for each in posted} == {(self.delivery, posted[0].body)}
        for each in posted:
            Webhook(self.secret).verify(each.body, each.headers)
        (delivery,) = self.rows("SELECT * FROM idempotency.webhook_deliveries")
        assert (delivery.id, delivery.status, delivery.body) == (self.delivery, "delivered", posted[0].body)
        assert len(self.answers()) >= len(posted)
        letter = "re-POST" if len(posted) > 1 else "finish"
        return f"{letter},S" if any(row.origin in ("recover", "resend") for row in self.outbox()) else letter


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is valid for a worker whose clock is a day off, too, if this machine can shift a clock."""
    directory = tmp_path_factory.mktemp("tls")
    past = clocks.Clock(directory, seconds=-2 * DAY).environment if clocks.can_be_built() else {}
    return receivers.certificate(directory, days=4, environment=past)


@pytest.fixture
def scene(
    bank: Celery,
    environment: dict[str, str],
    processes: Processes,
    outside: OutsideWorld,
    database: str,
    certificate: Path,
) -> Iterator[WebhookScene]:
    close_runtime(bank)
    before = dict(bank.conf.changes)
    receiver = receivers.start(certificate)
    environment["WEBHOOK_CA_FILE"] = str(receiver.ca_file)
    bank.conf.update(
        idempotency_webhook_allowed_hosts=("127.0.0.1",), idempotency_webhook_ca_file=str(receiver.ca_file)
    )
    send_webhooks(EVENT, app=bank)
    change, runtime = Change("ann", "test"), runtime_of(bank)
    made = add_endpoint(runtime, change, runtime.settings.tenant, url=f"{receiver.url}/hooks", events=[EVENT])
    enable_endpoint(runtime, change, made.id)
    scene = WebhookScene(bank, environment, processes, outside, database)
    scene.receiver, scene.endpoint, scene.secret = receiver, made.id, made.verifier
    yield scene
    scene.close()
    receiver.close()
    close_runtime(bank)
    events._subscriptions.pop(bank)
    for name in ("webhooks.fan_out", "webhooks.deliver"):
        bank.tasks.pop(name)
    bank.conf.changes.clear()
    bank.conf.changes.update(before)


@pytest.fixture(autouse=True)
def checked_accounts() -> None:
    """The books of a delivery are those that `WebhookScene.outcome` looks at."""


@pytest.mark.cell("F1", "P10")
def test_a_child_that_dies_after_its_post_posts_again(scene: WebhookScene, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to("P10")
    os.kill(scene.held("P10"), signal.SIGKILL)
    eventually(lambda: scene.record().duplicates == 1, timeout=PATIENCE, what="the redelivery was counted")
    scene.sweep()
    scene.delivered()
    assert scene.answers() == [None, 204]
    cell.saw(scene.outcome())


@pytest.mark.cell("F2", "P10")
def test_a_worker_that_dies_after_its_post_posts_again(scene: WebhookScene, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to("P10")
    worker.kill()
    scene.worker()
    eventually(lambda: scene.record().duplicates == 1, timeout=PATIENCE, what="the redelivery was counted")
    scene.sweep()
    scene.delivered()
    cell.saw(scene.outcome())


@pytest.mark.cell("F3", "P10")
def test_a_worker_frozen_after_its_post_changes_nothing_when_it_goes_on(scene: WebhookScene, cell: SeenCell) -> None:
    broker = scene.broker_proxy()
    frozen = scene.worker(LEASE="60")
    scene.bring_to("P10")
    child = scene.held("P10")
    frozen.signal(signal.SIGSTOP)
    scene.age()
    broker.reset()  # what the broker does with a peer whose heartbeats have stopped
    scene.worker()
    scene.completed()
    done = (scene.record(), scene.rows("SELECT * FROM idempotency.webhook_deliveries"))

    scene.let_go("P10")
    os.kill(child, signal.SIGCONT)
    asks = lambda: [each for each in scene.trace("hint.left") if each.pid == child][1:]  # noqa: E731
    eventually(asks, timeout=PATIENCE, what="the stale attempt asks again")
    frozen.signal(signal.SIGCONT)
    assert (scene.record(), scene.rows("SELECT * FROM idempotency.webhook_deliveries")) == done
    cell.saw(scene.outcome())


@pytest.mark.cell("F4", "P10")
@pytest.mark.parametrize("at_once", [False, True])
def test_a_worker_told_to_stop_after_its_post(at_once: bool, scene: WebhookScene, cell: SeenCell) -> None:
    worker = scene.worker()
    scene.bring_to("P10")
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in worker.log, timeout=PATIENCE)
    if at_once:
        worker.process.send_signal(signal.SIGQUIT)
        ended_at_last(worker)
        scene.worker()
    else:
        scene.let_go("P10")
        assert worker.process.wait(PATIENCE) == 0
    scene.delivered()
    cell.saw(scene.outcome())


@pytest.mark.cell("F12", "P10")
def test_a_post_that_a_killed_postgres_does_not_know_is_made_again(
    scene: WebhookScene, postgres: Any, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to("P10")
    postgres.kill()
    scene.let_go("P10")
    eventually(lambda: scene.logged("event=claim_waits"), timeout=PATIENCE, what="it waits for Postgres")
    postgres.start()
    scene.delivered()
    cell.saw(scene.outcome())


@pytest.mark.cell("F13", "P10")
def test_a_post_whose_record_has_no_reply_is_made_again(scene: WebhookScene, cell: SeenCell) -> None:
    proxy = scene.postgres_proxy()
    scene.worker()
    scene.bring_to("P10")
    proxy.cut_reply_to(RECORDED)
    scene.let_go("P10")
    scene.delivered()
    assert proxy.cuts == 1
    cell.saw(scene.outcome())


@pytest.mark.cell("F14", "P10")
def test_a_post_that_cannot_be_recorded_is_made_again(scene: WebhookScene, writes: Writes, cell: SeenCell) -> None:
    scene.worker()
    scene.bring_to("P10")
    writes.stop()
    scene.let_go("P10")
    eventually(lambda: scene.logged("event=claim_waits"), timeout=PATIENCE, what="it waits")
    writes.allow()
    scene.delivered()
    cell.saw(scene.outcome())


@pytest.mark.cell("F15", "P10")
@pytest.mark.parametrize("days", [1, -1])
def test_a_webhook_of_another_day_is_refused_in_sight_and_delivered_later(
    days: int, scene: WebhookScene, tmp_path: Path, cell: SeenCell
) -> None:
    if not clocks.can_be_built():
        cell.not_run("no C compiler")

    def of_now(request: Request) -> Answer:
        is_late = abs(time.time() - int(request.headers["webhook-timestamp"])) > TOLERANCE
        return (401, {}, b"") if is_late else (204, {}, b"")

    scene.receiver.answer = of_now
    clock = clocks.Clock(tmp_path, seconds=days * DAY)
    environment: dict[str, Any] = clock.environment
    scene.worker(**environment)
    scene.relay()
    scene.accept()
    eventually(lambda: scene.answers() == [401], timeout=PATIENCE, what="refused, and that is in sight")
    clock.shift(0)
    scene.delivered()
    assert scene.answers() == [401, 204]
    assert [each.id for each in scene.receiver.webhooks] == [scene.delivery] * 2
    cell.saw("refused")


def unanswered(request: Request) -> Answer:
    return None


def failing(request: Request) -> Answer:
    return 500, {}, b""


def busy(request: Request) -> Answer:
    return 429, {"Retry-After": "3600"}, b""


def hanging(request: Request) -> Answer:
    time.sleep(3)
    return 204, {}, b""


@pytest.mark.cell("F20", "P10")
@pytest.mark.parametrize("how", [unanswered, failing, busy, hanging])
def test_a_receiver_that_misbehaves_gets_the_same_again(
    how: Callable[[Request], Answer], scene: WebhookScene, cell: SeenCell
) -> None:
    begun = iter([how])
    scene.receiver.answer = lambda request: next(begun, receivers.accept)(request)
    scene.worker()
    scene.relay()
    scene.accept()
    # An attempt that is taken over while it lives is under way to a failing endpoint, which gets no other one meanwhile.
    scene.delivered(with_leases=False)
    assert len(scene.answers()) == 2
    cell.saw(scene.outcome())
