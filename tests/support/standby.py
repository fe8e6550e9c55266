"""A standby of a Postgres that a test has started: a base backup, which then follows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg

from services import Postgres
from services.postgres import _as_unprivileged, _plain


class Standby(Postgres):
    """Follows `primary`."""

    def __init__(self, directory: Path, primary: Postgres) -> None:
        super().__init__(directory)
        self._primary = primary
        self.password = primary.password

    def stop_replaying(self) -> None:
        """Receive the log, and replay it no more."""
        self._execute("SELECT pg_wal_replay_pause()")

    def replay(self) -> None:
        self._execute("SELECT pg_wal_replay_resume()")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(_plain(self.superuser_url()), connect_timeout=2, autocommit=True) as connection:
            connection.execute(statement)

    def _check(self) -> None:
        self._execute("SELECT 1")

    def _create_cluster(self, data: Path) -> None:
        source = _plain(self._primary.superuser_url())
        command = [*_as_unprivileged(), self._programs() / "pg_basebackup", "-d", source, "-D", data]
        command += ["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            owner = (self._primary.directory / "data").stat()
            for path in (self.directory, data):
                os.chown(path, owner.st_uid, owner.st_gid)
        subprocess.run(command, env=self._environment(), check=True, cwd="/", capture_output=True)
