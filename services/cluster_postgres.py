"""A Postgres primary and its synchronous standby, with promotion: what Patroni or an operator does elsewhere, by hand."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from services.postgres import ACCOUNT, Postgres, create_database, plain_address
from services.server import READY_SECONDS, ServiceError

NAMES = ("postgres-a", "postgres-b")
# Waits of a second would be most of a failover.
_POLL = 0.05


class PostgresNode(Postgres):
    """One of the two. Its name in `synchronous_standby_names` is that of its directory, with an underscore."""

    # where the other node finds this one: a proxy, if a test is to cut replication
    reached_at: int | None = None

    @property
    def standby_name(self) -> str:
        return self.directory.name.replace("-", "_")

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def copy_of(self, primary: PostgresNode) -> None:
        """Become a standby of the primary, with nothing of what was here. This one must not run."""
        shutil.rmtree(self.data, ignore_errors=True)
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT)
            for path in (self.directory, unfinished):
                os.chown(path, account.pw_uid, account.pw_gid)
        port = primary.reached_at or primary.port
        address = f"host=127.0.0.1 port={port} user=postgres application_name={self.standby_name}"
        # -R writes primary_conninfo and standby.signal; the password comes from the environment and is written there
        self._run(
            "pg_basebackup",
            "-D",
            unfinished,
            "-d",
            address,
            "-R",
            "--checkpoint=fast",
            "--wal-method=stream",
            "--no-sync",
        )
        unfinished.rename(self.data)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as the superuser, outside a transaction. It is not waited for until a standby has it."""
        address = plain_address(self.superuser_url(database))
        with psycopg.connect(address, autocommit=True, connect_timeout=2) as connection:
            # to change a setting waits for no standby
            connection.execute("SET synchronous_commit = local")
            cursor = connection.execute(sql.SQL(statement))
            return cursor.fetchall() if cursor.description else []

    @property
    def is_standby(self) -> bool:
        return bool(self.execute("SELECT pg_is_in_recovery()")[0][0])

    def _check(self) -> None:
        with psycopg.connect(plain_address(self.superuser_url()), connect_timeout=2) as connection:
            if connection.execute("SELECT pg_is_in_recovery()").fetchone() != (False,):
                return
            connection.execute("SET synchronous_commit = local")
        super()._check()


class PostgresPair:
    """Two nodes, of which one is the primary. `primary` is who this class has made it; no node decides by itself.

    `is_synchronous`: a commit is answered once the standby has it on disk too, and waits while there is none.
    """

    def __init__(self, directory: Path, password: str) -> None:
        for name in NAMES:
            PostgresNode.share_password(directory / name, password)
        self.nodes = tuple(PostgresNode(directory / name) for name in NAMES)
        self._state = directory / "postgres.primary"
        self.is_synchronous = True

    @property
    def primary(self) -> PostgresNode:
        name = self._state.read_text() if self._state.exists() else NAMES[0]
        return next(node for node in self.nodes if node.directory.name == name)

    @property
    def standby(self) -> PostgresNode:
        return next(node for node in self.nodes if node is not self.primary)

    def url(self, database: str = "postgres", *, ports: Sequence[int] = ()) -> str:
        """The SQLAlchemy address of both; `ports`: where they are reached instead, as by proxies."""
        login = f"deployer:{quote(self.primary.password, safe='')}"
        hosts = "&".join(f"host=127.0.0.1:{port}" for port in ports or [node.port for node in self.nodes])
        return f"postgresql+psycopg://{login}@/{database}?{hosts}&target_session_attrs=read-write"

    def launch(self) -> None:
        self.primary.launch()

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        self.primary.wait_until_ready(timeout)
        self.require_standby(self.is_synchronous)
        if not (self.standby.data / "standby.signal").exists():
            self.standby.copy_of(self.primary)
        self.standby.start(timeout)
        self.wait_for_standby(timeout)

    def require_standby(self, is_required: bool) -> None:
        """Whether commits wait for the standby from now on."""
        self.is_synchronous = is_required
        names = ", ".join(node.standby_name for node in self.nodes) if is_required else ""
        self.primary.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self.primary.execute("SELECT pg_reload_conf()")

    def wait_for_standby(self, timeout: float = READY_SECONDS) -> None:
        """Return once the standby is connected, as a synchronous one if that is required. Raises `ServiceError`."""
        wanted = "sync" if self.is_synchronous else "async"
        deadline = time.monotonic() + timeout
        while (wanted,) not in self._streaming():
            if time.monotonic() > deadline:
                raise ServiceError(f"the standby was not connected as {wanted} within {timeout:g} s")
            time.sleep(_POLL)

    @property
    def is_whole(self) -> bool:
        """Whether the standby is connected, as it is to be."""
        return self.standby.running and (("sync" if self.is_synchronous else "async"),) in self._streaming()

    def promote(self, timeout: float = READY_SECONDS) -> PostgresNode:
        """Make the standby the primary and return it. What becomes of the former one is the caller's duty: to kill it first."""
        promoted = self.standby
        promoted.execute("SELECT pg_promote(wait => false)")
        deadline = time.monotonic() + timeout
        while promoted.is_standby:
            if time.monotonic() > deadline:
                raise ServiceError(f"{promoted.directory.name} was not promoted within {timeout:g} s")
            time.sleep(_POLL)
        self._state.write_text(promoted.directory.name)
        return promoted

    def rebuild(self) -> None:
        """Make what is not the primary a standby of it, anew: what it alone had committed is gone."""
        self.standby.kill()
        self.standby.copy_of(self.primary)
        self.standby.start()
        self.wait_for_standby()

    def _streaming(self) -> list[tuple[object, ...]]:
        return self.primary.execute("SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'")

    def create_database(self, name: str) -> str:
        """Create an empty database and return the address of both nodes."""
        create_database(self.primary.url, name)
        return self.url(name)

    def stop(self) -> None:
        # the standby last: the primary's last commits wait for it
        for node in (self.primary, self.standby):
            node.stop()

    def discard(self) -> None:
        for node in self.nodes:
            node.discard()
