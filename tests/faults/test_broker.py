"""F5–F8: the broker's connections break, it is killed, frozen, or loses everything it had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import services
from idempotency.relay.relay import Relay, Relayed
from idempotency.relay.resend import resend_lost
from services import RabbitMQ
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.scene import PATIENCE, Scene
from tests.support.processes import eventually

WHILE_FROZEN = Relayed(0, 0, broker_unavailable=True)


@pytest.fixture
def rabbitmq(servers: services.Services, cell: SeenCell) -> Iterator[RabbitMQ]:
    """The run's own broker. It may be killed or frozen: it runs again at the end."""
    if servers.broker != "rabbitmq":
        cell.not_run("needs a RabbitMQ of our own")
    yield servers.rabbitmq
    if servers.rabbitmq.running:
        servers.rabbitmq.resume()
    servers.rabbitmq.start()


@pytest.fixture
def relay(scene: Scene) -> Iterator[Relay]:
    """A relay that this test runs pass by pass, through a proxy before the broker."""
    scene.broker_proxy()
    relay = Relay(scene.app, confirm_timeout=1.0)
    yield relay
    relay.close()


def publish(relay: Relay, scene: Scene) -> None:
    """Passes of the relay until the operation's row is published."""

    def passed() -> bool:
        relay.run_once()
        return bool(scene.outbox()[0].status == "published")

    eventually(passed, timeout=PATIENCE, what="the row is published")


def unconfirmed(scene: Scene) -> None:
    """Wait until the broker has the message and has sent its confirm, which is not received."""
    eventually(lambda: scene.proxy.swallowed > 0 and scene.messages() == 1, what="a message without its confirm")


def consumed(scene: Scene, copies: int) -> str:
    """Let a worker take what the broker has; the letter of what the copies did."""
    scene.worker(children=1)
    scene.completed()
    eventually(lambda: len(scene.trace("hint.left")) == copies and scene.messages() == 0, what=f"{copies} copies taken")
    outcome = scene.outcome()
    assert outcome == ("D" if copies > 1 else "–")
    return outcome


# ---------------------------------------------------------------- the relay


@pytest.mark.cell("F5", "P7")
def test_a_relay_reset_before_it_publishes_sends_its_row_in_the_next_pass(
    relay: Relay, scene: Scene, cell: SeenCell
) -> None:
    assert relay.run_once() == Relayed(0, 0)
    relay.publisher.in_queue(scene.app.conf.task_default_queue)  # connected, and the queues are there
    scene.accept()
    scene.at("relay.selected", scene.proxy.reset)
    assert relay.run_once() == WHILE_FROZEN
    assert (scene.outbox()[0].status, scene.proxy.resets) == ("pending", 1)
    publish(relay, scene)
    assert scene.messages() == 1
    assert consumed(scene, 1) == "–"
    cell.saw("W")


@pytest.mark.cell("F5", "P8")
def test_a_relay_reset_before_the_confirm_publishes_again(relay: Relay, scene: Scene, cell: SeenCell) -> None:
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    former = relay.publisher._channel
    scene.proxy.black_hole("replies")
    scene.at("relay.published", lambda: (unconfirmed(scene), scene.proxy.heal()))
    scene.accept()
    assert relay.run_once() == WHILE_FROZEN
    assert scene.outbox()[0].status == "pending"
    publish(relay, scene)
    assert relay.publisher._channel is not former
    assert consumed(scene, copies=2) == "D"
    cell.saw("K")


@pytest.mark.cell("F5", "P9")
def test_a_relay_reset_after_the_confirm_marks_its_row(relay: Relay, scene: Scene, cell: SeenCell) -> None:
    scene.at("relay.confirmed", scene.proxy.reset)
    scene.accept()
    assert relay.run_once() == Relayed(1, 0)
    assert scene.proxy.resets == 1
    assert relay.run_once() == Relayed(0, 0)
    cell.saw(consumed(scene, copies=1))


@pytest.mark.cell("F6", "P7")
def test_a_relay_waits_for_a_killed_broker_and_publishes_its_rows(
    relay: Relay, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell
) -> None:
    scene.declare_queues()
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.accept()
    scene.at("relay.selected", rabbitmq.kill)
    assert relay.run_once() == WHILE_FROZEN
    assert relay.run_once() == WHILE_FROZEN
    assert (scene.outbox()[0].status, scene.outbox()[0].attempts) == ("pending", 0)
    rabbitmq.start()
    publish(relay, scene)
    assert consumed(scene, copies=1) == "–"
    cell.saw("W")


@pytest.mark.cell("F6", "P8")
def test_a_message_whose_confirm_died_with_the_broker_is_published_again(
    relay: Relay, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell
) -> None:
    scene.declare_queues()
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.proxy.black_hole("replies")
    scene.at("relay.published", lambda: (unconfirmed(scene), rabbitmq.kill(), scene.proxy.heal()))
    scene.accept()
    assert relay.run_once() == WHILE_FROZEN
    rabbitmq.start()
    publish(relay, scene)
    assert consumed(scene, copies=2) == "D"
    cell.saw("K")


