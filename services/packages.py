"""Install the system packages that the servers need: by apt as root, otherwise only print which are missing.

Uses only the standard library and runs as a file, so that the set-up can start it in parallel with pip, before the
virtual environment exists: ``python3 services/packages.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

RABBITMQ_PROGRAMS = (
    # The scripts in /usr/lib run as any user; Debian's /usr/sbin/rabbitmq-server requires its own account.
    "/usr/lib/rabbitmq/bin/rabbitmq-server",
    "/usr/local/lib/rabbitmq/bin/rabbitmq-server",
)
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_BACKUP = Path("/usr/sbin/policy-rc.d.set-aside")
BLOCK_SERVICES = "#!/bin/sh\n# Temporary, during an installation: no service may start.\nexit 101\n"
# may be enabled
UNITS = (
    "rabbitmq-server.service",
    "redis-server.service",
    "postgresql.service",
    "prometheus.service",
    "epmd.service",
    "epmd.socket",
)
LOCK = Path("/run/lock/idempotency-packages.lock")


class PackageError(RuntimeError):
    """A system package could not be installed; the message is one line."""


def rabbitmq_program() -> Path | None:
    """The start script of an installed RabbitMQ, or None."""
    for candidate in RABBITMQ_PROGRAMS:
        if Path(candidate).is_file():
            return Path(candidate)
    on_path = shutil.which("rabbitmq-server")
    return Path(on_path) if on_path and not on_path.startswith("/usr/sbin/") else None


def postgres_programs() -> Path | None:
    """The directory of Debian's newest `postgres` and `initdb`, or None."""
    found = [path for path in Path("/usr/lib/postgresql").glob("[0-9]*/bin") if (path / "initdb").is_file()]
    return max(found, key=lambda path: int(path.parent.name), default=None)


def redis_program() -> Path | None:
    """Debian's redis-server. Not the wheel's, which has no TLS and is on the path wherever a virtual environment is activated."""
    others = [each for each in os.get_exec_path() if not (Path(each).parent / "pyvenv.cfg").exists()]
    on_path = shutil.which("redis-server", path=os.pathsep.join(others))
    return Path(on_path) if on_path else None


def prometheus_program() -> Path | None:
    """An installed Prometheus with its promtool, or None."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    return Path(found[0]) if found[0] and found[1] else None


def chromium_program() -> Path | None:
    """An installed Chromium, or None."""
    found = shutil.which("chromium")
    return Path(found) if found else None


def can_install() -> bool:
    """Whether this process may install packages: root on a machine with apt."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(*packages: str) -> None:
    """Install packages by apt, without recommended ones and without starting services.

    Raises `PackageError` with apt's error line if it fails.
    """
    print(f"installing {' '.join(packages)} (apt) ...", file=sys.stderr, flush=True)
    enabled_before = _enabled_units()
    with _one_at_a_time(), _no_service_starts():
        # Try the existing package lists first: an update takes seconds and is rarely needed.
        failure = _apt("install", *packages)
        if failure is not None:
            failure = _apt("update") or _apt("install", *packages)
    if failure is not None:
        raise PackageError(f"apt-get could not install {' '.join(packages)}: {failure}")
    # Packages enable their services for the next boot, but this project starts its servers itself.
    for unit in _enabled_units() - enabled_before:
        _systemctl("disable", unit)


def _apt(verb: str, *packages: str) -> str | None:
    command = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2"]
    # Skip syncing every file, which takes more than half of the time: a package can be reinstalled.
    command += ["-o", "Dpkg::Options::=--force-unsafe-io", "-o", "Dpkg::Use-Pty=0"]
    command += [verb, *(["--no-install-recommends", *packages] if packages else [])]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("E:")), lines[-1] if lines else "no output")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Concurrent installers would restore each other's policy file."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Prevent service starts while packages are configured; restores the machine's own policy afterwards."""
    if POLICY.exists() and POLICY.read_text(errors="replace") != BLOCK_SERVICES:
        POLICY.replace(POLICY_BACKUP)
    POLICY.write_text(BLOCK_SERVICES)
    POLICY.chmod(0o755)
    # Restore the policy on SIGTERM too.
    previous = signal.getsignal(signal.SIGTERM)
    in_main_thread = _on_sigterm(lambda *_: sys.exit(143))
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
        if POLICY_BACKUP.exists():
            POLICY_BACKUP.replace(POLICY)
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def _on_sigterm(handler: object) -> bool:
    try:
        signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
    except ValueError:  # not the main thread
        return False
    return True


def _enabled_units() -> set[str]:
    if shutil.which("systemctl") is None:
        return set()
    return {unit for unit in UNITS if _systemctl("is-enabled", unit) == "enabled"}


def _systemctl(verb: str, unit: str) -> str:
    command = ["systemctl", verb, unit]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout.strip()


def missing() -> list[str]:
    """The required system packages that are not installed."""
    wanted = []
    if not os.environ.get("BROKER_URL") and rabbitmq_program() is None:
        wanted.append("rabbitmq-server")
    # Everything else runs on those in wheels, which cannot speak TLS: the tests of TLS need these.
    if postgres_programs() is None:
        wanted.append("postgresql")
    if redis_program() is None:
        wanted.append("redis-server")
    return wanted


def missing_optional() -> list[str]:
    """Packages that are not installed, and without which only some tests are skipped: of monitoring/, the drill and the page."""
    programs = {"prometheus": prometheus_program(), "chromium": chromium_program()}
    return [package for package, program in programs.items() if program is None]


def main(packages: list[str]) -> int:
    """Install the packages, by default the missing ones, or print which are missing."""
    wanted, optional = packages or missing(), [] if packages else missing_optional()
    if (wanted or optional) and not can_install():
        print(f"missing, and only root can install it (apt): {', '.join([*wanted, *optional])}", file=sys.stderr)
        return 0
    try:
        if wanted:
            install(*wanted)
    except PackageError as error:
        print(error, file=sys.stderr)
        return 1
    for package in optional:
        try:
            install(package)
        except PackageError as error:
            print(f"{error}; the tests that need it are skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
