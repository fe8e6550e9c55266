"""From nothing to running pods: the page's commands, the Secrets that are made, and what each pod finds in its environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from idempotency.attempt.hints import hint_name
from idempotency.wire.keys import OperationId
from scripts import kubernetes_secrets
from tests.deploy.test_processes import LOGINS, PAGE, check
from tests.support.documents import ROOT
from tests.support.encrypted import authority, make_certificates
from tests.support.manifests import BUILDS, KUBERNETES, TOOLS, environment, need_tools, ours, settings

# Whose hints those of all pods are.
OWNER = "postgres-rw:5432/shop tasks"
# The same of many pods, each with its own variables and no other's: a process for each, in which only the application is loaded.
EACH = """
import json, os, sys, traceback
import idempotency.checks.tls, idempotency.application, idempotency.upkeep.alarms, pydantic_settings
import celery.app.amqp, httpx, iso4217, jinja2, kombu.transport.pyamqp, prometheus_client, pybreaker, standardwebhooks, stripe
found = {}
for name, variables in json.load(sys.stdin).items():
    read, write = os.pipe()
    if not os.fork():
        os.environ.clear()
        os.environ.update(variables)
        try:
            from tasks import app
            app.loader.import_default_modules()
            given = idempotency.application.settings_of(app)
            said = {each.subject: each.found for each in idempotency.checks.tls.check_tls(app, given)} | {"owner": given.owner}
        except BaseException:
            said = {"error": traceback.format_exc(limit=1)}
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    found[name] = read
print(json.dumps({name: json.loads(open(read).read()) for name, read in found.items()}))
"""


@pytest.mark.long
def test_every_pod_starts_with_its_own_variables_and_verifies_every_server(tmp_path: Path) -> None:
    authority_file = authority(make_certificates(tmp_path))
    pods: dict[str, dict[str, str]] = {}
    for directory, workload, container in ours():
        given = settings(directory, container) | environment(container)
        # of staging, what production has not: one Redis, and Flower
        is_another = "production" in directory or workload["metadata"]["name"] in ("worker", "flower")
        if is_another and "DATABASE_URL" in given:  # counters load no application
            given = {name: value.replace("/certificates/ca.crt", authority_file) for name, value in given.items()}
            given |= {name: "s" * 32 for name in ("IDEMPOTENCY_WEB_SECRET",) if name in given}
            given |= {name: "smtps://mail.example" for name in ("SMTP_URL",) if name in given}
            pods[f"{directory} {workload['metadata']['name']} {container['name']}"] = given
    assert len(pods) == len(LOGINS) + 4
    done = subprocess.run(
        [sys.executable, "-c", EACH], cwd=ROOT, input=json.dumps(pods), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    addresses = {"DATABASE_URL": "idempotency_database_url", "REDIS_URL": "idempotency_redis_url", "BROKER_URL": "broker_url"}  # fmt: skip
    assert found == {
        name: {f"{addresses[each]} TLS": "verified, with the host's name" for each in addresses if each in given}
        | {"owner": OWNER}
        for name, given in pods.items()
    }


def make_secrets(**given: str) -> subprocess.CompletedProcess[str]:
    """What the page's command does, with nothing of an application in its environment."""
    variables = os.environ | dict.fromkeys(kubernetes_secrets.GIVEN, "x") | {"SMTP_URL": "smtps://mail.example"} | given
    command = [sys.executable, "-m", "scripts.kubernetes_secrets"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_users_of_redis_are_for_the_hints_of_the_pods() -> None:
    made = {each["metadata"]["name"]: each["stringData"] for each in json.loads(make_secrets().stdout)["items"]}
    users, prefix = made["redis-users"], hint_name(OperationId("default", "a", "b"), OWNER).rpartition(":")[0]
    assert all(f" ~{prefix}:* " in users[key] for key in ("users.acl", "replicated.acl"))
    assert "user default off\n" in users["users.acl"]
    # the operator logs in as the default user, so without a password for it nobody would need one
    for key in ("replicated.acl", "sentinel.acl"):
        (default,) = [line for line in users[key].splitlines() if line.startswith("user default ")]
        password = hashlib.sha256(made["redis-operator"]["password"].encode()).hexdigest()
        assert default == f"user default reset on #{password} ~* &* +@all"


@pytest.mark.parametrize("name", kubernetes_secrets.NEEDED)
def test_secrets_are_not_made_of_what_no_process_starts_with(name: str) -> None:
    done = make_secrets(**{name: ""})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"empty: {name} (without them the application does not start)"


def page_commands() -> list[list[str]]:
    """The page's commands of kubectl, without what is piped into them."""
    lines = re.findall(r"^    (\S.*)$", PAGE.read_text(), re.MULTILINE)
    calls = [re.split(r"\s+#\s", line)[0].rpartition("| ")[2] for line in lines]
    return [shlex.split(call) for call in calls if call.startswith("kubectl ")]


def refusal(command: list[str]) -> str:
    """What kubectl says of a command where no cluster answers."""
    need_tools()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        # bound and not listening: refused
        server = f"--server=http://127.0.0.1:{closed.getsockname()[1]}"
        at = command.index("--") if "--" in command else len(command)
        call = [str(TOOLS / command[0]), *command[1:at], server, *command[at:]]
        secret = {"apiVersion": "v1", "kind": "List", "items": [kubernetes_secrets.secret("a", {"b": "c"})]}
        environment_ = {"KUBECONFIG": "/dev/null", "HOME": "/nonexistent", "PATH": os.environ["PATH"]}
        done = subprocess.run(
            call, cwd=ROOT, env=environment_, input=json.dumps(secret), capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
    return done.stderr


@pytest.mark.long
def test_every_command_of_the_page_is_one_of_kubectl() -> None:
    commands = page_commands()
    assert len(commands) >= 12
    for command in commands:
        assert "was refused" in refusal(command) or "connection refused" in refusal(command), (
            command,
            refusal(command),
        )
        if "--" in command:
            check(command[command.index("--") + 1 :])
        if "-k" in command:
            directory = ROOT / command[command.index("-k") + 1]
            assert str(directory.relative_to(KUBERNETES)) in BUILDS
    assert "unknown flag" in refusal(["kubectl", "wait", "--until=condition=Ready", "pod/a"])
    assert "unknown command" in refusal(["kubectl", "rollin", "restart", "deploy/a"])
