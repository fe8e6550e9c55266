"""Checks of the queues: as the application declares them, and whether RabbitMQ has them so."""

from __future__ import annotations

import re
from collections.abc import Iterable

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed
from celery import Celery
from celery.exceptions import QueueNotFound
from kombu import Connection, Queue

from ..queues import DELIVERY_LIMIT, SHARED_DEAD_LETTERS, QuorumQueue, dead_letter_queues, queue_of
from ..settings import Settings
from ..worker.task import IdempotentTask
from .findings import Finding, ok, refusal, warning

# Nodes that a queue is on: one of them may go.
MEMBERS = 3
_QUEUE_RULES: tuple[tuple[str, str, str], ...] = (
    ("x-queue-type", "quorum", "other types have no delivery limit"),
    ("x-dead-letter-strategy", "at-least-once", "a message could be lost on its way to the dead-letter queue"),
    ("x-overflow", "reject-publish", "a full queue would drop its oldest messages"),
)


def check_declared_queues(app: Celery, tasks: list[IdempotentTask], given: Settings | None) -> list[Finding]:
    """Whether the declared queues keep messages, and whether each task is routed to one. Connects to nothing."""
    findings = []
    used: dict[str, list[IdempotentTask]] = {}
    for task in tasks:
        try:
            used.setdefault(queue_of(app, task.name, getattr(task, "queue", None)), []).append(task)
        except QueueNotFound as missing:
            findings.append(refusal(f"task {task.name}", f"routed to nowhere: {missing.args[0]}", "declare it there"))
        except Exception as error:  # the application's own router, which may need the arguments
            findings.append(
                warning(
                    f"task {task.name}", f"its route cannot be determined: {type(error).__name__}", "check its queue"
                )
            )
    for name, queue in sorted(app.amqp.queues.items()):
        wrong = list(_declared(queue))
        if name not in used and wrong:  # plain tasks may accept less
            lacks = ", ".join(f.found.partition(" is ")[0] for f in wrong[:1])
            found = f"not as quorum_queue declares it: {lacks}" + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
            wrong = [
                warning(
                    f"queue {name}", found, "no idempotent task is routed here, so nothing more is lost than before"
                )
            ]
        findings += [*wrong, *_members(queue)]
        if name in used and not wrong:
            findings.append(_outage(queue, used[name], given))
    return findings


def _declared(queue: Queue) -> list[Finding]:
    subject, arguments = f"queue {queue.name}", queue.queue_arguments or {}
    findings = [
        refusal(subject, f"{name} is {arguments.get(name, 'not set')}, need {needed}", reason)
        for name, needed, reason in _QUEUE_RULES
        if arguments.get(name) != needed
    ]
    limit = arguments.get("x-delivery-limit")
    if limit is None or limit < DELIVERY_LIMIT:
        found = f"x-delivery-limit is {'not set' if limit is None else limit}, need at least {DELIVERY_LIMIT}"
        advice = "attempts are counted on the record; the broker counts lost connections too"
        findings.append(refusal(subject, found, advice))
    exchange, key = arguments.get("x-dead-letter-exchange"), arguments.get("x-dead-letter-routing-key")
    if exchange is None or (exchange == "" and key in (None, "", queue.name)):
        found = f"dead letters go to exchange {exchange!r} with routing key {key!r}, need a separate queue"
        findings.append(refusal(subject, found, "use idempotency.queues.quorum_queue"))
    if (exchange, key) == ("", SHARED_DEAD_LETTERS):
        found = f"dead letters go to {key}, as those of all applications of an earlier version"
        findings.append(
            warning(subject, found, "declare it without dead_letter_queue once you can delete and create it")
        )
    if not queue.durable or queue.auto_delete or queue.no_ack:
        found = f"durable={queue.durable} auto_delete={queue.auto_delete} no_ack={queue.no_ack}, need True False False"
        findings.append(refusal(subject, found, "use idempotency.queues.quorum_queue"))
    for name, attribute in (("x-expires", "expires"), ("x-message-ttl", "message_ttl")):
        if (value := arguments.get(name, getattr(queue, attribute))) is not None:
            findings.append(refusal(subject, f"{name} is {value}, need none", "accepted messages must not expire"))
    if queue.exchange is not None and queue.exchange.type != "topic":
        found = f"exchange type {queue.exchange.type}, recommended topic"
        findings.append(warning(subject, found, "a countdown in apply_async goes through a worker to the outbox"))
    return findings


def _members(queue: Queue) -> list[Finding]:
    """Whether a queue asks for fewer members than may go one by one."""
    name = "x-quorum-initial-group-size"
    members = (queue.queue_arguments or {}).get(name, MEMBERS)
    if members >= MEMBERS:
        return []
    loss = "its only node loses" if members < 2 else "one of its nodes stops it, and the loss of both loses"
    advice = (
        f"the loss of {loss} what waits in it; what the outbox has is published again, what `delay` has sent is not"
    )
    return [warning(f"queue {queue.name}", f"{name} is {members}, need {MEMBERS} or none", advice)]


def _outage(queue: Queue, tasks: list[IdempotentTask], given: Settings | None) -> Finding:
    """How late a message may come back. Waiting for Postgres uses up no deliveries; an attempt killed at its limit does."""
    subject, limit = f"queue {queue.name}", (queue.queue_arguments or {})["x-delivery-limit"]
    latest = limit * max((task.time_limit or 0 for task in tasks), default=0)
    if given is not None and latest > given.redelivery_horizon:
        found = f"{limit} deliveries x {latest / limit:g} s = {latest:g} s above redelivery_horizon={given.redelivery_horizon}"
        return warning(subject, found, "a message may still arrive after its record was purged")
    return ok(subject, f"quorum, {limit} deliveries; waiting for Postgres uses up none")


def check_real_queues(connection: Connection, declared: Iterable[Queue]) -> list[Finding]:
    """Whether existing queues and their dead-letter queues have the arguments declared here. Creates nothing."""
    declared = list(declared)
    return [finding for queue in [*declared, *dead_letter_queues(declared)] for finding in _real(connection, queue)]


def _real(connection: Connection, queue: Queue) -> list[Finding]:
    subject = f"queue {queue.name}"
    for passive in (True, False):  # a full declaration only if it exists; each refusal closes the channel
        channel = connection.channel()
        try:
            queue(channel).queue_declare(passive=passive)
        except NotFound:
            return [warning(subject, "not there yet", "a worker or the relay declares it")]
        except AccessRefused:
            return [warning(subject, "this user may not declare it", "compare its arguments manually")]
        except PreconditionFailed as error:
            return [
                refusal(
                    subject,
                    _inequivalent(error),
                    "delete the queue once it is empty, or declare it with its actual arguments",
                )
            ]
        else:
            is_shared = isinstance(queue, QuorumQueue) and queue.points_to_shared(channel)
        finally:
            if channel.is_open:
                channel.close()
    if is_shared:
        found = f"made by an earlier version: its dead letters go to {SHARED_DEAD_LETTERS}, which others may share"
        return [warning(subject, found, "delete the queue once it is empty; it is then created with its own")]
    return []


def _inequivalent(error: PreconditionFailed) -> str:
    """RabbitMQ's message, which names the argument and both values."""
    found = re.search(r"inequivalent arg .*", str(error.reply_text))
    return found.group() if found else "declared with different arguments than it has"