@pytest.mark.cell("F7", "P7")
def test_a_relay_waits_for_a_frozen_broker_and_publishes_its_rows(
    relay: Relay, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell
) -> None:
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.accept()
    scene.at("relay.selected", rabbitmq.pause)
    assert relay.run_once() == WHILE_FROZEN
    assert scene.outbox()[0].status == "pending"
    rabbitmq.resume()
    publish(relay, scene)
    eventually(lambda: scene.messages() > 0)
    # What the frozen broker found in its buffers when it went on may be there beside it.
    consumed(scene, copies=scene.messages())
    cell.saw("W")


@pytest.mark.cell("F7", "P8")
def test_a_broker_frozen_before_its_confirm_costs_a_second_copy(
    relay: Relay, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell
) -> None:
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.proxy.black_hole("replies")
    scene.at("relay.published", lambda: (unconfirmed(scene), rabbitmq.pause()))
    scene.accept()
    assert relay.run_once() == WHILE_FROZEN
    assert relay.publisher._channel is None
    assert scene.outbox()[0].status == "pending"
    scene.proxy.heal()
    rabbitmq.resume()
    publish(relay, scene)
    assert consumed(scene, copies=2) == "D"
    cell.saw("K")


@pytest.mark.cell("F8", "P7")
def test_a_row_whose_queue_was_deleted_waits_until_it_is_declared_again(
    relay: Relay, scene: Scene, cell: SeenCell
) -> None:
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.accept()
    scene.at("relay.selected", scene.delete_queues)
    assert relay.run_once() == Relayed(0, 1)
    row = scene.outbox()[0]
    assert (row.status, row.attempts) == ("pending", 1)
    assert "NO_ROUTE" in row.last_error
    scene.worker()  # declares its queues
    scene.age()
    publish(relay, scene)
    scene.completed()
    assert scene.outcome() == "–"
    cell.saw("W")


@pytest.mark.parametrize("phase", each("F8", "P8", "P9"))
def test_a_published_message_that_its_broker_lost_is_sent_again(
    phase: str, relay: Relay, scene: Scene, cell: SeenCell
) -> None:
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    scene.accept()
    scene.at(
        "relay.published" if phase == "P8" else "relay.confirmed",
        lambda: (eventually(lambda: scene.messages() == 1), scene.delete_queues()),
    )
    assert relay.run_once() == Relayed(1, 0)
    assert scene.outbox()[0].status == "published"
    scene.worker()
    assert resend_lost(scene.app).resent == 0, "not before its time"
    scene.age()
    assert resend_lost(scene.app).resent == 1
    publish(relay, scene)
    scene.completed()
    cell.saw(scene.outcome())


# ---------------------------------------------------------------- the worker


@pytest.mark.parametrize("phase", each("F6", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_a_worker_goes_on_after_its_broker_was_killed_and_came_back(
    phase: str, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell
) -> None:
    postgres = scene.postgres_proxy()
    scene.declare_queues()
    scene.worker()
    scene.bring_to(phase, postgres)
    rabbitmq.kill()
    scene.cancelled(phase)
    rabbitmq.start()
    scene.completed()
    # where only a redelivery will look: the process that was waiting for COMMIT's reply is gone
    again = "hint.left" if phase in ("P5", "P6") else "finish.committed"
    count = 2 if phase in ("P5", "P6") else 1
    eventually(lambda: len(scene.trace(again)) >= count, timeout=PATIENCE, what=again)
    cell.saw(scene.outcome())


@pytest.mark.parametrize("phase", each("F7", "P0", "P1", "P2", "P3", "P6"))
def test_a_frozen_broker_delays_new_messages_but_not_what_a_worker_has(
    phase: str, scene: Scene, rabbitmq: RabbitMQ, cell: SeenCell, caplog: pytest.LogCaptureFixture
) -> None:
    scene.worker()
    scene.bring_to(phase)
    rabbitmq.pause()
    scene.let_go(phase)
    scene.completed()
    eventually(lambda: scene.trace("finish.committed"))
    before = scene.outcome()
    scene.accept()  # a duplicate, which the relay cannot publish
    eventually(lambda: "event=broker_unavailable" in caplog.text, what="the relay has noticed")
    assert scene.outbox()[-1].status == "pending"
    rabbitmq.resume()
    eventually(lambda: {row.status for row in scene.outbox()} == {"published"}, timeout=PATIENCE)
    eventually(lambda: len(scene.trace("hint.left")) > 1, timeout=PATIENCE, what="the duplicate was delivered")
    eventually(lambda: scene.messages() == 0)
    assert before == "–"
    cell.saw("W" if phase == "P0" else scene.outcome() if phase == "P6" else before)


@pytest.mark.parametrize("phase", each("F8", "P0", "P1", "P2", "P3", "P4", "P5"))
def test_what_a_wiped_broker_had_is_done_after_a_sweep(phase: str, scene: Scene, cell: SeenCell) -> None:
    postgres = scene.postgres_proxy()
    scene.worker()
    scene.bring_to(phase, postgres)
    fence = scene.fence()
    scene.delete_queues()
    scene.cancelled(phase)
    scene.sweep(up_to=fence)
    scene.completed()
    scene.sweep()
    rows = scene.outbox()
    assert rows
    assert all(row.settled_at for row in rows)
    cell.saw(scene.outcome())
