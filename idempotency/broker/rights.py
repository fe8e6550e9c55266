"""Who may do what in RabbitMQ: a user for each kind of process, with the least that it needs, as a definitions document.

RabbitMQ has three rights in a virtual host (configure, write, read), each a pattern over the names of queues and
exchanges alike, and for topic exchanges a pattern over routing keys. Only workers and relays declare queues. Declaring
one whose dead letters go through the default exchange takes the right to write there, so these two may publish to every
queue of the virtual host. The pattern over routing keys does not see those in the headers CC and BCC. So applications
that must not reach each other's queues need a virtual host each.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Queue
from kombu.transport.native_delayed_delivery import CELERY_DELAYED_DELIVERY_EXCHANGE, MAX_LEVEL, level_name

from ..errors import SettingsError
from ..queues import dead_letter_queues, forwarded_dead_letters

APPLICATION, WORKER, RELAY, BEAT, FLOWER, STREAM, MONITOR = KINDS = (
    "application", "worker", "relay", "beat", "flower", "stream", "monitor",
)  # fmt: skip
# RabbitMQ's name for the exchange without one, which delivers to the queue that the routing key names.
DEFAULT_EXCHANGE = "amq.default"
NOTHING = "^$"
# What the names of queues begin with that the doctor makes for a moment, where it compares the brokers of cells.
DOCTOR = "idempotency-doctor-"
# Celery's routing keys of messages that wait: the delay in bits, then the queue's own.
_DELAY = rf"([01]\.){{{MAX_LEVEL + 1}}}"


@dataclass(frozen=True, slots=True)
class Rights:
    """Patterns of names, without anchors. `keys`: what may be published to a topic exchange, as a pattern with them."""

    configure: Sequence[str] = ()
    write: Sequence[str] = ()
    read: Sequence[str] = ()
    keys: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Rights) -> Rights:
        return Rights(
            [*self.configure, *other.configure],
            [*self.write, *other.write],
            [*self.read, *other.read],
            {**self.keys, **other.keys},
        )


def definitions(
    app: Celery,
    service: str,
    passwords: Mapping[str, str],
    *,
    prefix: str = "idempotency",
    event_exchanges: Iterable[str] = (),
    streams: Iterable[str] = (),
) -> dict[str, Any]:
    """The users whose passwords are given (by kind of process) and their rights, as RabbitMQ imports them.

    `event_exchanges`: those that `publish(…, exchange=…)` names, to which the relay publishes. `streams`: the queues that are
    streams, which processes of `idempotency stream` read. The document holds salted hashes of the passwords. Raises
    `SettingsError` if the broker is not RabbitMQ.
    """
    broker = app.connection_for_write()
    if broker.transport.driver_type != "amqp":
        raise SettingsError("broker_url: these users are for RabbitMQ")
    vhost = broker.virtual_host or "/"
    all_rights = rights_of(app, service, event_exchanges=event_exchanges, streams=streams)
    rights = {f"{prefix}_{kind}": given for kind, given in all_rights.items() if kind in passwords}
    return {
        "vhosts": [{"name": vhost}],
        "users": [
            {
                "name": f"{prefix}_{kind}",
                "password_hash": _hashed(password),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": [],
            }
            for kind, password in passwords.items()
        ],
        "permissions": [
            {"user": user, "vhost": vhost}
            | {name: _any_of(getattr(given, name)) for name in ("configure", "write", "read")}
            for user, given in rights.items()
        ],
        "topic_permissions": [
            {"user": user, "vhost": vhost, "exchange": exchange, "write": keys, "read": NOTHING}
            for user, given in rights.items()
            for exchange, keys in given.keys.items()
        ],
    }


def rights_of(
    app: Celery, service: str, *, event_exchanges: Iterable[str] = (), streams: Iterable[str] = ()
) -> dict[str, Rights]:
    """The rights of each kind of process, from the application's own queues and Celery's settings."""
    queues = list(app.amqp.queues.values())
    own = _exact(queue.name for queue in queues)
    dead = _exact([*(queue.name for queue in dead_letter_queues(queues)), forwarded_dead_letters(service)])
    exchanges = _exact(exchange for queue in queues for exchange in _exchanges(queue))
    published = _exact(map(_published_to, queues))
    declaring = Rights([*own, *dead, *exchanges], [*own, *exchanges, *_exact([DEFAULT_EXCHANGE])], exchanges)
    delayed, first = _delayed(app)
    sending, listening = _events(app)
    asking, answering = _remote_control(app)
    publishing = Rights(write=[*published, *first], keys=_keys(queues, first))
    if app.conf.task_send_sent_event:
        publishing += sending
    return {
        APPLICATION: publishing,
        BEAT: publishing,
        WORKER: declaring + Rights(delayed, [*published, *delayed], [*own, *delayed]) + sending + asking + answering,
        RELAY: declaring
        + Rights([rf"{re.escape(DOCTOR)}[0-9a-f]+"], [*published, *_exact(event_exchanges)], [*own, *dead])
        + asking,
        FLOWER: listening + asking,
        STREAM: Rights(read=_exact(streams)),  # what handlers enqueue, relays publish
        MONITOR: Rights(),  # RabbitMQ tells everyone who may connect how long a queue is
    }


def _delayed(app: Celery) -> tuple[list[str], list[str]]:
    """The queues and exchanges of Celery's native delayed delivery, and the one that messages are published to."""
    if not detect_quorum_queues(app, "amqp")[0]:
        return [], []
    levels = re.escape(level_name(0).removesuffix("0")) + r"\d+"
    return [levels, *_exact([CELERY_DELAYED_DELIVERY_EXCHANGE])], _exact([level_name(MAX_LEVEL)])


