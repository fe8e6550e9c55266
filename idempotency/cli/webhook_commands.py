"""`idempotency webhooks …`: the endpoints of customers, and what was delivered to them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..application import runtime_for, runtime_of
from ..errors import ChangeRefused, OperationNotFound
from ..framework import framework
from ..operate import webhooks as operate
from ..operate.change import Change
from ..store import webhooks as stored
from ..webhooks.signing import Scheme
from .options import ActorOption, AppOption, JsonOption, ReasonOption, TenantOption
from .terminal import application, console, print_json, print_line, print_table

commands = typer.Typer()
webhooks = typer.Typer(no_args_is_help=True, help="Where customers get events, and what was delivered to them.")
commands.add_typer(webhooks, name="webhooks")
errors = Console(stderr=True)

COLUMNS = ("id", "tenant", "url", "events", "status", "disabled_because", "failing_since", "given_up", "created_at")
DELIVERIES = (
    "id",
    "event_type",
    "status",
    "given_up_because",
    "redelivery",
    "created_at",
    "next_attempt_at",
    "ended_at",
)
ATTEMPTS = ("delivery_id", "event_type", "redelivery", "begun_at", "status", "error", "milliseconds")
EndpointArgument = Annotated[str, typer.Argument(metavar="ENDPOINT", help="The endpoint's id, ep_….")]
SchemeOption = Annotated[bool, typer.Option("--ed25519", help="Sign by a key pair instead of a shared secret.")]


@webhooks.command("add")
def add(
    tenant: Annotated[str, typer.Argument(help="Whose events it gets.")],
    url: Annotated[str, typer.Argument(help="Where, with https://.")],
    event: Annotated[list[str], typer.Option(help="A pattern of event types, order.*, say; repeat it for more.")],
    actor: ActorOption,
    ed25519: SchemeOption = False,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Register an endpoint, print what its receiver checks signatures with, once, and challenge it.

    Exit status 1 if it does not answer the challenge: then `enable` challenges it again.
    """
    runtime, change = runtime_for(application(app), tenant), Change(actor, "webhooks add")
    scheme = Scheme.ED25519 if ed25519 else Scheme.SHARED
    made = operate.add_endpoint(runtime, change, tenant, url=url, events=event, scheme=scheme)
    refused: str | None = None
    try:
        operate.enable_endpoint(runtime, change, made.id)
    except ChangeRefused as error:
        refused = str(error)
    if as_json:
        print_json({"id": made.id, "tenant": tenant, "secret": made.verifier, "enabled": refused is None})
    else:
        errors.print(f"endpoint {made.id} of {tenant}; this is shown only once:", markup=False, highlight=False)
        print(made.verifier)  # noqa: T201
    if refused is not None:
        errors.print(
            f"{refused}; the endpoint stays, and gets nothing before it answers:", markup=False, highlight=False
        )
        command = f"{framework().command} webhooks enable {made.id} --reason WHY"
        errors.print(command, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@webhooks.command("list")
def list_endpoints(tenant: TenantOption = None, app: AppOption = "", as_json: JsonOption = False) -> None:
    """The endpoints; never a secret."""
    runtime = runtime_of(application(app))
    with runtime.autocommit() as connection:
        rows = [row._asdict() for row in stored.endpoints(connection, runtime.settings.service, tenant)]
    if as_json:
        print_json(rows)
    else:
        shown = ({**row, "events": ", ".join(row["events"])} for row in rows)
        print_table(*COLUMNS, rows=([row[column] for column in COLUMNS] for row in shown))


@webhooks.command("show")
def show(
    id: Annotated[str, typer.Argument(metavar="ENDPOINT|DELIVERY", help="ep_… or msg_….")],
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest.")] = 20,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """The deliveries and attempts of an endpoint, or the attempts of a delivery; no bodies.

    An attempt without an end is under way, or its process died; the next one has repeated it under the same id.
    """
    runtime = runtime_of(application(app))
    service = runtime.settings.service
    with runtime.autocommit() as connection:
        endpoint = stored.endpoint(connection, service, id)
        delivery = None if endpoint is not None else stored.delivery(connection, service, id)
        found = endpoint if endpoint is not None else delivery
        if found is None:
            raise OperationNotFound("no endpoint and no delivery has this id")
        deliveries = [] if endpoint is None else stored.deliveries(connection, id, limit=limit)
        of = {"endpoint": id} if endpoint is not None else {"delivery": id}
        attempts = stored.attempts(connection, **of, limit=limit)
    if as_json:
        document = found._asdict() | {"attempts": [row._asdict() for row in attempts]}
        if endpoint is not None:
            document["deliveries"] = [row._asdict() for row in deliveries]
        print_json(document)
        return
    for name, value in found._asdict().items():
        print_line(f"{name}: {', '.join(value) if isinstance(value, list) else '' if value is None else value}")
    if endpoint is not None:
        print_table(
            *DELIVERIES, rows=([getattr(row, name) for name in DELIVERIES] for row in deliveries), title="deliveries"
        )
    print_table(*ATTEMPTS, rows=([getattr(row, name) for name in ATTEMPTS] for row in attempts), title="attempts")


@webhooks.command("rotate")
def rotate(
    id: EndpointArgument,
    reason: ReasonOption,
    actor: ActorOption,
    keep: Annotated[float, typer.Option(help="Seconds for which the old secret signs, too.")] = operate.KEEP_SECRET,
    ed25519: SchemeOption = False,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Replace an endpoint's secret, and print what its receiver checks signatures with, once."""
    scheme = Scheme.ED25519 if ed25519 else None
    runtime = runtime_of(application(app))
    verifier = operate.rotate_secret(runtime, Change(actor, reason), id, keep=keep, scheme=scheme)
    if as_json:
        print_json({"id": id, "secret": verifier})
    else:
        errors.print(f"endpoint {id}; this is shown only once:", markup=False, highlight=False)
        print(verifier)  # noqa: T201


@webhooks.command("disable")
def disable(
    id: EndpointArgument, reason: ReasonOption, actor: ActorOption, app: AppOption = "", as_json: JsonOption = False
) -> None:
    """Send an endpoint nothing more; what waits for it is given up. Ends the alarm about one that has disabled itself."""
    operate.disable_endpoint(runtime_of(application(app)), Change(actor, reason), id)
    _done(id, "disabled", as_json)


@webhooks.command("enable")
def enable(
    id: EndpointArgument, reason: ReasonOption, actor: ActorOption, app: AppOption = "", as_json: JsonOption = False
) -> None:
    """Challenge an endpoint, and send it webhooks again if it answers. What it has missed is not sent: redeliver that."""
    operate.enable_endpoint(runtime_of(application(app)), Change(actor, reason), id)
    _done(id, "enabled", as_json)


@webhooks.command("redeliver")
def redeliver(
    id: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id, msg_…, which is its webhook-id.")],
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Deliver again what was delivered or given up, or now what waits for its next attempt; under the same webhook-id."""
    operate.redeliver(application(app), Change(actor, reason), id)
    _done(id, "redelivered", as_json)


def _done(id: str, what: str, as_json: bool) -> None:
    if as_json:
        print_json({what: id})
    else:
        console.print(f"{id} {what}", markup=False, highlight=False)
