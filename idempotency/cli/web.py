"""`idempotency web`: one screen for the person on call. Exit status 1: refused, with one line on stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import SettingsError
from ..extras import extra
from .options import AppOption
from .terminal import application, console, log_to_stderr, operators_token

commands = typer.Typer()


@commands.command("web")
def serve(
    app: AppOption = "",
    host: Annotated[
        str, typer.Option(help="Where to listen. Anywhere but on this machine's own addresses, people have to log in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8500,
) -> None:
    """Serve the page for the person on call, until stopped: flow, failures, money in doubt, dead letters, approvals."""
    celery = application(app)
    with extra("web"):
        import uvicorn

        from ..web.application import create_app
    log_to_stderr()
    served = create_app(celery, host=host, port=port, token=operators_token())
    desk = served.state.desk
    whose = "people log in" if desk.login is not None else f"everyone is {desk.sessions.everyone}"
    at = desk.settings.web_url or f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    console.print(f"page at {at} ({whose})", soft_wrap=True, markup=False)
    config = uvicorn.Config(
        served,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        # an address may have the list of a bulk replay in it
        h11_max_incomplete_event_size=128 * 1024,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        http="h11",
    )
    server = uvicorn.Server(config)
    try:
        server.run()
    except SystemExit:  # it could not listen, which it has logged
        raise SettingsError(f"--host {host} --port {port}: cannot listen there") from None
