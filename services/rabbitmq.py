"""A separate RabbitMQ node with its own name, cookie, port mapper and directories, on loopback only."""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import shutil
import subprocess
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import amqp

from services import packages, process
from services.server import Server, ServiceError

USER = "services"


class RabbitMQ(Server):
    """RabbitMQ with quorum queues and the management API."""

    name = "rabbitmq"
    port_names: ClassVar[Sequence[str]] = ("amqp", "management", "distribution", "epmd")

    @property
    def url(self) -> str:
        return self.vhost_url("/")

    def vhost_url(self, vhost: str) -> str:
        """The AMQP address of a virtual host."""
        return f"amqp://{USER}:{self.password}@127.0.0.1:{self.port}/{_quote(vhost)}"

    def create_vhost(self, name: str) -> str:
        """Create an empty virtual host and return its AMQP address."""
        self._request("PUT", f"/api/vhosts/{_quote(name)}")
        return self.vhost_url(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with everything in it and close its connections."""
        self._request("DELETE", f"/api/vhosts/{_quote(name)}")

    def import_definitions(self, definitions: bytes) -> None:
        """Add the users, rights and virtual hosts of a definitions document (JSON), and replace those of the same name."""
        self._request("POST", "/api/definitions", definitions)

    def ask(self, path: str) -> bytes:
        """The management API's answer to a GET. Raises `ServiceError` for a refusal, and `OSError` if it does not answer."""
        return self._request("GET", path)

    def queue_lengths(self, vhost: str) -> dict[str, int]:
        """The messages per queue, ready and unacknowledged. Up to 5 s old; use a passive declare for exact numbers."""
        answer = self._request("GET", f"/api/queues/{_quote(vhost)}?columns=name,messages")
        return {queue["name"]: queue.get("messages", 0) for queue in json.loads(answer)}

    def launch(self) -> None:
        if process.find(self._epmd_record) is None:
            # By default, RabbitMQ starts a shared epmd that keeps running; this one ends with the node.
            self._spawn(epmd_command(self.ports["epmd"]), self._epmd_record)
        super().launch()

    def stop(self) -> None:
        super().stop()
        self._end_epmd()

    def discard(self) -> None:
        super().discard()
        self._end_epmd()

    @property
    def _holds_ports(self) -> bool:
        # a node that was killed leaves its epmd
        return super()._holds_ports or process.find(self._epmd_record) is not None

    @property
    def _epmd_record(self) -> Path:
        return self.directory / "epmd.pid"

    def _end_epmd(self) -> None:
        if (epmd := process.find(self._epmd_record)) is not None:
            process.end(epmd, self.discard_signal, timeout=5)

    @property
    def node_name(self) -> str:
        """The node's name in Erlang."""
        return "services@localhost"

    @property
    def _cookie(self) -> str:
        """What nodes of one cluster share."""
        return secrets.token_hex(16)

    @property
    def _more_configuration(self) -> str:
        """Lines of rabbitmq.conf in addition to those of every node."""
        return ""

    def _command(self) -> Sequence[str | Path]:
        program = packages.rabbitmq_program()
        if program is None:
            raise ServiceError("RabbitMQ not found: install the package rabbitmq-server, or set BROKER_URL")
        config = self.directory / "rabbitmq.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            f"default_user = {USER}\n"
            f"default_pass = {self.password}\n"
            "default_vhost = /\n"
            "disk_free_limit.absolute = 50MB\n"
            "management.tcp.ip = 127.0.0.1\n"
            f"management.tcp.port = {self.ports['management']}\n"
            # Message rates cost CPU time for every queue; message counts are still reported.
            "management.rates_mode = none\n"
            # Quorum queues keep their log in memory until a file is full, half a gigabyte by default.
            "raft.wal_max_size_bytes = 33554432\n"
            "log.console = true\n"
            "log.console.level = warning\n"
            "log.file = false\n"
            f"{self._more_configuration}"
        )
        (self.directory / "enabled_plugins").write_text("[rabbitmq_management].\n")
        cookie = self.directory / ".erlang.cookie"
        if not cookie.exists():
            cookie.touch(mode=0o600)
            cookie.write_text(self._cookie)
            cookie.chmod(0o400)
        return [program]

    def control(self, *arguments: str, program: str = "rabbitmqctl") -> str:
        """Run one of RabbitMQ's command-line programs against this node. Raises `ServiceError` if it fails."""
        start = packages.rabbitmq_program()
        assert start is not None
        done = subprocess.run(
            [start.with_name(program), "--node", self.node_name, *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise ServiceError(f"{program} {arguments[0]} failed: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        directory = self.directory
        return super()._environment() | {
            "RABBITMQ_NODENAME": self.node_name,
            "RABBITMQ_DIST_PORT": str(self.ports["distribution"]),
            "ERL_EPMD_PORT": str(self.ports["epmd"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(directory),
            "RABBITMQ_MNESIA_DIR": str(directory / "data"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(directory / "feature_flags"),
            "RABBITMQ_LOG_BASE": str(directory),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
            "RABBITMQ_PLUGINS_EXPAND_DIR": str(directory / "plugins"),
            "RABBITMQ_PID_FILE": str(directory / "rabbitmq.pid"),
            # No busy waiting, which takes CPU time from everything else (rabbitmq.com/docs/runtime#busy-waiting).
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none"
            ),
            # Makes the start script exec the node instead of supervising it: one pid, one signal.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _check(self) -> None:
        self._request("GET", "/api/vhosts")
        with amqp.Connection(
            f"127.0.0.1:{self.port}", userid=USER, password=self.password, connect_timeout=2, read_timeout=2
        ):
            pass

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["management"], timeout=30)
        credentials = base64.b64encode(f"{USER}:{self.password}".encode()).decode()
        try:
            headers = {"Authorization": f"Basic {credentials}", "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status >= http.client.BAD_REQUEST:
            raise ServiceError(f"RabbitMQ answered {response.status} to {method} {path}: {answer[:200].decode()}")
        return answer


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def epmd_command(port: int) -> list[str | Path]:
    """Erlang's port mapper, on loopback only."""
    return [_epmd_program(), "-address", "127.0.0.1", "-port", str(port)]


def _epmd_program() -> Path:
    on_path = shutil.which("epmd")
    found = [Path(on_path)] if on_path else sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))
    if not found:
        raise ServiceError("Erlang's epmd not found")
    return found[-1]
