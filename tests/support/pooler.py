"""PgBouncer before the database of a test: what hands one connection's statements to several backends."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import psycopg
import pytest
from sqlalchemy.engine import make_url

from services import packages
from tests.support.processes import eventually
from tests.support.roles import PASSWORDS

PROGRAM = "pgbouncer"


class Pooler:
    """A PgBouncer on a free port; skips the test where there is none and none can be installed.

    `ignores_options`: whether it drops the options we connect with, or refuses the connection for them, its default.
    """

    def __init__(
        self, database: str, *, mode: str = "transaction", ignores_options: bool = True, backends: int = 3
    ) -> None:
        if shutil.which(PROGRAM) is None:
            if not packages.can_install():
                pytest.skip(f"needs {PROGRAM}, and only root can install it")
            packages.install(PROGRAM)
        url = make_url(database)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        self._directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        logins = {str(url.username): str(url.password), **PASSWORDS}
        users = (f'"{login}" "{password}"\n' for login, password in logins.items())
        (self._directory / "users").write_text("".join(users))
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "plain",
            "auth_file": self._directory / "users",
            "pool_mode": mode,
            "default_pool_size": backends,
            "max_client_conn": 1000,
            "ignore_startup_parameters": "extra_float_digits" + ",options" * ignores_options,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        lines = ["[databases]", f"* = host={url.host} port={url.port}", "[pgbouncer]", *lines]
        (self._directory / "ini").write_text("\n".join(lines))
        for path in (self._directory, *self._directory.iterdir()):
            path.chmod(0o755)  # it does not run as root
        self._log = self._directory / "log"

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            command = [str(PROGRAM), "-u", "nobody", str(self._directory / "ini")]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        eventually(lambda: self._process.poll() is not None or self._answers(), what="PgBouncer")
        assert self._process.poll() is None, self._log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        shutil.rmtree(self._directory)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
