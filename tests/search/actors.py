"""Who acts: each kind of actor runs the library's own code, as its process would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from celery.exceptions import Reject
from sqlalchemy.exc import OperationalError

from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, DiscardRefused, OperationNotFound, ReplayRefused
from idempotency.operate import discard
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change
from idempotency.operate.people import Person
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from tests.search import application
from tests.search.scheduler import EVERYTHING, current, note, stop_before, touched
from tests.search.world import REFUND, World


@dataclass(frozen=True)
class Kind:
    """A kind of actor, and what it needs to find in the broker."""

    name: str
    act: Callable[[World], object]
    copies: int = 0  # of the message in the queue
    dead_copies: int = 0  # of the message in the dead-letter queue


def _attempt(world: World) -> None:
    world.attempt()


def _takeover(world: World) -> None:
    stop_before("time passes: a lease and more")
    world.a_while()
    world.attempt()


def _eager(world: World) -> None:
    """A caller runs the task in its own process, and gives up at any error."""
    try:
        world.task.apply((REFUND,), throw=True).get()
    except (Exception, Reject) as error:
        note(f"the caller sees {type(error).__name__}")


def _relay(world: World) -> None:
    world.relay()


def _recover(world: World) -> None:
    stop_before("time passes: a lease and more")
    world.a_while()
    world.recover()


def _resend(world: World) -> None:
    stop_before("time passes: a lease and more")
    world.a_while()
    world.resend()


def _dead_letter(world: World) -> None:
    stop_before("dead message taken")
    touched("w:queues")
    if world.broker.dead:
        world.bury()


def _message_dies(world: World) -> None:
    """The broker gives up its first message, and the consumer takes it."""
    stop_before("the first message dies")
    touched("w:queues")
    if world.broker.ready:
        world.broker.dead.append((world.broker.ready.popleft(), "delivery_limit"))
        world.bury()


def _rejected(world: World) -> None:
    """A worker of another version refuses the first message, and the consumer takes it."""
    stop_before("the first message is rejected")
    touched("w:queues")
    if world.broker.ready:
        world.broker.dead.append((world.broker.ready.popleft(), "rejected"))
        world.bury()


def _renew(world: World) -> None:
    """The heartbeat of the first actor's process."""
    stop_before("renews")
    touched(EVERYTHING)
    assert world.scheduler is not None
    process = world.scheduler.actors[0].process
    if process.holder not in world.dead:
        process.heartbeat.run_once()


def _revoke(world: World) -> None:
    """A worker has terminated the attempt of the task id that was revoked, and its main process marks the record."""
    stop_before("terminates")
    world.revoke()


def _release(world: World) -> None:
    with _refusals():
        shown = world.shown()
        _insisting(lambda change: release(application.app, shown, change))


def _cancel(world: World) -> None:
    with _refusals():
        shown = world.shown()
        _insisting(lambda change: cancel(application.app, shown, change))


def _cancel_anyway(world: World) -> None:
    with _refusals():
        shown = world.shown()
        _insisting(lambda change: cancel(application.app, shown, change, may_have_happened=True))


def _resolve(world: World) -> None:
    with _refusals():
        shown = world.shown()
        stop_before("asks at the provider's desk")
        _insisting(lambda change: world.resolve(shown, change))


def _resolve_effect(world: World) -> None:
    """As resolve, and the operation is not to go on."""
    with _refusals():
        shown = world.shown()
        stop_before("asks at the provider's desk")
        _insisting(lambda change: world.resolve(shown, change, end=True))


def _replay(world: World) -> None:
    stop_before("looks for a dead letter")
    with _refusals():
        for letter in world.letters()[:1]:
            _insisting(lambda change, letter=letter: replay(application.app, letter, change))


def _discard(world: World) -> None:
    stop_before("looks for a dead letter")
    engine = runtime_of(application.app).engine
    with _refusals():
        for letter in world.letters()[:1]:
            with engine.begin() as connection:
                discard.request(connection, Person("ann", "operator"), letter, "asked by the search")
            with engine.begin() as connection:
                discard.approve(connection, Person("bob", "admin"), letter, app=application.app)


def _insisting(command: Callable[[Change], object]) -> None:
    """A person who gets no answer gives the same command again."""
    actor = current()
    change = Change("search", "asked by the search", actor.name if actor is not None else None)
    try:
        command(change)
    except OperationalError:
        note("given again")
        command(change)


@contextmanager
def _refusals() -> Iterator[None]:
    """An operator is told that it cannot be done, and gives up."""
    try:
        yield
    except (ChangeRefused, ReplayRefused, DiscardRefused, OperationNotFound) as error:
        note(f"refused: {type(error).__name__}")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("attempt", _attempt, copies=1),
        Kind("takeover", _takeover, copies=1),
        Kind("eager", _eager),
        Kind("relay", _relay),
        Kind("recover", _recover),
        Kind("resend", _resend),
        Kind("dead_letter", _dead_letter, dead_copies=1),
        Kind("message_dies", _message_dies),
        Kind("rejected", _rejected),
        Kind("renew", _renew),
        Kind("revoke", _revoke),
        Kind("release", _release),
        Kind("cancel", _cancel),
        Kind("cancel_anyway", _cancel_anyway),
        Kind("replay", _replay),
        Kind("resolve", _resolve),
        Kind("resolve_effect", _resolve_effect),
        Kind("discard", _discard),
    )
}

# Those that run the body, and so call the provider.
RUNNERS = {"attempt", "takeover", "eager"}
