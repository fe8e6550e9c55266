"""RabbitMQ in a Docker container, for machines without the package and without root."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from services.rabbitmq import USER, RabbitMQ
from services.server import Server, ServiceError

IMAGE = "rabbitmq:4.2.9-management"
# The file in the server's directory with the container's name, so that any process can end it.
CONTAINER = "container"


class RabbitMQContainer(RabbitMQ):
    """The same server on the same ports; `pid` is that of the attached Docker client."""

    name = "rabbitmq-docker"
    port_names = ("amqp", "management")

    def launch(self) -> None:
        Server.launch(self)

    def stop(self) -> None:
        self._container("stop", "--time", "30")
        super().kill()

    def discard(self) -> None:
        remove(self.directory)
        super().kill()

    def kill(self) -> None:
        self._container("kill")
        super().kill()

    def pause(self) -> None:
        self._container("pause")

    def resume(self) -> None:
        self._container("unpause")

    def _command(self) -> Sequence[str | Path]:
        name = f"services-{hashlib.sha256(str(self.directory).encode()).hexdigest()[:12]}"
        (self.directory / CONTAINER).write_text(name)
        secrets_file = self.directory / "environment"
        secrets_file.touch(mode=0o600)
        secrets_file.write_text(f"RABBITMQ_DEFAULT_USER={USER}\nRABBITMQ_DEFAULT_PASS={self.password}\n")
        ports = {self.ports["amqp"]: 5672, self.ports["management"]: 15672}
        publish = [part for here, there in ports.items() for part in ("-p", f"127.0.0.1:{here}:{there}")]
        # The data is in a volume under the host name, so a new container finds it again.
        keep = ["--hostname", name, "-v", f"{name}:/var/lib/rabbitmq"]
        return ["docker", "run", "--rm", "--name", name, *keep, *publish, "--env-file", secrets_file, IMAGE]

    def _container(self, verb: str, *options: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            name = (self.directory / CONTAINER).read_text()
            done = _docker(verb, *options, name)
            if done.returncode != 0 and self.running:
                raise ServiceError(f"docker {verb} failed: {done.stderr.strip()}")


def remove(directory: Path) -> None:
    """Remove the container and the volume of a server's directory, if it has any."""
    with contextlib.suppress(FileNotFoundError):
        name = (directory / CONTAINER).read_text()
        _docker("rm", "--force", name)
        _docker("volume", "rm", "--force", name)


def docker_answers() -> bool:
    """Whether a Docker daemon answers this user."""
    if shutil.which("docker") is None:
        return False
    try:
        return _docker("version", timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _docker(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    command = ["docker", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
