"""`idempotency broker-users`: users with the least rights for RabbitMQ and Redis, as files that these servers read."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..application import settings_of
from ..attempt.hints import acl
from ..broker.rights import KINDS, definitions
from ..environment import broker_passwords, redis_password
from ..errors import SettingsError
from ..streams.declaring import rabbitmq_queues
from .options import AppOption
from .terminal import application, errors

commands = typer.Typer()


@commands.command("broker-users")
def broker_users(
    app: AppOption = "",
    rabbitmq: Annotated[
        typer.FileTextWrite | None,
        typer.Option(
            atomic=True,
            show_default=False,
            help="Write RabbitMQ's users here, as definitions for rabbitmqctl import_definitions or load_definitions. "
            "IDEMPOTENCY_BROKER_APPLICATION_PASSWORD, …_WORKER_…, …_RELAY_…, …_BEAT_…, …_FLOWER_…, …_STREAM_… and "
            "…_MONITOR_… are theirs.",
        ),
    ] = None,
    redis: Annotated[
        typer.FileTextWrite | None,
        typer.Option(
            atomic=True,
            show_default=False,
            help="Write Redis' users here, as its aclfile. IDEMPOTENCY_REDIS_HINTS_PASSWORD is that of the one for hints.",
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="The users' names begin with it: one for each application of a virtual host.")
    ] = "idempotency",
    event_exchange: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False, help="An exchange that publish(…, exchange=…) names; the option may be repeated."
        ),
    ] = None,
) -> None:
    """Write users with the least rights for each kind of process, for RabbitMQ and Redis to read. Connects to neither."""
    if rabbitmq is None and redis is None:
        raise SettingsError("--rabbitmq FILE, --redis FILE: give at least one of them; - is stdout")
    celery = application(app)
    celery.loader.import_default_modules()  # they may declare queues
    settings = settings_of(celery, needs_database=redis is not None)  # hints have the database's name in theirs
    if rabbitmq is not None:
        if not (passwords := broker_passwords()):
            names = ", ".join(f"IDEMPOTENCY_BROKER_{kind.upper()}_PASSWORD" for kind in KINDS)
            raise SettingsError(f"{names}: at least one of them; a user without a password is left out")
        users = definitions(
            celery,
            settings.service,
            passwords,
            prefix=prefix,
            event_exchanges=event_exchange or (),
            streams=rabbitmq_queues(),
        )
        rabbitmq.write(json.dumps(users, indent=2) + "\n")
        errors.print("start workers with --without-mingle --without-gossip: they have no rights for these")
    if redis is not None:
        if (password := redis_password()) is None:
            raise SettingsError("IDEMPOTENCY_REDIS_HINTS_PASSWORD: not set")
        redis.write(acl(settings.owner, password, name=f"{prefix}_hints"))
