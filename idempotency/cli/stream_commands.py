"""`idempotency stream`, and `stream status, seek`: handling streams, where they are, and moving that.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from sqlalchemy import Row

from ..application import runtime_of, settings_of
from ..checks.startup import require_safe_setup
from ..observe import outages
from ..observe.logs import log
from ..operate.change import Change
from ..operate.money import stream_moves_money
from ..operate.seek import forget_position, needs_token, seek_stream
from ..store import stream_status as stored
from ..store.overview import monitoring_connection
from ..store.stream_places import Place
from ..streams.claimed import said
from ..streams.declaring import TASK_PREFIX
from ..streams.process import chosen, run_streams
from ..text import number_of
from ..upkeep.presence import SignOfLife
from .options import ActorOption, AppOption, JsonOption, ReasonOption, RequestOption
from .proof import proven_if
from .terminal import application, console, log_to_stderr, print_json, print_table, stopped_by_signals

commands = typer.Typer()
group = typer.Typer(
    invoke_without_command=True,
    help="Handle the application's streams until stopped. Run any number: partitions are divided among them.",
)
commands.add_typer(group, name="stream")


@group.callback()
def stream(
    context: typer.Context,
    app: AppOption = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this stream; may be given again. Default: all.")
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="A name that this process keeps over restarts, and no other has: Kafka then gives it its partitions back without "
            "moving the others.",
        ),
    ] = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    celery = application(app)
    streams = chosen(celery, only or ())
    log_to_stderr()
    stop = stopped_by_signals()
    unanswered = require_safe_setup(celery, has_streams=True)
    if unanswered is not None and outages.postgres.is_news():
        log.warning("postgres_unavailable", error=unanswered)
    life = SignOfLife(celery, "stream", instance, queues=lambda: [each.task for each in streams.values()])
    life.start()
    log.info("streams_started", streams=",".join(streams))
    run_streams(celery, streams, stop, instance=instance, progressed=lambda name: life.progressed(loop=name))
    life.end()
    log.info("streams_stopped")


@group.command()
def status(
    app: AppOption = "",
    name: Annotated[str | None, typer.Option("--only", metavar="NAME", help="Only this stream.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Where each stream is: positions, how far behind, who handles them, and what has stopped."""
    settings = settings_of(application(app))
    with monitoring_connection(settings) as connection:
        rows = stored.status(connection, settings.service, name)
        tasks = {TASK_PREFIX + row.consumer for row in rows}
        claims = stored.claimed_elsewhere(connection, settings.service, tasks)
    if as_json:
        print_json([dict(row._mapping) | {"claimed_elsewhere": _claims_of(row.consumer, claims)} for row in rows])
        return
    columns = ("stream", "partition", "position", "lag", "handled by", "last moved", "stopped")
    print_table(
        *columns,
        rows=[
            (
                row.consumer,
                f"{row.topic}/{row.partition}",
                row.position,
                _lag(row.lag, is_least=bool(row.lag_is_least)),
                _owner(row.owner, row.lease_left),
                row.advanced_at,
                row.stopped,
            )
            for row in rows
        ],
    )
    for row in claims:
        many = number_of(row.messages, "message is", "messages are")
        until = f"for {row.lease_left:.0f} s more" if row.lease_left > 0 else "which is over"
        console.print(
            f"{row.task.removeprefix(TASK_PREFIX)}: {many} under a claim of {said(row.holder)}, {until}; it has no partition, and "
            "may have died. Who has the partition waits for that, unless it or a relay proves the death"
        )


def _claims_of(consumer: str, claims: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    return [
        {"holder": said(row.holder), "messages": row.messages, "lease_left": row.lease_left}
        for row in claims
        if row.task == TASK_PREFIX + consumer
    ]


def _lag(lag: int | None, *, is_least: bool) -> str:
    """How many messages wait, as far as anyone knows: only who reads a partition sees what comes to it."""
    if lag is None:
        return "not known"
    return f"{lag:,} or more" if is_least else f"{lag:,}"


def _owner(owner: str | None, lease_left: float | None) -> str:
    """Host and process of an owner, and whether it is silent."""
    if owner is None or lease_left is None:
        return "no one"
    return said(owner) if lease_left > 0 else f"{said(owner)}, silent for {-lease_left:.0f} s"


@group.command()
def seek(
    name: Annotated[str, typer.Argument(help="The stream's name in the application.")],
    reason: ReasonOption,
    actor: ActorOption,
    to: Annotated[int, typer.Option(min=0, help="The offset of the next message.")],
    topic: Annotated[str, typer.Option(help="The topic of Kafka, or the stream of RabbitMQ.")],
    partition: Annotated[int, typer.Option(min=0)] = 0,
    take: Annotated[
        bool,
        typer.Option("--take", help="Also from a process that handles it now; it reads again within some seconds."),
    ] = False,
    app: AppOption = "",
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a stream go on from another offset. What it has handled is known by its keys, while their records are kept."""
    celery = application(app)
    settings = runtime_of(celery).settings
    change = proven_if(
        celery,
        Change(actor, reason, request_id),
        lambda connection: needs_token(celery, connection, Place(settings.service, name, topic, partition), to),
        action="stream seek",
        what=f"stream {name}",
    )
    before = seek_stream(celery, name, topic, partition, to, change, take=take)
    with monitoring_connection(settings) as connection:
        every = stored.status(connection, settings.service, name)
    ends = [row.end_position for row in every if (row.topic, row.partition) == (topic, partition)]
    is_beyond = bool(ends) and ends[0] is not None and to > ends[0]
    if as_json:
        moved = {"stream": name, "topic": topic, "partition": partition, "from": before, "to": to}
        print_json(moved | {"is_beyond_end": is_beyond})
        return
    console.print(f"{name}: {topic}/{partition} goes on from {to}, was at {before}")
    if before is not None and to < before:
        console.print(
            f"what was handled more than {settings.retention_completed / 3600:g} h ago may have no record any more, and is handled again"
        )
    elif before is not None and to > before:
        console.print("what is between the two is not handled")
    if is_beyond:
        console.print(
            f"beyond its end, {ends[0]} as far as is known: the partition stops, unless there is a message {to} by then"
        )


@group.command()
def forget(
    name: Annotated[str, typer.Argument(help="The stream's name, as `stream status` prints it.")],
    reason: ReasonOption,
    actor: ActorOption,
    topic: Annotated[str, typer.Option(help="The topic of Kafka, or the stream of RabbitMQ.")],
    partition: Annotated[int, typer.Option(min=0)] = 0,
    app: AppOption = "",
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a partition that is read no more, because the stream has moved or is gone: its alarm ends."""
    celery = application(app)
    change = proven_if(
        celery,
        Change(actor, reason, request_id),
        lambda _: stream_moves_money(celery, name),
        action="stream forget",
        what=f"stream {name}",
    )
    before = forget_position(celery, name, topic, partition, change)
    if as_json:
        print_json({"stream": name, "topic": topic, "partition": partition, "from": before})
    else:
        console.print(f"{name}: {topic}/{partition} is forgotten, was at {before}")
