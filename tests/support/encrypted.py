"""Servers that speak TLS alone, with the certificates that scripts/certificates.py makes for docker-compose.yml.

Debian's Postgres and Redis: those in wheels have no TLS. Each listens on `HOST`, which its certificate names, and on
`OTHER_HOST`, which it does not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlencode

import amqp
import pytest

from services import packages
from services.postgres import Postgres
from services.rabbitmq import USER, RabbitMQ
from services.redis import Redis

ROOT = Path(__file__).parents[2]
HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"
SERVERS = ("postgres", "redis", "rabbitmq")


def make_certificates(directory: Path) -> Path:
    """Run the script as docker-compose.yml does; the directory that it fills."""
    command: list[str | Path] = [sys.executable, "-m", "scripts.certificates", directory, *SERVERS]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return directory


def authority(certificates: Path) -> str:
    return str(certificates / "ca" / "ca.crt")


class TlsPostgres(Postgres):
    def __init__(self, directory: Path, certificates: Path) -> None:
        self.certificates = certificates
        super().__init__(directory)

    def database_url(self, database: str, **options: str) -> str:
        return f"{super().database_url(database)}?{urlencode(self._options | options)}"

    def superuser_url(self, database: str = "postgres") -> str:
        return f"{super().superuser_url(database)}?{urlencode(self._options)}"

    @property
    def _options(self) -> dict[str, str]:
        return {"sslmode": "verify-full", "sslrootcert": authority(self.certificates)}

    def _command(self) -> Sequence[str | Path]:
        rules = self.directory / "pg_hba.conf"
        rules.write_text("hostssl all all 127.0.0.0/8 scram-sha-256\n")
        rules.chmod(0o644)
        own = self.certificates / "postgres"
        given = {
            "listen_addresses": f"{HOST},{OTHER_HOST}",
            "ssl": "on",
            "ssl_cert_file": own / "server.crt",
            "ssl_key_file": own / "server.key",
            "hba_file": rules,
        }
        return [*super()._command(), *(f"--{name}={value}" for name, value in given.items())]

    def _programs(self) -> Path:
        return installed(packages.postgres_programs, "postgresql")


class TlsRedis(Redis):
    def __init__(self, directory: Path, certificates: Path) -> None:
        self.certificates = certificates
        super().__init__(directory)

    @property
    def url(self) -> str:
        return self.address()

    def address(self, host: str = HOST, **options: str) -> str:
        given = {"ssl_ca_certs": authority(self.certificates)} | options
        return f"rediss://:{self.password}@{host}:{self.port}/0?{urlencode(given)}"

    def _command(self) -> Sequence[str | Path]:
        command = super()._command()
        own = self.certificates / "redis"
        with (self.directory / "redis.conf").open("a") as config:
            # what comes later counts
            config.write(f"bind {HOST} {OTHER_HOST}\nport 0\ntls-port {self.port}\ntls-auth-clients no\n")
            config.write(f"tls-cert-file {own}/server.crt\ntls-key-file {own}/server.key\n")
        return command

    def program(self) -> Path:
        return installed(packages.redis_program, "redis-server")


class TlsRabbitMQ(RabbitMQ):
    def __init__(self, directory: Path, certificates: Path) -> None:
        self.certificates = certificates
        super().__init__(directory)

    def vhost_url(self, vhost: str) -> str:
        return super().vhost_url(vhost).replace("amqp://", "amqps://")

    def _command(self) -> Sequence[str | Path]:
        command = super()._command()
        config = self.directory / "rabbitmq.conf"
        own = self.certificates / "rabbitmq"
        plain = f"listeners.tcp.local = {HOST}:{self.port}\n"
        encrypted = f"listeners.tcp = none\nlisteners.ssl.local = {HOST}:{self.port}\n"
        encrypted += f"listeners.ssl.other = {OTHER_HOST}:{self.port}\n"
        encrypted += f"ssl_options.certfile = {own}/server.crt\nssl_options.keyfile = {own}/server.key\n"
        written = config.read_text()
        assert plain in written
        config.write_text(written.replace(plain, encrypted))
        return command

    def _check(self) -> None:
        self._request("GET", "/api/vhosts")
        options = {"server_hostname": HOST, "ca_certs": authority(self.certificates)}
        with amqp.Connection(
            f"{HOST}:{self.port}", userid=USER, password=self.password, ssl=options, connect_timeout=2
        ):
            pass


def installed(find: Callable[[], Path | None], package: str) -> Path:
    """What a package has brought. The set-up installs it on Debian and Ubuntu; elsewhere nothing is shown, and the run says so."""
    if find() is None and packages.can_install():
        packages.install(package)
    if (found := find()) is None:
        pytest.skip(f"{package} is not installed, and only root can install it by apt")
    return found