def _events(app: Celery) -> tuple[Rights, Rights]:
    """Sending Celery's events, among them a worker's signs of life, and listening to them.

    A listener first asks all workers for a sign of life, and gives up if it may not. With remote control off, none of
    them hears it.
    """
    exchange, mailbox = _exact([app.conf.event_exchange, app.control.mailbox.exchange.name])
    queues = rf"{re.escape(app.conf.event_queue_prefix)}\..+"
    return Rights([exchange], [exchange]), Rights([exchange, queues, mailbox], [queues, mailbox], [exchange, queues])


def _remote_control(app: Celery) -> tuple[Rights, Rights]:
    """Asking workers over remote control, and being asked. Nothing while it is off."""
    if not app.conf.worker_enable_remote_control:
        return Rights(), Rights()
    mailbox, replies = _exact([app.control.mailbox.exchange.name, app.control.mailbox.reply_exchange.name])
    of_worker, of_asker = rf".+\.{mailbox}", rf".+\.{replies}"
    asking = Rights([mailbox, replies, of_asker], [mailbox, of_asker], [replies, of_asker])
    return asking, Rights([mailbox, replies, of_worker], [replies, of_worker], [mailbox, of_worker])


def _exchanges(queue: Queue) -> list[str]:
    found = [queue.exchange, *(binding.exchange for binding in queue.bindings or ())]
    return [exchange.name for exchange in found if exchange is not None and exchange.name]


def _published_to(queue: Queue) -> str:
    """The exchange that Celery publishes to for this queue: the default one instead of a direct one."""
    exchange = queue.exchange
    return str(exchange.name) if exchange is not None and exchange.type != "direct" else DEFAULT_EXCHANGE


def _keys(queues: Iterable[Queue], first: list[str]) -> dict[str, str]:
    """The routing keys of the queues by topic exchange, for exchanges whose queues take single keys only."""
    by_exchange: dict[str, set[str]] = {}
    for queue in queues:
        if queue.exchange is not None and queue.exchange.name and queue.exchange.type == "topic":
            by_exchange.setdefault(queue.exchange.name, set()).add(queue.routing_key or "")
    single = {
        name: sorted(map(re.escape, keys)) for name, keys in by_exchange.items() if not set("#*") & set("".join(keys))
    }
    found = {name: _any_of(keys) for name, keys in single.items()}
    if first and single.keys() == by_exchange.keys():
        every = sorted({key for keys in single.values() for key in keys})
        found[level_name(MAX_LEVEL)] = f"^{_DELAY}({'|'.join(every)})$"
    return found


def _exact(names: Iterable[str]) -> list[str]:
    return [re.escape(name) for name in dict.fromkeys(names)]


def _any_of(patterns: Iterable[str]) -> str:
    found = "|".join(dict.fromkeys(patterns))
    return f"^({found})$" if found else NOTHING


def _hashed(password: str) -> str:
    salt = secrets.token_bytes(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
