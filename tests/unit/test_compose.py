"""docker-compose.yml as far as it can be checked without a container engine.

Checked: it is YAML, images are pinned, servers have health checks and every dependency is on a service there is, with
a condition it can meet; ports are on the loopback address; no password is in it or in a command line of the project;
commands name programs and Celery applications there are; every connection is encrypted and verified. Not checked: that the images exist, start and get healthy.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import load_pem_x509_certificate

from idempotency.broker.rights import KINDS, MONITOR, STREAM
from idempotency.store.rights import APPLICATION, OPERATOR, RELAY
from scripts import certificates
from tests.support.encrypted import authority, make_certificates

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROCESSES = [name for name, service in SERVICES.items() if "DATABASE_URL" in service.get("environment", {})]


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_built_here_or_pinned_to_a_version(name: str) -> None:
    service = SERVICES[name]
    assert ("image" in service) != ("build" in service)
    if "image" in service:
        full = r"\d+\.\d+" if service["image"].startswith("postgres:") else r"\d+\.\d+\.\d+"
        assert re.fullmatch(rf"[a-z/]+:{full}[\w-]*", service["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_writes_only_where_it_must_and_has_a_limit_of_memory(name: str) -> None:
    assert SERVICES[name]["read_only"] is True
    assert re.fullmatch(r"\d+[mg]", SERVICES[name]["mem_limit"])


@pytest.mark.parametrize("name", [name for name in SERVICES if "build" in SERVICES[name]])
def test_our_processes_have_no_privileges(name: str) -> None:
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_to_this_machine_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_conditions_that_can_come_true(name: str) -> None:
    for other, wanted in SERVICES[name].get("depends_on", {}).items():
        match wanted["condition"]:
            case "service_healthy":
                assert {"test", "interval", "timeout", "retries"} <= SERVICES[other]["healthcheck"].keys()
            case "service_completed_successfully":
                assert SERVICES[other]["restart"] == "no"
            case condition:
                pytest.fail(f"{name} waits for {other}: {condition}")


@pytest.mark.parametrize("name", SERVICES)
def test_passwords_come_from_outside_and_a_missing_one_is_an_error(name: str) -> None:
    for variable, value in SERVICES[name].get("environment", {}).items():
        if re.search(r"PASS|AUTH|KEY|_URL$", variable) and not re.search(
            r"//[^@]*$", value
        ):  # an address without a login
            assert re.search(r"\$\{[A-Z_]+:\?\}", value), variable


@pytest.mark.parametrize("name", [name for name in SERVICES if "build" in SERVICES[name]])
def test_our_commands_exist_and_hold_no_password(name: str) -> None:
    command = SERVICES[name]["command"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command[0] in {"celery", "uvicorn", *scripts} or (ROOT / f"{command[2].replace('.', '/')}.py").exists()
    assert not any("$" in part for part in command)


SHOW = """
import json
from idempotency.application import settings_of
from idempotency.checks.tls import check_tls
from tasks import app
print(json.dumps({finding.subject: finding.found for finding in check_tls(app, settings_of(app))}))
"""


def test_every_connection_is_encrypted_and_verified_with_the_hosts_name(tmp_path: Path) -> None:
    file = authority(make_certificates(tmp_path))
    for name in PROCESSES:
        url = SERVICES[name]["environment"]["DATABASE_URL"]
        assert url.endswith("postgres:5432/shop?sslmode=verify-full&sslrootcert=/certificates/ca.crt")
    given = {name: re.sub(r"\$\{.*?\}", "secret", value) for name, value in SERVICES["worker"]["environment"].items()}
    given = {name: value.replace("/certificates/ca.crt", file) for name, value in given.items()}
    given |= {"CARRIER_URL": "https://carrier.example"}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )
    settings = ("idempotency_database_url", "idempotency_redis_url", "broker_url")
    verified = {f"{setting} TLS": "verified, with the host's name" for setting in settings}
    assert json.loads(shown.stdout or "null") == verified, shown.stderr


def test_no_server_takes_plain_text_from_the_network() -> None:
    rules = [line.split() for line in COMPOSE["configs"]["pg_hba"]["content"].splitlines()]
    assert {kind for kind, *_ in rules} == {"local", "hostssl"}
    assert "listeners.tcp = none" in COMPOSE["configs"]["rabbitmq_tls"]["content"]
    redis = SERVICES["redis"]["command"]
    assert redis[redis.index("--port") + 1] == "0"


def test_a_certificates_key_is_mounted_by_its_server_alone() -> None:
    mounts = {name: [v for v in service.get("volumes", []) if "certificate" in v] for name, service in SERVICES.items()}
    for name in ("postgres", "redis", "rabbitmq"):
        assert mounts[name] == [f"{name}-certificate:/certificates:ro"]
        assert f"{name}-certificate:/certificates/{name}" in mounts["certificates"]
        assert "certificates" in SERVICES[name]["depends_on"]
    assert all(mounts[name] == ["authority:/certificates:ro"] for name in PROCESSES)


def test_certificates_are_kept_as_long_as_they_belong_together(tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.*")}

    certificates.main(tmp_path, ["postgres"])
    first = files()
    assert set(first) == {"ca/ca.crt", "postgres/server.crt", "postgres/server.key"}
    assert (tmp_path / "postgres" / "server.key").stat().st_mode & 0o777 == 0o600
    certificates.main(tmp_path, ["postgres"])
    assert files() == first
    certificates.main(tmp_path, ["postgres", "redis"])  # signed by an authority whose key is gone
    second = files()
    assert all(second[name] != first[name] for name in first)
    for name in ("postgres", "redis"):
        load_pem_x509_certificate(second[f"{name}/server.crt"]).verify_directly_issued_by(
            load_pem_x509_certificate(second["ca/ca.crt"])
        )


def test_no_process_starts_before_the_business_tables_are_there() -> None:
    assert SERVICES["tables"]["command"] == ["python", "-m", "tasks.migrate", "--roles"]
    assert "migrate" in SERVICES["tables"]["depends_on"]
    for name in ("worker", "maintenance", "relay", "beat", "api", "admin"):
        assert "tables" in SERVICES[name]["depends_on"]


def test_each_process_logs_in_as_its_role_and_none_as_a_superuser() -> None:
    urls = {name: service.get("environment", {}).get("DATABASE_URL") for name, service in SERVICES.items()}
    logins = {name: url.partition("//")[2].partition(":")[0] for name, url in urls.items() if url is not None}
    assert logins == {
        **dict.fromkeys(("migrate", "tables"), "deployer"),
        **dict.fromkeys(("users", "worker", "api"), APPLICATION),
        "flower": "postgres",  # the host
        "admin": OPERATOR,
        **dict.fromkeys(("maintenance", "relay", "beat"), RELAY),
    }
    (statement, _) = COMPOSE["configs"]["deployer"]["content"].split(";", 1)
    assert re.fullmatch(r"CREATE ROLE deployer LOGIN CREATEROLE PASSWORD '\$\{DEPLOYER_PASSWORD:\?\}'", statement)


def test_each_kind_of_process_is_its_own_user_of_the_broker() -> None:
    urls = {name: service.get("environment", {}).get("BROKER_URL") for name, service in SERVICES.items()}
    users = {
        name: url.partition("//idempotency_")[2].partition(":")[0] for name, url in urls.items() if url is not None
    }
    assert users == {
        **dict.fromkeys(("users", "migrate", "tables", "api", "admin"), "application"),
        **dict.fromkeys(("worker", "maintenance"), "worker"),
        **{kind: kind for kind in ("relay", "beat", "flower")},
    }
    given = {
        name.split("_")[2].lower() for name in SERVICES["users"]["environment"] if name.startswith("IDEMPOTENCY_BROKER")
    }
    assert given == set(KINDS) - {STREAM, MONITOR}  # it has no streams here, and nothing that only looks


def test_the_servers_read_the_users_that_the_command_writes() -> None:
    command = SERVICES["users"]["command"]
    (_, path) = COMPOSE["configs"]["rabbitmq_users"]["content"].split(" = ")
    assert path.strip() == command[command.index("--rabbitmq") + 1]
    redis = SERVICES["redis"]["command"]
    assert redis[redis.index("--aclfile") + 1] == command[command.index("--redis") + 1]
    for server in ("redis", "rabbitmq"):
        assert "users:/users:ro" in SERVICES[server]["volumes"]
        assert SERVICES[server]["depends_on"]["users"]["condition"] == "service_completed_successfully"


def test_workers_do_nothing_that_needs_remote_control() -> None:
    for name in ("worker", "maintenance"):
        assert {"--without-mingle", "--without-gossip"} <= set(SERVICES[name]["command"])


def test_the_queue_of_the_maintenance_has_a_worker_of_its_own() -> None:
    queues = {name: SERVICES[name]["command"][-1 if name == "worker" else -2] for name in ("worker", "maintenance")}
    assert queues == {
        "worker": "--queues=payments,refunds,orders,notifications,webhooks",
        "maintenance": "--queues=maintenance",
    }


def test_what_is_kept_is_declared() -> None:
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])


def test_beat_keeps_its_schedule() -> None:
    beat = SERVICES["beat"]
    kept = [volume.partition(":")[2] for volume in beat["volumes"]]
    assert beat["command"][-1].partition("=")[2].rpartition("/")[0] in kept


def test_a_task_has_longer_to_end_than_celery_gives_it() -> None:
    source = (ROOT / "celeryconfig.py").read_text()
    given = re.search(r"worker_soft_shutdown_timeout = ([\d.]+)", source)
    assert given is not None
    assert float(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > float(given.group(1))


def test_rabbitmq_waits_as_long_for_an_acknowledgement_as_in_kubernetes() -> None:
    """Where it is compared with the limits of the tasks."""
    line = COMPOSE["configs"]["rabbitmq_patience"]["content"].strip()
    assert line.startswith("consumer_timeout = ")
    assert line in (ROOT / "deploy" / "kubernetes" / "dependencies" / "rabbitmq.yaml").read_text()


@pytest.mark.parametrize("path", [".env", ".env.production", "api/.env"])
def test_a_file_of_secrets_is_neither_committed_nor_in_an_image(path: str) -> None:
    patterns = [
        line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("**/")
    ]
    assert any(fnmatch(Path(path).name, pattern) for pattern in patterns)
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert git(["git", "check-ignore", path]).stdout == f"{path}\n"
    assert not [name for name in git(["git", "ls-files"]).stdout.split() if Path(name).name.startswith(".env")]
