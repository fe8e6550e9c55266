"""Run the stand-ins: `python -m sandbox provider|mail|carrier|all`. Each prints one line `ready URL` to stdout.

`python -m sandbox find KEY` asks the provider that runs at STRIPE_API_BASE what it has under an idempotency key.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from sandbox import carrier, mail, provider
from sandbox.events import Webhooks
from sandbox.faults import CARRIER_FAULTS, MAIL_FAULTS, PROVIDER_FAULTS, FaultPlan
from sandbox.finding import find

HOST = "127.0.0.1"
PLAN_TIMES = ("latency_ms", "hold_ms", "search_lag_ms", "undecided", "decision_ms")

Service = Callable[[asyncio.Event], Awaitable[None]]


class _Server(uvicorn.Server):
    """Leaves signals to `_until_stopped`: uvicorn would raise them again and exit with a non-zero status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def provider_service(port: int, data: Path, plan: FaultPlan, api_key: str, webhooks: Webhooks | None) -> Service:
    """Create the payment provider; it listens immediately and runs until the event is set."""
    return _http_service(port, provider.application(data, api_key=api_key, plan=plan, webhooks=webhooks))


def carrier_service(port: int, data: Path, plan: FaultPlan) -> Service:
    """Create the carrier; it listens immediately and runs until the event is set."""
    return _http_service(port, carrier.application(data, plan=plan))


def _http_service(port: int, application: Starlette) -> Service:
    config = uvicorn.Config(
        application,
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        # uvicorn logs deliberately cut connections as errors.
        log_level="critical",
        timeout_keep_alive=300,
        # Do not wait for clients held by `timeout_after`.
        timeout_graceful_shutdown=1,
    )
    listener = _listen(port)

    async def serve(stop: asyncio.Event) -> None:
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        _ready("http", listener)
        await stop.wait()
        server.should_exit = True
        await serving

    return serve


def mail_service(port: int, data: Path, rates: dict[str, float], seed: int) -> Service:
    """Create the mail server; it listens immediately and runs until the event is set."""
    sink = mail.MailSink(data, rates, seed)
    listener = _listen(port)

    async def serve(stop: asyncio.Event) -> None:
        server = await asyncio.get_running_loop().create_server(sink.protocol, sock=listener)
        _ready("smtp", listener)
        await stop.wait()
        server.close()

    return serve


async def _until_stopped(services: list[Service], *, with_stdin: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if with_stdin:
        # The parent process holds the other end of the pipe, which closes however the parent ends.
        loop.add_reader(sys.stdin.fileno(), stop.set)
    async with asyncio.TaskGroup() as tasks:
        for service in services:
            tasks.create_task(_run(service, stop))


async def _run(service: Service, stop: asyncio.Event) -> None:
    await service(stop)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"port {port} of {HOST}: {error.strerror}; choose another port, or stop the process listening there"
        ) from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _ready(scheme: str, listener: socket.socket) -> None:
    print(f"ready {scheme}://{HOST}:{listener.getsockname()[1]}", flush=True)


def _faults(text: str) -> dict[str, float]:
    faults: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        try:
            faults[name.strip()] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{item!r} is not name=number") from None
    return faults


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--data", type=Path, required=True, metavar="DIR", help="directory of the ledger")
    common.add_argument("--seed", type=int, default=0, help="determines which requests the faults hit")
    common.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input closes")
    payment = argparse.ArgumentParser(add_help=False)
    payment.add_argument("--api-key", default=provider.API_KEY, help="the only accepted key (not a secret)")
    payment.add_argument("--webhook-url", metavar="URL", help="where events are sent; none are without")
    payment.add_argument("--webhook-secret", default="whsec_sandbox", help="their signature's (not a secret)")
    names = ", ".join(PROVIDER_FAULTS)
    provider_faults = f"rates from 0 to 1 of {names}; {', '.join(PLAN_TIMES)} in milliseconds"
    mail_faults = f"rates from 0 to 1 of {', '.join(MAIL_FAULTS)}"

    only_provider = commands.add_parser("provider", parents=[common, payment], help="the payment provider")
    only_provider.add_argument("--port", type=int, default=0)
    only_provider.add_argument("--faults", type=_faults, default={}, metavar="NAME=N,...", help=provider_faults)
    only_mail = commands.add_parser("mail", parents=[common], help="the mail server")
    only_mail.add_argument("--port", type=int, default=0)
    only_mail.add_argument("--faults", type=_faults, default={}, metavar="NAME=N,...", help=mail_faults)
    carrier_faults = f"rates from 0 to 1 of {', '.join(CARRIER_FAULTS)}; times as for the provider"
    only_carrier = commands.add_parser("carrier", parents=[common], help="the carrier")
    only_carrier.add_argument("--port", type=int, default=0)
    only_carrier.add_argument("--faults", type=_faults, default={}, metavar="NAME=N,...", help=carrier_faults)
    every = commands.add_parser("all", parents=[common, payment], help="all, in one process; the carrier has no faults")
    every.add_argument("--provider-port", type=int, default=0)
    every.add_argument("--mail-port", type=int, default=0)
    every.add_argument("--carrier-port", type=int, default=0)
    every.add_argument(
        "--faults",
        type=_faults,
        default={},
        metavar="NAME=N,...",
        help=f"{provider_faults}; of mail {', '.join(MAIL_FAULTS)}",
    )
    asked = commands.add_parser("find", help="what the provider has under an idempotency key, from its own lists")
    asked.add_argument("key", metavar="KEY")
    asked.add_argument("--url", default=os.environ.get("STRIPE_API_BASE", "http://127.0.0.1:8420"))
    asked.add_argument("--api-key", default=provider.API_KEY, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for until SIGTERM or SIGINT. Exits with 2 for a bad argument."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "find":
        found = find(options.url, options.key, options.api_key)
        outcome = ["--not-happened"] if found is None else ["--happened", json.dumps(found)]
        print(json.dumps({"found": found, "outcome": outcome}))
        return
    faults: dict[str, float] = options.faults
    services: list[Service] = []
    try:
        if options.command == "all":
            rates = {name: faults.pop(name) for name in MAIL_FAULTS if name in faults}
            services.append(mail_service(options.mail_port, options.data, rates, options.seed))
            no_faults = FaultPlan(known=CARRIER_FAULTS)
            services.append(carrier_service(options.carrier_port, options.data, no_faults))
            options.port = options.provider_port
        if options.command == "mail":
            services.append(mail_service(options.port, options.data, faults, options.seed))
        else:
            times: dict[str, Any] = {name: faults.pop(name) for name in PLAN_TIMES if name in faults}
            known = CARRIER_FAULTS if options.command == "carrier" else PROVIDER_FAULTS
            plan = FaultPlan(rates=faults, seed=options.seed, known=known, **times)
            if options.command == "carrier":
                services.append(carrier_service(options.port, options.data, plan))
            else:
                webhooks = (
                    Webhooks(options.webhook_url, options.webhook_secret, options.seed) if options.webhook_url else None
                )
                services.append(provider_service(options.port, options.data, plan, options.api_key, webhooks))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    uvloop.run(_until_stopped(services, with_stdin=options.exit_with_stdin))


if __name__ == "__main__":
    main()
