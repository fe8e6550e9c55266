"""The package as users get it: built, installed beside nothing but what it asks for, and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGE = "celery-idempotency"
NOT_SOURCE = shutil.ignore_patterns(".*", "var", "*.egg-info", "__pycache__", "build", "dist")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
# A user's application, with a task that is sent to a broker in memory.
SHOP = """
from celery import Celery
from idempotency import IdempotentTask, InvalidArguments
from idempotency.queues import quorum_queue

app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.update(
    idempotency_database_url="postgresql+psycopg://app@127.0.0.1:1/app",
    task_queues=[quorum_queue("payments")],
    task_default_queue="payments",
)


@app.task(name="payments.capture", base=IdempotentTask, bind=True, key="{payment_id}")
def capture(self, payment_id): ...


capture.delay(payment_id="p1")
with app.connection_for_read() as connection:
    print(connection.SimpleQueue(app.amqp.queues["payments"]).get(block=False).headers["idempotency-key"])
try:
    capture.delay()
except InvalidArguments as refused:
    print(refused)
"""


def build(what: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel with the build backend that is installed here."""
    command = [sys.executable, "-c", BUILD, what, str(target)]
    built = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=120)
    return target / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which has to contain everything it needs."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(unpacked)], check=True, timeout=60)
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


class Installed:
    """A virtual environment with the wheel, and of this machine's packages only those that it asks for."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        venv.create(directory, symlinks=True)
        self.bin = directory / "bin"
        (self._site,) = directory.glob("lib/python*/site-packages")
        self._present: set[str] = set()
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
        self.add("")

    def add(self, extra: str) -> None:
        """What pip would install for the extra, linked from where this test runs."""
        (found,) = (each for each in Distribution.discover(path=[str(self._site)]) if each.name == PACKAGE)
        self._add_requirements(found, {"", extra})

    def _add_requirements(self, of: Distribution, extras: set[str]) -> None:
        for requirement in map(Requirement, of.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                self._add(requirement)

    def _add(self, requirement: Requirement) -> None:
        for extra in sorted({"", *requirement.extras}):
            if (name := f"{requirement.name}[{extra}]") in self._present:
                continue
            self._present.add(name)
            found = distribution(requirement.name)
            if not extra:
                self._link(found)
            self._add_requirements(found, {"", extra})

    def _link(self, found: Distribution) -> None:
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (self._site / top).exists():
                (self._site / top).symlink_to(Path(str(found.locate_file(top))))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.defpath, "HOME": str(self._site)}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self._site.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Without any extra."""
    return Installed(tmp_path_factory.mktemp("light"), wheel)


@pytest.fixture(scope="module")
def with_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    installed = Installed(tmp_path_factory.mktemp("with-cli"), wheel)
    installed.add("cli")
    return installed


def names(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> str:
    (name,) = (name for name in names(wheel) if name.endswith(".dist-info/METADATA"))
    with ZipFile(wheel) as archive:
        return archive.read(name).decode()


@pytest.mark.long
def test_the_wheel_has_the_types_the_migrations_and_nothing_else(wheel: Path) -> None:
    found = names(wheel)
    assert "idempotency/py.typed" in found
    page = ("runbooks/declined.md", "templates/base.html", "static/style.css", "static/page.js")
    assert {f"idempotency/web/{name}" for name in page} <= found
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "idempotency").rglob("*.py")}
    assert source <= found
    assert {name.partition("/")[0].partition("-")[0] for name in found} == {
        "idempotency",
        "idempotency_pytest.py",
        "celery_idempotency",
    }


def test_the_sdist_is_small_and_has_no_tests(sdist: Path) -> None:
    assert sdist.stat().st_size < 800_000
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"idempotency", "idempotency_pytest.py", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not {"tests", "demo", "drill", "var", "tasks", "docs"} & tops


def test_a_plain_install_brings_five_packages_and_what_they_need(wheel: Path) -> None:
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?:\[[\w,]+\])?[^;\n]*$", metadata(wheel), re.MULTILINE)
    # these come with the others, and are imported by name
    named = {"kombu", "pydantic", "typing-extensions"}
    assert set(required) == {"celery", "sqlalchemy", "psycopg", "redis", "pydantic-settings"} | named


def test_the_metadata_say_what_it_is_and_which_extras_there_are(wheel: Path) -> None:
    said = metadata(wheel)
    fields = dict(line.split(": ", 1) for line in said.partition("\n\n")[0].splitlines() if ": " in line)
    assert (fields["Name"], fields["License-Expression"], fields["Requires-Python"]) == (PACKAGE, "MIT", ">=3.11")
    assert "outbox" in fields["Keywords"]
    assert "Classifier: Framework :: Celery\n" in said
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", said, re.MULTILINE))
    assert {"cli", "django", "metrics", "test"} <= extras
    assert "Project-URL" not in said  # the project has no address of its own yet


@pytest.mark.long
def test_without_an_extra_a_task_is_defined_and_called(light: Installed) -> None:
    done = light.run("python", "-W", "error", "-c", SHOP)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "p1\narguments: missing a required argument: 'payment_id'\n"
    missing = light.run("python", "-c", "import prometheus_client")
    assert "No module named 'prometheus_client'" in missing.stderr


@pytest.mark.long
def test_without_an_extra_each_part_says_which_one_it_needs(light: Installed) -> None:
    command = light.run("idempotency", "--version")
    hint = "install the extra: pip install 'celery-idempotency[{}]'\n"
    assert (command.returncode, command.stdout) == (1, "")
    assert command.stderr == f"idempotency: typer is not installed; {hint.format('cli')}"
    migrate = "from idempotency.store import schema; schema.migrate(None)"
    assert light.run("python", "-c", migrate).stderr.endswith(f"alembic is not installed; {hint.format('cli')}")
    serve = "from idempotency.observe import metrics; metrics.combined_registry()"
    assert light.run("python", "-c", serve).stderr.endswith(
        f"prometheus_client is not installed; {hint.format('metrics')}"
    )


@pytest.mark.long
def test_with_its_extra_the_command_line_answers(with_cli: Installed, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    answer = with_cli.run("idempotency", "--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"celery-idempotency {version}\n", "")
    refused = with_cli.run("idempotency", "migrate")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("idempotency: no application: name your Celery application with -A")
