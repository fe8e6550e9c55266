"""All streams of an application in one process: a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..errors import SettingsError
from ..observe.logs import log
from ..store import schema
from .consumer import Consumer
from .declaring import Stream, declared_streams
from .holdings import Holdings
from .reader import Reader
from .sources import KafkaTopics

if TYPE_CHECKING:
    from celery import Celery

# The revision of the schema whose columns positions need.
NEEDS = "0019"


def chosen(app: Celery, names: Collection[str] = ()) -> Mapping[str, Stream]:
    """The streams that the application's modules declare; with `names`, those. Raises `SettingsError` for a name that none has."""
    app.loader.import_default_modules()
    every = declared_streams()
    if unknown := sorted(set(names) - set(every)):
        raise SettingsError(f"stream {unknown[0]!r}: not declared; there are: {', '.join(sorted(every)) or 'none'}")
    if not every:
        raise SettingsError("no stream is declared: @stream(...) in a module that the application imports")
    return {name: every[name] for name in names} if names else every


def run_streams(
    app: Celery,
    streams: Mapping[str, Stream],
    stop: threading.Event,
    *,
    instance: str | None = None,
    progressed: Callable[[str], object] = lambda name: None,
) -> None:
    """Handle these streams until `stop` is set. `instance`: this process's name among the members of Kafka's groups.

    `progressed` is called in each turn of each stream's loop, with its name. Raises what ends one of the loops, after the others
    have stopped, too.
    """
    runtime = runtime_of(app)
    errors: list[BaseException] = []

    def run(stream: Stream) -> None:
        try:
            Consumer(runtime, stream, partial(make_reader, app, runtime, stream, instance), stop).run(
                lambda: progressed(stream.name)
            )
        except BaseException as error:
            log.error("stream_ended", stream=stream.name, error=type(error).__name__)
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(each,), name=f"stream-{each.name}") for each in streams.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def make_reader(app: Celery, runtime: Runtime, stream: Stream, instance: str | None, holdings: Holdings) -> Reader:
    """Connect to the broker of a stream. Raises `BrokerUnavailable`, `SettingsError`, `MissingExtra` and SQLAlchemy's errors."""
    with runtime.autocommit() as connection:
        if (found := schema.current_revision(connection) or "") < NEEDS:
            raise SettingsError(f"database schema: at {found}, streams need {NEEDS}; migrate it")
    if isinstance(stream.source, KafkaTopics):
        from .kafka_reader import KafkaReader

        return KafkaReader(stream.source, holdings, instance=instance)
    from .rabbitmq_reader import RabbitReader  # kombu, which a consumer of Kafka does without

    return RabbitReader(app, stream.source, holdings)
